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
LENGTH_STEP = 8  # lengths are rounded up to a multiple: torch prepares a kernel for each new one
TILE = 128  # queries


@dataclass(frozen=True)
class Band:
    """One-token sequences of similar length: one batched call. B sequences, the longest of L."""

    rows: Tensor | slice  # int64 [B]: which packed tokens; a slice, if they are the first B
    key_rows: Tensor  # int64 [B * Hkv * L]: rows of the pool, seen as [slots * Hkv, D]
    value_rows: Tensor  # int64 [B * Hq * L]: the same, for each *query* head
    value_starts: Tensor  # int64 [B * Hq]: where each query head's rows begin
    mask: Tensor  # [B * Hkv, 1, L]: 0 where there is a token, -inf behind the sequence's end
    copied: Tensor  # [B * Hkv * L, D]: where a layer's keys are copied to, and the next layer's


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
    one_band: bool  # all of the step's tokens are in one, in order: nothing to put together


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
        pool = kv_cache.keys[0]
        groups = split_by_length(meta.seq_lens_host[: meta.num_decodes], pool[0, 0].nbytes)
        bands = [self._plan_band(meta, group, pool, dtype) for group in groups]
        one_band = len(groups) == 1 and len(groups[0]) == len(meta.slot_mapping)
        meta.plan = Plan(bands, plan_chunks(meta, pool), one_band)

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        # Both pools as [slots * Hkv, D]: a row is one head of one token.
        keys = kv_cache.keys[layer].flatten(0, 2)
        values = kv_cache.values[layer].flatten(0, 2)
        plan = meta.plan
        if plan.one_band:
            return self._attend_band(q, keys, values, plan.bands[0])
        out = torch.zeros_like(q)  # padding stays 0
        for band in plan.bands:
            out[band.rows] = self._attend_band(q[band.rows], keys, values, band)
        for chunk in plan.chunks:
            self._attend_chunk(q, keys, values, chunk, out)
        return out

    def _attend_band(self, q: Tensor, keys: Tensor, values: Tensor, band: Band) -> Tensor:
        """``q [B, Hq, D]`` to ``[B, Hq, D]``."""
        batch_heads, _, longest = band.mask.shape  # B * Hkv, 1, L
        head_dim = q.shape[-1]
        queries = q.reshape(batch_heads, -1, head_dim)  # [B * Hkv, G, D]
        torch.index_select(keys, 0, band.key_rows, out=band.copied)
        k = band.copied.view(batch_heads, longest, head_dim)
        scores = torch.baddbmm(band.mask, queries, k.mT, alpha=head_dim**-0.5)
        weights = scores.softmax(dim=-1)  # [B * Hkv, G, L]
        sums, *_ = torch.embedding_bag(
            values,
            band.value_rows,
            band.value_starts,
            mode=0,  # sum
            per_sample_weights=weights.view(-1),
        )  # [B * Hq, D]
        return sums.view(q.shape)

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

    def _plan_band(
        self, meta: AttentionMetadata, group: list[int], pool: Tensor, dtype: torch.dtype
    ) -> Band:
        """The one-token sequences of ``group`` together. ``pool``: any layer's keys (its shape)."""
        num_kv_heads, head_dim = pool.shape[2:]
        everybody = len(group) == meta.num_decodes
        rows = slice(meta.num_decodes) if everybody else torch.tensor(group)
        longest = max(meta.seq_lens_host[row] for row in group)
        positions = torch.arange(-(-longest // LENGTH_STEP) * LENGTH_STEP)  # [L]
        live = positions < meta.seq_lens[rows, None]  # [B, L]
        # Behind its end a sequence reads its own first token again: always written, so always a
        # number. An unwritten slot may hold NaN, and NaN times a weight of 0 is NaN.
        source = torch.where(live, positions, 0)
        key_rows = rows_of_heads(meta.block_tables[rows], source, pool)  # [B, Hkv, L]
        value_rows = key_rows.repeat_interleave(self.num_heads // num_kv_heads, dim=1)
        mask = torch.zeros(live.shape, dtype=dtype).masked_fill_(~live, -torch.inf)
        return Band(
            rows,
            key_rows.flatten(),
            value_rows.flatten(),  # of [B, Hq, L]
            torch.arange(0, value_rows.numel(), len(positions)),
            mask.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1),
            self._buffer(key_rows.numel() * head_dim, pool.dtype).view(-1, head_dim),
        )

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """``size`` numbers of the buffer for copied keys; all bands use the same ones in turn."""
        if self._keys.numel() < size or self._keys.dtype is not dtype:
            self._keys = torch.empty(size + size // 4, dtype=dtype)  # sequences grow
        return self._keys[:size]


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
