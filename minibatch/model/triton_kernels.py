"""Three Triton kernels over the paged cache, and how they are launched.

``_store_kv`` writes this step's keys and values, ``_attend`` reads, ``_merge`` adds up where
``_attend`` worked in several pieces. One ``_attend`` serves decodes and prompts alike:

* A program owns a *tile* of queries of one sequence and one KV head. The G query heads that share
  the KV head are rows of the tile, beside the queries: M rows = M // G queries x G heads. So K
  and V are read once for the whole group, and a decode (one query) still fills a matrix product.
* It walks over the keys in pieces of N and never holds all scores at once. *Online softmax*: for
  each row it keeps the largest score so far m, the sum of weights ``d = sum exp(s - m)`` and the
  weighted values ``a = sum exp(s - m) v``. When a piece raises m, both sums shrink by
  ``exp(m_old - m_new)``; at the end the answer is ``a / d``. (Milakov and Gimelshein, 2018; Dao
  et al., "FlashAttention", 2022.)
* A few decodes cannot fill a GPU, so the keys of a sequence are shared out to SPLITS programs
  (flash decoding). Each leaves its (m, d, a), and ``_merge`` combines them by the same rule.
"""

# ruff: noqa: ANN001, ANN202 - a kernel has no types: Triton compiles it for those it is given

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's interpreter multiplies bfloat16 wrongly (triton issue 11584): it gets float32.
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# "No score": finite, because the difference of two infinities is not a number.
NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def _store_kv(
    k, v,  # [T, Hkv, D]
    keys, values,  # [blocks, block_size, Hkv, D], read as rows of WIDTH = Hkv * D by slot
    slots,  # [T]; -1: nowhere
    key_scale, value_scale,  # float32 [Hkv], or None where the cache holds plain numbers
    k_stride, v_stride,
    WIDTH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < tl.where(slot < 0, 0, WIDTH)
    key = tl.load(k + token * k_stride + column, mask=mask, other=0.0)
    value = tl.load(v + token * v_stride + column, mask=mask, other=0.0)
    if key_scale is not None:
        # Stored numbers are the real ones divided by their head's scale, within the format's LIMIT.
        key = key.to(tl.float32) / tl.load(key_scale + column // D, mask=mask, other=1.0)
        value = value.to(tl.float32) / tl.load(value_scale + column // D, mask=mask, other=1.0)
        key = tl.minimum(tl.maximum(key, -LIMIT), LIMIT)
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    tl.store(keys + slot * WIDTH + column, key.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + slot * WIDTH + column, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q, out,  # [T, Hq, D]
    part_a, part_m, part_d,  # float32 [T, Hq, SPLITS, D], [T, Hq, SPLITS] twice; if SPLITS > 1
    keys, values,  # [blocks, BLOCK_SIZE, Hkv, D], the first three dimensions apart by *_STRIDE
    key_scale, value_scale,  # float32 [Hkv], or None
    block_tables, query_start, seq_lens,  # [S, ...], [S + 1], [S]
    tile_sequence, tile_first,  # [tiles]: whose queries, and the index of the first one
    q_stride, table_stride, score_scale,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(tile_sequence + tile), tl.load(tile_first + tile)
    start, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    length = tl.load(seq_lens + sequence)

    row = tl.arange(0, M)
    query = first + row // G  # this row's query, counted within its sequence
    head = kv_head * G + row % G
    real = (row < M // G * G) & (query < end - start)
    visible = length - (end - start) + query + 1  # keys that a row sees: causal
    column = tl.arange(0, BLOCK_D)
    row_offset = (start + query).to(tl.int64)
    q_mask = real[:, None] & (column[None, :] < D)
    q_tile = tl.load(
        q + row_offset[:, None] * q_stride + head[:, None] * D + column[None, :], q_mask, 0.0
    )  # [M, BLOCK_D]
    if INTERPRET:
        q_tile = q_tile.to(tl.float32)
    if key_scale is not None:
        score_scale = score_scale * tl.load(key_scale + kv_head)
    score_scale = score_scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e))

    # Keys [low, high) are this program's. How long a span is follows from the real length, not
    # from the launch, so that a captured launch serves every length.
    last = tl.minimum(length, length - (end - start) + first + M // G)
    span = tl.cdiv(tl.cdiv(last, SPLITS), N) * N
    low = split * span
    high = tl.minimum(low + span, last)

    m = tl.full([M], NOTHING, tl.float32)
    d = tl.zeros([M], tl.float32)
    a = tl.zeros([M, BLOCK_D], tl.float32)
    for piece in range(low, high, N):
        key = piece + tl.arange(0, N)
        there = key < high
        block = tl.load(block_tables + sequence * table_stride + key // BLOCK_SIZE, there, 0)
        within = key % BLOCK_SIZE * TOKEN_STRIDE + kv_head * HEAD_STRIDE
        offset = (block.to(tl.int64) * BLOCK_STRIDE + within)[:, None] + column[None, :]
        kv_mask = there[:, None] & (column[None, :] < D)  # what lies behind may be NaN
        k_tile = tl.load(keys + offset, kv_mask, 0.0).to(q_tile.dtype)  # [N, BLOCK_D]
        v_tile = tl.load(values + offset, kv_mask, 0.0).to(q_tile.dtype)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * score_scale  # [M, N]
        s = tl.where(real[:, None] & (key[None, :] < visible[:, None]), s, NOTHING)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        # Where a row has seen nothing yet, exp2(NOTHING - NOTHING) would be 1.
        p = tl.where(s > 0.1 * NOTHING, tl.exp2(s - m_new[:, None]), 0.0)  # [M, N]
        shrink = tl.exp2(m - m_new)
        d = d * shrink + tl.sum(p, axis=1)
        a = a * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        m = m_new

    if value_scale is not None:
        a = a * tl.load(value_scale + kv_head)
    out_row = row_offset * (KV_HEADS * G) + head
    if SPLITS == 1:
        answer = a / tl.where(d > 0, d, 1.0)[:, None]  # a row that saw nothing gives 0
        to = out + out_row[:, None] * D + column[None, :]
        tl.store(to, answer.to(out.dtype.element_ty), q_mask)
    else:
        part = out_row * SPLITS + split
        tl.store(part_a + part[:, None] * D + column[None, :], a, q_mask)
        tl.store(part_m + part, m, real)
        tl.store(part_d + part, d, real)


@triton.jit
def _merge(
    part_a, part_m, part_d, out,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # one token and query head
    part = row * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_D)
    mask = column < D
    m = tl.load(part_m + part)
    weight = tl.exp2(m - tl.max(m, axis=0))  # [SPLITS]
    d = tl.sum(weight * tl.load(part_d + part), axis=0)
    a = tl.load(part_a + part[:, None] * D + column[None, :], mask[None, :], 0.0)
    answer = tl.sum(weight[:, None] * a, axis=0) / tl.where(d > 0, d, 1.0)
    tl.store(out + row * D + column, answer.to(out.dtype.element_ty), mask)


@dataclass(frozen=True)
class Tiling:
    """How ``_attend`` cuts its work: M rows by N keys a tile, over SPLITS programs a sequence."""

    rows: int
    keys: int = 64
    splits: int = 1
    warps: int = 4


@dataclass(frozen=True)
class Tiles:
    """One launch of ``_attend``: the tokens ``[start, end)``, dealt to tiles."""

    start: int
    end: int
    sequence: Tensor  # int32 [tiles]: whose queries
    first: Tensor  # int32 [tiles]: the index of the first one within its sequence
    tiling: Tiling


def store_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write ``k`` and ``v [T, Hkv, D]`` to slots of one layer, divided by ``scales [Hkv]``."""
    width, head_dim = k.shape[1] * k.shape[2], k.shape[2]
    key_scale, value_scale = scales or (None, None)
    limit = torch.finfo(keys.dtype).max
    block = triton.next_power_of_2(width)
    _store_kv[(len(k),)](
        k, v, keys, values, slots, key_scale, value_scale, k.stride(0), v.stride(0),
        WIDTH=width, D=head_dim, BLOCK=block, LIMIT=limit,
    )  # fmt: skip


def attend(
    q: Tensor,  # [T, Hq, D]
    out: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [blocks, block_size, Hkv, D]; may be a transposed view, but for D
    values: Tensor,  # as the keys
    sequences: tuple[Tensor, Tensor, Tensor],  # block tables, query starts, lengths
    tiles: Tiles,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch ``_attend``, and ``_merge`` if the keys were split, for the tokens of ``tiles``."""
    block_tables, query_start, seq_lens = sequences
    key_scale, value_scale = scales or (None, None)
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    assert keys.stride() == values.stride()
    block_stride, token_stride, head_stride, one = keys.stride()
    assert one == 1
    tiling, splits = tiles.tiling, tiles.tiling.splits
    block_d = max(16, triton.next_power_of_2(head_dim))
    part_a = part_m = part_d = None
    if splits > 1:
        rows = tiles.end  # tokens behind belong to another launch, a long prompt's maybe
        part_a = q.new_empty((rows, heads, splits, head_dim), dtype=torch.float32)
        part_m, part_d = (q.new_empty(part_a.shape[:3], dtype=torch.float32) for _ in range(2))
    _attend[(len(tiles.sequence), kv_heads, splits)](
        q, out, part_a, part_m, part_d, keys, values, key_scale, value_scale,
        block_tables, query_start, seq_lens, tiles.sequence, tiles.first,
        q.stride(0), block_tables.stride(0), head_dim**-0.5,
        BLOCK_STRIDE=block_stride, TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride,
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, G=heads // kv_heads, D=head_dim,
        BLOCK_D=block_d, M=tiling.rows, N=tiling.keys, SPLITS=splits, num_warps=tiling.warps,
    )  # fmt: skip
    if splits > 1:
        own = slice(tiles.start, tiles.end)
        _merge[((tiles.end - tiles.start) * heads,)](
            part_a[own], part_m[own], part_d[own], out[own],
            D=head_dim, BLOCK_D=block_d, SPLITS=splits,
        )  # fmt: skip
