"""Bad input is turned away at the door, with the numbers and the knob, and harms nobody else.

Checkpoints (missing, truncated, pickled) are in ``tests/model/test_loader.py``, the details of
sampling parameters in ``tests/test_sampling_params.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_helpers import (
    Alphabet,
    Auditor,
    assert_all_free,
    foretell,
    greedy,
    make_config,
    make_engine,
    tokens_of,
)

from minibatch.config import EngineConfig, PreemptionMode, SchedulerConfig
from minibatch.engine import Engine
from minibatch.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    MinibatchError,
    RequestTooLargeError,
)
from minibatch.llm import make_config as make_engine_config
from minibatch.sampling_params import SamplingParams

POLICIES = ["static", "dynamic", "continuous", "unified"]
OK = greedy(2)

BAD_REQUESTS: dict[str, tuple[Callable[[Engine], None], type[MinibatchError], str]] = {
    "no tokens": (
        lambda engine: engine.add_request("bad", [], OK),
        InvalidRequestError,
        "'bad': the prompt has no tokens",
    ),
    "empty text": (
        lambda engine: engine.add_request("bad", "", OK),
        InvalidRequestError,
        "'bad': the prompt is empty",
    ),
    "nothing": (
        lambda engine: engine.add_request("bad", None, OK),
        InvalidRequestError,
        "not NoneType",
    ),
    "a number": (lambda engine: engine.add_request("bad", 7, OK), InvalidRequestError, "not int"),  # type: ignore[arg-type]
    "bytes": (lambda engine: engine.add_request("bad", b"x", OK), InvalidRequestError, "not bytes"),
    "a dict without a prompt": (
        lambda engine: engine.add_request("bad", {"text": "x"}, OK),
        InvalidRequestError,
        "not NoneType",
    ),
    "text without a tokenizer": (
        lambda engine: engine.add_request("bad", "hello", OK),
        InvalidRequestError,
        "no tokenizer",
    ),
    "stop strings without a tokenizer": (
        lambda engine: engine.add_request("bad", [1], greedy(2, stop="x")),
        InvalidRequestError,
        "stop strings need a tokenizer; use stop_token_ids",
    ),
    "an id above the vocabulary": (
        lambda engine: engine.add_request("bad", [1, 2, 50], OK),
        InvalidRequestError,
        r"token id 50 at prompt position 2 is not in \[0, 50\)",
    ),
    "a negative id": (
        lambda engine: engine.add_request("bad", [1, -1], OK),
        InvalidRequestError,
        r"token id -1 at prompt position 1 is not in \[0, 50\)",
    ),
    "a huge id": (
        lambda engine: engine.add_request("bad", [10**30], OK),
        InvalidRequestError,
        "token id 1000000000000000000000000000000 at prompt position 0",
    ),
    "a float": (
        lambda engine: engine.add_request("bad", [1, 2.0], OK),  # type: ignore[list-item]
        InvalidRequestError,
        "position 1 holds 2.0, not a token id",
    ),
    "NaN": (
        lambda engine: engine.add_request("bad", [math.nan], OK),  # type: ignore[list-item]
        InvalidRequestError,
        "position 0 holds nan",
    ),
    "a word": (
        lambda engine: engine.add_request("bad", ["one"], OK),  # type: ignore[list-item]
        InvalidRequestError,
        "position 0 holds 'one'",
    ),
    "a truth": (
        lambda engine: engine.add_request("bad", [True], OK),
        InvalidRequestError,
        "position 0 holds True",
    ),
    "a live id": (
        lambda engine: engine.add_request("A", [1], OK),
        DuplicateRequestError,
        "'A' is in use by a live request",
    ),
    "a prompt as long as the model": (
        lambda engine: engine.add_request("bad", [1] * 32, greedy(1)),
        RequestTooLargeError,
        "32 prompt tokens leave no room .* max_model_len=32",
    ),
    "a prompt longer than the model": (
        lambda engine: engine.add_request("bad", [1] * 100, greedy(1)),
        RequestTooLargeError,
        "100 prompt tokens .* max_model_len=32",
    ),
    "max_tokens 0": (
        lambda engine: engine.add_request("bad", [1], greedy(0)),
        InvalidSamplingParamsError,
        "max_tokens=0 .* >= 1",
    ),
    "max_tokens below 0": (
        lambda engine: engine.add_request("bad", [1], greedy(-3)),
        InvalidSamplingParamsError,
        "max_tokens=-3",
    ),
    "temperature below 0": (
        lambda engine: engine.add_request("bad", [1], SamplingParams(temperature=-0.5)),
        InvalidSamplingParamsError,
        "temperature=-0.5",
    ),
    "temperature NaN": (
        lambda engine: engine.add_request("bad", [1], SamplingParams(temperature=math.nan)),
        InvalidSamplingParamsError,
        "temperature=nan",
    ),
    "top_p 0": (
        lambda engine: engine.add_request("bad", [1], SamplingParams(top_p=0.0)),
        InvalidSamplingParamsError,
        r"top_p=0.0 .*\(0.0, 1.0\]",
    ),
    "top_p above 1": (
        lambda engine: engine.add_request("bad", [1], SamplingParams(top_p=1.01)),
        InvalidSamplingParamsError,
        r"top_p=1.01 .*\(0.0, 1.0\]",
    ),
    "top_p NaN": (
        lambda engine: engine.add_request("bad", [1], SamplingParams(top_p=math.nan)),
        InvalidSamplingParamsError,
        "top_p=nan",
    ),
    "n 0": (
        lambda engine: engine.add_request("bad", [1], SamplingParams(n=0)),
        InvalidSamplingParamsError,
        "n=0",
    ),
    "an unknown way to be preempted": (
        lambda engine: engine.preempt("A", "forget"),
        ConfigError,
        "preemption_mode='forget': expected one of swap, recompute",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_turned_away_and_the_others_never_notice(case: str) -> None:
    attempt, error_type, message = BAD_REQUESTS[case]
    engine = make_engine(policy="continuous", max_model_len=32)
    auditor = Auditor(engine)
    engine.add_request("A", [1, 2, 3], greedy(5))
    auditor.step()
    engine.add_request("B", [4], greedy(5))
    with pytest.raises(error_type, match=message) as caught:
        attempt(engine)
    assert isinstance(caught.value, ValueError)  # what a caller of a library expects
    while engine.has_unfinished:
        auditor.step()
    assert tokens_of(engine, "A") == foretell([1, 2, 3], 5)
    assert tokens_of(engine, "B") == foretell([4], 5)
    assert_all_free(engine)
    with pytest.raises(KeyError):
        engine.output("bad")
    engine.add_request("bad", [1], greedy(1))  # its id was never taken
    auditor.step()


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        [np.int64(1), np.uint8(2), 3],
        {"prompt_token_ids": [1, 2, 3]},
        "bcd",
        {"prompt": "bcd"},
        {"prompt": "another text", "prompt_token_ids": [1, 2, 3]},
    ],
    ids=repr,
)
def test_good_prompts_in_many_shapes(prompt: Any) -> None:
    engine = make_engine(tokenizer=Alphabet("abcdefghijklmnopqrstuvwxyz" * 2))
    engine.add_request("A", prompt, greedy(1))
    assert engine.output("A").prompt_token_ids == [1, 2, 3]
    assert all(type(token_id) is int for token_id in engine.output("A").prompt_token_ids)


def test_text_that_has_no_tokens() -> None:
    class Silent(Alphabet):
        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(InvalidRequestError, match="the prompt has no tokens"):
        make_engine(tokenizer=Silent("ab")).add_request("A", "\x00", OK)


# -- what could never run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "prompt", "output", "needed", "available", "knob"),
    [
        # 9 prompt tokens and one more: 3 blocks of 2. (The last token never needs KV.)
        ({"policy": "continuous", "num_gpu_blocks": 2}, 9, 1, 3, 2, "num_gpu_blocks"),
        # It begins, but would outgrow the pool: 6 + 8 - 1 tokens.
        ({"policy": "continuous", "num_gpu_blocks": 2}, 6, 8, 4, 2, "num_gpu_blocks"),
        ({"policy": "unified", "num_gpu_blocks": 3}, 9, 1, 3, 2, "num_gpu_blocks"),  # null block
        ({"policy": "unified", "num_gpu_blocks": 1}, 1, 1, 1, 0, "num_gpu_blocks"),
        ({"policy": "static", "num_gpu_blocks": 7}, 1, 1, 8, 7, "num_gpu_blocks"),
        ({"policy": "dynamic", "num_gpu_blocks": 7}, 9, 8, 8, 7, "num_gpu_blocks"),
        ({"policy": "static", "max_num_batched_tokens": 16}, 17, 1, 17, 16,
         "max_num_batched_tokens"),
        ({"policy": "dynamic", "max_num_batched_tokens": 16}, 17, 1, 17, 16,
         "max_num_batched_tokens"),
        ({"policy": "continuous"}, 32, 1, 33, 32, "max_model_len"),
        # A prompt in pieces needs a free block to go on with.
        ({"policy": "continuous", "enable_chunked_prefill": True, "num_gpu_blocks": 3}, 9, 1, 3, 2,
         "num_gpu_blocks"),
    ],
)  # fmt: skip
def test_too_large(
    knobs: dict[str, Any], prompt: int, output: int, needed: int, available: int, knob: str
) -> None:
    engine = make_engine(**{"max_model_len": 32, **knobs})
    with pytest.raises(RequestTooLargeError, match=knob) as caught:
        engine.add_request("bad", [1] * prompt, greedy(output))
    error = caught.value
    assert (error.needed, error.available, error.knob) == (needed, available, knob)
    assert f" {prompt} prompt tokens" in str(error) and str(available) in str(error)
    assert not engine.has_unfinished


@pytest.mark.parametrize("policy", POLICIES)
def test_the_largest_that_fits_does_run(policy: str) -> None:
    """The refusals above are not too strict: one token less, and it runs to its end."""
    blocks = {"static": 8, "dynamic": 8, "continuous": 3, "unified": 4}[policy]
    engine = make_engine(policy=policy, num_gpu_blocks=blocks, max_model_len=32)
    engine.add_request("A", [1] * 6, greedy(7))  # 12 tokens with KV
    while engine.has_unfinished:
        engine.step()
    assert tokens_of(engine, "A") == foretell([1] * 6, 7)


# -- knobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"policy": "magic"}, "policy='magic': expected one of static, dynamic, continuous"),
        ({"block_size": 0}, "block_size=0: expected a whole number of at least 1"),
        ({"block_size": -4}, "block_size=-4"),
        ({"block_size": 2.0}, "block_size=2.0"),
        ({"block_size": True}, "block_size=True"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks=0"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks=-1: expected a whole number of at least 0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_wait": -1.0}, "max_wait=-1.0"),
        ({"max_wait": math.nan}, "max_wait=nan"),
        ({"max_wait": "soon"}, "max_wait='soon'"),
        ({"preemption_mode": "forget"}, "preemption_mode='forget': expected one of swap"),
        (
            {"max_num_batched_tokens": 3, "max_num_seqs": 4, "policy": "unified"},
            "max_num_batched_tokens=3 is below max_num_seqs=4",
        ),
        (
            {"max_num_batched_tokens": 63, "policy": "continuous"},
            "max_num_batched_tokens=63 is below max_model_len=64.*enable_chunked_prefill",
        ),
    ],
)
def test_scheduler_knobs(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"model": ""}, "model=''"),
        ({"model": None}, "model=None"),
        ({"policy": "magic"}, "policy='magic'"),
        ({"dtype": "int4"}, "dtype='int4': expected one of auto, float32"),
        ({"load_format": "pickle"}, "load_format='pickle'"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks=0"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks=-1"),
        ({"max_model_len": -5}, "max_model_len=-5"),
        ({"max_num_seqs": 1.5}, "max_num_seqs=1.5"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization=1.1"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization=nan"),
        ({"swap_space": -1}, "swap_space=-1"),
        ({"preemption_mode": "forget"}, "preemption_mode='forget'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"max_nun_seqs": 4}, "unknown knob max_nun_seqs; EngineConfig has .*max_num_seqs"),
    ],
)
def test_engine_knobs(knobs: dict[str, Any], message: str) -> None:
    knobs = dict(knobs)
    with pytest.raises(ConfigError, match=message):
        make_engine_config(knobs.pop("model", "tiny"), knobs)


def test_preemption_mode_by_name_or_value() -> None:
    assert SchedulerConfig(preemption_mode="swap").preemption_mode is PreemptionMode.SWAP  # type: ignore[arg-type]
    assert EngineConfig("tiny", preemption_mode="recompute").preemption_mode is (  # type: ignore[arg-type]
        PreemptionMode.RECOMPUTE
    )
