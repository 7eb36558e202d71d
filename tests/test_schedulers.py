"""What each policy does, step by step, on workloads small enough to be checked with a pencil.

Steps are written as ``A:p5 B:d1 C:x1`` (prefill of 5 tokens, decode, padding), ``A:p3+2`` (3 of
its own and 2 of padding), ``-B/r`` and ``-B/s`` (evicted to be recomputed, or swapped out), ``+B``
(swapped in), and after a bar who was held back and why. Blocks have 4 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from engine_helpers import (
    Auditor,
    assert_all_free,
    foretell,
    greedy,
    make_config,
    make_engine,
    paper,
    table,
    tokens_of,
)

from minibatch.clock import VirtualClock
from minibatch.engine import Engine
from minibatch.errors import NoProgressError, PreemptionUnsupportedError, RequestTooLargeError
from minibatch.record import HELD_BACK_REASONS, Preemption, StepRecord
from minibatch.request import FinishReason, Request
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import (
    ChunkedContinuousScheduler,
    ForcedPreemption,
    UnifiedScheduler,
    make_scheduler,
)
from minibatch.scheduler.output import SchedulerOutput

Sizes = Mapping[str, tuple[int, int]]  # name -> prompt tokens, output tokens


def play(
    requests: Sizes,
    arrivals: Mapping[str, int] | None = None,
    before_step: Callable[[Engine, int], None] = lambda engine, step: None,
    **knobs: Any,
) -> list[StepRecord]:
    """Run a workload to its end, audited; who arrives at step s is added just before it."""
    engine = make_engine(**knobs)
    auditor = Auditor(engine)
    late = arrivals or {}
    step = 0
    while engine.has_unfinished or step <= max(late.values(), default=0):
        for name, (prompt, output) in requests.items():
            if late.get(name, 0) == step:
                engine.add_request(name, prompt_of(name, prompt), greedy(output))
        before_step(engine, step)
        auditor.step()
        step += 1
        assert step < 2000, "it does not end"
    for name, (prompt, output) in requests.items():
        assert tokens_of(engine, name) == foretell(prompt_of(name, prompt), output)
    assert_all_free(engine)
    return auditor.records


def prompt_of(name: str, length: int) -> list[int]:
    """Every request begins with its own letter, so that nothing is shared by accident."""
    return [ord(name[0]) % 50, *(position % 50 for position in range(length - 1))]


def queues(records: list[StepRecord]) -> list[str]:
    return [f"{' '.join(r.waiting)} > {' '.join(r.running)}" for r in records]


# -- static -------------------------------------------------------------------------------------


def test_static_keeps_the_batch_and_computes_its_padding() -> None:
    records = play(
        {"A": (3, 2), "B": (5, 4), "C": (2, 3)}, policy="static", max_num_seqs=2, max_model_len=16
    )
    assert table(records) == [
        "A:p3+2 B:p5 | C no_slot",
        "A:d1 B:d1 | C batch_not_drained",
        "A:x1 B:d1 | C batch_not_drained",
        "A:x1 B:d1 | C batch_not_drained",
        "C:p2",
        "C:d1",
        "C:d1",
    ]
    assert [(r.num_batched_tokens, r.num_padding_tokens) for r in records[:4]] == [
        (8, 2),
        (2, 0),
        (1, 1),
        (1, 1),
    ]
    # "Max": a row reserves max_model_len in one piece, and nothing comes back before the end.
    assert records[0].blocks_allocated == {"A": [0, 1, 2, 3], "B": [4, 5, 6, 7]}
    assert [r.free_blocks for r in records] == [24, 24, 24, 24, 28, 28, 28]
    assert [sorted(r.blocks_freed) for r in records] == [[], [], [], ["A", "B"], [], [], ["C"]]
    assert [row.slot for r in records[:4] for row in r.scheduled] == [0, 1] * 4  # padding too


def test_static_counts_padding_against_the_budget() -> None:
    records = play(
        {"A": (2, 1), "B": (8, 1), "C": (5, 1)},
        policy="static",
        max_num_batched_tokens=20,
        max_model_len=16,
    )
    # Three rows of the longest prompt's 8 tokens would be 24.
    assert table(records) == ["A:p2+6 B:p8 | C no_token_budget", "C:p5"]
    assert records[0].held_back is not None and records[0].held_back[2:] == (24, 20)


def test_static_waits_for_its_batch_to_fill() -> None:
    engine = make_engine(policy="static", max_num_seqs=3, max_wait=2.5, max_model_len=16)
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    scheduler = engine.scheduler
    assert scheduler.wake_time(clock.now) == 0.0  # nobody to wait for
    engine.add_request("A", [1, 2], greedy(1))
    clock.advance(0.5)
    engine.add_request("B", [1, 2], greedy(1))
    assert scheduler.wake_time(clock.now) == 2.5
    paper(engine).seconds = lambda output: 0.25
    records = [engine.step()]
    clock.advance_to(2.4)
    records.append(engine.step())
    clock.advance_to(scheduler.wake_time(clock.now))
    records.append(engine.step())  # the oldest has waited long enough
    assert table(records) == ["| A batch_filling", "| A batch_filling", "A:p2 B:p2"]
    assert records[0].held_back is not None and records[0].held_back[2:] == (3, 2)
    for name in "CDE":
        engine.add_request(name, [1, 2], greedy(1))
    assert scheduler.wake_time(clock.now) == clock.now  # full: at once
    assert table([engine.step()]) == ["C:p2 D:p2 E:p2"]
    assert not engine.has_unfinished


# -- dynamic ------------------------------------------------------------------------------------


def test_dynamic_refills_a_slot_one_step_late() -> None:
    records = play(
        {"A": (3, 2), "B": (5, 6), "C": (2, 3), "D": (1, 1)},
        policy="dynamic",
        max_num_seqs=2,
        max_model_len=32,
    )
    assert table(records) == [
        "A:p3 B:p5 | C no_slot",
        "A:d1 B:d1 | C no_slot",
        "B:d1 | C slot_released_late",  # A left after the step before
        "C:p2 | D no_slot",
        "B:d1 C:d1 | D no_slot",
        "B:d1 C:d1 | D no_slot",
        "B:d1 | D slot_released_late",
        "D:p1",  # nobody runs any more: there is no step to be late by
    ]
    # "Pow2": 3 + 2 -> 8 tokens, 5 + 6 -> 16, 2 + 3 -> 8, 1 + 1 -> 2; in one piece, up front.
    allocated = {name: b for r in records for name, b in r.blocks_allocated.items()}
    assert allocated == {"A": [0, 1], "B": [2, 3, 4, 5], "C": [0, 1], "D": [0]}
    assert not any(r.num_padding_tokens for r in records)


@pytest.mark.parametrize(
    ("prompt", "output", "blocks"),
    [(3, 1, 1), (3, 2, 2), (8, 8, 4), (8, 9, 8), (20, 13, 10), (39, 1, 10)],
)
def test_dynamic_reserves_a_power_of_two_but_no_more_than_a_sequence_can_be(
    prompt: int, output: int, blocks: int
) -> None:
    records = play({"A": (prompt, output)}, policy="dynamic", max_model_len=40)
    assert len(records[0].blocks_allocated["A"]) == blocks


def test_dynamic_suffers_external_fragmentation() -> None:
    records = play(
        {"A": (3, 2), "B": (5, 3), "C": (3, 2), "D": (8, 8)}, policy="dynamic", num_gpu_blocks=7
    )
    assert table(records) == [
        "A:p3 B:p5 C:p3 | D no_blocks",
        "A:d1 B:d1 C:d1 | D no_blocks",
        "B:d1 | D no_blocks",  # 5 blocks are free, but not 4 in one piece
        "D:p8",
        *["D:d1"] * 7,
    ]
    assert [r.held_back[2:] for r in records[:3] if r.held_back] == [(4, 1), (4, 1), (4, 5)]


# -- continuous ---------------------------------------------------------------------------------


def test_continuous_prefills_first_and_never_mixes() -> None:
    records = play(
        {"A": (3, 4), "B": (5, 4), "C": (2, 2), "D": (2, 1)},
        {"C": 2, "D": 3},
        policy="continuous",
        max_num_seqs=3,
    )
    assert table(records) == [
        "A:p3 B:p5",
        "A:d1 B:d1",
        "C:p2",  # A and B sit it out
        "A:d1 B:d1 C:d1 | D no_slot",
        "D:p2",
        "A:d1 B:d1",
    ]
    assert records[2].running == ("A", "B", "C")


def test_continuous_stops_at_the_first_that_does_not_fit() -> None:
    """First come, first served: C would fit, but waits behind B."""
    records = play(
        {"A": (40, 1), "B": (40, 1), "C": (2, 1)}, policy="continuous", max_num_batched_tokens=64
    )
    assert table(records) == ["A:p40 | B no_token_budget", "B:p40 C:p2"]
    assert records[0].held_back is not None and records[0].held_back[2:] == (40, 24)


def test_continuous_leaves_one_hundredth_of_the_pool_free() -> None:
    sizes = {"A": (784, 2), "B": (5, 1)}
    knobs = {"policy": "continuous", "num_gpu_blocks": 200, "max_model_len": 900}
    records = play(sizes, **knobs, max_num_batched_tokens=900)
    assert table(records) == ["A:p784 B:p5", "A:d1"]  # 196 and 2 of 200, 2 are left
    records = play({**sizes, "B": (9, 1)}, **knobs, max_num_batched_tokens=900)
    assert table(records) == ["A:p784 | B watermark", "A:d1 | B watermark", "B:p9"]
    assert records[0].held_back is not None and records[0].held_back[2:] == (5, 4)
    # 199 blocks would be free, but 198 are all that one may ever have.
    with pytest.raises(RequestTooLargeError, match="199 KV blocks of 4, and at most 198"):
        play({"A": (793, 2)}, **knobs, max_num_batched_tokens=900)


def test_continuous_evicts_the_last_to_come_and_takes_it_back_first() -> None:
    records = play(
        {"A": (4, 6), "B": (4, 6), "C": (4, 6)}, policy="continuous", num_gpu_blocks=6,
        max_model_len=16,
    )  # fmt: skip
    assert table(records) == [
        "A:p4 B:p4 C:p4",
        "A:d1 B:d1 C:d1",
        "-C/r A:d1 B:d1",  # no block is needed, but none is free: vLLM 0.6.0's simplification
        "C:p6",
        "-C/r A:d1 B:d1",
        "C:p7",
        "-C/r A:d1 B:d1",
        "C:p8",
        "-C/r A:d1 B:d1",
        "C:p9",
    ]
    assert records[2].preempted == (Preemption("C", "recompute", "A", needed=1, free=0),)
    assert records[2].waiting == ("C",)


def test_continuous_puts_victims_at_the_head_in_the_order_they_came() -> None:
    records = play(
        {"A": (4, 3), "B": (4, 3), "C": (4, 3), "D": (4, 3), "E": (4, 1)},
        {"E": 1},
        policy="continuous",
        num_gpu_blocks=4,
        max_model_len=12,
    )
    assert table(records)[:4] == [
        "A:p4 B:p4 C:p4 D:p4",
        "-D/r -C/r A:d1 B:d1 | E no_blocks",
        "-B/r A:d1 | C no_blocks",
        "B:p6 C:p5 | D no_blocks",
    ]
    assert queues(records)[1:4] == ["C D E > A B", "B C D E > A", "D E > B C"]
    assert [p.victim_of for p in records[1].preempted] == ["A", "B"]


def test_continuous_swaps_out_and_returns_the_swapped_before_it_prefills() -> None:
    records = play(
        {"A": (4, 6), "B": (4, 6), "C": (4, 6), "D": (4, 2)},
        {"D": 3},
        policy="continuous",
        preemption_mode="swap",
        num_gpu_blocks=6,
        max_model_len=16,
    )
    assert table(records) == [
        "A:p4 B:p4 C:p4",
        "A:d1 B:d1 C:d1",
        "-C/s A:d1 B:d1 | C preempted_this_step",
        "A:d1 B:d1 | C no_blocks",  # its 2 and one more, 2 are free; D waits too
        "A:d1 B:d1 | C no_blocks",
        "A:d1 B:d1 | C no_blocks",
        "+C C:d1 | D swapped_first",
        "D:p4",
        "C:d1 D:d1",
        "C:d1",
        "C:d1",
    ]
    assert [r.swapped for r in records] == [()] * 2 + [("C",)] * 4 + [()] * 5
    assert records[2].swapped_out == records[6].swapped_in == {"C": 2}
    assert records[2].cpu_blocks_allocated == records[6].cpu_blocks_freed == {"C": [0, 1]}
    assert [r.free_cpu_blocks for r in records] == [32] * 2 + [30] * 4 + [32] * 5


@pytest.mark.parametrize(("cpu_blocks", "mode"), [(0, "r"), (1, "r"), (2, "s")])
def test_continuous_recomputes_when_the_cpu_pool_is_full(cpu_blocks: int, mode: str) -> None:
    records = play(
        {"A": (4, 6), "B": (4, 6), "C": (4, 6)},
        policy="continuous",
        preemption_mode="swap",
        num_gpu_blocks=6,
        num_cpu_blocks=cpu_blocks,
        max_model_len=16,
    )
    assert table(records)[2].startswith(f"-C/{mode} A:d1 B:d1")


def test_continuous_never_swaps_what_could_not_come_back() -> None:
    """To return, a swapped request needs its blocks and one more: here it would wait for ever."""
    records = play(
        {"A": (7, 10)}, policy="continuous", preemption_mode="swap", num_gpu_blocks=4,
        max_model_len=17,
    )  # fmt: skip
    # With all four blocks held, it evicts itself each time; each prefill gives it a token.
    assert table(records)[6:] == ["A:d1", "-A/r", "A:p14", "-A/r", "A:p15", "-A/r", "A:p16"]
    assert {p.mode for r in records for p in r.preempted} == {"recompute"}
    assert all(p.victim_of == "A" for r in records for p in r.preempted)


def test_chunked_decodes_first_and_fills_the_step_with_pieces_of_prompts() -> None:
    records = play(
        {"A": (3, 6), "B": (10, 2), "C": (2, 2)},
        {"B": 1, "C": 1},
        policy="continuous",
        enable_chunked_prefill=True,
        max_num_batched_tokens=5,
    )
    assert table(records) == [
        "A:p3",
        "B:p4 A:d1 | C no_token_budget",
        "B:p4 A:d1 | C no_token_budget",
        "B:p2 C:p2 A:d1",
        "A:d1 B:d1 C:d1",
        "A:d1",
    ]
    # All blocks of the whole prompt are taken at once, only its tokens come in pieces.
    assert records[1].blocks_allocated == {"B": [1, 2, 3]}


def test_chunked_admits_even_in_a_step_that_evicts() -> None:
    records = play(
        {"A": (4, 3), "B": (12, 2), "C": (2, 1)},
        {"C": 1},
        policy="continuous",
        enable_chunked_prefill=True,
        num_gpu_blocks=5,
        max_model_len=16,
        max_num_batched_tokens=32,
    )
    assert table(records)[1].startswith("-B/r")
    assert any(p.request_id == "B" for p in records[1].preempted)
    assert [a.request_id for a in records[1].admitted] == ["C"]


# -- unified ------------------------------------------------------------------------------------


def test_unified_spends_one_budget_on_everything() -> None:
    records = play(
        {"A": (3, 6), "B": (10, 2), "C": (2, 2)},
        {"B": 1, "C": 1},
        policy="unified",
        max_num_batched_tokens=5,
    )
    assert table(records) == [
        "A:p3",
        "A:d1 B:p4 | C no_token_budget",
        "A:d1 B:p4 | C no_token_budget",
        "A:d1 B:p2 C:p2",
        "A:d1 B:d1 C:d1",
        "A:d1",
    ]
    # Only the blocks of what is computed now, and never block 0.
    assert [r.blocks_allocated.get("B") for r in records[1:4]] == [[2], [4], [5]]
    used = {b for r in records for blocks in r.blocks_allocated.values() for b in blocks}
    assert 0 not in used and records[0].free_blocks == 30


def test_unified_admits_nobody_in_a_step_that_evicts() -> None:
    records = play({"A": (4, 6), "B": (4, 6), "C": (4, 6)}, policy="unified", num_gpu_blocks=6)
    assert table(records) == [
        "A:p4 B:p4 C:p4",
        "-C/r A:d1 B:d1",  # 5 blocks can be used; C evicts itself
        "A:d1 B:d1 | C no_blocks",
        "A:d1 B:d1 | C no_blocks",
        "A:d1 B:d1 | C no_blocks",
        "-B/r A:d1 | C preempted_this_step",
        "B:p9 C:p5",
        "C:d1",
        "C:d1",
        "C:d1",
        "C:d1",
    ]
    assert records[1].preempted == (Preemption("C", "recompute", "C", needed=1, free=0),)
    assert records[5].preempted == (Preemption("B", "recompute", "B", needed=1, free=0),)
    assert records[5].waiting == ("B", "C")


def test_unified_admits_only_whose_whole_sequence_fits() -> None:
    """B's first chunk is one block, but all its 12 tokens need three, and two are free."""
    records = play(
        {"A": (12, 2), "B": (12, 2)}, policy="unified", num_gpu_blocks=6, max_num_batched_tokens=8
    )
    assert table(records) == [
        "A:p8 | B no_token_budget",
        "A:p4 | B no_blocks",
        "A:d1 | B no_blocks",
        "B:p8",
        "B:p4",
        "B:d1",
    ]
    assert [r.held_back[2:] for r in records[1:3] if r.held_back] == [(3, 2), (3, 1)]


