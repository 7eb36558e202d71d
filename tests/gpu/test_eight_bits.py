"""8-bit weights, activations and caches: how far off, and that a token depends on itself alone."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import tiny_model
from torch import nn

from minibatch.errors import ConfigError
from minibatch.model.fp8 import Fp8Linear, quantize_fp8, quantize_rows
from minibatch.model.fp8_kv_cache import (
    HEADROOM,
    Fp8KVCache,
    UnpackingAttention,
    calibrate,
    pack,
    unpack,
)
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.one_prompt import one_prompt


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.inference_mode()
def logits(model: LlamaForCausalLM, cache: KVCache, count: int = 40) -> torch.Tensor:
    ids = torch.arange(count) * 7 % model.config.vocab_size
    meta = one_prompt(count, cache.block_size, model.device)
    return model.compute_logits(model(ids, torch.arange(count), cache, meta))


# -- W8A8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_fp8_linear(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 96, bias=bias, dtype=dtype)
    x = torch.randn(33, 256, dtype=dtype) * torch.logspace(-3, 3, 33, dtype=dtype)[:, None]
    with torch.inference_mode():
        expected, found = linear(x), Fp8Linear(linear)(x)
    assert found.dtype == dtype
    for row in range(33):  # small rows are as exact as large ones: each has its own scale
        assert relative_error(found[row], expected[row]) < 0.06
    assert relative_error(found, expected) < 0.05


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    linear = Fp8Linear(nn.Linear(64, 32))
    x = torch.randn(5, 64)
    x[3] *= 1000
    with torch.inference_mode():
        together = linear(x)
        alone = torch.cat([linear(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


def test_quantized_rows_use_the_whole_range() -> None:
    rows, _ = quantize_rows(torch.randn(4, 64))
    assert rows.float().abs().amax(dim=-1).tolist() == [448.0] * 4
    zero, _ = quantize_rows(torch.zeros(1, 16))
    assert not zero.float().any()


@pytest.mark.usefixtures("e4m3")
@pytest.mark.parametrize(("rows", "inner"), [(1, 48), (3, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_quantizes_rows(
    rows: int, inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As torch does it: numbers that the format holds exactly, in rows further apart than they are
    long, and a row of zeros. (The interpreter rounds some of the others wrongly.)
    """
    pytest.importorskip("triton")
    from minibatch.model.triton_fp8 import quantize_rows as fused

    choices = torch.tensor([0.0, 1.0, -3.5, 0.8125, 208.0, -448.0])
    generator = torch.Generator().manual_seed(0)
    x = choices[torch.randint(6, (rows, inner + 16), generator=generator)]
    x[:, 0] = 448
    x[-1] *= 2.0**-9
    x = torch.cat([x, torch.zeros(1, inner + 16)]).to(device, dtype)[:, :inner]
    found, scale = fused(x)
    expected, expected_scale = quantize_rows(x)
    assert found.shape == expected.shape and scale.shape == expected_scale.shape
    torch.testing.assert_close(scale, expected_scale)
    assert torch.equal(found.float(), expected.float())


def test_fp8_model() -> None:
    model = tiny_model()
    cache = KVCache(model.config, 4, 16)
    expected = logits(model, cache)
    before = sum(p.nbytes for p in model.parameters())
    quantize_fp8(model)
    found = logits(model, KVCache(model.config, 4, 16))
    assert relative_error(found, expected) < 0.25  # random weights are the hardest case
    after = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.dim() > 1)
    assert after < before
    assert all(isinstance(layer.mlp.down_proj, Fp8Linear) for layer in model.layers)
    assert model.dtype == torch.float32 and model.embed_tokens.weight.dtype == torch.float32


def test_sizes_that_do_not_suit_are_refused_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match="multiples of 16; use quantization='int8'"):
        Fp8Linear(nn.Linear(24, 32))


