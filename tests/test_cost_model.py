"""The roofline step time: each term against numbers worked out by hand, and every run against
what its tokens take at least.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.bounds import UniformLoad, least_seconds, uniform_bounds
from minibatch.clock import VirtualClock
from minibatch.config import POLICY_NAMES, SchedulerConfig
from minibatch.cost_model import CostModel, StepCost
from minibatch.engine import Engine
from minibatch.errors import ConfigError
from minibatch.executor.simulated import SimulatedExecutor
from minibatch.hardware import hardware
from minibatch.metrics import chip_use, measure
from minibatch.model.presets import preset
from minibatch.sampling_params import SamplingParams
from minibatch.simulation import simulate
from minibatch.workload import RequestSpec, Segment, generate, lognormal

LLAMA = preset("llama-2-7b")
A100 = CostModel.ideal(LLAMA, hardware("a100-80gb"))

# Generated tokens/s at most, 512 tokens in and 128 out: (batch, decode only, serial, overlapped).
A100_BOUNDS = [
    (1, 151, 148, None),
    (8, 1044, 894, None),
    (16, 1808, 1395, None),
    (32, 2852, 1939, 2874),
    (64, 4010, 2408, 4042),
    (128, 5032, 2740, 4745),
    (256, 5766, 2942, None),
]
H200_BOUNDS = [
    (1, 318, 314, None),
    (8, 2201, 1934, None),
    (16, 3812, 3063, None),
    (32, 6015, 4325, None),
    (64, 8457, 5447, None),
    (128, 10611, 6259, None),
    (256, 12160, 6763, None),
]


@pytest.mark.parametrize(
    ("chip", "batch", "decode", "serial", "overlapped"),
    [("a100-80gb", *row) for row in A100_BOUNDS] + [("h200-measured", *row) for row in H200_BOUNDS],
)
def test_the_bounds_table_to_one_percent(
    chip: str, batch: int, decode: int, serial: int, overlapped: int | None
) -> None:
    bounds = uniform_bounds(LLAMA, hardware(chip), UniformLoad(batch, 512, 128))
    assert bounds.decode_only == pytest.approx(decode, rel=0.01)
    assert bounds.serial == pytest.approx(serial, rel=0.01)
    if overlapped is not None:
        assert bounds.overlapped == pytest.approx(overlapped, rel=0.01)


def test_llama_2_7b_in_bytes_and_flops() -> None:
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008) + 32_000 * 4096
    assert A100.step_weight_bytes == 2 * matrices
    assert A100.step_weight_bytes == pytest.approx(13.21e9, rel=1e-3)
    assert A100.resident_weight_bytes / 2**30 == pytest.approx(12.55, abs=0.005)
    assert A100.kv_token_bytes == 512 * 1024
    prefill = A100.work([(512, 512, 0, True)])
    assert prefill.flops == pytest.approx(6.70e12, rel=1e-3)
    pairs = sum(range(1, 513))  # token i looks at i tokens
    head = 32_000 * 4096
    assert prefill.flops == 2 * ((matrices - head) * 512 + head) + 4 * 32 * 4096 * pairs


def test_grouped_query_attention_shrinks_kv_but_not_its_arithmetic() -> None:
    model = CostModel(preset("llama-3-8b"), hardware("h100"))
    assert model.kv_token_bytes == 128 * 1024
    assert model.pair_flops == 4 * 32 * 32 * 128
    assert CostModel(preset("llama-3-70b"), hardware("h100")).kv_token_bytes == 320 * 1024


def test_terms_of_a_decode_step() -> None:
    cost = A100.decode_cost(batch=1, context=576)
    assert cost.weights_s == pytest.approx(13.2142e9 / 2.039e12, rel=1e-4)
    assert cost.kv_s == pytest.approx(576 * 524_288 / 2.039e12)
    assert cost.total_s == pytest.approx(6.63e-3, rel=1e-3)
    assert cost.bound == "weights"
    assert A100.decode_cost(128, 576).bound == "kv"
    assert A100.prefill_cost(1, 512).bound == "compute"
    assert A100.prefill_cost(1, 512).total_s == pytest.approx(21.5e-3, rel=2e-3)


def test_decode_stays_memory_bound_to_the_end_of_the_card() -> None:
    for batch in (1, 16, 64, 128, 256):
        cost = A100.decode_cost(batch, 576)
        assert cost.memory_s > cost.compute_s


@pytest.mark.parametrize(
    ("cost", "bound"),
    [
        (StepCost(3, 2, 4, 1, 0), "weights"),  # 5 s of memory hide 4 s of compute
        (StepCost(2, 3, 4, 1, 0), "kv"),
        (StepCost(2, 3, 6, 1, 0), "compute"),
        (StepCost(2, 3, 6, 7, 0), "overhead"),
        (StepCost(2, 3, 6, 7, 8), "link"),
    ],
)
def test_the_bound_is_the_largest_term(cost: StepCost, bound: str) -> None:
    assert cost.bound == bound
    assert cost.total_s == max(cost.weights_s + cost.kv_s, cost.compute_s) + (
        cost.overhead_s + cost.link_s
    )


def test_chunks_compute_what_the_whole_prompt_does_but_read_more() -> None:
    whole = A100.work([(512, 512, 0, True)])
    chunks = [A100.work([(128, end, 0, end == 512)]) for end in (128, 256, 384, 512)]
    assert sum(chunk.flops for chunk in chunks) == whole.flops
    assert sum(chunk.kv_bytes for chunk in chunks) == (128 + 256 + 384 + 512) * 524_288
    assert whole.kv_bytes == 512 * 524_288


def test_padding_goes_through_the_matrices() -> None:
    padded, useful = A100.work([(100, 100, 28, True)]), A100.work([(100, 100, 0, True)])
    assert padded.flops - useful.flops == 2 * 28 * A100.layer_parameters
    assert padded.kv_bytes == useful.kv_bytes
    assert padded.num_tokens == 128


def test_swapping_512_tokens_takes_11_ms_on_pcie_4() -> None:
    model = CostModel(LLAMA, hardware("a100-80gb"))
    moved = model.cost(model.work([], swapped_tokens=512))
    assert moved.link_s == pytest.approx(10.7e-3, rel=0.01)  # 256 MiB at 25 GB/s
    assert moved.weights_s == 0.0  # nothing runs in such a step
    newer = CostModel(LLAMA, hardware("h100"))
    assert newer.cost(newer.work([], swapped_tokens=512)).link_s == pytest.approx(5.4e-3, rel=0.02)


def test_quantisation_fixes_one_end_each() -> None:
    chip = hardware("h200-measured")
    plain = CostModel.ideal(LLAMA, chip)
    int8_weights = CostModel(LLAMA, chip, "float16", "int8", None, 1.0, 1.0, 1.0, 0.0)
    fp8_kv = CostModel(LLAMA, chip, "float16", None, "float8", 1.0, 1.0, 1.0, 0.0)
    rate = {
        (name, batch): batch / model.decode_cost(batch, 576).total_s
        for name, model in (("plain", plain), ("weights", int8_weights), ("kv", fp8_kv))
        for batch in (1, 256)
    }
    assert rate["weights", 1] == pytest.approx(622, rel=0.01)
    assert rate["plain", 1] == pytest.approx(318, rel=0.01)
    assert rate["kv", 256] == pytest.approx(21223, rel=0.01)
    assert rate["plain", 256] == pytest.approx(12160, rel=0.01)


def test_what_does_not_overlap_is_added() -> None:
    cost = StepCost(3.0, 1.0, 2.0, 0.5, 0.0, overlap=0.25)
    assert cost.total_s == pytest.approx(4.0 + 0.75 * 2.0 + 0.5)
    core = CostModel(LLAMA, hardware("a100-80gb"), overlap=0.0, step_overhead_s=0.0)
    step = core.decode_cost(32, 576)
    assert step.total_s == pytest.approx(step.memory_s + step.compute_s)


def test_overheads_are_added_per_step_and_row() -> None:
    model = CostModel(LLAMA, hardware("a100-80gb"), step_overhead_s=1.0, row_overhead_s=0.1)
    work = model.work([(10, 10, 5, True), (1, 9, 0, True)])
    assert model.cost(work).overhead_s == pytest.approx(1.0 + 2 * 0.1)
    assert model.cost(work).total_s > 1.2


@pytest.mark.parametrize(
    "constants",
    [
        {"memory_efficiency": 0.0},
        {"compute_efficiency": -0.1},
        {"step_overhead_s": -1e-9},
        {"overlap": 1.5},
        {"dtype": "float12"},
        {"kv_dtype": "float12"},
        {"dtype": "float8"},  # an A100 has none
    ],
)
def test_impossible_constants_are_refused(constants: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(constants.values())))):
        CostModel(LLAMA, hardware("a100-80gb"), **constants)


def test_a_cost_model_survives_json() -> None:
    for name in ("llama-3-8b", "tiny"):
        model = CostModel(preset(name), hardware("l4"), memory_efficiency=0.7, kv_dtype="float8")
        assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_record_costs_what_its_step_did(policy: str) -> None:
    """Duration comes from the decisions, the recount from the record of them."""
    workload = generate(30, lognormal(60, 0.8, high=200), lognormal(20, 0.8, high=60), seed=5)
    model = CostModel(LLAMA, hardware("a100-80gb"))
    knobs: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks": 60, "max_model_len": 300}
    if policy == "continuous":
        knobs |= {"preemption_mode": "swap", "num_cpu_blocks": 40}
    trace = simulate(workload, cost_model=model, policy=policy, knobs=knobs)
    if policy in ("continuous", "unified"):
        assert trace.summary["num_preemptions"] > 0
    for step in trace:
        cost = model.cost(model.record_work(step, 16))
        assert step.duration_s == pytest.approx(cost.total_s, rel=1e-6, abs=1e-12)


def specs(draw_segments: bool) -> st.SearchStrategy[list[RequestSpec]]:
    """Random requests; with ``draw_segments`` many begin alike."""

    def build(rows: list[tuple[float, int, int, int]]) -> list[RequestSpec]:
        return [
            RequestSpec(
                f"r{i}",
                arrival,
                prompt + 40 * draw_segments,
                output,
                (Segment(key, 40),) if draw_segments else (),
            )
            for i, (arrival, prompt, output, key) in enumerate(rows)
        ]

    row = st.tuples(st.floats(0, 2), st.integers(1, 120), st.integers(1, 60), st.integers(0, 2))
    return st.lists(row, min_size=1, max_size=24).map(build)


@given(
    requests=st.booleans().flatmap(specs),
    policy=st.sampled_from(POLICY_NAMES),
    chip=st.sampled_from(["a100-80gb", "h100", "rtx-4090", "h200-measured"]),
    model=st.sampled_from(["llama-2-7b", "smollm2-135m"]),
    ideal=st.booleans(),
    slots=st.integers(1, 12),
    blocks=st.integers(40, 120),
    knobs=st.fixed_dictionaries(
        {
            "enable_prefix_caching": st.booleans(),
            "enable_chunked_prefill": st.booleans(),
            "preemption_mode": st.sampled_from(["swap", "recompute"]),
        }
    ),
)
@settings(max_examples=150, deadline=None)
def test_no_run_beats_its_own_roofline(
    requests: list[RequestSpec],
    policy: str,
    chip: str,
    model: str,
    ideal: bool,
    slots: int,
    blocks: int,
    knobs: dict[str, Any],
) -> None:
    make = CostModel.ideal if ideal else CostModel
    cost_model = make(preset(model), hardware(chip))
    knobs = {
        **knobs,
        "max_num_seqs": slots,
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": 30,
        "max_model_len": 256,
        "max_num_batched_tokens": 4096 if policy == "static" else 256,
    }
    trace = simulate(requests, cost_model=cost_model, policy=policy, knobs=knobs)
    run = measure(trace)
    assert run.num_finished == len(requests)
    assert run.busy_s >= least_seconds(trace, cost_model) * (1 - 1e-9)
    use = chip_use(trace, cost_model)
    assert 0.0 < use.mbu <= cost_model.memory_efficiency + 1e-9
    assert 0.0 < use.mfu <= cost_model.compute_efficiency + 1e-9
    assert sum(use.bound_share.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_uniform_load_keeps_below_its_bound(policy: str, batch: int) -> None:
    """Ideal engine, everybody at once: serial policies reach the serial bound and no more."""
    knobs = {"max_num_seqs": batch, "num_gpu_blocks": 20_000, "max_num_batched_tokens": 40_960}
    trace = simulate(generate(batch, 512, 128), cost_model=A100, policy=policy, knobs=knobs)
    rate = measure(trace).output_tokens_per_s
    bounds = uniform_bounds(LLAMA, A100.hardware, UniformLoad(batch, 512, 128))
    assert rate <= bounds.overlapped
    assert rate == pytest.approx(bounds.serial, rel=1e-3)


def test_the_bound_of_nothing_is_no_time() -> None:
    trace = simulate([], cost_model=A100)
    assert len(trace) == 0
    assert math.isclose(measure(trace).duration_s, 0.0)


def test_importing_the_simulator_does_not_import_torch() -> None:
    code = "import minibatch.simulation, minibatch.audit, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_record_s_prediction_counts_the_head_of_rows_that_sample() -> None:
    """The engine predicts a step as it was decided: afterwards no row looks as if it sampled."""
    clock = VirtualClock()
    executor = SimulatedExecutor(A100, clock, block_size=16)
    engine = Engine(
        SchedulerConfig(num_gpu_blocks=64),
        executor,
        clock=clock,
        predict=lambda output: A100.cost(A100.output_work(output, 16)).total_s,
    )
    engine.add_request("A", list(range(40)), SamplingParams(max_tokens=4))
    records = list(engine.run())
    assert len(records) == 4
    for record in records:  # the executor's own time comes from the same model, before the update
        assert record.predicted_s == pytest.approx(record.duration_s)
