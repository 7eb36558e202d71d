"""8-bit matrices on a CPU: how far off, and that a row depends on itself alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import hf_config, hf_logits, hf_model, paged_logits, random_tokens, save
from torch import nn

from minibatch.model.loader import load_model
from minibatch.model.quantization import Int8Linear, quantize_int8, quantize_rows


def test_a_number_is_off_by_half_a_step_at_most() -> None:
    x = torch.randn(7, 300) * torch.logspace(-6, 6, 7)[:, None]
    quantized, scale = quantize_rows(x)
    assert quantized.dtype == torch.int8 and scale.shape == (7, 1)
    assert quantized.abs().amax(dim=1).tolist() == [127] * 7  # each row uses the whole range
    assert ((x - quantized * scale).abs() <= 0.5001 * scale).all()


def test_a_row_of_zeros_stays_one() -> None:
    quantized, scale = quantize_rows(torch.zeros(2, 5))
    assert not quantized.any() and torch.isfinite(scale).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_int8_linear(rows: int, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 96, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, 256).to(dtype)
    with torch.inference_mode():
        expected, found = linear(x), Int8Linear(linear)(x)
    assert found.dtype == dtype
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.02


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    linear = Int8Linear(nn.Linear(64, 32).requires_grad_(False))
    x = torch.randn(5, 64)
    x[3] *= 1000
    with torch.inference_mode():
        together = linear(x)
        alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(together, alone)


def test_a_quarter_of_the_bytes() -> None:
    linear = nn.Linear(512, 512, bias=False).requires_grad_(False)
    packed = Int8Linear(linear)
    size = sum(buffer.numel() * buffer.element_size() for buffer in packed.buffers())
    assert size < 0.26 * linear.weight.numel() * 4


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_quantised_model_stay_near(tied: bool, tmp_path: Path) -> None:
    theirs = hf_model(hf_config(tie_word_embeddings=tied))
    ours = load_model(save(theirs, tmp_path))
    quantize_int8(ours)
    assert not any(isinstance(module, nn.Linear) for module in ours.modules())
    tokens = random_tokens(40)
    exact, found = hf_logits(theirs, tokens), paged_logits(ours, tokens, chunk=7)
    assert (found - exact).norm() / exact.norm() < 0.05


@pytest.mark.smollm2
def test_smollm2_keeps_its_wits(smollm2_path: Path) -> None:
    """It still knows the capital of Italy, and its next-token distribution is close."""
    capitals = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 7158, 314]
    exact_model = load_model(smollm2_path, max_model_len=64)
    exact = paged_logits(exact_model, capitals)
    quantize_int8(exact_model)
    found = paged_logits(exact_model, capitals)
    assert found[-1].argmax() == exact[-1].argmax()
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert divergence.mean() < 0.2