@pytest.mark.parametrize("budget", [3, 64])
def test_unified_stops_at_max_model_len(budget: int) -> None:
    """Without the engine, which would cut ``max_tokens`` at the door."""
    scheduler = make_scheduler(
        make_config(
            policy="unified", max_model_len=8, max_num_batched_tokens=budget, max_num_seqs=2
        )
    )
    request = Request("A", [1] * 5, SamplingParams(max_tokens=100))
    scheduler.add(request)
    steps = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        steps.append([row.num_tokens for row in output.scheduled])
        sampled = {row.request.request_id: 7 for row in output.scheduled if row.samples}
        scheduler.update(output, sampled, lambda request: request.token_stop_reason(8))
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 8 and request.num_computed_tokens == 7
    assert steps == ([[3], [2], [1], [1]] if budget == 3 else [[5], [1], [1]])


def test_unified_computes_nothing_past_max_model_len_even_if_nobody_stops_it() -> None:
    scheduler = make_scheduler(make_config(policy="unified", max_model_len=8))
    request = Request("A", [1] * 5, SamplingParams(max_tokens=100))
    scheduler.add(request)
    steps = []
    for _ in range(6):
        output = scheduler.schedule()
        steps.append([row.num_tokens for row in output.scheduled])
        scheduler.update(output, {row.request.request_id: 7 for row in output.scheduled},
                         lambda request: None)  # fmt: skip
    assert steps == [[5], [1], [1], [], [], []]
    assert request.num_tokens == 8 and request.num_computed_tokens == 7


