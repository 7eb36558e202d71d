"""The GPU's runner on a CPU: the same code, a tape for a graph, streams that stand for nothing.

Every engine here must say, token for token, what the plain engine over the same model says.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pipeline_helpers import (
    SwappingCache,
    answers,
    drive,
    make_cache,
    pipelined_engine,
    plain_engine,
    random_arrivals,
    small_config,
    tiny_model,
)
from tape_graph import TapeGraph

from minibatch.errors import DeviceMemoryError, InvalidRequestError
from minibatch.executor.cuda_graphs import DecodeGraphs, batch_sizes
from minibatch.executor.cuda_model_runner import CudaModelRunner
from minibatch.executor.device_sampler import sample, write_knobs
from minibatch.executor.step_inputs import NUM_KNOBS, CopyIn, StepInputs
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.sampler import Sampler, SamplingRow
from minibatch.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


def runner_of(engine: Any) -> CudaModelRunner:
    assert isinstance(engine.executor, CudaModelRunner)
    return engine.executor


# -- the same answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("make_graph", [TapeGraph, None], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"policy": "static"},
        {"policy": "continuous", "num_gpu_blocks": 13, "preemption_mode": "swap"},
        {"policy": "continuous", "num_gpu_blocks": 13, "preemption_mode": "recompute"},
        {"policy": "unified", "num_gpu_blocks": 13, "max_num_batched_tokens": 9},
        {"policy": "unified", "enable_prefix_caching": True},
    ],
    ids=["static", "swap", "recompute", "unified", "prefix cache"],
)
@pytest.mark.parametrize("n", [1, 2])
def test_greedy_tokens(
    model: LlamaForCausalLM, knobs: dict[str, Any], make_graph: Any, n: int
) -> None:
    config = small_config(**knobs)
    arrivals = random_arrivals(0, count=9, n=n, stop_token_ids=list(range(40, 60)))
    plain = plain_engine(model, config)
    drive(plain, arrivals)
    expected = answers(plain, arrivals)
    assert len({tuple(one[0]) for said in expected.values() for one in said}) > 5
    ahead = pipelined_engine(model, config, make_graph, check=True)
    drive(ahead, arrivals)
    assert answers(ahead, arrivals) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 7, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2},
        {"temperature": 0.0, "min_tokens": 4, "max_tokens": 9, "stop_token_ids": list(range(100))},
    ],
    ids=lambda params: " ".join(params),
)
def test_drawn_tokens(model: LlamaForCausalLM, params: dict[str, Any]) -> None:
    config = small_config("continuous")
    arrivals = random_arrivals(1, count=6, **params)
    plain = plain_engine(model, config)
    drive(plain, arrivals)
    expected = answers(plain, arrivals)
    ahead = pipelined_engine(model, config)
    drive(ahead, arrivals)
    assert answers(ahead, arrivals) == expected


def test_logprobs(model: LlamaForCausalLM) -> None:
    config = small_config("continuous")
    arrivals = random_arrivals(1, count=4, logprobs=2)
    plain = plain_engine(model, config)
    drive(plain, arrivals)
    tables = [plain.output(a.request_id).outputs[0].logprobs for a in arrivals]
    ahead = pipelined_engine(model, config)
    drive(ahead, arrivals)
    for arrival, table in zip(arrivals, tables, strict=True):
        found = ahead.output(arrival.request_id).outputs[0].logprobs
        assert found is not None and table is not None
        for ours, theirs in zip(found, table, strict=True):
            assert ours.keys() == theirs.keys()
            for token_id, entry in ours.items():
                assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


def test_nan_ends_its_own_request_only(model: LlamaForCausalLM) -> None:
    """A request whose KV is poisoned on the way gives NaN logits; its neighbours go on."""
    config = small_config("continuous", num_gpu_blocks=40)
    arrivals = random_arrivals(3, count=3, max_tokens=10)
    arrivals = [type(a)(0, a.request_id, a.prompt, a.params) for a in arrivals]
    plain = plain_engine(model, config)
    drive(plain, arrivals)
    expected = answers(plain, arrivals)
    ahead = pipelined_engine(model, config)
    victim = arrivals[1].request_id

    def poison(call: int) -> None:
        if call == 3:
            table = ahead.scheduler.requests[victim].block_table
            for pool in runner_of(ahead).kv_cache.keys:  # type: ignore[union-attr]
                pool[table[0]] = float("nan")

    records = drive(ahead, arrivals, before_step=poison)
    found = answers(ahead, arrivals)
    assert found[victim][0][2] == "error"
    assert -1 not in found[victim][0][0]
    assert [f.reason for r in records for f in r.finished if f.request_id == victim] == ["error"]
    for arrival in arrivals:
        if arrival.request_id != victim:
            assert found[arrival.request_id] == expected[arrival.request_id]


# -- graphs and their padding -------------------------------------------------------------------


def test_batch_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 32, 40]
    assert len(batch_sizes(256)) == 20 and batch_sizes(256)[-2:] == [240, 256]


def test_a_batch_takes_the_next_larger_graph() -> None:
    made: list[TapeGraph] = []

    def make() -> TapeGraph:
        made.append(TapeGraph())
        return made[-1]

    order: list[int] = []
    state = torch.zeros(8)
    graphs = DecodeGraphs(lambda size: state[:size] + 1, [1, 2, 4, 8], make, order.append)
    assert order == [8, 4, 2, 1]  # the largest is captured first
    assert [graphs.padded_size(batch) for batch in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]
    state.copy_(torch.arange(8))
    assert graphs.replay(4).tolist() == [1, 2, 3, 4]
    assert [graph.replays for graph in made] == [0, 1, 0, 0]


def test_the_fake_graph_freezes_what_a_real_one_would() -> None:
    state = torch.zeros(3)
    python = [1.0]
    graph = TapeGraph()
    result = graph.capture(lambda: state * python[0])
    python[0] = 5.0
    state.fill_(2.0)
    graph.replay()
    assert result.tolist() == [2.0] * 3  # new contents, old Python number
    for forbidden in (lambda: state.sum().item(), lambda: torch.tensor([1.0]) + state):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            TapeGraph().capture(forbidden)  # type: ignore[arg-type]


def test_decode_steps_replay_graphs_and_padding_writes_nowhere(model: LlamaForCausalLM) -> None:
    """Three rows run in the graph of four; no block but their own is touched."""
    made: list[TapeGraph] = []

    def make() -> TapeGraph:
        made.append(TapeGraph())
        return made[-1]

    config = small_config("continuous", num_gpu_blocks=40)
    engine = pipelined_engine(model, config, make)
    cache = runner_of(engine).kv_cache
    assert cache is not None
    written = [pool.isnan() for pool in (*cache.keys, *cache.values)]
    assert all(bool(nan.all()) for nan in written), "capture wrote to the cache"
    arrivals = [type(a)(0, a.request_id, a.prompt, a.params)
                for a in random_arrivals(2, count=3, max_tokens=6)]  # fmt: skip
    records = drive(engine, arrivals)
    owned = {block for r in records for ids in r.blocks_allocated.values() for block in ids}
    touched = {
        int(block)
        for pool in (*cache.keys, *cache.values)
        for block in (~pool.isnan()).flatten(1).any(dim=1).nonzero()
    }
    assert touched <= owned
    by_size = dict(zip(reversed(batch_sizes(5)), (graph.replays for graph in made), strict=True))
    assert by_size == {5: 0, 4: 5, 2: 0, 1: 0}  # five decode steps of three rows


def test_only_changes_of_block_tables_are_sent(model: LlamaForCausalLM) -> None:
    """A decode step sends a table entry for each block that it begins, and no more."""
    config = small_config("continuous", num_gpu_blocks=40)
    engine = pipelined_engine(model, config)
    runner = runner_of(engine)
    sent: list[int] = []
    changes = runner._block_tables.changes

    def watched(rows: Any) -> tuple[list[int], list[int]]:
        where, blocks = changes(rows)
        sent.append(len(where))
        return where, blocks

    runner._block_tables.changes = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    engine.add_request("A", list(range(2, 9)), params)  # 7 tokens: two blocks of four
    list(engine.run())
    assert sent == [2, 0, 1, 0, 0, 0, 1, 0]
    assert sum(sent) == 4


# -- the copy in --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "rows", "updates"), [(7, 3, 2), (8, 4, 4), (1, 1, 0), (13, 6, 1)]
)
def test_step_inputs_lie_side_by_side_and_nothing_overlaps(
    tokens: int, rows: int, updates: int
) -> None:
    size = StepInputs.size(tokens, rows, updates)
    host = np.zeros(size, dtype=np.int32)
    inputs = StepInputs.over(host, tokens, rows, updates)
    for number, part in enumerate(vars(inputs).values()):
        part.view(np.int32)[...] = number + 1
    assert [int((host == number + 1).sum()) for number in range(12)] == [
        tokens, tokens, tokens, rows + 1, rows, rows, rows, rows, rows * NUM_KNOBS, rows,
        updates, updates,
    ]  # fmt: skip
    device = StepInputs.over(torch.from_numpy(host), tokens, rows, updates)
    inputs.knobs[0, 2] = 0.25
    assert device.knobs.dtype == torch.float32 and device.knobs[0, 2] == 0.25
    # Updates lie at the end: where all else is does not depend on them.
    without = StepInputs.over(host, tokens, rows)
    assert np.shares_memory(without.due, inputs.due) and len(without.where) == 0


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 3), (130, 5), (13, 6)])
def test_every_array_of_a_step_begins_at_a_multiple_of_16_bytes(tokens: int, rows: int) -> None:
    """Else Triton would compile its kernels anew, in the middle of serving."""
    buffer = torch.zeros(StepInputs.size(tokens, rows, 9), dtype=torch.int32)
    assert buffer.data_ptr() % 16 == 0
    for name, part in vars(StepInputs.over(buffer, tokens, rows, 9)).items():
        assert part.data_ptr() % 16 == 0, name


def test_padding_reads_and_writes_nothing() -> None:
    host = np.full(StepInputs.size(6, 6), 99, dtype=np.int32)
    inputs = StepInputs.over(host, 6, 6)
    inputs.query_start[:3] = [0, 1, 2]
    inputs.pad(2, 2)
    assert inputs.slots.tolist() == [99, 99, -1, -1, -1, -1]
    assert inputs.seq_lens.tolist() == [99, 99, 0, 0, 0, 0]
    assert inputs.source.tolist() == [99, 99, -1, -1, -1, -1]
    assert inputs.query_start.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_copy_in_alternates_between_two_host_buffers() -> None:
    copy_in = CopyIn(4, torch.device("cpu"))
    first = copy_in.begin()
    first[:] = 1
    copy_in.send(4)
    second = copy_in.begin()
    assert not np.shares_memory(first, second)
    second[:] = 2
    copy_in.send(3)
    assert copy_in.device_buffer.tolist() == [2, 2, 2, 1]
    assert np.shares_memory(copy_in.begin(), first)


# -- sampling without questions -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_device_sampler_draws_what_the_sampler_draws(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(64, 3000, generator=generator)
    choices = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.3, "top_k": 50},
        {"top_k": 1},
        {"min_p": 0.1},
        {"min_p": 0.05, "top_k": 20, "top_p": 0.8},
        {"top_k": 5000},
    ]
    temperatures = (0.0, 0.5, 1.0, 3.0)
    rows = [
        SamplingRow(
            SamplingParams(temperature=temperatures[i % 4], **choices[i % len(choices)]),
            (seed, 0),
            i,
        )
        for i in range(64)
    ]
    knobs = np.zeros((64, NUM_KNOBS), dtype=np.float32)
    needs = write_knobs(rows, 3000, knobs)
    found = sample(logits, torch.from_numpy(knobs), needs).tolist()
    assert found == Sampler()(logits, rows).token_ids


def test_only_a_top_p_without_top_k_sorts_the_vocabulary() -> None:
    """With one the heaviest few are enough, also where more than k are equally heavy."""
    logits = torch.tensor([4.0, 3, 3, 3, 3, 2, 1, 0]).repeat(2, 1)
    for top_k, expected in ((2, 2), (0, 8)):
        rows = [
            SamplingRow(SamplingParams(temperature=1.0, top_p=0.95, top_k=top_k), (0, 0), 0),
            SamplingRow(SamplingParams(temperature=1.0, top_k=6), (0, 0), 1),
        ]
        knobs = np.zeros((2, NUM_KNOBS), dtype=np.float32)
        needs = write_knobs(rows, 8, knobs)
        assert needs.nucleus_size == expected
        for uniform in np.linspace(0, 0.999, 40):
            knobs[:, 1] = uniform
            with mock.patch("minibatch.sampler.uniforms", lambda rows, u=uniform: [float(u)] * 2):
                found = sample(logits, torch.from_numpy(knobs), needs).tolist()
                assert found == Sampler()(logits, rows).token_ids


def test_device_sampler_marks_rows_without_a_token() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 3] = float("nan")
    logits[2] = -torch.inf
    rows = [SamplingRow(SamplingParams(temperature=t), (0, 0), 0) for t in (0.0, 1.0, 0.0)]
    knobs = np.zeros((3, NUM_KNOBS), dtype=np.float32)
    needs = write_knobs(rows, 8, knobs)
    assert sample(logits, torch.from_numpy(knobs), needs).tolist() == [0, -1, -1]


# -- swaps --------------------------------------------------------------------------------------


def test_swaps_through_a_stage_move_the_same_bytes(model: LlamaForCausalLM) -> None:
    """More blocks than are staged at a time, there and back."""
    config = small_config("continuous", num_gpu_blocks=30, num_cpu_blocks=30)
    caches = [make_cache(kind, model, config) for kind in (KVCache, SwappingCache)]
    noise = torch.randn(caches[0]._device_pool.shape)
    out = [(block, 29 - block) for block in range(19)]
    back = [(29 - block, (block + 7) % 30) for block in range(19)]
    for cache in caches:
        cache._device_pool.copy_(noise)
        cache.swap_out(out)
        cache._device_pool[:, :, :10] = 0
        cache.swap_in(back)
    assert torch.equal(caches[0]._device_pool, caches[1]._device_pool)
    assert torch.equal(caches[0]._cpu_pool, caches[1]._cpu_pool)
    with pytest.raises(IndexError):
        caches[1].swap_in([(0, 30)])


# -- the end ------------------------------------------------------------------------------------


def test_close_gives_everything_back_even_what_a_traceback_holds() -> None:
    model = tiny_model()
    engine = pipelined_engine(model, small_config("continuous"))
    runner = runner_of(engine)
    runner._owns_model = True
    weights, cache = list(model.parameters()), runner.kv_cache
    assert cache is not None
    engine.add_request("A", [1, 2, 3])
    engine.step()
    engine.close()
    assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
    assert runner._copy_in.device_buffer.untyped_storage().nbytes() == 0
    assert runner.model is None and runner.kv_cache is None
    engine.close()
    with pytest.raises(Exception, match="closed"):
        engine.step()


def test_close_leaves_a_model_that_is_somebody_elses(model: LlamaForCausalLM) -> None:
    engine = pipelined_engine(model, small_config("continuous"))
    engine.close()
    assert all(weight.untyped_storage().nbytes() > 0 for weight in model.parameters())


def test_bad_requests_are_refused_while_a_step_is_in_flight(model: LlamaForCausalLM) -> None:
    engine = pipelined_engine(model, small_config("continuous"), vocab_size=256)
    engine.add_request("A", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    with pytest.raises(InvalidRequestError):
        engine.add_request("B", [999])
    list(engine.run())
    assert len(engine.output("A").outputs[0].token_ids) == 5


def test_out_of_memory_in_a_step_names_the_knob_and_the_step_can_be_tried_again(
    model: LlamaForCausalLM,
) -> None:
    config = small_config("continuous", num_gpu_blocks=40)
    arrivals = random_arrivals(3, count=4)
    plain = plain_engine(model, config)
    drive(plain, arrivals)
    expected = answers(plain, arrivals)
    engine = pipelined_engine(model, config)
    logits, calls = model.compute_logits, [0]

    def sometimes(hidden: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 3 == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return logits(hidden)

    step, failures = engine.step, []

    def step_again() -> Any:
        while True:
            try:
                return step()
            except DeviceMemoryError as error:
                failures.append(str(error))

    engine.step = step_again  # type: ignore[method-assign]
    with mock.patch.object(model, "compute_logits", sometimes):
        drive(engine, arrivals)
    assert answers(engine, arrivals) == expected
    assert failures and all("lower gpu_memory_utilization" in text for text in failures)
