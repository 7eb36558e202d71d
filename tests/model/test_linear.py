"""Packed matrices give what plain ones give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import (
    PagedDriver,
    assert_close,
    hf_config,
    hf_logits,
    hf_model,
    paged_logits,
    save,
)
from model_helpers import random_tokens as tokens_of
from torch import nn

from minibatch.model import llama
from minibatch.model.linear import PackedLinear, can_pack, head_of, pack_linears
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, CPU), reason="torch has no packed kernels here"
)


def linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 16, 130])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """One packing serves every number of rows."""
    if not can_pack(dtype, CPU):
        pytest.skip(f"no packed kernels for {dtype}")
    plain = linear(72, 200, bias, dtype)
    x = torch.randn(rows, 72).to(dtype)
    with torch.inference_mode():
        found, expected = PackedLinear(plain)(x), plain(x)
    assert found.dtype == dtype and found.shape == expected.shape
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@needs_packing
def test_rows_that_do_not_lie_side_by_side() -> None:
    plain = linear(48, 32, True, torch.float32)
    x = torch.randn(10, 96)
    with torch.inference_mode():
        packed = PackedLinear(plain)
        for view in (x[:, 48:], x[::3, :48], x[:5].view(10, 48)):
            torch.testing.assert_close(packed(view), plain(view), atol=1e-5, rtol=1e-5)


@needs_packing
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ],
    ids=["untied", "tied", "biases", "odd sizes"],
)
def test_a_packed_model_gives_transformers_logits(shape: dict, tmp_path: Path) -> None:
    theirs = hf_model(hf_config(**shape))
    ours = load_model(save(theirs, tmp_path))
    pack_linears(ours)
    assert not any(isinstance(module, nn.Linear) for module in ours.modules())
    tokens = tokens_of(23)
    assert_close(paged_logits(ours, tokens), hf_logits(theirs, tokens))
    assert_close(paged_logits(ours, tokens, chunk=5), hf_logits(theirs, tokens))


@needs_packing
def test_matrices_are_not_kept_twice(tmp_path: Path) -> None:
    """Of a packed model only norms, biases and the embedding are left as they were."""
    ours = load_model(save(hf_model(hf_config()), tmp_path))
    matrices = [p for name, p in ours.named_parameters() if "_proj.weight" in name]
    assert matrices
    pack_linears(ours)
    left = dict(ours.named_parameters())
    assert not any("_proj" in name or "lm_head" in name for name in left)
    assert "embed_tokens.weight" in left


def test_only_what_this_processor_can_do_is_packed() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    tied = load_model(save(hf_model(hf_config(tie_word_embeddings=True)), tmp_path))
    assert head_of(tied).weight.data_ptr() == tied.embed_tokens.weight.data_ptr()


def test_slices_of_the_widest_layer_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: LlamaForCausalLM = load_model(save(hf_model(hf_config()), tmp_path))
    sequences = [tokens_of(17), tokens_of(9)]
    whole = PagedDriver(ours, sequences).step({0: 17, 1: 9})
    monkeypatch.setattr(llama, "MLP_ROWS", 4)
    sliced = PagedDriver(ours, sequences).step({0: 17, 1: 9})
    for index in (0, 1):
        torch.testing.assert_close(sliced[index], whole[index], atol=1e-5, rtol=0)