def test_unified_hits_what_an_earlier_row_of_the_same_step_computes() -> None:
    engine = make_engine(policy="unified", enable_prefix_caching=True)
    auditor = Auditor(engine)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add_request("A", prompt, greedy(2))
    engine.add_request("B", prompt, greedy(2))
    record = auditor.step()
    assert table([record]) == ["A:p9 B:p1"]
    assert [a.prefix_hit_tokens for a in record.admitted] == [0, 8]
    assert record.scheduled[1].context_len == 9
    auditor.step()
    assert tokens_of(engine, "A") == tokens_of(engine, "B") == foretell(prompt, 2)


def test_a_hit_in_the_free_queue_counts_as_needed() -> None:
    """A's two cached blocks are free memory too: B needs them and three more, of four."""
    engine = make_engine(policy="unified", enable_prefix_caching=True, num_gpu_blocks=7)
    auditor = Auditor(engine)
    engine.add_request("A", list(range(9)), greedy(1))
    auditor.step()
    engine.add_request("C", [9] * 8, greedy(3))
    auditor.step()
    engine.add_request("B", [*range(9), *range(30, 40)], greedy(1))
    record = auditor.step()
    assert record.cached_blocks == 2 and record.free_blocks == 3
    assert record.held_back is not None and record.held_back == ("B", "no_blocks", 5, 3)


