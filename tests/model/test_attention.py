"""The plain backend and the CPU's against attention written out for one query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from minibatch.errors import ConfigError
from minibatch.model import paged_cpu_attention
from minibatch.model.attention import AttentionBackend, AttentionMetadata, PagedReferenceAttention
from minibatch.model.config import ModelConfig
from minibatch.model.cpu.kernels import CpuKernels
from minibatch.model.cpu.ops import CompiledAttention
from minibatch.model.kv_cache import KVCache
from minibatch.model.paged_cpu_attention import PagedCPUAttention, split_by_length

BLOCK_SIZE = 4
HEAD_DIM = 8

Pair = tuple[torch.Tensor, torch.Tensor]  # K and V of one sequence, [length, kv_heads, HEAD_DIM]
Attend = Callable[[KVCache, AttentionMetadata, torch.Tensor], torch.Tensor]


def build(
    heads: int,
    kv_heads: int,
    lengths: list[int],
    query_lens: list[int],
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[KVCache, AttentionMetadata, list[Pair], torch.Tensor]:
    """A poisoned cache with K and V of ``lengths`` tokens stored, and its step's metadata."""
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=HEAD_DIM, max_position_embeddings=64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    needed = [math.ceil(length / BLOCK_SIZE) for length in lengths]
    cache = KVCache(config, sum(needed) + 2, BLOCK_SIZE, dtype=dtype)
    cache.keys[0].fill_(float("nan"))
    cache.values[0].fill_(float("nan"))
    deck = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    tables = torch.full((len(lengths), max(needed) + 2), -1, dtype=torch.int32)
    stored = []
    for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        table = [deck.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(table, dtype=torch.int32)
        k, v = torch.randn(2, length, kv_heads, HEAD_DIM, generator=generator).to(dtype)
        slots = [table[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(length)]
        cache.store(0, k, v, torch.tensor(slots, dtype=torch.int64))
        stored.append((k, v))
    meta = AttentionMetadata(
        slot_mapping=torch.full((sum(query_lens) + padding,), -1),
        block_tables=tables,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_lens=query_lens,
        seq_lens_host=lengths,
        num_decodes=query_lens.count(1),
    )
    q = torch.randn(sum(query_lens) + padding, heads, HEAD_DIM, generator=generator).to(dtype)
    return cache, meta, stored, q


def by_hand(
    q: torch.Tensor, stored: list[Pair], lengths: list[int], query_lens: list[int]
) -> torch.Tensor:
    """One query, one head at a time."""
    rows = []
    for (k, v), length, num_queries in zip(stored, lengths, query_lens, strict=True):
        for i in range(num_queries):
            visible = length - num_queries + i + 1
            query, heads = q[len(rows)], []
            for head in range(q.shape[1]):
                kv_head = head * k.shape[1] // q.shape[1]
                scores = k[:visible, kv_head].float() @ query[head].float()
                weights = torch.softmax(scores / math.sqrt(HEAD_DIM), dim=0)
                heads.append(weights @ v[:visible, kv_head].float())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.fixture(params=["reference", "cpu", "compiled"])
def attend(request: pytest.FixtureRequest) -> Attend:
    """One layer's attention, by each backend."""

    def run(cache: KVCache, meta: AttentionMetadata, q: torch.Tensor) -> torch.Tensor:
        backends: dict[str, Callable[[], AttentionBackend]] = {
            "reference": PagedReferenceAttention,
            "cpu": lambda: PagedCPUAttention(q.shape[1]),
            "compiled": lambda: compiled_attention(q, cache),
        }
        return run_backend(backends[request.param](), cache, meta, q)

    return run


def compiled_attention(q: torch.Tensor, cache: KVCache) -> AttentionBackend:
    heads = q.shape[1]
    try:
        kernels = CpuKernels(q.dtype, HEAD_DIM, heads // cache.keys[0].shape[2])
    except ConfigError as error:
        pytest.skip(str(error).partition("\n")[0])
    return CompiledAttention(kernels)


def run_backend(
    backend: AttentionBackend, cache: KVCache, meta: AttentionMetadata, q: torch.Tensor
) -> torch.Tensor:
    with torch.inference_mode():
        backend.prepare(meta, cache, q.dtype)
        return backend.forward(q, cache, 0, meta)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (6, 1)])
@pytest.mark.parametrize(
    ("lengths", "query_lens"),
    [
        ([1, 4, 5, 13], [1, 1, 1, 1]),  # decodes of unequal length
        ([9], [9]),  # a whole prompt
        ([11], [3]),  # a chunk over earlier context
        ([6, 17, 4, 12], [1, 1, 4, 5]),  # all of it mixed
    ],
)
def test_against_attention_by_hand(
    attend: Attend, heads: int, kv_heads: int, lengths: list[int], query_lens: list[int]
) -> None:
    """Unwritten slots hold NaN throughout: one leak and the comparison fails."""
    cache, meta, stored, q = build(heads, kv_heads, lengths, query_lens, padding=3)
    out = attend(cache, meta, q)
    used = sum(query_lens)
    torch.testing.assert_close(out[:used], by_hand(q, stored, lengths, query_lens))
    assert not out[used:].any()  # padding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(attend: Attend, dtype: torch.dtype) -> None:
    lengths, query_lens = [6, 17, 4, 12], [1, 1, 4, 5]
    cache, meta, stored, q = build(4, 2, lengths, query_lens, dtype=dtype)
    out = attend(cache, meta, q)
    assert out.dtype == dtype
    expected = by_hand(q, stored, lengths, query_lens)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


def test_rows_that_pad_a_batch_to_a_fixed_size_give_zero(attend: Attend) -> None:
    """Sequences of length 0, with nothing in their tables, beside real ones."""
    lengths, query_lens = [5, 0, 9, 0], [1, 1, 1, 1]
    cache, meta, stored, q = build(4, 2, lengths, query_lens)
    out = attend(cache, meta, q)
    real = [0, 2]
    expected = by_hand(q[real], [stored[i] for i in real], [5, 9], [1, 1])
    torch.testing.assert_close(out[real], expected)
    assert not out[[1, 3]].any()


def test_a_step_of_padding_only(attend: Attend) -> None:
    cache, meta, _, q = build(4, 2, [3], [1], padding=2)
    meta.query_lens, meta.seq_lens_host, meta.num_decodes = [], [], 0
    assert not attend(cache, meta, q).any()


def test_sequence_of_token() -> None:
    _, meta, _, q = build(4, 2, [6, 17, 4, 12], [1, 1, 4, 5], padding=2)
    expected = [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    assert meta.sequence_of_token(q.shape[0]).tolist() == expected


# -- the CPU's own ways -------------------------------------------------------------------------


def cpu_attend(cache: KVCache, meta: AttentionMetadata, q: torch.Tensor) -> torch.Tensor:
    return run_backend(PagedCPUAttention(q.shape[1]), cache, meta, q)


def test_sequences_are_grouped_by_length() -> None:
    assert split_by_length([100, 90, 95], 512) == [[0, 1, 2]]  # little padding: one group
    assert split_by_length([2000, 10, 2000, 12], 512) == [[0, 2], [1, 3]]
    assert split_by_length([7, 0, 9], 512) == [[0, 2]]  # nobody attends for a sequence of nothing
    assert split_by_length([], 512) == []


def test_a_group_copies_no_more_keys_than_the_cache_holds() -> None:
    per_token = paged_cpu_attention.BAND_BYTES // 1000
    groups = split_by_length([400] * 5, per_token)
    assert groups == [[0, 1], [2, 3], [4]]
    assert split_by_length([5000], per_token) == [[0]]  # one alone may be larger


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_give_what_one_batch_gives(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_cpu_attention, "BAND_TOKENS", 3)
    lengths, query_lens = [6, 40, 5, 0, 39, 17, 12], [1, 1, 1, 1, 1, 1, 4]
    assert len(split_by_length(lengths[:6], 512)) == 3
    cache, meta, stored, q = build(6, 2, lengths, query_lens, padding=2, dtype=dtype)
    out = cpu_attend(cache, meta, q)
    real = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    expected = by_hand(
        q[real],
        [pair for pair, length in zip(stored, lengths, strict=True) if length],
        [length for length in lengths if length],
        [1, 1, 1, 1, 1, 4],
    )
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(out[real].float(), expected, atol=tolerance, rtol=tolerance)
    assert not out[3].any() and not out[10:].any()


@pytest.mark.parametrize(("length", "queries"), [(11, 11), (30, 11), (30, 1 + 8)])
def test_prompts_longer_than_a_tile(
    length: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_cpu_attention, "TILE", 4)
    cache, meta, stored, q = build(4, 2, [9, length], [1, queries])
    torch.testing.assert_close(
        cpu_attend(cache, meta, q), by_hand(q, stored, [9, length], [1, queries])
    )


def test_the_buffer_of_keys_is_kept_from_layer_to_layer_and_step_to_step() -> None:
    cache, meta, _, q = build(4, 2, [30, 30], [1, 1])
    backend = PagedCPUAttention(4)
    run_backend(backend, cache, meta, q)
    address = backend._keys.data_ptr()
    shorter = build(4, 2, [20, 9], [1, 1])
    for again in ((cache, meta, q), (shorter[0], shorter[1], shorter[3])):
        run_backend(backend, *again)
        assert backend._keys.data_ptr() == address
