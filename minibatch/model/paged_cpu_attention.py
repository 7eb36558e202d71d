"""Attention for a CPU: decodes read values where they lie, and keys are copied once, tightly.

A decode is bound by memory: each sequence's keys and values pass through the cores once, for a
handful of dot products. ``PagedReferenceAttention`` copies all of them before it starts. Here

* **values are not copied.** The output is a sum of rows of the pool, weighted by attention. Torch
  sums rows of a table by index and weight in ``embedding_bag``; it was made for bags of words,
  and a paged pool is such a table.
* **keys are copied head by head** into one buffer that is kept, in the order in which a batched
  matrix product reads them.
* **sequences of like length go together**, so that little is spent on padding.

Prompts and chunks are bound by arithmetic, and stay with ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minibatch.model.attention import (
    AttentionBackend,
    AttentionMetadata,
    Chunk,
    attend_chunk,
    plan_chunks,
    slots_of,
)
from minibatch.model.kv_cache import KVCache

BAND_TOKENS = 256  # a further band costs as much time as so many tokens of padding
BAND_BYTES = 16 * 2**20  # of copied keys in a band: little enough to be still in the cache


@dataclass(frozen=True)
class Band:
    """One-token sequences of similar length: one batched call. B sequences, the longest of L."""

    rows: Tensor | None  # int64 [B]: which packed tokens; None: the first B
    key_rows: Tensor  # int64 [B * Hkv * L]: rows of the pool, seen as [slots * Hkv, D]
    value_rows: Tensor  # int64 [B * Hq * L]: the same, for each *query* head
    value_starts: Tensor  # int64 [B * Hq]: where each query head's rows begin
    mask: Tensor  # [B * Hkv, 1, L]: 0 where there is a token, -inf behind the sequence's end


@dataclass
class Plan:
    chunks: list[Chunk]
    bands: list[Band] | None  # None: the first layer will know the number of query heads


class PagedCPUAttention(AttentionBackend):
    """What the model uses on a CPU."""

    def __init__(self) -> None:
        self._keys = torch.empty(0)  # the copy of keys, as large as was ever needed

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        meta.plan = Plan(plan_chunks(meta, kv_cache.block_size, dtype), bands=None)

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        plan = meta.plan
        if plan.bands is None:
            plan.bands = plan_bands(meta, keys, q)
        out = torch.zeros_like(q)  # padding stays 0
        for band in plan.bands:
            self._attend_band(q, keys, values, band, out)
        for chunk in plan.chunks:
            queries = q[chunk.start : chunk.end]
            out[chunk.start : chunk.end] = attend_chunk(queries, keys, values, chunk)
        return out

    def _attend_band(
        self, q: Tensor, keys: Tensor, values: Tensor, band: Band, out: Tensor
    ) -> None:
        """Attend from ``q [T, Hq, D]`` to the pools, and write the band's rows of ``out``."""
        num_heads, head_dim = q.shape[1:]
        batch_heads, _, longest = band.mask.shape  # B * Hkv, 1, L
        batch = len(band.value_starts) // num_heads
        queries = q[:batch] if band.rows is None else q[band.rows]
        # The G query heads of one KV head are rows of one matrix: [B * Hkv, G, D].
        queries = queries.reshape(batch_heads, -1, head_dim)
        copied = self._copy_keys(keys, band).view(batch_heads, longest, head_dim)
        scores = torch.baddbmm(band.mask, queries, copied.mT, alpha=head_dim**-0.5)
        weights = scores.softmax(dim=-1)  # [B * Hkv, G, L]
        attended = torch.embedding_bag(
            values.view(-1, head_dim),
            band.value_rows,
            band.value_starts,
            mode=0,  # sum
            per_sample_weights=weights.flatten(),
        )[0].view(batch, num_heads, head_dim)
        if band.rows is None:
            out[:batch] = attended
        else:
            out[band.rows] = attended

    def _copy_keys(self, keys: Tensor, band: Band) -> Tensor:
        """The band's keys, ``[B * Hkv * L, D]``, in a buffer that the next call overwrites."""
        head_dim = keys.shape[-1]
        needed = len(band.key_rows) * head_dim
        if self._keys.numel() < needed or self._keys.dtype is not keys.dtype:
            self._keys = keys.new_empty(needed + needed // 4)  # sequences grow
        copied = self._keys[:needed].view(-1, head_dim)
        return torch.index_select(keys.view(-1, head_dim), 0, band.key_rows, out=copied)


def plan_bands(meta: AttentionMetadata, keys: Tensor, q: Tensor) -> list[Band]:
    """The one-token sequences of a step, by length. A sequence without tokens is in no band."""
    _, block_size, num_kv_heads, head_dim = keys.shape
    lengths = meta.seq_lens_host[: meta.num_decodes]
    bands = []
    for members in split_by_length(lengths, num_kv_heads * head_dim * keys.element_size()):
        rows = None if len(members) == meta.num_decodes else torch.tensor(members)
        which = slice(meta.num_decodes) if rows is None else rows
        positions = torch.arange(max(lengths[member] for member in members))  # [L]
        live = positions < meta.seq_lens[which, None]  # [B, L]
        # Behind its end a sequence reads its own first token again: always written, so always a
        # number. An unwritten slot may hold NaN, and NaN times a weight of 0 is NaN.
        slots = slots_of(meta.block_tables[which], torch.where(live, positions, 0), block_size)
        batch, longest = slots.shape
        key_rows = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]
        value_rows = key_rows[:, :, None].expand(-1, -1, q.shape[1] // num_kv_heads, -1)
        mask = torch.zeros(live.shape, dtype=q.dtype).masked_fill_(~live, -torch.inf)
        bands.append(
            Band(
                rows,
                key_rows.flatten(),  # of [B, Hkv, L]
                value_rows.flatten(),  # of [B, Hkv, G, L]
                torch.arange(0, batch * q.shape[1] * longest, longest),
                mask.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1),
            )
        )
    return bands


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