# -- why somebody is held back ------------------------------------------------------------------

HELD_BACK: dict[str, dict[str, Any]] = {
    "no_blocks": {"policy": "continuous", "num_gpu_blocks": 5, "max_model_len": 16},
    "watermark": {
        "policy": "continuous",
        "num_gpu_blocks": 100,
        "block_size": 1,
        "requests": {"A": (50, 2), "B": (50, 2)},
    },
    "no_slot": {"policy": "unified", "max_num_seqs": 1},
    "no_token_budget": {"policy": "unified", "max_num_batched_tokens": 9},
    "preempted_this_step": {
        "policy": "unified",
        "num_gpu_blocks": 6,
        "requests": {"A": (7, 4), "B": (7, 4), "C": (8, 1)},
    },
    "batch_not_drained": {"policy": "static", "max_num_seqs": 1},
    "batch_filling": {"policy": "static", "max_wait": 2.5, "max_num_seqs": 3},
    "slot_released_late": {
        "policy": "dynamic",
        "max_num_seqs": 2,
        "requests": {"A": (4, 2), "B": (4, 4), "C": (4, 2)},
    },
    "swapped_first": {
        "policy": "continuous",
        "preemption_mode": "swap",
        "num_gpu_blocks": 5,
        "max_model_len": 16,
        "requests": {"A": (7, 4), "B": (7, 4), "C": (7, 1)},
    },
}


