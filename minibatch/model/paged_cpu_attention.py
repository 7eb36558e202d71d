"""Attention for a CPU: decodes read values where they lie, and keys are copied once, tightly.

A decode is bound by memory: each sequence's keys and values pass through the cores once, for a
handful of dot products. ``PagedReferenceAttention`` copies all of them before it starts. Here

* **values are not copied.** The output is a sum of rows of the pool, weighted by attention. Torch
  sums rows of a table by index and weight in ``embedding_bag``; it was made for bags of words,
  and a paged pool is such a table.
* **keys are copied head by head** into a buffer that is kept, in the order in which a batched
  matrix product reads them.
* **sequences of like length go together**, so that little is spent on padding.

Prompts and chunks are bound by arithmetic. They are cut into tiles of queries, each of which
meets only the keys that it may see: what flash attention does, with torch's matrix products.
(Torch's own CPU version is 2 to 3 times slower in bfloat16.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minibatch.model.attention import AttentionBackend, AttentionMetadata, slots_of
from minibatch.model.kv_cache import KVCache

BAND_TOKENS = 256  # a further band costs as much time as so many tokens of padding
BAND_BYTES = 16 * 2**20  # of copied keys in a band: little enough to be still in the cache
TILE = 128  # queries


@dataclass(frozen=True)
class Band:
    """One-token sequences of similar length: one batched call. B sequences, the longest of L."""

    rows: Tensor | None  # int64 [B]: which packed tokens; None: the first B
    key_rows: Tensor  # int64 [B * Hkv * L]: rows of the pool, seen as [slots * Hkv, D]
    value_rows: Tensor  # int64 [B * Hq * L]: the same, for each *query* head
    value_starts: Tensor  # int64 [B * Hq]: where each query head's rows begin
    mask: Tensor  # [B * Hkv, 1, L]: 0 where there is a token, -inf behind the sequence's end


@dataclass(frozen=True)
class Chunk:
    """One sequence with several query tokens."""

    start: int  # its first packed token
    end: int
    rows: Tensor  # int64 [Hkv, L]: its keys' and values' rows of the pool, seen as above


@dataclass(frozen=True)
class Plan:
    bands: list[Band]
    chunks: list[Chunk]


class PagedCPUAttention(AttentionBackend):
    """What the model uses on a CPU.

    Args:
        num_heads: query heads. Those of one KV head are rows of one matrix, or share an index.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self._keys = torch.empty(0)  # the copy of keys, as large as was ever needed
        self._future = torch.full((TILE, TILE), -torch.inf).triu(1)

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        self._future = self._future.to(dtype)
        bands = plan_bands(meta, kv_cache.keys[0], self.num_heads, dtype)
        meta.plan = Plan(bands, plan_chunks(meta, kv_cache.keys[0]))

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        # Both pools as [slots * Hkv, D]: a row is one head of one token.
        keys = kv_cache.keys[layer].flatten(0, 2)
        values = kv_cache.values[layer].flatten(0, 2)
        out = torch.zeros_like(q)  # padding stays 0
        for band in meta.plan.bands:
            self._attend_band(q, keys, values, band, out)
        for chunk in meta.plan.chunks:
            self._attend_chunk(q, keys, values, chunk, out)
        return out

    def _attend_band(
        self, q: Tensor, keys: Tensor, values: Tensor, band: Band, out: Tensor
    ) -> None:
        """Write the band's rows of ``out [T, Hq, D]``."""
        batch_heads, _, longest = band.mask.shape  # B * Hkv, 1, L
        batch, head_dim = len(band.value_starts) // self.num_heads, q.shape[-1]
        queries = q[:batch] if band.rows is None else q[band.rows]
        queries = queries.reshape(batch_heads, -1, head_dim)  # [B * Hkv, G, D]
        copied = self._copy_keys(keys, band).view(batch_heads, longest, head_dim)
        scores = torch.baddbmm(band.mask, queries, copied.mT, alpha=head_dim**-0.5)
        weights = scores.softmax(dim=-1)  # [B * Hkv, G, L]
        sums, *_ = torch.embedding_bag(
            values,
            band.value_rows,
            band.value_starts,
            mode=0,  # sum
            per_sample_weights=weights.flatten(),
        )  # [B * Hq, D]
        sums = sums.view(batch, self.num_heads, head_dim)
        if band.rows is None:
            out[:batch] = sums
        else:
            out[band.rows] = sums

    def _copy_keys(self, keys: Tensor, band: Band) -> Tensor:
        """The band's keys, ``[B * Hkv * L, D]``, in a buffer that the next call overwrites."""
        head_dim = keys.shape[-1]
        needed = len(band.key_rows) * head_dim
        if self._keys.numel() < needed or self._keys.dtype is not keys.dtype:
            self._keys = keys.new_empty(needed + needed // 4)  # sequences grow
        copied = self._keys[:needed].view(-1, head_dim)
        return torch.index_select(keys, 0, band.key_rows, out=copied)

    def _attend_chunk(
        self, q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, out: Tensor
    ) -> None:
        """Write the chunk's rows of ``out [T, Hq, D]``."""
        k, v = F.embedding(chunk.rows, keys), F.embedding(chunk.rows, values)  # [Hkv, L, D]
        num_kv_heads, length, head_dim = k.shape
        for start in range(chunk.start, chunk.end, TILE):
            end = min(start + TILE, chunk.end)
            n, visible = end - start, length - (chunk.end - end)
            queries = q[start:end].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = torch.baddbmm(
                q.new_zeros(1),
                queries.flatten(1, 2),  # [Hkv, G * n, D]
                k[:, :visible].mT,
                beta=0,
                alpha=head_dim**-0.5,
            ).view(num_kv_heads, -1, n, visible)
            scores[..., visible - n :] += self._future[:n, :n]  # the tile's own tokens
            weights = scores.softmax(dim=-1).flatten(1, 2)  # [Hkv, G * n, visible]
            attended = torch.bmm(weights, v[:, :visible]).view(queries.shape)  # [Hkv, G, n, D]
            out[start:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def plan_bands(
    meta: AttentionMetadata, pool: Tensor, num_heads: int, dtype: torch.dtype
) -> list[Band]:
    """The one-token sequences of a step, by length. A sequence without tokens is in no band.

    Args:
        pool: the keys of any layer, for its shape.
    """
    num_kv_heads, head_dim = pool.shape[2:]
    lengths = meta.seq_lens_host[: meta.num_decodes]
    bands = []
    for members in split_by_length(lengths, num_kv_heads * head_dim * pool.element_size()):
        rows = None if len(members) == meta.num_decodes else torch.tensor(members)
        which = slice(meta.num_decodes) if rows is None else rows
        positions = torch.arange(max(lengths[member] for member in members))  # [L]
        live = positions < meta.seq_lens[which, None]  # [B, L]
        # Behind its end a sequence reads its own first token again: always written, so always a
        # number. An unwritten slot may hold NaN, and NaN times a weight of 0 is NaN.
        source = torch.where(live, positions, 0)
        key_rows = rows_of_heads(meta.block_tables[which], source, pool)  # [B, Hkv, L]
        value_rows = key_rows.repeat_interleave(num_heads // num_kv_heads, dim=1)  # [B, Hq, L]
        mask = torch.zeros(live.shape, dtype=dtype).masked_fill_(~live, -torch.inf)
        bands.append(
            Band(
                rows,
                key_rows.flatten(),
                value_rows.flatten(),
                torch.arange(0, value_rows.numel(), len(positions)),
                mask.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1),
            )
        )
    return bands


def plan_chunks(meta: AttentionMetadata, pool: Tensor) -> list[Chunk]:
    """The sequences with several query tokens, in packed order."""
    chunks, start = [], meta.num_decodes
    for sequence in range(meta.num_decodes, len(meta.query_lens)):
        positions = torch.arange(meta.seq_lens_host[sequence])[None]  # [1, L]
        table = meta.block_tables[sequence : sequence + 1]
        end = start + meta.query_lens[sequence]
        chunks.append(Chunk(start, end, rows_of_heads(table, positions, pool)[0]))
        start = end
    return chunks


def rows_of_heads(block_tables: Tensor, positions: Tensor, pool: Tensor) -> Tensor:
    """Rows of ``pool``, seen as [slots * Hkv, D], for ``positions [B, L]``: ``[B, Hkv, L]``."""
    _, block_size, num_kv_heads, _ = pool.shape
    slots = slots_of(block_tables, positions, block_size)  # [B, L]
    return slots[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]


def split_by_length(lengths: list[int], bytes_per_token: int) -> list[list[int]]:
    """Sequences in groups: a group ends where its padding would outweigh a further group, or its
    copied keys ``BAND_BYTES``. Members stand in the order of the batch.
    """
    most_tokens = BAND_BYTES // bytes_per_token
    groups: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        if length == 0:
            continue
        padding += longest - length
        full = not groups or (len(groups[-1]) + 1) * longest > most_tokens
        if full or padding > BAND_TOKENS:
            groups.append([])
            longest, padding = length, 0
        groups[-1].append(index)
    return [sorted(group) for group in groups]
