"""A step over a poisoned paged cache, and attention over it written out in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minibatch.model.attention import AttentionBackend, AttentionMetadata
from minibatch.model.config import ModelConfig
from minibatch.model.fp8_kv_cache import Fp8KVCache, pack, unpack
from minibatch.model.kv_cache import KVCache

BLOCK_SIZE = 16


@dataclass
class Case:
    """Sequences with ``lengths`` tokens of KV, the last ``query_lens`` of which attend."""

    cache: KVCache
    meta: AttentionMetadata
    q: Tensor  # [T, Hq, D], rows further apart than they are long
    expected: Tensor  # float32 [T, Hq, D]


def config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, max_position_embeddings=4096,
    )  # fmt: skip


def make_case(
    heads: tuple[int, int],
    lengths: list[int],
    query_lens: list[int],
    *,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    number: torch.dtype | None = None,
    padding: int = 0,
    seed: int = 0,
) -> Case:
    """Blocks are dealt at random; what no sequence has written is NaN, and table entries behind
    a sequence's last are garbage. ``number``: the 8-bit format of the cache, if it has one.
    """
    num_heads, kv_heads = heads
    shape = config(num_heads, kv_heads, head_dim)
    generator = torch.Generator().manual_seed(seed)
    needed = [math.ceil(length / BLOCK_SIZE) for length in lengths]
    total = sum(needed) + 2
    if number is None:
        cache = KVCache(shape, total, BLOCK_SIZE, dtype=dtype, device=device)
    else:
        scales = 0.01 + 0.02 * torch.rand(1, 2, kv_heads, generator=generator)
        cache = Fp8KVCache(shape, total, BLOCK_SIZE, scales=scales, number=number, device=device)
    keys, values = (pool[0].view(torch.uint8) for pool in (cache.keys, cache.values))
    keys.fill_(255)  # all bits set is NaN in each of the formats
    values.fill_(255)
    deck = torch.randperm(total, generator=generator).tolist()
    width = max(needed, default=0) + 2
    tables = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    stored: list[tuple[Tensor, Tensor]] = []
    for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        table = [deck.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(table, dtype=torch.int32)
        pair = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        seen = []
        for x, pool, which in zip(pair, (cache.keys, cache.values), (0, 1), strict=True):
            if number is None:
                seen.append(x.float())
                bits = x
            else:
                scale = cache.scales(0)[which].cpu()
                bits = pack(x, scale, number)
                seen.append(unpack(bits, scale, torch.float32))
            for token in range(length):
                slot = table[token // BLOCK_SIZE], token % BLOCK_SIZE
                pool[0].view(torch.uint8)[slot] = bits.view(torch.uint8)[token].to(device)
        stored.append((seen[0], seen[1]))
    count = sum(query_lens)
    wide = torch.randn(count + padding, num_heads + kv_heads, head_dim, generator=generator)
    q = wide.to(dtype)[:, :num_heads]
    meta = AttentionMetadata(
        slot_mapping=torch.full((count + padding,), -1, device=device),
        block_tables=tables.to(device),
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_lens=query_lens,
        seq_lens_host=lengths,
        num_decodes=query_lens.count(1),
    )
    expected = torch.zeros(count + padding, num_heads, head_dim)
    start = 0
    for (k, v), length, queries in zip(stored, lengths, query_lens, strict=True):
        if length:
            rows = slice(start, start + queries)
            expected[rows] = by_hand(q[rows].float(), k, v)
        start += queries
    return Case(cache, meta, wide.to(dtype).to(device)[:, :num_heads], expected)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``q [n, Hq, D]`` over ``k`` and ``v [length, Hkv, D]``, causal from the bottom right."""
    n, heads, head_dim = q.shape
    length, kv_heads = k.shape[:2]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    hidden = torch.arange(length) > torch.arange(length - n, length)[:, None]  # [n, length]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend(backend: AttentionBackend, case: Case) -> Tensor:
    with torch.inference_mode():
        backend.prepare(case.meta, case.cache, case.q.dtype)
        return backend.forward(case.q, case.cache, 0, case.meta).float().cpu()
