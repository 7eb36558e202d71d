"""Metrics: every definition on runs small enough to work out by hand."""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.clock import VirtualClock
from minibatch.config import POLICY_NAMES, SchedulerConfig
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.errors import RequestTooLargeError
from minibatch.executor.base import SampledToken
from minibatch.hardware import hardware
from minibatch.metrics import (
    SLO,
    MetricsCollector,
    RunMetrics,
    chip_use,
    measure,
    percentile,
)
from minibatch.model.presets import preset
from minibatch.record import (
    Admission,
    Arrival,
    Finish,
    Preemption,
    Refusal,
    Scheduled,
    StepRecord,
)
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler.output import SchedulerOutput
from minibatch.simulation import simulate
from minibatch.tables import comparison, request_rows, table
from minibatch.trace import Trace, TraceMeta
from minibatch.workload import generate, lognormal, poisson, uniform


class ScriptedExecutor:
    """Step k takes ``durations[k]`` seconds; a request's tokens are read off its script."""

    def __init__(
        self, clock: VirtualClock, durations: Sequence[float], scripts: dict[str, list[int]]
    ) -> None:
        self.clock = clock
        self.durations = list(durations)
        self.scripts = scripts

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        self.clock.advance(self.durations[output.step % len(self.durations)])
        return {
            row.request.request_id: SampledToken(
                self.scripts[row.request.request_id][row.request.num_output_tokens]
            )
            for row in output.scheduled
            if row.samples
        }

    def close(self) -> None:
        pass


def scripted_engine(
    durations: Sequence[float], scripts: dict[str, list[int]], **knobs: Any
) -> Engine:
    clock = VirtualClock()
    config = SchedulerConfig(**{"policy": "unified", "num_gpu_blocks": 100, **knobs})
    executor = ScriptedExecutor(clock, durations, scripts)
    return Engine(config, executor, clock=clock, eos_token_ids=(2,))


def serve(engine: Engine, prompts: dict[str, int], max_tokens: int = 100) -> RunMetrics:
    for request_id, length in prompts.items():
        params = SamplingParams(max_tokens=max_tokens)
        engine.add_request(request_id, prompt_token_ids=[7] * length, sampling_params=params)
    for _ in engine.run():
        pass
    return measure(engine.trace)


def test_input_output_and_total_tokens_per_second_are_three_numbers() -> None:
    """C1: prompt 100, output 10, in 2 s."""
    engine = scripted_engine([0.2], {"r": list(range(10, 20))})
    run = serve(engine, {"r": 100}, max_tokens=10)
    assert run.duration_s == pytest.approx(2.0)
    assert run.input_tokens_per_s == pytest.approx(50.0)
    assert run.output_tokens_per_s == pytest.approx(5.0)
    assert run.total_tokens_per_s == pytest.approx(55.0)
    text = comparison({"r": run})
    assert all(name in text for name in ("in tok/s", "out tok/s", "total tok/s"))


def test_tokens_are_counted_as_ids() -> None:
    """C2: seven equal ids that any text would run together, then an end token that it would hide.

    TPOT ends at the last token's time.
    """
    engine = scripted_engine([1.0, 0.5], {"r": [220] * 7 + [2]})
    run = serve(engine, {"r": 3})
    (request,) = run.requests
    assert request.finish_reason == "stop"
    assert request.num_output_tokens == run.num_output_tokens == 8
    # Steps end at 1, 1.5, 2.5, 3, 4, 4.5, 5.5, 6.
    assert request.tpot_s == pytest.approx((6.0 - 1.0) / 7)
    assert request.itl_s == pytest.approx((0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5))


def test_ttft_is_queue_and_prefill() -> None:
    """C3: one slot, three requests at 0: they queue for 0, e1 and e1 + e2."""
    scripts = {name: [10] * count for name, count in (("a", 3), ("b", 5), ("c", 1))}
    engine = scripted_engine([0.1], scripts, max_num_seqs=1)
    for name, script in scripts.items():
        params = SamplingParams(max_tokens=len(script))
        engine.add_request(name, prompt_token_ids=[7, 8], sampling_params=params)
    for _ in engine.run():
        pass
    run = measure(engine.trace)
    a, b, c = run.requests
    assert a.queue_s == 0.0
    assert b.queue_s == pytest.approx(a.e2e_s) == pytest.approx(0.3)
    assert c.queue_s == pytest.approx(0.3 + 0.5)
    for request in (a, b, c):
        assert request.prefill_s == pytest.approx(0.1)
        assert request.ttft_s == pytest.approx(request.queue_s + request.prefill_s)
    assert not run.open_loop
    assert run.slot_utilization == 1.0


