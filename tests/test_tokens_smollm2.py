"""SmolLM2-135M says under every policy, evicted or not, what transformers says of each prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokens_helpers import (
    admissions,
    assert_nothing_held,
    greedy_alone,
    mixed_steps,
    preemptions,
    split_prompts,
)
from transformers import LlamaForCausalLM as HFLlama

from minibatch.builder import engine_for, pack_for_cpu
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model
from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import ForcedPreemption
from minibatch.tokenizer import Tokenizer

pytestmark = pytest.mark.smollm2

MAX_TOKENS = 16

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
ASK = "<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "capital": f"{SYSTEM}What is the capital of France?{ASK}",
    "sum": f"{SYSTEM}What is 2+2?{ASK}",
    "tale": "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "rome": "The capital of France is Paris. The capital of Italy is",
}

POLICIES: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "dynamic": {"policy": "dynamic"},
    "continuous": {"policy": "continuous"},
    "chunked": {
        "policy": "continuous",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 24,
    },
    "unified": {"policy": "unified", "max_num_batched_tokens": 24},
}


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> LlamaForCausalLM:
    model = load_model(smollm2, max_model_len=256)
    pack_for_cpu(model, EngineConfig("smollm2-135m"))
    return model


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2)


@pytest.fixture(scope="module")
def alone(smollm2: Path, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """transformers' continuation of every prompt."""
    # It asks for accelerate, and does without.
    with mock.patch("transformers.modeling_utils.is_accelerate_available", return_value=True):
        theirs = HFLlama.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    return {
        name: greedy_alone(
            theirs,
            tokenizer.encode(text),
            MAX_TOKENS,
            least_margin=0.01,
            eos_token_id=theirs.config.eos_token_id,
        )
        for name, text in PROMPTS.items()
    }


def run(
    ours: LlamaForCausalLM,
    tokenizer: Tokenizer,
    alone: dict[str, list[int]],
    plan: ForcedPreemption | None = None,
    **knobs: Any,
) -> list[StepRecord]:
    """Run all prompts, the last one arriving later; every text must be that of the prompt alone."""
    settings: dict[str, Any] = {
        "model": "smollm2-135m",
        "max_model_len": 128,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks": 64,
        "num_cpu_blocks": 64,
        "check_invariants": True,
    }
    engine = engine_for(ours, EngineConfig(**(settings | knobs)), tokenizer)
    engine.force_preemption(plan)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    *first, last = PROMPTS
    for name in first:
        engine.add_request(name, PROMPTS[name], params)
    records = [engine.step(), engine.step()]
    engine.add_request(last, PROMPTS[last], params)
    records += engine.run()
    for name, expected in alone.items():
        assert said(engine, name) == expected, name
    assert_nothing_held(engine)
    return records


def said(engine: Engine, name: str) -> list[int]:
    return engine.output(name).outputs[0].token_ids


def test_prompts_and_answers_are_worth_comparing(
    alone: dict[str, list[int]], tokenizer: Tokenizer
) -> None:
    """Sense, of different lengths; some end by themselves."""
    texts = {name: tokenizer.decode(tokens) for name, tokens in alone.items()}
    assert texts["capital"].startswith("The capital of France is Paris.")
    assert texts["rome"].startswith(" Rome.")
    assert len({len(tokenizer.encode(text)) for text in PROMPTS.values()}) >= 3
    assert len({len(tokens) for tokens in alone.values()}) >= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(
    ours: LlamaForCausalLM, tokenizer: Tokenizer, alone: dict[str, list[int]], policy: str
) -> None:
    records = run(ours, tokenizer, alone, **POLICIES[policy])
    splits = policy in ("chunked", "unified")
    assert bool(mixed_steps(records)) == bool(split_prompts(records)) == splits
    assert any(record.rows("padding") for record in records) == (policy == "static")


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("continuous", "swap"), ("chunked", "recompute"), ("unified", "recompute")],
)
def test_preemption(
    ours: LlamaForCausalLM,
    tokenizer: Tokenizer,
    alone: dict[str, list[int]],
    policy: str,
    mode: str,
) -> None:
    """Everybody evicted early, one of them again later."""
    plan = ForcedPreemption(at={3: list(PROMPTS), 9: ["tale"]})
    records = run(
        ours, tokenizer, alone, plan, **POLICIES[policy], preemption_mode=mode, block_size=4,
        num_gpu_blocks=256, num_cpu_blocks=256,
    )  # fmt: skip
    assert len(preemptions(records)) >= 3
    assert {entry.mode for entry in preemptions(records)} == {mode}


@pytest.mark.parametrize("policy", ["continuous", "unified"])
def test_prefix_hits(
    ours: LlamaForCausalLM, tokenizer: Tokenizer, alone: dict[str, list[int]], policy: str
) -> None:
    """Both questions begin with the same words of the system."""
    knobs = POLICIES[policy] | {"enable_prefix_caching": True, "block_size": 4}
    records = run(ours, tokenizer, alone, **knobs, num_gpu_blocks=256)
    (second,) = admissions(records, "sum")
    shared = tokenizer.encode(SYSTEM)
    assert second.prefix_hit_tokens >= len(shared) // 4 * 4 >= 8