def test_every_reason_is_played() -> None:
    assert HELD_BACK.keys() == set(HELD_BACK_REASONS)


@pytest.mark.parametrize("reason", HELD_BACK)
def test_held_back(reason: str) -> None:
    knobs = dict(HELD_BACK[reason])
    requests: Sizes = knobs.pop("requests", {"A": (10, 3), "B": (10, 3)})

    def idle(engine: Engine, step: int) -> None:
        if knobs.get("max_wait") and step:  # nobody else moves the clock of an idle engine
            clock = engine.clock
            assert isinstance(clock, VirtualClock)
            clock.advance_to(engine.scheduler.wake_time(clock.now))

    records = play(requests, before_step=idle, **knobs)
    found = [r for r in records if r.held_back is not None and r.held_back.reason == reason]
    assert found
    for record in found:
        held = record.held_back
        assert held is not None
        evicted = {p.request_id for p in record.preempted if p.mode == "recompute"}
        waiting = [name for name in record.waiting if name not in evicted]
        assert held.request_id in (*waiting[:1], *record.swapped[:1])  # the head of a queue
        if reason in ("no_blocks", "watermark", "no_slot", "no_token_budget", "batch_filling"):
            assert held.needed > held.available


# -- preemption by hand -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "mode", "expected"),
    [
        ("continuous", None, ["A:p4 B:p4", "-B/r A:d1", "B:p5", "A:d1 B:d1"]),
        ("continuous", "swap", ["A:p4 B:p4", "-B/s A:d1 | B preempted_this_step", "+B A:d1 B:d1",
                                "B:d1"]),
        ("unified", None, ["A:p4 B:p4", "-B/r A:d1", "A:d1 B:p5", "B:d1"]),
    ],
)  # fmt: skip
def test_preempting_one_by_hand(policy: str, mode: Any, expected: list[str]) -> None:
    def evict(engine: Engine, step: int) -> None:
        if step == 1:
            engine.preempt("B", mode)

    records = play({"A": (4, 3), "B": (4, 3)}, before_step=evict, policy=policy)
    assert records[1].preempted[0][:4] == ("B", mode or "recompute", None, 0)
    assert table(records) == expected


