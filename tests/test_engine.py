"""The engine around the schedulers: requests come, go and fail, and others never notice."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_helpers import (
    Alphabet,
    Auditor,
    PaperExecutor,
    assert_all_free,
    foretell,
    greedy,
    make_config,
    make_engine,
    next_token,
    paper,
    run,
    table,
    tokens_of,
)

from minibatch.clock import VirtualClock
from minibatch.engine import Engine
from minibatch.errors import DuplicateRequestError, EngineClosedError, RequestTooLargeError
from minibatch.executor.base import SampledToken
from minibatch.record import Finish, StepRecord
from minibatch.request import Request
from minibatch.sampling_params import Logprob, SamplingParams
from minibatch.scheduler import SchedulerOutput

POLICIES = ["static", "dynamic", "continuous", "unified"]
PROMPTS = {"A": [1, 2, 3], "B": [4, 5, 6, 7, 8], "C": [9]}


def reason_of(engine: Engine, request_id: str) -> str | None:
    return engine.output(request_id).outputs[0].finish_reason


# -- a plain run --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_says_the_same(policy: str) -> None:
    engine = make_engine(policy=policy, max_num_seqs=2)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy(5))
    records = list(engine.run())
    assert records == engine.trace.steps and [r.step for r in records] == list(range(len(records)))
    for name, prompt in PROMPTS.items():
        output = engine.output(name)
        assert output.request_id == name and output.prompt_token_ids == prompt and output.finished
        (part,) = output.outputs
        assert part.token_ids == foretell(prompt, 5) and part.text == ""
        assert (part.index, part.finish_reason, part.stop_reason) == (0, "length", None)
        assert part.logprobs is None and part.cumulative_logprob is None
        assert [t for r in records for t in r.sampled.get(name, [])] == part.token_ids
    assert_all_free(engine)


def test_a_step_with_nothing_to_do_is_idle() -> None:
    engine = make_engine()
    record = engine.step()
    assert not record.scheduled and record.free_blocks == 32
    assert list(engine.run()) == []


def test_max_tokens_none_means_to_the_end_of_the_model() -> None:
    engine = make_engine(max_model_len=20)
    engine.add_request("A", [1] * 5, SamplingParams(temperature=0, max_tokens=None))
    run(engine)
    assert tokens_of(engine, "A") == foretell([1] * 5, 15)
    assert reason_of(engine, "A") == "length"
    assert engine.trace.requests["A"].max_tokens == 15


def test_max_tokens_is_cut_where_the_model_ends() -> None:
    engine = make_engine(max_model_len=20)
    engine.add_request("A", [1] * 19, greedy(100))
    run(engine)
    assert len(tokens_of(engine, "A")) == 1


@pytest.mark.parametrize(
    ("more", "length", "reason", "stop_reason"),
    [
        ({}, 3, "stop", None),
        ({"ignore_eos": True}, 6, "length", None),
        ({"stop_token_ids": [12]}, 2, "stop", 12),
        ({"stop_token_ids": [12], "ignore_eos": True}, 2, "stop", 12),
        ({"stop_token_ids": [10], "min_tokens": 2}, 3, "stop", None),
        ({"stop_token_ids": [49], "min_tokens": 4}, 5, "stop", None),
    ],
)
def test_end_and_stop_tokens(
    more: dict[str, Any], length: int, reason: str, stop_reason: int | None
) -> None:
    engine = make_engine(eos_token_ids=[20, 21])
    paper(engine).scripts["A"] = [10, 12, 20, 13, 21, 14]
    engine.add_request("A", [1, 2], greedy(6, **more))
    run(engine)
    (part,) = engine.output("A").outputs
    assert part.token_ids == [10, 12, 20, 13, 21, 14][:length]
    assert (part.finish_reason, part.stop_reason) == (reason, stop_reason)


def test_n_samples_have_names_of_their_own() -> None:
    engine = make_engine()
    engine.add_request("A", [1, 2, 3], greedy(3, n=3))
    records = run(engine)
    output = engine.output("A")
    assert [part.index for part in output.outputs] == [0, 1, 2]
    for index, part in enumerate(output.outputs):
        assert part.token_ids == foretell([1, 2, 3], 3, sample_index=index)
    assert [a.request_id for a in records[0].arrived] == ["A#0", "A#1", "A#2"]
    assert {a.how for r in records for a in r.admitted} == {"new", "forked"}


def test_logprobs_are_collected_and_added_up() -> None:
    class Talkative(PaperExecutor):
        def _sample(self, request: Request) -> SampledToken:
            token_id = next_token(request.token_ids)
            return SampledToken(token_id, {token_id: Logprob(-0.5, 1), 3: Logprob(-2.0, 2)})

    config = make_config()
    engine = Engine(config, Talkative(config), tokenizer=Alphabet([chr(65 + i) for i in range(60)]))
    engine.add_request("A", [1], greedy(4, logprobs=1))
    run(engine)
    (part,) = engine.output("A").outputs
    assert part.logprobs is not None and part.cumulative_logprob == -2.0
    for token_id, entry in zip(part.token_ids, part.logprobs, strict=True):
        assert entry[token_id] == Logprob(-0.5, 1, chr(65 + token_id))


def test_unseeded_requests_draw_from_the_engine_s_seed() -> None:
    def seeds(seed: int) -> list[int]:
        config = make_config()
        engine = Engine(config, PaperExecutor(config), seed=seed)
        for name in "AB":
            engine.add_request(name, [1], greedy(1))
        engine.add_request("C", [1], greedy(1, seed=5))
        return [engine.scheduler.requests[name].seed for name in "ABC"]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len({*seeds(1)}) == 3 and seeds(1)[2] == 5


# -- times --------------------------------------------------------------------------------------


def prefill_takes_longer(output: SchedulerOutput) -> float:
    return 2.0 if any(row.phase == "prefill" for row in output.scheduled) else 0.5


def test_metrics_on_a_virtual_clock() -> None:
    """One at a time, all there from the beginning: each waits for those before it."""
    engine = make_engine(max_num_seqs=1, seconds=prefill_takes_longer)
    for name, output_len in (("A", 3), ("B", 1), ("C", 2)):
        engine.add_request(name, [1, 2], greedy(output_len))
    records = run(engine)
    a, b, c = (engine.output(name).metrics for name in "ABC")
    assert a is not None and b is not None and c is not None
    assert [m.time_in_queue for m in (a, b, c)] == [0.0, 3.0, 5.0]
    assert [m.prefill_time for m in (a, b, c)] == [2.0, 2.0, 2.0]
    assert [m.ttft for m in (a, b, c)] == [2.0, 5.0, 7.0]
    assert [m.tpot for m in (a, b, c)] == [0.5, None, 0.5]
    assert [m.e2e for m in (a, b, c)] == [3.0, 5.0, 7.5]
    assert [m.num_generated_tokens for m in (a, b, c)] == [3, 1, 2]
    assert [r.duration_s for r in records] == [2.0, 0.5, 0.5, 2.0, 2.0, 0.5]
    assert [r.start_s for r in records] == [0.0, 2.0, 2.5, 3.0, 5.0, 7.0]
    assert [r.schedule_s for r in records] == [0.0] * 6


def test_metrics_count_from_the_arrival_that_the_caller_names() -> None:
    engine = make_engine()
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(10.0)
    engine.add_request("A", [1, 2], greedy(2), arrival_s=7.5)
    run(engine)
    metrics = engine.output("A").metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.time_in_queue, metrics.ttft) == (7.5, 2.5, 3.5)


def test_metrics_of_an_evicted_and_of_an_aborted_request() -> None:
    engine = make_engine(policy="unified")
    engine.add_request("A", [1, 2], greedy(4))
    engine.add_request("B", [1, 2], greedy(4))
    engine.step()
    engine.preempt("A")
    engine.step()
    engine.abort("B")
    run(engine)
    a, b = engine.output("A").metrics, engine.output("B").metrics
    assert a is not None and b is not None
    assert a.num_preemptions == 1 and a.tpot == pytest.approx(4 / 3)  # a step was lost
    assert (b.num_generated_tokens, b.finished_time, b.last_token_time) == (2, 2.0, 2.0)


def test_predicted_time_goes_into_the_record() -> None:
    config = make_config()
    engine = Engine(
        config, PaperExecutor(config), predict=lambda output: 0.1 * output.num_batched_tokens
    )
    engine.add_request("A", [1, 2, 3], greedy(2))
    assert [r.predicted_s for r in run(engine)] == pytest.approx([0.3, 0.1])


# -- aborting -----------------------------------------------------------------------------------

STATES: dict[str, tuple[dict[str, Any], int]] = {
    # knobs, and the number of steps after which B is in that state
    "waiting": ({"policy": "unified", "max_num_seqs": 1}, 2),
    "mid-prefill": ({"policy": "unified", "max_num_batched_tokens": 6}, 2),
    "mid-prefill, chunked": (
        {"policy": "continuous", "enable_chunked_prefill": True, "max_num_batched_tokens": 6},
        2,
    ),
    "running": ({"policy": "continuous"}, 2),
    "swapped": (
        {"policy": "continuous", "preemption_mode": "swap", "num_gpu_blocks": 5,
         "max_model_len": 16},
        2,
    ),
    "running, static": ({"policy": "static", "max_model_len": 32}, 2),
    "waiting, static": ({"policy": "static", "max_model_len": 32, "max_num_seqs": 1}, 2),
    "running, dynamic": ({"policy": "dynamic"}, 2),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_aborting(state: str) -> None:
    knobs, steps = STATES[state]
    engine = make_engine(**knobs)
    auditor = Auditor(engine)
    prompts = {"A": [1] * 7, "B": [2] * 7, "C": [3] * 3}
    for name in "AB":
        engine.add_request(name, prompts[name], greedy(6))
    for _ in range(steps):
        auditor.step()
    if state == "swapped":
        auditor.step()
    request = engine.scheduler.requests["B"]
    expected = "running" if "mid-prefill" in state else state.split(",")[0]
    assert request.status.value == expected
    if "mid-prefill" in state:
        assert 0 < request.num_computed_tokens < 7
    engine.add_request("C", prompts["C"], greedy(4))
    so_far = tokens_of(engine, "B")

    assert engine.abort("B") is True
    assert engine.abort("B") is False  # it is gone
    assert not request.block_table or state == "running, static"  # whose batch keeps its row
    while engine.has_unfinished:
        auditor.step()
    assert reason_of(engine, "B") == "abort"
    assert tokens_of(engine, "B") == so_far == foretell(prompts["B"], 6)[: len(so_far)]
    assert tokens_of(engine, "A") == foretell(prompts["A"], 6)
    assert tokens_of(engine, "C") == foretell(prompts["C"], 4)
    aborts = [f for r in auditor.records for f in r.finished if f.request_id == "B"]
    assert aborts == [Finish("B", "abort")]
    assert_all_free(engine)


def test_aborting_the_unknown_and_the_finished() -> None:
    engine = make_engine()
    engine.add_request("A", [1], greedy(1))
    assert engine.abort("nobody") is False
    run(engine)
    assert engine.abort("A") is False
    assert reason_of(engine, "A") == "length"


def test_aborting_everybody_tells_it_in_the_next_record() -> None:
    engine = make_engine()
    engine.add_request("A", [1], greedy(9))
    engine.step()
    engine.abort("A")
    assert not engine.has_unfinished
    record = engine.step()
    assert record.finished == (Finish("A", "abort"),) and record.blocks_freed == {"A": [0]}
    assert not record.scheduled


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_aborting_n_samples_ends_them_all(policy: str, after: int) -> None:
    """Also those that are not born yet: they wait for their leader's first token."""
    engine = make_engine(policy=policy, max_num_seqs=4)
    auditor = Auditor(engine)
    engine.add_request("A", [1, 2, 3, 4, 5], greedy(9, n=3))
    engine.add_request("B", [6], greedy(9))
    for _ in range(after):
        auditor.step()
    assert engine.abort("A")
    while engine.has_unfinished:
        auditor.step()
    output = engine.output("A")
    assert [part.finish_reason for part in output.outputs] == ["abort"] * 3
    for index, part in enumerate(output.outputs):
        said = foretell([1, 2, 3, 4, 5], 9, sample_index=index)
        assert part.token_ids == said[: len(part.token_ids)]
    assert tokens_of(engine, "B") == foretell([6], 9)
    assert_all_free(engine)


