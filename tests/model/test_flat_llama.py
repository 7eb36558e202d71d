"""The flat forward pass is the model's own, whatever the linears are made of."""

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
    random_tokens,
    save,
)

from minibatch.model import flat_llama
from minibatch.model.flat_llama import FlatLlama
from minibatch.model.linear import can_pack, pack_linears
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model
from minibatch.model.quantization import quantize_int8

SHAPES = {
    "gqa 4/2": {},
    "mha 4/4": {"num_key_value_heads": 4},
    "gqa 9/3": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "large eps": {"rms_norm_eps": 0.1},
    "dynamic rope": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    },
}


class FlatDriver(PagedDriver):
    """Runs the flat pass where ``PagedDriver`` runs the model's own."""

    def __init__(self, model: LlamaForCausalLM, *args: object, **settings: object) -> None:
        super().__init__(model, *args, **settings)
        self.model = _Flat(model)


class _Flat:
    def __init__(self, model: LlamaForCausalLM) -> None:
        self._forward = FlatLlama(model)
        self.compute_logits = model.compute_logits

    def __call__(self, *args: object) -> torch.Tensor:
        return self._forward(*args)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_transformers_logits(shape: str, tmp_path: Path) -> None:
    theirs = hf_model(hf_config(**SHAPES[shape]))
    ours = load_model(save(theirs, tmp_path), max_model_len=64)
    tokens = random_tokens(23)
    found = FlatDriver(ours, [tokens]).run(23)[0]
    assert_close(found, hf_logits(theirs, tokens))
    if shape != "dynamic rope":  # there the first tokens of a long prompt turn otherwise
        assert_close(FlatDriver(ours, [tokens]).run(5)[0], hf_logits(theirs, tokens))


@pytest.mark.parametrize("kind", ["plain", "packed", "int8", "bfloat16", "float16"])
def test_it_is_the_models_own_pass(kind: str, tmp_path: Path) -> None:
    """Mixed steps: prompts, chunks, decodes and padding share them."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kind, torch.float32)
    ours = load_model(save(hf_model(hf_config()), tmp_path), dtype=dtype)
    if kind == "packed":
        if not can_pack(torch.float32, ours.device):
            pytest.skip("torch has no packed kernels here")
        pack_linears(ours)
    if kind == "int8":
        quantize_int8(ours)
    sequences = [random_tokens(length, seed=length) for length in (9, 1, 21, 6)]
    plain, flat = PagedDriver(ours, sequences), FlatDriver(ours, sequences)
    tolerance = {"bfloat16": 0.1, "float16": 0.01, "int8": 0.05}.get(kind, 1e-4)
    for counts in ({0: 8, 2: 5}, {0: 1, 1: 1, 2: 7, 3: 4}, {2: 1, 3: 1}, {2: 8, 3: 1}):
        expected, found = plain.step(counts, padding=2), flat.step(counts, padding=2)
        for index, logits in expected.items():
            assert_close(found[index], logits, tolerance)


def test_half_precision_is_no_worse_than_transformers(tmp_path: Path) -> None:
    theirs = hf_model(hf_config())
    ours = load_model(save(theirs, tmp_path), dtype=torch.bfloat16)
    tokens = random_tokens(40)
    exact = hf_logits(theirs, tokens)
    rounded = hf_logits(theirs.to(torch.bfloat16), tokens)
    found = FlatDriver(ours, [tokens]).run(7)[0]
    assert (found - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()


def test_slices_of_the_widest_layer_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load_model(save(hf_model(hf_config()), tmp_path))
    tokens = random_tokens(17)
    whole = FlatDriver(ours, [tokens]).run(17)[0]
    monkeypatch.setattr(flat_llama, "MLP_ROWS", 4)
    assert_close(FlatDriver(ours, [tokens]).run(17)[0], whole, 1e-5)
    assert_close(paged_logits(ours, tokens), whole)