def test_preempting_by_plan_is_newest_first_and_passes_over_who_does_not_run() -> None:
    plan = ForcedPreemption({1: ["B", "A", "nobody"], 2: ["A"]})
    records = play(
        {"A": (4, 3), "B": (4, 3)},
        before_step=lambda engine, step: engine.force_preemption(plan) if step == 0 else None,
        policy="unified",
    )
    assert table(records) == ["A:p4 B:p4", "-B/r -A/r", "A:p5 B:p5", "A:d1 B:d1"]
    assert records[1].waiting == ("A", "B")


def test_random_preemption_is_reproducible_and_limited() -> None:
    def trial(seed: int) -> list[str]:
        plan = ForcedPreemption(probability=0.5, seed=seed, limit=5)
        records = play(
            {"A": (4, 9), "B": (4, 9), "C": (2, 9)},
            before_step=lambda engine, step: engine.force_preemption(plan) if step == 0 else None,
            policy="unified",
        )
        assert sum(len(r.preempted) for r in records) == 5
        return table(records)

    assert trial(1) == trial(1) != trial(2)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_policies_without_preemption_say_so(policy: str) -> None:
    engine = make_engine(policy=policy)
    engine.add_request("A", [1, 2, 3], greedy(4))
    engine.step()
    with pytest.raises(PreemptionUnsupportedError, match=f"policy '{policy}' never preempts"):
        engine.preempt("A")
    with pytest.raises(PreemptionUnsupportedError, match=f"policy '{policy}' never preempts"):
        engine.force_preemption(ForcedPreemption({1: ["A"]}))
    engine.force_preemption(None)
    while engine.has_unfinished:
        engine.step()
    assert tokens_of(engine, "A") == foretell([1, 2, 3], 4)