# -- the 8-bit cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pack_rounds_to_the_nearest_and_cuts_off_what_is_too_large(number: torch.dtype) -> None:
    scale = torch.tensor([0.01, 3.0])
    x = torch.randn(500, 2, 8)
    x[:, 0] *= 0.5  # with each scale, well within the format
    back = unpack(pack(x, scale, number), scale, torch.float32)
    mantissa = 3 if number == torch.float8_e4m3fn else 2
    normal = x.abs() / scale[:, None] > 0.02
    error = ((back - x).abs() / x.abs())[normal]
    assert float(error.max()) <= 2.0 ** -(mantissa + 1) + 1e-6
    limit = torch.finfo(number).max
    huge = torch.full((1, 2, 8), 1e9)
    assert torch.equal(pack(huge, scale, number).float(), torch.full((1, 2, 8), limit))


def test_scales_leave_headroom_over_what_calibration_saw() -> None:
    model = tiny_model()
    scales = calibrate(model)
    config = model.config
    assert scales.shape == (config.num_layers, 2, config.num_kv_heads)
    assert torch.equal(scales, calibrate(model))  # the same prompt every time
    ids = torch.arange(40) * 7 % config.vocab_size
    scales = calibrate(model, ids)
    cache = KVCache(config, 4, 16)
    logits(model, cache)
    for layer in range(config.num_layers):
        for which, pool in enumerate((cache.keys, cache.values)):
            largest = pool[layer].abs().amax(dim=(0, 1, 3)) / scales[layer, which]
            torch.testing.assert_close(largest, torch.full_like(largest, 448.0 / HEADROOM))


def test_fp8_cache_halves_or_quarters_the_bytes() -> None:
    model = tiny_model()
    plain = KVCache(model.config, 4, 16)
    packed = Fp8KVCache(model.config, 4, 16, scales=calibrate(model))
    assert packed.bytes_per_block * 4 == plain.bytes_per_block
    expected = logits(model, plain)
    model.backend = UnpackingAttention()
    assert relative_error(logits(model, packed), expected) < 0.15


def test_fp8_blocks_move_as_bytes() -> None:
    model = tiny_model()
    cache = Fp8KVCache(model.config, 4, 16, scales=calibrate(model), num_cpu_blocks=2)
    model.backend = UnpackingAttention()
    logits(model, cache, count=30)
    before = [pool.view(torch.uint8)[1].clone() for pool in cache.keys]
    assert any(bool(block.any()) for block in before)
    cache.swap_out([(1, 0)])
    cache.swap_in([(0, 3)])
    cache.copy_blocks([(3, 2)])
    for pool, block in zip(cache.keys, before, strict=True):
        assert torch.equal(pool.view(torch.uint8)[2], block)


# -- int8 weights on a GPU ----------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 33, 40), (19, 32, 300), (40, 130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear(
    rows: int, outputs: int, inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Against the same 8-bit weights multiplied by torch; sizes that fill no tile."""
    pytest.importorskip("triton")
    from minibatch.model.triton_int8 import int8_linear, quantize_channels

    torch.manual_seed(0)
    weight, scale = quantize_channels(torch.randn(outputs, inner, device=device))
    x = torch.randn(rows, 2 * inner, device=device).to(dtype)[:, :inner]
    expected = (x.double() @ weight.double().T * scale.double()).float()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    found = int8_linear(x, weight, scale)
    assert found.dtype == dtype
    assert relative_error(found, expected) < tolerance


def test_int8_weights_are_off_by_half_a_step_at_most(device: torch.device) -> None:
    pytest.importorskip("triton")
    from minibatch.model.triton_int8 import TritonInt8Linear, quantize_channels

    torch.manual_seed(0)
    linear = nn.Linear(64, 16, device=device)
    weight, scale = quantize_channels(linear.weight.detach())
    error = weight * scale[:, None] - linear.weight.detach()
    assert float(error.abs().max()) <= float(scale.max()) / 2
    x = torch.randn(3, 64, device=device)
    with torch.inference_mode():
        assert relative_error(TritonInt8Linear(linear)(x), linear(x)) < 0.02