def handmade(rows: list[dict[str, Any]]) -> RunMetrics:
    """Requests with given first and last token times, each alone in its records."""
    steps: list[StepRecord] = []
    for index, row in enumerate(rows):
        name = f"r{index}"
        arrival = (Arrival(name, 0.0, 4, 9),)
        steps.append(
            StepRecord(
                step=len(steps),
                start_s=0.0,
                duration_s=row["first"],
                arrived=arrival,
                admitted=(Admission(name, "new"),),
                sampled={name: [1]},
            )
        )
        ends = [row["first"] + (i + 1) * row["gap"] for i in range(row["more"])]
        for end in ends:
            steps.append(
                StepRecord(
                    step=len(steps), start_s=end - 0.001, duration_s=0.001, sampled={name: [1]}
                )
            )
        reason = row.get("reason", "length")
        if reason is not None:
            steps.append(StepRecord(step=len(steps), start_s=1.0, finished=(Finish(name, reason),)))
    return measure(Trace(TraceMeta(), steps))


def test_goodput_counts_who_kept_every_limit() -> None:
    """C7: limits of 100 ms to the first token and 20 ms a token; one keeps both."""
    run = handmade(
        [
            {"first": 0.090, "gap": 0.019, "more": 5},
            {"first": 0.110, "gap": 0.019, "more": 5},
            {"first": 0.090, "gap": 0.021, "more": 5},
            {"first": 0.110, "gap": 0.021, "more": 5},
        ]
    )
    slo = SLO(ttft_s=0.100, tpot_s=0.020)
    assert [slo.met_by(request) for request in run.requests] == [True, False, False, False]
    assert run.goodput(slo) == pytest.approx(1 / run.duration_s)
    assert run.goodput(SLO(ttft_s=0.100)) == pytest.approx(2 / run.duration_s)
    assert run.goodput(SLO()) == run.requests_per_s == pytest.approx(4 / run.duration_s)
    assert run.goodput(SLO(e2e_s=0.19)) == pytest.approx(1 / run.duration_s)


def test_aborted_refused_and_unfinished_requests_are_not_good() -> None:
    run = handmade(
        [
            {"first": 0.01, "gap": 0.01, "more": 2},
            {"first": 0.01, "gap": 0.01, "more": 2, "reason": "abort"},
            {"first": 0.01, "gap": 0.01, "more": 2, "reason": "error"},
            {"first": 0.01, "gap": 0.01, "more": 2, "reason": None},
        ]
    )
    assert [SLO().met_by(request) for request in run.requests] == [True, False, False, False]
    assert run.num_finished == 1
    assert run.num_output_tokens == 12  # they were made all the same
    assert [request.e2e_s is None for request in run.requests] == [False, True, True, True]


def test_one_token_has_no_tpot_and_keeps_any_limit_on_it() -> None:
    run = handmade([{"first": 0.05, "gap": 0.0, "more": 0}])
    (request,) = run.requests
    assert request.tpot_s is None and request.itl_s == ()
    assert SLO(tpot_s=1e-9).met_by(request)
    assert run.values("tpot_s") == []
    assert math.isnan(run.percentile("tpot_s", 50)) and math.isnan(run.mean("tpot_s"))


def test_an_engine_that_refuses_and_aborts() -> None:
    engine = scripted_engine([0.1], {n: [5] * 50 for n in "abc"}, num_gpu_blocks=5, max_num_seqs=1)
    params = SamplingParams(max_tokens=20)
    engine.add_request("a", prompt_token_ids=[7] * 4, sampling_params=params)
    engine.add_request("b", prompt_token_ids=[7] * 4, sampling_params=params)
    with pytest.raises(RequestTooLargeError):
        engine.add_request("c", prompt_token_ids=[7] * 400, sampling_params=params)
    for step, _ in enumerate(engine.run()):
        if step == 1:
            engine.abort("b")
    run = measure(engine.trace)
    found = {request.request_id: request for request in run.requests}
    assert {name: request.finish_reason for name, request in found.items()} == {
        "a": "length",
        "b": "abort",
        "c": "refused",
    }
    assert found["b"].queue_s is None and found["b"].ttft_s is None
    assert run.goodput(SLO()) == pytest.approx(1 / 2.0)
    assert run.num_input_tokens == 4 and run.num_output_tokens == 20


# -- utilisation ----------------------------------------------------------------------------------


def test_kv_utilisation_of_a_reservation() -> None:
    """Static reserves 64 tokens for a prompt of 10 and 4 outputs: 10, 11, 12, 13 of 64 filled."""
    engine = scripted_engine(
        [1.0], {"r": [5] * 9}, policy="static", max_model_len=64, max_num_seqs=1
    )
    run = serve(engine, {"r": 10}, max_tokens=4)
    assert run.num_steps == 4
    assert run.kv_utilization == pytest.approx((10 + 11 + 12 + 13) / (4 * 64))
    assert run.pool_use == pytest.approx(4 / 100)


