"""A real model, SmolLM2-135M-Instruct in 4 bits, against transformers reading the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import PagedDriver, assert_close, hf_logits, paged_logits
from transformers import AutoConfig
from transformers import LlamaForCausalLM as HFLlama
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_config, load_model
from minibatch.model.presets import preset

pytestmark = pytest.mark.smollm2

# SmolLM2's ids of "The capital of France is Paris. The capital of Italy is", and of a
# question about planets.
CAPITALS = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 7158, 314]
PLANETS = [1780, 359, 260, 9244, 281, 653, 3693, 817, 47]


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> LlamaForCausalLM:
    return load_model(smollm2_path, max_model_len=256)


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> HFLlama:
    """transformers' own reading of the file (its ``from_pretrained`` would ask for accelerate)."""
    config = AutoConfig.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    with torch.device("meta"):
        model = HFLlama(config)
    tensors = load_gguf_checkpoint(smollm2_path, return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    model = HFLlama(config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def test_config_is_the_published_shape(smollm2_path: Path) -> None:
    found, published = load_config(smollm2_path), preset("smollm2-135m")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim", "max_position_embeddings", "rope",
                 "tie_word_embeddings", "eos_token_ids", "bos_token_id"):  # fmt: skip
        assert getattr(found, name) == getattr(published, name), name
    assert found.rms_norm_eps == pytest.approx(published.rms_norm_eps)


def test_logits_equal_transformers(ours: LlamaForCausalLM, theirs: HFLlama) -> None:
    for tokens in (CAPITALS, PLANETS):
        expected = hf_logits(theirs, tokens)
        assert_close(paged_logits(ours, tokens, block_size=16), expected)
        assert_close(paged_logits(ours, tokens, chunk=5, block_size=4), expected)


def test_it_generates_what_transformers_generates(ours: LlamaForCausalLM, theirs: HFLlama) -> None:
    """Greedy, with a neighbour in every step, and the answer is not gibberish."""
    expected = theirs.generate(
        torch.tensor([CAPITALS]),
        attention_mask=torch.ones(1, len(CAPITALS), dtype=torch.int64),
        max_new_tokens=10,
        do_sample=False,
        pad_token_id=2,
    )[0].tolist()
    sequence = CAPITALS + [0] * 10  # filled in as it grows
    driver = PagedDriver(ours, [sequence, PLANETS + CAPITALS], block_size=16)
    logits = driver.step({0: len(CAPITALS), 1: len(PLANETS)})[0][-1]
    for position in range(len(CAPITALS), len(expected)):
        sequence[position] = int(logits.argmax())
        logits = driver.step({0: 1, 1: 1})[0][-1]
    assert sequence[: len(expected)] == expected
