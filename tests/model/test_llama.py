"""The paged model gives transformers' logits, however its tokens are cut, packed and paged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import (
    PagedDriver,
    assert_close,
    config_json,
    hf_config,
    hf_logits,
    hf_model,
    paged_logits,
    random_tokens,
    save,
    write_folder,
)
from transformers import LlamaForCausalLM as HFLlama

from minibatch.model.config import ModelConfig
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model, random_model
from minibatch.model.presets import preset

Pair = tuple[HFLlama, LlamaForCausalLM]  # the same weights, theirs and ours

SHAPES = {
    "gqa 4/2": {},
    "mha 4/4": {"num_key_value_heads": 4},
    "gqa 9/3": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "one kv head": {"num_key_value_heads": 1},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "theta 500000": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """transformers' model and ours, of the plain shape."""
    theirs = hf_model(hf_config())
    return theirs, load_model(save(theirs, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_transformers_logits(shape: str, tmp_path: Path) -> None:
    theirs = hf_model(hf_config(**SHAPES[shape]))
    ours = load_model(save(theirs, tmp_path))
    tokens = random_tokens(23)
    expected = hf_logits(theirs, tokens)
    assert_close(paged_logits(ours, tokens), expected)
    assert_close(paged_logits(ours, tokens, chunk=5), expected)
    assert ours.config.num_parameters == sum(p.numel() for p in theirs.parameters())


def test_heads_that_do_not_divide_the_hidden_size(tmp_path: Path) -> None:
    """Hidden 48, five heads of 8: transformers' config refuses it, its model would run it."""
    config = hf_config(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=8,
        attention_bias=True,
    )
    config.__dict__["num_attention_heads"] = 5  # behind the validator's back
    theirs = hf_model(config)
    ours = load_model(write_folder(tmp_path, config_json(config), theirs.state_dict()))
    assert ours.config.num_heads == 5
    tokens = random_tokens(17)
    assert_close(paged_logits(ours, tokens, chunk=4), hf_logits(theirs, tokens))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 7, 40])
def test_chunks_and_block_sizes(pair: Pair, block_size: int, chunk: int | None) -> None:
    theirs, ours = pair
    tokens = random_tokens(33)
    logits = paged_logits(ours, tokens, chunk=chunk, block_size=block_size)
    assert_close(logits, hf_logits(theirs, tokens))


def test_interleaved_sequences_in_one_packed_batch(pair: Pair) -> None:
    """Prompts, chunks and decodes of five sequences, joining and leaving, share their steps."""
    theirs, ours = pair
    sequences = [random_tokens(length, seed=length) for length in (9, 1, 21, 6, 14)]
    driver = PagedDriver(ours, sequences)
    plan = [{0: 8, 2: 5}, {0: 1, 1: 1, 2: 7, 3: 4}, {2: 1, 3: 1, 4: 13}, {2: 8, 3: 1, 4: 1}]
    logits = [[] for _ in sequences]
    for counts in plan:
        for index, rows in driver.step(counts).items():
            logits[index].append(rows)
    for tokens, rows in zip(sequences, logits, strict=True):
        assert_close(torch.cat(rows), hf_logits(theirs, tokens))


@pytest.mark.parametrize("padding", [0, 4])
def test_prompts_of_unequal_length_equal_single_runs(pair: Pair, padding: int) -> None:
    """Static batching's trap: company, and padding tokens, must not be seen by anyone."""
    theirs, ours = pair
    sequences = [random_tokens(length) for length in (1, 4, 7)]
    together = PagedDriver(ours, sequences).step({0: 1, 1: 4, 2: 7}, padding=padding)
    for index, tokens in enumerate(sequences):
        assert_close(together[index], paged_logits(ours, tokens), 1e-5)
        assert_close(together[index], hf_logits(theirs, tokens))


def test_generation_step_by_step(pair: Pair) -> None:
    """A prompt in one step, then token after token, beside a neighbour twice as long."""
    theirs, ours = pair
    sequences = [random_tokens(12), random_tokens(24)]
    driver = PagedDriver(ours, sequences)
    rows = [driver.step({0: 6, 1: 18})[0]]
    rows += [driver.step({0: 1, 1: 1})[0] for _ in range(6)]
    assert_close(torch.cat(rows), hf_logits(theirs, sequences[0]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_stays_near_float32(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """Half precision rounds, differently in other company: only a tolerance can be promised."""
    theirs = hf_model(hf_config())
    folder = save(theirs, tmp_path)
    ours = load_model(folder, dtype=dtype)
    tokens = random_tokens(20)
    logits = paged_logits(ours, tokens, chunk=6)
    assert logits.dtype == torch.float32
    exact = hf_logits(theirs, tokens)
    assert_close(logits, exact, tolerance)
    halved = hf_logits(hf_model(hf_config()).to(dtype), tokens)
    ours_off, theirs_off = (logits - exact).abs().mean(), (halved - exact).abs().mean()
    assert ours_off <= 1.5 * theirs_off  # no worse than transformers' own rounding


def test_random_model_is_sane() -> None:
    """Every weight and every table is filled, the same for the same seed."""
    config = preset("tiny")
    model, again, other = (random_model(config, seed=seed) for seed in (1, 1, 2))
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    for view, same in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(view, same)
    assert not torch.equal(model.embed_tokens.weight, other.embed_tokens.weight)
    assert torch.all(model.norm.weight == 1)
    assert abs(model.embed_tokens.weight.std().item() - 0.02) < 1e-3
    assert torch.equal(model.rotary.table[0, 0], torch.ones(config.head_dim))
    logits = paged_logits(model, random_tokens(10), chunk=3)
    assert logits.shape == (10, config.vocab_size) and torch.isfinite(logits).all()


def test_random_model_matches_transformers_on_shared_weights() -> None:
    """The views under checkpoint names are all that another implementation needs."""
    theirs = hf_model(hf_config())
    ours = random_model(ModelConfig.from_dict(config_json(theirs.config)), seed=3)
    theirs.load_state_dict(ours.checkpoint_views(), assign=True)
    tokens = random_tokens(11)
    assert_close(paged_logits(ours, tokens), hf_logits(theirs, tokens))
