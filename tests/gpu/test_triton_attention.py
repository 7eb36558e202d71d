"""The attention kernels against float32 attention by hand: compiled on a GPU, else interpreted.

The interpreter takes some 30 ms a program, so shapes are the smallest that show a thing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_case import BLOCK_SIZE, attend, config, make_case
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from minibatch.model.attention import PagedReferenceAttention
from minibatch.model.fp8_kv_cache import Fp8KVCache, UnpackingAttention
from minibatch.model.triton_attention import TritonAttention, TritonFp8KVCache, TritonKVCache
from minibatch.model.triton_kernels import Tiling

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def backend(heads: tuple[int, int], splits: int = 1) -> TritonAttention:
    small = Tiling(rows=16, keys=32, splits=splits)
    return TritonAttention(heads[0] // heads[1], decode=small, chunk=Tiling(rows=32, keys=32))


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (6, 2)], ids=["MHA", "MQA", "G=3"])
@pytest.mark.parametrize("splits", [1, 4])
def test_decodes_of_unequal_length(
    heads: tuple[int, int], splits: int, device: torch.device
) -> None:
    """A token, blocks full, nearly full and just begun, several tiles; more splits than tiles."""
    case = make_case(heads, [1, 15, 16, 17, 130], [1] * 5, device=device)
    torch.testing.assert_close(
        attend(backend(heads, splits), case), case.expected, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("lengths", "query_lens"),
    [
        pytest.param([70], [70], id="a whole prompt over several tiles"),
        pytest.param([60], [9], id="a chunk behind earlier context"),
        pytest.param([33, 20, 40], [1, 5, 40], id="decode, chunk and prompt"),
    ],
)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=["MHA", "G=3"])
def test_chunks(
    heads: tuple[int, int], lengths: list[int], query_lens: list[int], device: torch.device
) -> None:
    case = make_case(heads, lengths, query_lens, device=device, padding=2)
    out = attend(backend(heads, splits=2), case)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-4)
    assert not out[-2:].any()  # static batching's padding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 12], ids=["D=16", "D=12, no power of two"])
def test_half_precision(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    case = make_case((4, 2), [40, 21], [1, 6], head_dim=head_dim, dtype=dtype, device=device)
    out = attend(backend((4, 2), splits=2), case)
    torch.testing.assert_close(out, case.expected, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("number", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_cache(
    number: torch.dtype, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Scales of each head, keys and values; the only error left is that of the arithmetic."""
    if number == torch.float8_e4m3fn:
        request.getfixturevalue("e4m3")
    case = make_case((4, 2), [40, 21], [1, 6], dtype=torch.float16, device=device, number=number)
    out = attend(backend((4, 2), splits=2), case)
    torch.testing.assert_close(out, case.expected, atol=4e-3, rtol=1e-2)
    plain = attend(UnpackingAttention(), case)
    torch.testing.assert_close(out, plain, atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_that_pad_a_captured_batch_give_zero(splits: int, device: torch.device) -> None:
    """Length 0 and a table of garbage, as in the padding of a CUDA graph."""
    case = make_case((4, 2), [20, 0, 0], [1, 1, 1], device=device)
    out = attend(backend((4, 2), splits), case)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-4)
    assert not out[1:].any()


@pytest.mark.parametrize("number", [None, torch.float8_e5m2], ids=["plain", "8 bits"])
def test_blocks_with_a_head_in_one_piece(number: torch.dtype | None, device: torch.device) -> None:
    """The other layout, [blocks, Hkv, block_size, D], is a matter of strides."""
    case = make_case((4, 2), [40, 21], [1, 6], device=device, number=number)
    for pools in (case.cache.keys, case.cache.values):
        bits = pools[0].view(torch.uint8)
        apart = bits.transpose(1, 2).contiguous().transpose(1, 2)
        assert apart.stride() != bits.stride()
        pools[0] = apart.view(pools[0].dtype)
    out = attend(backend((4, 2), splits=2), case)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-4)


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.elements = max(self.elements, result.numel())
        return result


def test_a_decode_beside_a_long_prompt_needs_scratch_for_itself_alone(
    device: torch.device,
) -> None:
    """Else 16 splits of a step of 8192 tokens of Llama-2-7B would take 2 GiB."""
    case = make_case((2, 2), [33, 60], [1, 60], device=device)
    with LargestAllocation() as largest:
        out = attend(backend((2, 2), splits=16), case)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-4)
    assert largest.elements == case.q.numel()  # the result