def test_the_other_samples_go_on_when_their_leader_ends_first() -> None:
    engine = make_engine(eos_token_ids=[7])
    paper(engine).scripts |= {"A#0": [7], "A#1": [1, 7], "A#2": [1, 2, 3]}
    auditor = Auditor(engine)
    engine.add_request("A", [1, 2, 3, 4, 5], greedy(3, n=3))
    while engine.has_unfinished:
        auditor.step()
    assert [p.token_ids for p in engine.output("A").outputs] == [[7], [1, 7], [1, 2, 3]]
    assert_all_free(engine)


# -- a request that goes wrong ------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_other_samples_go_on_when_their_leader_says_nothing(policy: str) -> None:
    """They wait for its first token, which never comes."""
    engine = make_engine(policy=policy, max_model_len=32)
    auditor = Auditor(engine)
    paper(engine).speechless = {"A#0"}
    engine.add_request("A", [1, 2, 3, 4, 5], greedy(4, n=3))
    while engine.has_unfinished:
        auditor.step()
    parts = engine.output("A").outputs
    assert [part.finish_reason for part in parts] == ["error", "length", "length"]
    for index in (1, 2):
        assert parts[index].token_ids == foretell([1, 2, 3, 4, 5], 4, sample_index=index)
    assert_all_free(engine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", [0, 2])
def test_a_row_without_a_token_ends_alone(policy: str, when: int) -> None:
    engine = make_engine(policy=policy, max_model_len=32)
    auditor = Auditor(engine)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy(6))
    for _ in range(when):
        auditor.step()
    paper(engine).speechless = {"A", "C"}
    record = auditor.step()
    assert record.finished == (Finish("A", "error"), Finish("C", "error"))
    while engine.has_unfinished:
        auditor.step()
    assert tokens_of(engine, "B") == foretell(PROMPTS["B"], 6)
    for name in "AC":
        assert reason_of(engine, name) == "error"
        assert tokens_of(engine, name) == foretell(PROMPTS[name], 6)[:when]
    assert_all_free(engine)


