"""The model in fifteen lines, and the real engine's agreement with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.metrics import measure
from minibatch.simulation import simulate
from minibatch.toy import continuous, static, utilization
from minibatch.trace import Trace
from minibatch.workload import RequestSpec

REQUEST_LISTS = st.lists(st.integers(1, 24), min_size=1, max_size=24)
SLOTS = st.integers(1, 9)


def run(policy: str, lengths: list[int], slots: int) -> Trace:
    """One-token prompts and endless memory: nothing but slots limits anybody."""
    requests = [RequestSpec(f"r{i}", 0.0, 1, length) for i, length in enumerate(lengths)]
    knobs = {"max_num_seqs": slots, "num_gpu_blocks": 100, "max_model_len": 64}
    return simulate(requests, model="tiny", policy=policy, knobs=knobs)


def test_eight_slots_one_long_and_seven_short() -> None:
    lengths = [500, *[10] * 7]
    assert static(lengths, 8) == (500, 570)
    assert utilization(static(lengths, 8), 8) == 570 / 4000
    # Ten iterations full, then one request alone: nobody waits, so nothing is gained here.
    assert continuous(lengths, 8) == (500, 570)


def test_a_freed_slot_is_refilled_in_the_next_iteration() -> None:
    assert static([4, 1, 1, 1, 1], 2) == (4 + 1 + 1, 8)
    assert continuous([4, 1, 1, 1, 1], 2) == (4, 8)
    assert continuous([1, 1, 1], 1) == (3, 3)


def test_equal_lengths_gain_nothing() -> None:
    assert static([7] * 12, 4) == continuous([7] * 12, 4) == (21, 84)


@given(REQUEST_LISTS, SLOTS)
@settings(max_examples=300, deadline=None)
def test_continuous_is_never_slower_and_does_the_same_work(lengths: list[int], slots: int) -> None:
    static_steps, static_busy = static(lengths, slots)
    steps, busy = continuous(lengths, slots)
    assert busy == static_busy == sum(lengths)
    assert max(max(lengths), -(-sum(lengths) // slots)) <= steps <= static_steps


@pytest.mark.parametrize(("policy", "toy"), [("static", static), ("unified", continuous)])
@given(lengths=REQUEST_LISTS, slots=SLOTS)
@settings(max_examples=200, deadline=None)
def test_the_engine_agrees_step_for_step(
    policy: str, toy: Callable[..., tuple[int, int]], lengths: list[int], slots: int
) -> None:
    trace = run(policy, lengths, slots)
    useful = [sum(row.num_tokens > 0 for row in step.scheduled) for step in trace]
    assert (len(trace), sum(useful)) == toy(lengths, slots)
    assert measure(trace).slot_utilization == pytest.approx(utilization(toy(lengths, slots), slots))