def test_llama_2_heads(device: torch.device) -> None:
    """D = 128 in bfloat16, the default tiling, against the plain backend as well."""
    case = make_case((2, 2), [70], [1], head_dim=128, dtype=torch.bfloat16, device=device)
    out = attend(TritonAttention(1, num_processors=2), case)
    torch.testing.assert_close(out, case.expected, atol=2e-2, rtol=2e-2)
    plain = attend(PagedReferenceAttention(), case)
    torch.testing.assert_close(out, plain, atol=2e-2, rtol=2e-2)


def test_fewer_splits_for_larger_batches() -> None:
    chosen = [TritonAttention(1)._decode_tiling(batch, 32).splits for batch in (1, 2, 4, 16, 128)]
    assert chosen == [16, 8, 4, 1, 1]


def test_a_group_wider_than_a_tile_gets_a_wider_tile(device: torch.device) -> None:
    heads = (20, 1)
    case = make_case(heads, [9, 7], [1, 3], device=device)
    out = attend(TritonAttention(20, chunk=Tiling(rows=16)), case)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("prompts", [1, 3])
def test_tiles_begin_at_multiples_of_16_bytes(prompts: int) -> None:
    """Else Triton would compile the kernel anew, in the middle of serving."""
    case = make_case((2, 2), [40] * prompts, [40] * prompts)
    chunked = backend((2, 2))
    chunked.prepare(case.meta, case.cache, torch.float32)
    (tiles,) = case.meta.plan
    assert tiles.sequence.tolist() == sorted([*range(prompts)] * 2)
    assert tiles.first.tolist() == [0, 32] * prompts
    assert tiles.sequence.data_ptr() % 16 == 0 and tiles.first.data_ptr() % 16 == 0


# -- the store kernel ---------------------------------------------------------------------------


def test_store(device: torch.device) -> None:
    """Rows further apart than they are long; slot -1 writes nowhere, all else stays as it was."""
    cache = TritonKVCache(config(6, 3, 8), 4, BLOCK_SIZE, dtype=torch.float16, device=device)
    for pool in (cache.keys[0], cache.values[0]):
        pool.fill_(7)
    fused = torch.randn(6, 10, 8).to(device, torch.float16)
    k, v = fused[:, 4:7], fused[:, 7:10]
    slots = [5, -1, 63, 0, -1, 16]
    cache.store(0, k, v, torch.tensor(slots, device=device))
    for x, pool in ((k, cache.keys[0]), (v, cache.values[0])):
        expected = torch.full_like(pool, 7).flatten(0, 1)
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = x[row]
        assert torch.equal(pool.flatten(0, 1), expected)


@pytest.mark.usefixtures("e4m3")
def test_store_in_eight_bits(device: torch.device) -> None:
    """Numbers that the format holds exactly (the interpreter rounds others wrongly), and one that
    is too large for it.
    """
    scales = torch.tensor([[[0.5, 2.0], [0.25, 1.0]]])
    cache = TritonFp8KVCache(config(2, 2, 4), 2, BLOCK_SIZE, scales=scales, device=device)
    codes = torch.tensor([-3.5, 0.0, 448.0, 0.8125]).expand(3, 2, 4)
    k, v = (codes * scale[:, None] for scale in scales[0])
    k = k.clone()
    k[2, 1, 2] = 1e6
    slots = torch.tensor([17, -1, 3], device=device)
    cache.store(0, k.to(device), v.to(device), slots)
    for pool in (cache.keys[0], cache.values[0]):
        stored = pool.flatten(0, 1).float().cpu()
        assert torch.equal(stored[[17, 3]], codes[:2])
        assert stored.count_nonzero() == 2 * codes[0].count_nonzero()


@pytest.mark.gpu
@pytest.mark.usefixtures("e4m3")
def test_store_rounds_as_torch_does() -> None:
    scales = 0.01 + torch.rand(1, 2, 4)
    k, v = torch.randn(2, 33, 4, 128, device="cuda", dtype=torch.bfloat16)
    caches = []
    for kind in (TritonFp8KVCache, Fp8KVCache):
        cache = kind(config(4, 4, 128), 3, BLOCK_SIZE, scales=scales, device="cuda")
        cache.store(0, k, v, torch.arange(33, device="cuda"))
        caches.append(cache.keys[0].float())
    torch.testing.assert_close(caches[0], caches[1], atol=0, rtol=0.07)  # a step of the format
