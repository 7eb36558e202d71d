"""Rope of every kind against transformers, and the rule that dynamic rope needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model
from minibatch.model.rotary import rotate

ORIGINAL = 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


def rope_pair(folder: Path, rope_parameters: dict[str, Any]) -> tuple[HFLlama, LlamaForCausalLM]:
    config = hf_config(rope_parameters=rope_parameters, max_position_embeddings=ORIGINAL)
    theirs = hf_model(config)
    return theirs, load_model(save(theirs, folder), max_model_len=256)


@pytest.mark.parametrize("rope", [LINEAR, DYNAMIC, LLAMA3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("length", [32, 64, 65, 100])
@pytest.mark.parametrize("chunk", [None, 7])
def test_scaled_rope_gives_transformers_logits(
    rope: dict[str, Any], length: int, chunk: int | None, tmp_path: Path
) -> None:
    theirs, ours = rope_pair(tmp_path, rope)
    tokens = random_tokens(length)
    assert_close(paged_logits(ours, tokens, chunk=chunk), hf_logits(theirs, tokens))


def test_dynamic_rope_is_unscaled_up_to_the_original_length(tmp_path: Path) -> None:
    _, dynamic = rope_pair(tmp_path / "dynamic", DYNAMIC)
    _, plain = rope_pair(tmp_path / "plain", {"rope_type": "default", "rope_theta": 10_000.0})
    short, long = random_tokens(32), random_tokens(100)
    assert_close(paged_logits(dynamic, short), paged_logits(plain, short), 1e-5)
    assert (paged_logits(dynamic, long) - paged_logits(plain, long)).abs().max() > 0.01


@pytest.mark.parametrize("prompt_length", [40, 60, 80])
@pytest.mark.parametrize("chunk", [None, 9])
def test_dynamic_rope_generates_as_transformers_does(
    prompt_length: int, chunk: int | None, tmp_path: Path
) -> None:
    """Within, across and beyond the original length, with transformers' own KV cache."""
    theirs, ours = rope_pair(tmp_path, DYNAMIC)
    prompt = random_tokens(prompt_length)
    generated = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, prompt_length, dtype=torch.int64),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = generated.sequences[0, :-1].tolist()
    expected = torch.cat(generated.logits)  # [12, V], the first from the prompt's last token

    driver = PagedDriver(ours, [tokens], prompt_lens=[prompt_length])
    rows = []
    while driver.done[0] < prompt_length:
        rows.append(driver.step({0: min(chunk or 999, prompt_length - driver.done[0])})[0])
    rows += [driver.step({0: 1})[0] for _ in range(11)]
    assert_close(torch.cat(rows)[prompt_length - 1 :], expected)

    # Recomputed after a preemption: the same tokens in other chunks, the same prompt length.
    recomputed = PagedDriver(ours, [tokens], prompt_lens=[prompt_length]).run(chunk=13)[0]
    assert_close(recomputed[prompt_length - 1 :], expected)


def test_dynamic_rope_does_not_see_neighbours(tmp_path: Path) -> None:
    _, ours = rope_pair(tmp_path, DYNAMIC)
    short, long = random_tokens(20), random_tokens(100)
    together = PagedDriver(ours, [short, long]).step({0: 20, 1: 100})
    assert_close(together[0], paged_logits(ours, short), 1e-5)
    assert_close(together[1], paged_logits(ours, long), 1e-5)


def test_dynamic_rope_insists_on_prompt_lengths(tmp_path: Path) -> None:
    _, ours = rope_pair(tmp_path, DYNAMIC)
    with pytest.raises(ValueError, match="prompt_lens"):
        ours.rotary(torch.arange(3), None, torch.float32)


@pytest.mark.parametrize("theta", [None, 500_000.0])
def test_old_and_new_config_give_equal_logits(theta: float | None, tmp_path: Path) -> None:
    """transformers 5 moved theta into rope_parameters; a reader of one form misses the other."""
    given = {} if theta is None else {"rope_theta": theta}
    theirs = hf_model(hf_config(rope_parameters={"rope_type": "default", **given}))
    new = config_json(theirs.config)
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | given
    assert ("rope_theta" in old) == (theta is not None)
    tokens = random_tokens(51)
    expected = hf_logits(theirs, tokens)
    for name, config in (("new", new), ("old", old)):
        ours = load_model(write_folder(tmp_path / name, config, theirs.state_dict()))
        assert ours.config.rope.theta == (theta or 10_000.0)
        assert_close(paged_logits(ours, tokens), expected)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", [LINEAR, DYNAMIC, LLAMA3], ids=lambda rope: rope["rope_type"])
def test_old_rope_scaling(rope: dict[str, Any], key: str, tmp_path: Path) -> None:
    theirs, _ = rope_pair(tmp_path / "new", rope)
    config = config_json(theirs.config)
    del config["rope_parameters"]
    scaling = {name: value for name, value in rope.items() if not name.startswith("rope_")}
    config |= {"rope_theta": 10_000.0, "rope_scaling": scaling | {key: rope["rope_type"]}}
    folder = write_folder(tmp_path / "old", config, theirs.state_dict())
    assert "rope_parameters" not in json.loads((folder / "config.json").read_text())
    tokens = random_tokens(80)
    ours = load_model(folder, max_model_len=128)
    assert_close(paged_logits(ours, tokens), hf_logits(theirs, tokens))


def test_rotate_turns_each_pair_by_its_angle() -> None:
    angles = torch.tensor([[0.3, -1.2]])
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    x = torch.randn(1, 3, 4)  # three heads of two pairs
    turned = rotate(x, cos[:, None], sin[:, None])
    pairs = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones(1, 2), angles)
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1))