# -- a livelock is an error ---------------------------------------------------------------------


class Circling(UnifiedScheduler):
    """Takes everybody's memory away before anybody has computed all of its prompt."""

    def _decide(self, output: SchedulerOutput, now: float) -> None:
        for request in list(self.running):
            if request.num_tokens > 8:
                self.running.remove(request)
                self._preempt(request, self.config.preemption_mode, output, request)
        super()._decide(output, now)


def test_going_in_circles_is_an_error_and_not_the_end() -> None:
    engine = make_engine(policy="unified", max_num_batched_tokens=8)
    engine.scheduler = Circling(engine.config)
    engine.add_request("long", [1] * 10, greedy(2))
    with pytest.raises(
        NoProgressError, match=r"1\d\d\d steps without a sampled token: 1 running, 0 w"
    ):
        for _ in range(3000):
            engine.step()
    assert 1000 < len(engine.trace) < 1100
    engine.add_request("short", [1, 2], greedy(3))
    engine.abort("long")
    steps = len(engine.trace)
    while engine.has_unfinished:
        engine.step()
    assert len(engine.trace) - steps == 3
    assert tokens_of(engine, "short") == foretell([1, 2], 3)
    assert_all_free(engine)


def test_a_long_prompt_in_tiny_chunks_is_no_livelock() -> None:
    """More steps without a token than the guard's thousand, each of them progress."""
    records = play(
        {"A": (1500, 1), "B": (1, 1)},
        policy="unified",
        max_model_len=1600,
        num_gpu_blocks=500,
        max_num_batched_tokens=1,
        max_num_seqs=1,
    )  # fmt: skip
    assert len(records) == 1501


# -- lanes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dynamic", "continuous", "unified"])
def test_a_newcomer_takes_the_lowest_free_lane_and_keeps_it(policy: str) -> None:
    records = play(
        {"A": (4, 2), "B": (4, 9), "C": (4, 3), "D": (4, 4), "E": (4, 3)},
        {"D": 3, "E": 5},
        policy=policy,
        max_num_seqs=3,
    )
    lanes: dict[str, set[int]] = {}
    for record in records:
        for row in record.scheduled:
            lanes.setdefault(row.request_id, set()).add(row.slot)
    assert lanes == {"A": {0}, "B": {1}, "C": {2}, "D": {0}, "E": {2}}


def test_make_scheduler_knows_the_chunked_one() -> None:
    assert type(make_scheduler(make_config(enable_chunked_prefill=True))) is (
        ChunkedContinuousScheduler
    )
