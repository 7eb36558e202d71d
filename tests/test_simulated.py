"""The simulator makes a real engine's decisions, only faster: parity, calibration, forks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.calibration import fit, halves, report
from minibatch.clock import VirtualClock
from minibatch.config import POLICY_NAMES, EngineConfig, SchedulerConfig
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.errors import ConfigError, RequestTooLargeError
from minibatch.executor.simulated import SimulatedExecutor
from minibatch.hardware import hardware
from minibatch.metrics import measure
from minibatch.model.presets import preset
from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams
from minibatch.simulation import Recipe, compare, fork, scheduler_config, simulate
from minibatch.toy import continuous, static
from minibatch.trace import Trace
from minibatch.workload import (
    RequestSpec,
    Workload,
    all_at_once,
    fixed,
    gamma,
    generate,
    listed,
    lognormal,
    poisson,
    uniform,
)

ROOT = Path(__file__).resolve().parent.parent
RECORDED = sorted((ROOT / "data" / "traces").glob("smollm2_cpu_*.jsonl.gz"))
NOT_DECISIONS = {"start_s", "duration_s", "schedule_s", "predicted_s", "sampled"}


def decisions(steps: list[StepRecord]) -> list[dict[str, Any]]:
    """Everything but times and token ids (of those, who got how many)."""
    return [
        {name: value for name, value in vars(step).items() if name not in NOT_DECISIONS}
        | {"sampled": {name: len(tokens) for name, tokens in step.sampled.items()}}
        for step in steps
    ]


# -- the same decisions as a real engine ----------------------------------------------------------

PARITY_RUNS = [
    ("static", {}),
    ("dynamic", {}),
    ("continuous", {}),
    ("continuous", {"preemption_mode": "swap", "num_cpu_blocks": 8}),
    ("continuous", {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}),
    ("unified", {"max_num_batched_tokens": 24}),
    ("unified", {"max_num_batched_tokens": 32, "enable_prefix_caching": True}),
]


@pytest.mark.parametrize(("policy", "knobs"), PARITY_RUNS)
def test_simulated_and_real_engines_decide_alike(policy: str, knobs: dict[str, Any]) -> None:
    """A tiny model really computes what the cost model only prices; requests come at the same
    steps.
    """
    import torch

    from minibatch.builder import engine_for
    from minibatch.model.loader import random_model

    workload = generate(14, uniform(3, 30), uniform(2, 25), shared_prefix_len=9, seed=6)
    shape = preset("tiny")
    config = SchedulerConfig(
        policy=policy,
        **{
            "num_gpu_blocks": 24,
            "num_cpu_blocks": 0,
            "block_size": 4,
            "max_model_len": 80,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 400,
            **knobs,
        },
    )
    names = {knob.name for knob in dataclasses.fields(EngineConfig)}
    wanted = {k: v for k, v in dataclasses.asdict(config).items() if k in names}
    model = random_model(
        shape, dtype=torch.float32, device=torch.device("cpu"), max_model_len=80, seed=0
    )
    real = engine_for(model, EngineConfig(model="tiny", load_format="dummy", **wanted))
    assert real.config == config
    clock = VirtualClock()
    cost_model = CostModel(shape, hardware("l4"))
    simulated = Engine(config, SimulatedExecutor(cost_model, clock, 4), clock=clock)

    def drive(engine: Engine) -> list[dict[str, Any]]:
        pending = list(workload)
        steps: list[StepRecord] = []
        while pending or engine.has_unfinished:
            for spec in pending[: 1 + len(steps) % 2]:  # one or two before each step
                pending.remove(spec)
                engine.add_request(
                    spec.request_id,
                    prompt_token_ids=spec.prompt_token_ids(shape.vocab_size),
                    sampling_params=SamplingParams(
                        max_tokens=spec.output_len, ignore_eos=True, temperature=0.0
                    ),
                    arrival_s=0.0,
                )
            steps.append(engine.step())
        return decisions(steps)

    ours, theirs = drive(simulated), drive(real)
    for index, (our_step, their_step) in enumerate(zip(ours, theirs, strict=False)):
        assert our_step == their_step, f"step {index}"
    assert len(ours) == len(theirs)
    if policy in ("continuous", "unified"):
        assert any(step["preempted"] for step in ours)  # memory was short: it was a hard case


def test_a_step_executed_twice_gives_the_same_tokens() -> None:
    """An interrupted step is run again; what it decided must not change."""
    clock = VirtualClock()
    config = SchedulerConfig(num_gpu_blocks=8)
    executor = SimulatedExecutor(CostModel(preset("tiny"), hardware("l4")), clock, 16)
    engine = Engine(config, executor, clock=clock)
    for name in "ab":
        engine.add_request(name, prompt_token_ids=[5] * 9)
    output = engine.scheduler.schedule()
    first, before = executor.execute(output), clock.now
    assert executor.execute(output) == first
    assert clock.now == pytest.approx(2 * before) and before > 0
    assert set(first) == {"a", "b"} and output.moves_made == 3
    assert all(0 <= token.token_id < preset("tiny").vocab_size for token in first.values())
    executor.close()
    executor.close()


# -- time -----------------------------------------------------------------------------------------


def test_time_is_what_the_cost_model_says_and_idle_time_is_skipped() -> None:
    model = CostModel(preset("llama-2-7b"), hardware("a100-80gb"))
    requests = [RequestSpec("a", 1.0, 100, 2), RequestSpec("b", 50.0, 10, 1)]
    trace = simulate(requests, cost_model=model, knobs={"num_gpu_blocks": 100})
    prefill_a, decode_a, prefill_b = trace.steps
    assert prefill_a.start_s == 1.0
    assert prefill_a.duration_s == pytest.approx(model.prefill_cost(1, 100).total_s)
    assert decode_a.start_s == prefill_a.end_s
    assert decode_a.duration_s == pytest.approx(model.decode_cost(1, 101).total_s)
    assert prefill_b.start_s == 50.0
    assert trace.meta.source == "simulated" and trace.meta.hardware == "a100-80gb"
    assert trace.meta.model == "llama-2-7b"


def test_swaps_pay_for_the_link() -> None:
    model = CostModel(preset("llama-2-7b"), hardware("a100-80gb"))
    knobs = {
        "num_gpu_blocks": 22,
        "num_cpu_blocks": 20,
        "max_model_len": 300,
        "max_num_seqs": 4,
        "preemption_mode": "swap",
    }
    trace = simulate(generate(4, 64, 60), cost_model=model, policy="continuous", knobs=knobs)
    moved = [step for step in trace if step.swapped_out or step.swapped_in]
    assert moved
    for step in moved:
        blocks = sum(step.swapped_out.values()) + sum(step.swapped_in.values())
        link_s = blocks * 16 * 524_288 / (0.8 * 31.5e9)
        assert step.duration_s > link_s > 0.0003


def test_a_batch_waits_to_fill_but_not_for_ever() -> None:
    requests = [RequestSpec("a", 0.0, 8, 2), RequestSpec("b", 0.4, 8, 2), RequestSpec("c", 9, 8, 2)]
    knobs = {"max_num_seqs": 3, "num_gpu_blocks": 100, "max_model_len": 64, "max_wait": 1.0}
    trace = simulate(requests, model="tiny", policy="static", knobs=knobs)
    starts = {row.request_id: step.start_s for step in trace for row in step.rows("prefill")}
    assert starts == pytest.approx({"a": 1.0, "b": 1.0, "c": 10.0})
    full = simulate(requests, model="tiny", policy="static", knobs=knobs | {"max_num_seqs": 2})
    first = next(step for step in full if step.scheduled)
    assert first.start_s == pytest.approx(0.4)  # two are a full batch


def test_who_can_never_run_is_refused_and_the_others_go_on() -> None:
    requests = [
        RequestSpec("a", 0.0, 8, 2),
        RequestSpec("big", 0.0, 900, 2),
        RequestSpec("bigger", 5.0, 901, 2),
    ]
    trace = simulate(requests, model="tiny", knobs={"max_model_len": 128, "num_gpu_blocks": 50})
    reasons = {r.request_id: r.finish_reason for r in measure(trace).requests}
    assert reasons == {"a": "length", "big": "refused", "bigger": "refused"}


def test_the_same_again_and_nothing_is_shared_between_runs() -> None:
    workload = generate(30, lognormal(30, 1, high=200), uniform(1, 50), poisson(20), seed=4)
    first = simulate(workload, "l4", "smollm2-135m")
    second = simulate(workload, "l4", "smollm2-135m")
    assert first.steps == second.steps


# -- knobs ----------------------------------------------------------------------------------------


def test_pools_are_sized_from_the_cards_memory() -> None:
    model = CostModel(preset("llama-2-7b"), hardware("a100-80gb"))
    config = scheduler_config("continuous", model, {"preemption_mode": "swap"})
    assert config.num_gpu_blocks == 121_750 // 16
    assert config.num_cpu_blocks == 4 * 2**30 // (16 * 512 * 1024)
    assert config.max_model_len == 4096 and config.max_num_batched_tokens == 4096
    assert scheduler_config("unified", model).max_num_batched_tokens == 2048
    tighter = scheduler_config("unified", model, {"gpu_memory_utilization": 0.5})
    assert tighter.num_gpu_blocks < config.num_gpu_blocks / 2


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_num_sequences": 3}, "no knob max_num_sequences; there are"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"gpu_memory_utilization": 0.1}, "no memory for KV"),
    ],
)
def test_knobs_that_cannot_work(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(generate(1, 1, 1), knobs=knobs)


def test_compare_serves_the_same_to_all() -> None:
    traces = compare(generate(6, 20, uniform(2, 30)), model="smollm2-135m", hardware="l4")
    assert list(traces) == list(POLICY_NAMES)
    tokens = {policy: trace.summary["num_generated_tokens"] for policy, trace in traces.items()}
    assert len(set(tokens.values())) == 1


# -- T3: the gain grows with the spread -----------------------------------------------------------

SPREADS = [(128, 128), (32, 512), (16, 1024)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("fast", "toy"), [("continuous", None), ("unified", continuous)])
def test_the_gain_over_static_grows_with_the_spread_of_lengths(
    seed: int, fast: str, toy: Any
) -> None:
    gains: list[float] = []
    for low, high in SPREADS:
        lengths = fixed(low) if low == high else uniform(low, high)
        workload = generate(100, 512, lengths, seed=seed)
        knobs = {"max_num_seqs": 32, "max_model_len": 2048}
        traces = compare(workload, ("static", fast), knobs=knobs)
        rate = {name: measure(trace).output_tokens_per_s for name, trace in traces.items()}
        gains.append(rate[fast] / rate["static"])
        if toy is not None and low < high:
            outputs = [request.output_len for request in workload]
            in_steps = static(outputs, 32)[0] / toy(outputs, 32)[0]
            # Time gains more than steps do: static's rows of padding are read as well.
            assert gains[-1] > 0.9 * in_steps
    assert gains == sorted(gains)
    assert gains[0] == pytest.approx(1.0, abs=0.2)  # equal lengths: nearly nothing to gain
    assert gains[2] > gains[1] > 1.2


# -- calibration ----------------------------------------------------------------------------------


def base() -> CostModel:
    """The recorded runs' model in float32; the chip's figures only set the scale."""
    chip = dataclasses.replace(
        hardware("l4"), flops={"float32": 100e9}, memory_bandwidth=40e9, name="a-cpu"
    )
    return CostModel(preset("smollm2-135m"), chip, "float32")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
@pytest.mark.parametrize("split", ["first half", "second half", "every second step"])
def test_half_of_a_recorded_run_predicts_the_other_half(path: Path, split: str) -> None:
    trace = Trace.load(path)
    assert trace.meta.source == "measured" and len(trace) > 300
    middle = len(trace) // 2
    parts = {
        "first half": (trace.steps[:middle], trace.steps[middle:]),
        "second half": (trace.steps[middle:], trace.steps[:middle]),
        "every second step": halves(trace.steps),
    }
    known, unknown = parts[split]
    fitted = fit(known, base())
    errors = report(unknown, fitted)
    assert errors.median < 0.11  # below 0.15 is what a simulator must reach to be believed
    assert abs(errors.total) < 0.15
    assert report(unknown, base()).median > 2 * errors.median  # fitting is what did it
    text = errors.describe()
    assert f"median error {100 * errors.median:.1f} %" in text and "missed most: step" in text
    # A CPU core: some gigabytes and some ten GFLOP a second.
    assert 2e9 < fitted.rates.bandwidth < 100e9
    assert 2e9 < fitted.rates.flops < 1e12


def test_there_are_recorded_runs() -> None:
    assert {path.name for path in RECORDED} >= {
        "smollm2_cpu_continuous.jsonl.gz",
        "smollm2_cpu_unified.jsonl.gz",
    }


@given(
    memory=st.floats(0.3, 1.0),
    compute=st.floats(0.3, 1.0),
    per_row=st.floats(0.0, 2e-4),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_known_constants_are_found_again(
    memory: float, compute: float, per_row: float, seed: int
) -> None:
    truth = CostModel(
        preset("llama-2-7b"),
        hardware("a100-80gb"),
        memory_efficiency=memory,
        compute_efficiency=compute,
        step_overhead_s=0.0,
        row_overhead_s=per_row,
    )
    workload = generate(60, lognormal(200, 0.8, high=900), lognormal(40, 0.8, high=200), seed=seed)
    trace = simulate(workload, cost_model=truth, policy="unified", knobs={"max_num_seqs": 32})
    fitted = fit(trace, CostModel(truth.model, truth.hardware))
    assert report(trace, fitted).median < 0.02
    assert fitted.memory_efficiency == pytest.approx(memory, rel=0.1)
    assert fitted.compute_efficiency == pytest.approx(compute, rel=0.1)


def test_disturbed_steps_do_not_pull_the_fit() -> None:
    """Every eighth step takes 20 times as long as it should; the others are predicted well."""
    truth = CostModel(
        preset("llama-2-7b"), hardware("a100-80gb"), step_overhead_s=0.0, row_overhead_s=2e-4
    )
    workload = generate(40, lognormal(200, 0.8, high=900), uniform(5, 60))
    trace = simulate(workload, cost_model=truth, policy="unified", knobs={"max_num_seqs": 16})
    steps = [
        dataclasses.replace(step, duration_s=step.duration_s * (20 if step.step % 8 == 3 else 1))
        for step in trace
    ]
    fitted = fit(steps, CostModel(truth.model, truth.hardware))
    assert report(trace, fitted).percentile(90) < 0.03
    worst = report(steps, fitted).worst(1)[0]
    assert worst.step % 8 == 3 and worst.relative < -0.9


def test_too_few_steps_cannot_calibrate() -> None:
    trace = simulate(generate(1, 10, 3))
    with pytest.raises(ConfigError, match="3 steps to calibrate from; 8 are needed"):
        fit(trace, base())


# -- what if --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original() -> Trace:
    workload = generate(24, uniform(5, 60), uniform(5, 60), gamma(60, 0.5), seed=8)
    knobs = {
        "num_gpu_blocks": 40,
        "num_cpu_blocks": 20,
        "block_size": 8,
        "max_model_len": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 1024,
    }
    return simulate(workload, "l4", "smollm2-135m", "continuous", knobs)


def test_a_fork_under_the_same_rules_is_the_same_run(original: Trace) -> None:
    assert fork(original, 0).steps == original.steps
    assert fork(original, 40).steps == original.steps


@pytest.mark.parametrize("step", [1, 37, 90])
def test_a_take_over_by_the_same_scheduler_changes_no_decision(original: Trace, step: int) -> None:
    """A knob that ``continuous`` ignores makes a new scheduler, with new blocks, take over."""
    forked = fork(original, step, max_wait=1.0)

    def told(steps: list[StepRecord]) -> list[dict[str, Any]]:
        blocks = {name for name in vars(steps[0]) if "blocks" in name} - {"free_blocks"}
        return [{k: v for k, v in row.items() if k not in blocks} for row in decisions(steps)]

    assert original.summary["num_preemptions"] > 0
    assert told(forked.steps) == told(original.steps)
    assert [s.duration_s for s in forked] == pytest.approx([s.duration_s for s in original])


def test_a_fork_at_the_start_is_a_run_under_the_other_rules(original: Trace) -> None:
    recipe = Recipe.from_dict(original.meta.simulation)
    knobs = {name: value for name, value in original.meta.knobs.items() if name != "policy"}
    for policy in POLICY_NAMES:
        alone = simulate(recipe.workload, cost_model=recipe.cost_model, policy=policy, knobs=knobs)
        assert fork(original, 0, policy=policy).steps == alone.steps


@given(
    step=st.integers(0, 120),
    policy=st.sampled_from(POLICY_NAMES),
    first=st.sampled_from(POLICY_NAMES),
    knobs=st.fixed_dictionaries(
        {},
        optional={
            "max_num_seqs": st.integers(1, 12),
            "num_gpu_blocks": st.integers(34, 90),
            "block_size": st.sampled_from([4, 8, 16]),
            "enable_chunked_prefill": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "preemption_mode": st.sampled_from(["swap", "recompute"]),
        },
    ),
)
@settings(max_examples=60, deadline=None)
def test_any_fork_keeps_the_past_and_serves_everybody(
    step: int, policy: str, first: str, knobs: dict[str, Any]
) -> None:
    workload = generate(12, uniform(5, 60), uniform(5, 60), gamma(60, 0.5), seed=step)
    base_knobs = {
        "num_gpu_blocks": 36,
        "num_cpu_blocks": 20,
        "preemption_mode": "swap",
        "block_size": 8,
        "max_model_len": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 2048,
    }
    trace = simulate(workload, "l4", "smollm2-135m", first, base_knobs)
    step = min(step, len(trace) - 1)
    forked = fork(trace, step, policy=policy, **knobs)
    assert forked.steps[:step] == trace.steps[:step]
    run = measure(forked)
    assert run.num_finished == len(workload)
    for spec, request in zip(workload, run.requests, strict=True):
        assert request.num_output_tokens == spec.output_len
    assert [record.step for record in forked] == list(range(len(forked)))
    # Books: what was taken is given back, whoever kept them.
    held: dict[str, int] = {}
    for record in forked:
        for request_id, blocks in record.blocks_freed.items():
            held[request_id] = held.get(request_id, 0) - len(blocks)
        for request_id, blocks in record.blocks_allocated.items():
            held[request_id] = held.get(request_id, 0) + len(blocks)
    assert set(held.values()) == {0}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_swapped_requests_are_computed_again_after_a_fork(original: Trace, policy: str) -> None:
    """Their KV lies in a CPU pool that the new scheduler does not have."""
    swapping = fork(original, 0, preemption_mode="swap")
    step = next(record.step for record in swapping if record.swapped) + 1
    away = swapping[step - 1].swapped
    forked = fork(swapping, step, policy=policy, num_cpu_blocks=0)
    assert forked[step].swapped == () and forked[step].cpu_blocks_freed.keys() >= set(away)
    assert measure(forked).num_finished == 24
    again = {
        admission.request_id
        for record in forked.steps[step:]
        for admission in record.admitted
        if admission.how == "recomputed"
    }
    assert again >= set(away)


def test_a_fork_of_a_fork_keeps_both_changes(original: Trace) -> None:
    once = fork(original, 20, policy="unified")
    twice = fork(once, 60, max_num_seqs=2)
    assert twice.steps[:60] == once.steps[:60]
    assert twice.meta.policy == "unified" and twice.meta.knobs["max_num_seqs"] == 2
    # Who has no slot any more gave up its place and is computed again.
    assert max(len(step.running) for step in twice.steps[60:]) == 2
    assert any(a.how == "recomputed" for step in twice.steps[60:] for a in step.admitted)


def test_a_fork_survives_the_way_through_a_file(original: Trace, tmp_path: Path) -> None:
    loaded = Trace.load(original.save(tmp_path / "run.jsonl.gz"))
    assert fork(loaded, 30, policy="static").steps == fork(original, 30, policy="static").steps


def test_what_cannot_be_forked(original: Trace) -> None:
    with pytest.raises(ConfigError, match="only a simulated run"):
        fork(Trace.load(RECORDED[0]), 3)
    with pytest.raises(ConfigError, match=f"step=9999: the run has {len(original)} steps"):
        fork(original, 9999)
    with pytest.raises(ConfigError, match="max_model_len cannot change"):
        fork(original, 3, max_model_len=64)
    with pytest.raises(ConfigError, match="no knob slots"):
        fork(original, 3, slots=64)
    with pytest.raises(RequestTooLargeError, match="KV blocks of 8"):
        fork(original, 3, num_gpu_blocks=4)


def test_a_recipe_says_everything(original: Trace) -> None:
    recipe = Recipe.from_dict(original.meta.simulation)
    assert recipe.to_dict() == original.meta.simulation
    assert isinstance(recipe.workload, Workload) and len(recipe.workload) == 24


def test_lengths_from_a_list_and_all_at_once_are_what_generate_uses() -> None:
    workload = generate(3, listed([4, 5]), 1, all_at_once())
    assert [request.prompt_len for request in workload] == [4, 5, 4]
