"""Attention over a paged KV cache: what a backend is told, what it owes, and the plain one.

A step packs the tokens of all its sequences one behind the other, without padding between them:
first the sequences with one query token (decodes), then the longer ones (prompts and chunks).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minibatch.model.kv_cache import KVCache


@dataclass
class AttentionMetadata:
    """Where the tokens of one step belong. T packed tokens of S sequences.

    Tokens behind ``query_start[-1]`` are padding: they pass through every linear layer, belong
    to no sequence, and attention gives them 0. Their slot is -1.
    """

    slot_mapping: Tensor  # int64 [T]: where each token's K and V go; -1: nowhere
    block_tables: Tensor  # int32 [S, max_blocks]: entries behind a sequence's last are ignored
    query_start: Tensor  # int32 [S + 1]: where each sequence's tokens begin; last: the end
    seq_lens: Tensor  # int32 [S]: tokens with KV once this step's are stored
    query_lens: list[int]  # [S], on the host
    seq_lens_host: list[int]  # seq_lens, on the host
    num_decodes: int  # the first num_decodes sequences have exactly one query token
    prompt_lens: Tensor | None = None  # int32 [S]: only dynamic rope reads it
    plan: Any = field(default=None, repr=False, compare=False)  # what the backend prepared

    def sequence_of_token(self, num_tokens: int) -> Tensor:
        """Sequence index of each packed token, ``[T]``; padding counts as the last sequence."""
        tokens = torch.arange(num_tokens, device=self.query_start.device, dtype=torch.int32)
        sequence = torch.bucketize(tokens, self.query_start[1:], right=True)
        return sequence.clamp(max=self.query_start.shape[0] - 2)


class AttentionBackend(ABC):
    """One way to compute attention. The model calls ``prepare`` once a step, then each layer."""

    @abstractmethod
    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        """Put on ``meta.plan`` whatever is the same in every layer."""

    @abstractmethod
    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        """Attend from ``q [T, Hq, D]`` to what is stored. Returns ``[T, Hq, D]``, 0 for padding.

        K and V of this step's tokens are in the cache already. Query i of a sequence with n
        queries sees the first ``seq_len - n + i + 1`` tokens of that sequence.
        """


@dataclass(frozen=True)
class _Decodes:
    """All one-token sequences of a step: one batched call."""

    slots: Tensor  # int64 [B * L]: the slot to read for each position of each sequence
    mask: Tensor  # [B, 1, 1, L]: 0 where there is a token, -inf behind the sequence's end
    batch: int  # B
    empty: Tensor | None  # bool [B, 1, 1, 1]: sequences without any token, or None if none is


@dataclass(frozen=True)
class Chunk:
    """One sequence with several query tokens: one call of its own."""

    start: int  # its first packed token
    end: int
    slots: Tensor  # int64 [L]
    mask: Tensor | None  # [queries, L], 0 or -inf; None: the whole sequence, so plainly causal


@dataclass(frozen=True)
class _Plan:
    decodes: _Decodes | None
    chunks: list[Chunk]


class PagedReferenceAttention(AttentionBackend):
    """Gather the blocks, then torch's ``scaled_dot_product_attention``. Runs on any device.

    The reference for every other backend. It pays for its plainness by copying what it reads.
    Several query heads share a KV head by being *rows* of one query matrix, so K and V are never
    repeated.
    """

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        decodes = None
        if meta.num_decodes:
            decodes = _plan_decodes(meta, kv_cache.block_size, dtype)
        meta.plan = _Plan(decodes, plan_chunks(meta, kv_cache.block_size, dtype))

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        out = torch.zeros_like(q)  # padding stays 0
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        decodes = meta.plan.decodes
        if decodes is not None:
            out[: decodes.batch] = _attend_decodes(q[: decodes.batch], keys, values, decodes)
        for chunk in meta.plan.chunks:
            queries = q[chunk.start : chunk.end]
            out[chunk.start : chunk.end] = attend_chunk(queries, keys, values, chunk)
        return out


def _plan_decodes(meta: AttentionMetadata, block_size: int, dtype: torch.dtype) -> _Decodes:
    batch = meta.num_decodes
    lengths = meta.seq_lens_host[:batch]
    longest = max(1, *lengths)
    positions = torch.arange(longest, device=meta.seq_lens.device)  # [L]
    live = positions < meta.seq_lens[:batch, None]  # [B, L]
    # Behind its end a sequence reads its own first token again: always written, so always a
    # number. An unwritten slot may hold NaN, and NaN times a weight of 0 is NaN.
    source = torch.where(live, positions, 0)  # [B, L]
    slots = slots_of(meta.block_tables[:batch], source, block_size)
    empty = None
    if 0 in lengths:  # rows that pad the batch to a fixed size
        empty = (meta.seq_lens[:batch] == 0).view(batch, 1, 1, 1)
        live = live | (positions == 0)  # no softmax over nothing
    mask = torch.zeros(live.shape, dtype=dtype, device=live.device).masked_fill_(~live, -torch.inf)
    return _Decodes(slots.flatten(), mask.view(batch, 1, 1, longest), batch, empty)


def plan_chunks(meta: AttentionMetadata, block_size: int, dtype: torch.dtype) -> list[Chunk]:
    """The sequences with several query tokens."""
    chunks, start = [], meta.num_decodes
    for sequence in range(meta.num_decodes, len(meta.query_lens)):
        num_queries, length = meta.query_lens[sequence], meta.seq_lens_host[sequence]
        positions = torch.arange(length, device=meta.seq_lens.device)  # [L]
        table = meta.block_tables[sequence : sequence + 1]
        slots = slots_of(table, positions[None], block_size)[0]
        mask = None
        if num_queries < length:  # earlier context: torch's own causal mask is aligned top left
            hidden = positions > positions[length - num_queries :, None]  # [queries, L]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, -torch.inf)
        chunks.append(Chunk(start, start + num_queries, slots, mask))
        start += num_queries
    return chunks


def slots_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots of ``positions [B, L]`` under ``block_tables [B, max_blocks]``: int64 ``[B, L]``."""
    blocks = block_tables.long().clamp(min=0).gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def read_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Copy ``[N, Hkv, D]`` out of a pool ``[blocks, block_size, Hkv, D]``."""
    heads, head_dim = pool.shape[2:]
    # An embedding lookup is torch's fastest copy of whole rows (on a CPU, by several times).
    return F.embedding(slots, pool.view(-1, heads * head_dim)).view(-1, heads, head_dim)


def _attend_decodes(q: Tensor, keys: Tensor, values: Tensor, plan: _Decodes) -> Tensor:
    """``q [B, Hq, D]`` to ``[B, Hq, D]``."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    # [B, L, Hkv, D] seen as [B, Hkv, L, D]
    k = read_rows(keys, plan.slots).view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
    v = read_rows(values, plan.slots).view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
    # The G query heads of one KV head stand where a sequence's queries would: [B, Hkv, G, D]
    q = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask)
    if plan.empty is not None:
        out = out.masked_fill(plan.empty, 0.0)
    return out.reshape(batch, num_heads, head_dim)


def attend_chunk(q: Tensor, keys: Tensor, values: Tensor, plan: Chunk) -> Tensor:
    """``q [queries, Hq, D]`` to ``[queries, Hq, D]``."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    # KV heads stand where a batch would; their query heads share K and V by a stride of 0.
    q = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    k = read_rows(keys, plan.slots).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    v = read_rows(values, plan.slots).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=plan.mask, is_causal=plan.mask is None
    )  # [Hkv, G, n, D]
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
