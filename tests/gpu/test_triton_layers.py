"""The fused layers against the readable ones: compiled on a GPU, else interpreted."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import (
    answers,
    drive,
    pipelined_engine,
    plain_engine,
    random_arrivals,
    small_config,
    tiny_model,
)
from tape_graph import RepeatedCall

pytest.importorskip("triton")

from minibatch.model.attention import PagedReferenceAttention
from minibatch.model.fp8_kv_cache import Fp8KVCache, UnpackingAttention, calibrate
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM, RMSNorm
from minibatch.model.one_prompt import one_prompt
from minibatch.model.triton_attention import TritonAttention, TritonKVCache
from minibatch.model.triton_kernels import Tiling
from minibatch.model.triton_layers import FusedLlama, add_rms_norm, silu_times


@pytest.fixture
def model(device: torch.device) -> LlamaForCausalLM:
    model = tiny_model(device)
    model.backend = PagedReferenceAttention()
    return model


@torch.inference_mode()
def both(
    model: LlamaForCausalLM, caches: tuple[KVCache, KVCache], count: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(count, device=model.device) * 7 + 3
    positions = torch.arange(count, device=model.device) + 20
    outs = []
    for forward, cache in zip((model, FusedLlama(model)), caches, strict=True):
        meta = one_prompt(count, cache.block_size, model.device)
        meta.slot_mapping[2] = -1
        outs.append(forward(ids, positions, cache, meta))
    return outs[0], outs[1]


def test_forward_and_what_it_stores(model: LlamaForCausalLM) -> None:
    first, second = (KVCache(model.config, 2, 16, device=model.device) for _ in range(2))
    caches = first, second
    expected, found = both(model, caches)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    for layer in range(model.config.num_layers):
        for plain, fused in ((c.keys[layer], f.keys[layer]) for c, f in [caches]):
            torch.testing.assert_close(fused, plain, atol=2e-4, rtol=1e-3)
            assert not fused[0, 2].any() and not fused[1].any()  # slot -1, and behind the end
        torch.testing.assert_close(
            caches[1].values[layer], caches[0].values[layer], atol=2e-4, rtol=1e-3
        )


@pytest.mark.usefixtures("e4m3")
def test_eight_bit_cache(model: LlamaForCausalLM) -> None:
    """Interpreted, one number in forty is rounded to half its size: the text is off, not lost."""
    scales = calibrate(model)
    model.backend = UnpackingAttention()
    caches = tuple(
        Fp8KVCache(model.config, 2, 16, scales=scales, device=model.device) for _ in range(2)
    )
    both(model, caches)  # type: ignore[arg-type]
    plain, fused = (cache.keys[0].float().flatten() for cache in caches)
    written = plain != 0
    close = ((plain - fused).abs() <= 0.13 * plain.abs())[written]
    assert float(close.float().mean()) > 0.9
    assert not fused[~written].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48, 1e-5, dtype).to(device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    hidden, delta = torch.randn(2, 3, 48, device=device).to(dtype)
    expected = hidden + delta
    # The interpreter cuts a bfloat16 off where a GPU rounds it.
    off = 1e-5 if dtype == torch.float32 else 0.02
    tolerance = {"atol": off, "rtol": off}
    with torch.inference_mode():
        first = add_rms_norm(hidden.clone(), None, norm)
        torch.testing.assert_close(first, norm(hidden), **tolerance)
        stream = hidden.clone()
        second = add_rms_norm(stream, delta, norm)
        torch.testing.assert_close(stream, expected, **tolerance)
        torch.testing.assert_close(second, norm(expected), **tolerance)


def test_silu_times(device: torch.device) -> None:
    gate_up = 4 * torch.randn(3, 2 * 1100, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(
        silu_times(gate_up), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5
    )


def test_the_whole_stack_says_what_the_plain_engine_says(model: LlamaForCausalLM) -> None:
    """Kernels, fused layers, graphs, static inputs and the pipelined engine, all at once."""
    config = small_config("unified", max_num_seqs=3, max_num_batched_tokens=9)
    arrivals = random_arrivals(5, count=3, max_tokens=3)
    plain = plain_engine(model, config)
    drive(plain, arrivals)
    expected = answers(plain, arrivals)
    tiling = Tiling(rows=16, keys=16, splits=2)
    ahead = pipelined_engine(
        model,
        config,
        RepeatedCall,
        backend=TritonAttention(2, decode=tiling, chunk=Tiling(rows=16, keys=16)),
        cache=TritonKVCache,
        forward=FusedLlama(model),
    )
    drive(ahead, arrivals)
    assert answers(ahead, arrivals) == expected