def test_kv_utilisation_of_paging() -> None:
    """Blocks of 16, and a 17th token with KV: 15, 16 of 16, then 17 of 32."""
    engine = scripted_engine([1.0], {"r": [5] * 9}, max_num_seqs=1)
    run = serve(engine, {"r": 15}, max_tokens=3)
    assert run.kv_utilization == pytest.approx((15 + 16 + 17) / (16 + 16 + 32))


def test_finished_rows_of_a_static_batch_hold_memory_for_nobody() -> None:
    scripts = {"a": [5], "b": [5] * 4}
    engine = scripted_engine(
        [1.0], scripts, policy="static", max_model_len=16, max_num_seqs=2, num_gpu_blocks=2
    )
    for name, script in scripts.items():
        params = SamplingParams(max_tokens=len(script))
        engine.add_request(name, prompt_token_ids=[7] * 8, sampling_params=params)
    for _ in engine.run():
        pass
    run = measure(engine.trace)
    assert run.slot_utilization == pytest.approx((2 + 1 + 1 + 1) / (4 * 2))
    assert run.kv_utilization == pytest.approx((8 + 8 + 9 + 10 + 11) / (4 * 32))
    assert run.pool_use == pytest.approx(1.0)
    assert run.num_padding_tokens == 3


def test_an_evicted_request_holds_nothing_while_it_waits() -> None:
    steps = [
        StepRecord(
            0,
            duration_s=1.0,
            arrived=(Arrival("a", 0.0, 8, 9), Arrival("b", 0.0, 8, 9)),
            admitted=(Admission("a", "new"), Admission("b", "new")),
            scheduled=(Scheduled("a", 0, "prefill", 8, 8), Scheduled("b", 1, "prefill", 8, 8)),
            blocks_allocated={"a": [1], "b": [2]},
            free_blocks=0,
            sampled={"a": [1], "b": [1]},
        ),
        StepRecord(
            1,
            start_s=1.0,
            duration_s=1.0,
            scheduled=(Scheduled("a", 0, "decode", 1, 9),),
            preempted=(Preemption("b", "recompute", "a", 1, 0),),
            blocks_freed={"b": [2]},
            free_blocks=1,
            sampled={"a": [1]},
        ),
    ]
    knobs = {"max_num_seqs": 2, "num_gpu_blocks": 2, "block_size": 16}
    run = measure(Trace(TraceMeta(knobs=knobs), steps))
    assert run.kv_utilization == pytest.approx((8 + 8 + 9) / (2 * 16 + 16))
    assert run.pool_use == pytest.approx((1.0 + 0.5) / 2)
    assert run.num_preemptions == 1


def test_mbu_and_mfu_of_an_ideal_chip() -> None:
    """An ideal decode is all bandwidth, an ideal prefill all arithmetic."""
    model = CostModel.ideal(preset("llama-2-7b"), hardware("a100-80gb"))
    trace = simulate(generate(1, 512, 2), cost_model=model)
    prefill, decode = trace.steps
    pieces = {"prefill": prefill, "decode": decode}
    use = {name: chip_use(Trace(trace.meta, [step]), model) for name, step in pieces.items()}
    assert use["prefill"].mfu == pytest.approx(1.0)
    assert use["prefill"].bound_share == {"compute": 1.0}
    assert use["decode"].mbu == pytest.approx(1.0)
    assert use["decode"].mfu == pytest.approx(13.48e9 / 312e12 / decode.duration_s, rel=0.01)
    assert use["decode"].bound_share == {"weights": 1.0}


def test_padding_is_no_model_flop() -> None:
    model = CostModel.ideal(preset("llama-2-7b"), hardware("a100-80gb"))
    requests = generate(2, uniform(10, 400), 1, seed=3)
    trace = simulate(requests, cost_model=model, policy="static")
    (step,) = trace.steps
    assert step.num_padding_tokens > 0
    useful = sum(model.work([(r.prompt_len, r.prompt_len, 0, True)]).flops for r in requests)
    assert chip_use(trace, model).mfu == pytest.approx(useful / step.duration_s / 312e12)


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICY_NAMES),
    blocks=st.integers(30, 80),
    caching=st.booleans(),
    swap=st.booleans(),
    chunked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_identities_of_any_run(
    seed: int, policy: str, blocks: int, caching: bool, swap: bool, chunked: bool
) -> None:
    workload = generate(
        15, uniform(1, 60), uniform(1, 40), poisson(30), shared_prefix_len=20, seed=seed
    )
    knobs = {
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": 20,
        "block_size": 8,
        "max_model_len": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 1024 if policy == "static" else 128,
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": chunked,
        "preemption_mode": "swap" if swap else "recompute",
    }
    trace = simulate(workload, "l4", "smollm2-135m", policy, knobs)
    run = measure(trace)
    asked = {request.request_id: request for request in workload}
    assert len(run.requests) == len(workload)
    for request in run.requests:
        spec = asked[request.request_id]
        assert request.num_output_tokens == spec.output_len
        assert request.arrival_s == spec.arrival_s
        assert request.queue_s >= 0.0 and request.prefill_s > 0.0
        assert request.ttft_s == pytest.approx(request.queue_s + request.prefill_s)
        assert sum(request.itl_s) == pytest.approx(request.e2e_s - request.ttft_s, abs=1e-9)
        if spec.output_len > 1:
            assert request.tpot_s == pytest.approx(np.mean(request.itl_s))
    assert run.busy_s <= run.duration_s + 1e-9
    assert run.num_preemptions == trace.summary["num_preemptions"]
    for share in (run.slot_utilization, run.kv_utilization, run.pool_use):
        assert 0.0 < share <= 1.0
    if policy == "static":
        assert run.kv_utilization <= (60 + 20 + 40) / 128


