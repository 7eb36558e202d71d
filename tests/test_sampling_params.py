"""SamplingParams: vLLM's defaults, plain values inside, and every bad value named at the door."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from minibatch.errors import InvalidRequestError, InvalidSamplingParamsError, MinibatchError
from minibatch.sampling_params import GREEDY_TEMPERATURE, Logprob, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "stream": False,
    }


BAD = [
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", True),
    ("n", "2"),
    ("n", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("seed", "x"),
    ("seed", 1.0),
    ("seed", True),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 1]),
    ("stop", 5),
    ("stop", b"x"),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [1, -1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1.0]),
    ("ignore_eos", 1),
    ("ignore_eos", "no"),
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 1.0),
    ("max_tokens", False),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("logprobs", -1),
    ("logprobs", True),
    ("skip_special_tokens", None),
    ("include_stop_str_in_output", 0),
    ("stream", "yes"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name}=")
    assert "must be" in message


def test_the_message_has_the_number_and_the_range() -> None:
    with pytest.raises(InvalidSamplingParamsError, match=r"top_p=1\.5 .*\(0\.0, 1\.0\]"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidSamplingParamsError, match=r"max_tokens=0 .*an integer >= 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidSamplingParamsError, match=r"min_tokens=9 is above max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_a_bad_value_is_also_a_value_error() -> None:
    for family in (ValueError, MinibatchError, InvalidRequestError):
        with pytest.raises(family):
            SamplingParams(n=0)


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0},
        {"temperature": 1e30},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1.0},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(knobs: dict[str, Any]) -> None:
    SamplingParams(**knobs)


def test_stop_becomes_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")
    assert SamplingParams(stop=()).stop == ()
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == (7,)


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(
        n=np.int32(2),
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int16(4),
        stop_token_ids=np.array([5, 6]),
    )
    assert (params.n, params.temperature, params.top_k, params.max_tokens) == (2, 0.5, 3, 4)
    assert params.stop_token_ids == (5, 6)
    assert params.seed == 2**64 - 1
    assert type(params.n) is int and type(params.temperature) is float
    assert type(params.seed) is int and type(params.stop_token_ids[0]) is int


def test_frozen_hashable_and_comparable() -> None:
    params = SamplingParams(stop=["x"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert params == SamplingParams(stop=("x",))
    assert len({params, SamplingParams(stop="x")}) == 1
    assert dataclasses.replace(params, n=3).stop == ("x",)


def test_the_callers_lists_are_not_kept() -> None:
    stop, ids = ["x"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("y")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("x",), (1,))


def test_greedy_below_the_threshold_only() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=GREEDY_TEMPERATURE / 2).greedy
    assert not SamplingParams(temperature=GREEDY_TEMPERATURE).greedy


def test_has_penalties() -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=-1).has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties


def test_logprob_reads_like_vllms() -> None:
    assert Logprob(-0.5, 1).decoded_token is None


def test_importing_it_does_not_import_torch() -> None:
    code = "import minibatch.sampling_params, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