def test_an_executor_that_fails_may_be_asked_again() -> None:
    engine = make_engine()
    engine.add_request("A", [1, 2, 3], greedy(3))
    paper(engine).errors = {0: [RuntimeError("device lost"), RuntimeError("again")]}
    for message in ("device lost", "again"):
        with pytest.raises(RuntimeError, match=message):
            engine.step()
    assert len(engine.trace) == 0
    assert table(run(engine)) == ["A:p3", "A:d1", "A:d1"]
    assert tokens_of(engine, "A") == foretell([1, 2, 3], 3)


# -- between an interrupted step and its end ----------------------------------------------------


def interrupted(step: int, policy: str = "unified", **knobs: Any) -> tuple[Engine, Auditor]:
    """A and B run; the step of that number is decided, but cut short."""
    engine = make_engine(policy=policy, **knobs)
    auditor = Auditor(engine)
    engine.add_request("A", [1, 2, 3, 4, 5], greedy(5))
    engine.add_request("B", [1, 2, 3, 4, 6], greedy(5))
    for _ in range(step):
        auditor.step()
    paper(engine).errors = {step: [KeyboardInterrupt()]}
    with pytest.raises(KeyboardInterrupt):
        auditor.step()
    return engine, auditor


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", [0, 1])
def test_adding_while_a_step_is_pending(policy: str, step: int) -> None:
    engine, auditor = interrupted(step, policy)
    engine.add_request("C", [9, 9], greedy(3))
    while engine.has_unfinished:
        auditor.step()
    assert tokens_of(engine, "C") == foretell([9, 9], 3)
    assert tokens_of(engine, "A") == foretell([1, 2, 3, 4, 5], 5)
    assert_all_free(engine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("victims", ["A", "B", "AB", "BA"])
@pytest.mark.parametrize("release", [False, True])
def test_aborting_while_a_step_is_pending(
    policy: str, step: int, victims: str, release: bool
) -> None:
    """``release`` is what ``LLM`` does when a call is interrupted: nobody will ask again."""
    engine, auditor = interrupted(step, policy, enable_prefix_caching=True)
    for name in victims:
        assert engine.abort(name)
        if release:
            engine.outputs.release(name)
    engine.add_request("C", [1, 2, 3, 4, 5, 6], greedy(5))  # might hit what was never computed
    while engine.has_unfinished:
        auditor.step()
    auditor.step()
    assert tokens_of(engine, "C") == foretell([1, 2, 3, 4, 5, 6], 5)
    for name, last in (("A", 5), ("B", 6)):
        if name in victims and not release:
            assert reason_of(engine, name) == "abort"
        elif name not in victims:
            assert tokens_of(engine, name) == foretell([1, 2, 3, 4, last], 5)
    ended = [f for r in auditor.records for f in r.finished if f.reason == "abort"]
    assert sorted(f.request_id for f in ended) == sorted(victims)
    assert_all_free(engine)


def test_coming_and_going_while_a_step_is_pending() -> None:
    """Nobody's end is told before its arrival."""
    engine, auditor = interrupted(1)
    engine.add_request("C", [9], greedy(3))
    engine.abort("C")
    while engine.has_unfinished:
        auditor.step()
    told = [(r.step, f) for r in auditor.records for f in r.finished if f.request_id == "C"]
    arrived = [r.step for r in auditor.records for a in r.arrived if a.request_id == "C"]
    assert told == [(arrived[0], Finish("C", "abort"))]


def test_an_aborted_row_of_a_pending_step_is_still_computed_for_others() -> None:
    """B hits a block that A computes in the same step; A is aborted before it has."""
    engine, auditor = interrupted(0, enable_prefix_caching=True)
    assert [a.prefix_hit_tokens for a in engine._pending.output.admitted] == [0, 4]  # type: ignore[union-attr]
    engine.abort("A")
    while engine.has_unfinished:
        auditor.step()
    assert tokens_of(engine, "B") == foretell([1, 2, 3, 4, 6], 5)


# -- ids ----------------------------------------------------------------------------------------


def test_a_live_id_is_refused_and_a_finished_one_may_be_used_again() -> None:
    engine = make_engine()
    engine.add_request("x", [1, 2], greedy(4))
    engine.step()
    with pytest.raises(DuplicateRequestError, match="'x' is in use"):
        engine.add_request("x", [3], greedy(1))
    run(engine)
    assert tokens_of(engine, "x") == foretell([1, 2], 4)
    engine.add_request("x", [3], greedy(2))
    run(engine)
    assert tokens_of(engine, "x") == foretell([3], 2)


@pytest.mark.parametrize(("first", "second"), [("x", "x#0"), ("x#1", "x"), ("x#0", "x")])
def test_samples_names_are_taken_too(first: str, second: str) -> None:
    engine = make_engine()
    n = {"x": 2}
    engine.add_request(first, [1, 2], greedy(4, n=n.get(first, 1)))
    with pytest.raises(DuplicateRequestError, match="x#"):
        engine.add_request(second, [3], greedy(1, n=n.get(second, 1)))
    run(engine)
    # Finished but not released: the name of a sample may be used, and outlives its namesake.
    engine.add_request(second, [3], greedy(3, n=n.get(second, 1)))
    engine.outputs.release(first)
    run(engine)
    assert tokens_of(engine, second) == foretell([3], 3)


def test_an_id_may_be_used_again_right_after_its_abort() -> None:
    """The next record tells of the old one's end; the new one must not be taken for it."""
    letters = Alphabet([chr(65 + i) for i in range(60)])
    engine = make_engine(tokenizer=letters)
    engine.add_request("x", [1, 2], greedy(9))
    engine.step()
    engine.abort("x")
    engine.add_request("x", [3, 4], greedy(3))
    records = run(engine)
    assert records[0].finished == (Finish("x", "abort"),)
    output = engine.output("x").outputs[0]
    assert output.token_ids == foretell([3, 4], 3)
    assert output.text == letters.decode(output.token_ids)
    metrics = engine.output("x").metrics
    assert metrics is not None and metrics.finished_time == records[-1].end_s


def test_a_released_id_is_unknown() -> None:
    engine = make_engine()
    engine.add_request("x", [1], greedy(1))
    run(engine)
    engine.outputs.release("x")
    engine.outputs.release("x")
    with pytest.raises(KeyError):
        engine.output("x")


# -- the door stays in order --------------------------------------------------------------------


def test_refused_requests_are_told_in_the_next_record() -> None:
    engine = make_engine(num_gpu_blocks=4)
    engine.add_request("A", [1, 2], greedy(2))
    with pytest.raises(RequestTooLargeError) as caught:
        engine.add_request("huge", [1] * 17, greedy(5))
    assert (caught.value.needed, caught.value.available) == (6, 4)
    first, second = run(engine)
    (refusal,) = first.refused
    assert refusal[:1] + refusal[2:] == ("huge", 6, 4, "num_gpu_blocks")
    assert "num_gpu_blocks" in refusal.reason and second.refused == ()
    assert engine.trace.summary["num_refused"] == 1
    assert "huge" not in engine.trace.requests


def test_closing() -> None:
    with make_engine() as engine:
        engine.add_request("A", [1], greedy(3))
        engine.step()
    assert paper(engine).closed
    engine.close()
    for use in (engine.step, lambda: engine.add_request("B", [1], greedy(1))):
        with pytest.raises(EngineClosedError, match="closed"):
            use()
    assert len(tokens_of(engine, "A")) == 1  # what it said can still be read
    assert len(engine.trace) == 1


def test_only_the_newest_records_are_kept() -> None:
    engine = make_engine(keep_records=10)
    engine.add_request("A", [1], greedy(60))
    sizes = []
    for record in engine.run():
        sizes.append(len(engine.trace))
        assert engine.trace[-1] is record
        assert [r.step for r in engine.trace.steps[-10:]] == (
            list(range(max(0, record.step - 9), record.step + 1))
        )
    assert max(sizes) < 20 and len(sizes) == 60


# -- threads ------------------------------------------------------------------------------------


def test_adding_and_aborting_from_other_threads() -> None:
    engine = make_engine(
        policy="unified", num_gpu_blocks=12, max_num_seqs=3, enable_prefix_caching=True
    )
    auditor = Auditor(engine)
    errors: list[BaseException] = []
    aborted: set[str] = set()
    prompts: dict[str, list[int]] = {}

    def caller(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(30):
                name = f"{number}-{turn}"
                prompts[name] = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
                engine.add_request(name, prompts[name], greedy(6))
                if rng.random() < 0.4 and engine.abort(name):
                    aborted.add(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while engine.has_unfinished or any(thread.is_alive() for thread in threads):
        with engine._lock:  # an audit looks at the books between two steps, not during another's
            auditor.step()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(prompts) == 120
    for name, prompt in prompts.items():
        said, expected = tokens_of(engine, name), foretell(prompt, 6)
        assert said == (expected[: len(said)] if name in aborted else expected)
    assert_all_free(engine)


def test_stepping_from_several_threads() -> None:
    engine = make_engine(policy="continuous")
    for number in range(20):
        engine.add_request(str(number), [number], greedy(8))
    records: list[StepRecord] = []

    def work() -> None:
        while engine.has_unfinished:
            records.append(engine.step())

    in_threads(4, work)
    assert sorted(r.step for r in records) == [r.step for r in engine.trace]
    for number in range(20):
        assert tokens_of(engine, str(number)) == foretell([number], 8)
    assert_all_free(engine)


def in_threads(count: int, work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