def test_a_run_from_a_file_or_record_by_record_has_the_same_figures(tmp_path: Path) -> None:
    workload = generate(20, lognormal(30, 1, high=90), uniform(1, 30), poisson(50), seed=9)
    knobs = {"num_gpu_blocks": 12, "max_model_len": 128, "max_num_seqs": 8}
    collector = MetricsCollector(8, 12, 16)
    trace = simulate(
        workload,
        "l4",
        "smollm2-135m",
        "unified",
        knobs,
        on_step=collector.add,
        trace_path=tmp_path / "t.jsonl.gz",
    )
    assert trace.summary["num_preemptions"] > 0
    assert measure(Trace.load(tmp_path / "t.jsonl.gz")) == measure(trace) == collector.result()


def test_a_trace_that_begins_in_the_middle_tells_of_who_arrives_in_it() -> None:
    workload = generate(12, 20, uniform(5, 20), poisson(40), seed=2)
    knobs = {"num_gpu_blocks": 60, "max_model_len": 64, "max_num_seqs": 4}
    trace = simulate(workload, "l4", "smollm2-135m", "unified", knobs)
    late = Trace(trace.meta, trace.steps[len(trace) // 2 :])
    run = measure(late)
    assert {request.request_id for request in run.requests} == set(late.requests)
    assert 0 < len(run.requests) < 12
    assert 0.0 < run.kv_utilization <= 1.0


def test_an_empty_trace_has_no_figures() -> None:
    run = measure(Trace())
    assert run.requests == () and run.duration_s == 0.0 and run.output_tokens_per_s == 0.0
    assert "0/0" in comparison({"nothing": run})


# -- percentiles and tables -----------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@settings(max_examples=200, deadline=None)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-6
    )


def test_percentiles_at_the_edges() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 25) == 1.25
    assert math.isnan(percentile([], 50))
    with pytest.raises(ValueError, match="percent=101"):
        percentile([1.0], 101)


def test_tables_in_three_styles() -> None:
    rows = [("static", 1.5), ('a,"b"', 22)]
    assert table(("run", "x"), rows).splitlines() == ["run       x", "static  1.5", 'a,"b"    22']
    markdown = table(("run", "x"), rows, "markdown").splitlines()
    assert markdown[0] == "| run    |   x |" and markdown[1] == "| ------ | --: |"
    parsed = list(csv.reader(io.StringIO(table(("run", "x"), rows, "csv"))))
    assert parsed == [["run", "x"], ["static", "1.5"], ['a,"b"', "22"]]
    with pytest.raises(ValueError, match="style='html'"):
        table(("run",), [], "html")


def test_a_line_a_request_and_a_line_a_run() -> None:
    random.seed(0)
    workload = generate(5, 10, uniform(1, 9), seed=1)
    knobs = {"num_gpu_blocks": 50, "max_model_len": 64}
    run = measure(simulate(workload, "l4", "smollm2-135m", "continuous", knobs))
    rows = list(csv.DictReader(io.StringIO(request_rows(run))))
    assert [row["request_id"] for row in rows] == [f"r{i}" for i in range(5)]
    for row, request in zip(rows, run.requests, strict=True):
        assert float(row["ttft_s"]) == pytest.approx(request.ttft_s, abs=1e-6)
        assert row["tpot_s"] == "" if request.tpot_s is None else float(row["tpot_s"]) > 0
    assert comparison({"x": run}, "csv").count("\n") == 1


def test_a_refusal_is_known_by_its_own_record() -> None:
    steps = [StepRecord(0, start_s=1.0, refused=(Refusal("big", "too long", 9, 4, "x"),))]
    run = measure(Trace(TraceMeta(), steps))
    assert run.requests[0].finish_reason == "refused"
    assert run.goodput(SLO()) == 0.0
