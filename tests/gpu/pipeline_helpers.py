"""Engines of both kinds over the same fake or tiny model, and a driver for random workloads."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tape_graph import TapeGraph
from torch import Tensor

from minibatch.config import SchedulerConfig
from minibatch.engine import Engine
from minibatch.executor.base import SampledToken
from minibatch.executor.cuda_graphs import Graph
from minibatch.executor.cuda_model_runner import CudaModelRunner
from minibatch.executor.launch import PENDING, Launched
from minibatch.executor.model_runner import ModelRunner
from minibatch.model.attention import AttentionBackend, AttentionMetadata, PagedReferenceAttention
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import random_model
from minibatch.model.presets import PRESETS
from minibatch.model.swap_stream import StreamedSwaps
from minibatch.pipelined import PipelinedEngine
from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import SchedulerOutput

TIMES = ("start_s", "duration_s", "schedule_s", "predicted_s")


# -- a model that is arithmetic -----------------------------------------------------------------


@dataclass
class _FakeLaunched:
    tokens: dict[str, SampledToken]
    waited: bool = False

    def wait(self) -> dict[str, SampledToken]:
        self.waited = True
        return self.tokens


@dataclass
class FakeLauncher:
    """Draws a token from a request's seed and position. Notes what it was asked for."""

    vocab_size: int = 50
    fails: int = 0  # launches that raise before one succeeds
    launched: list[_FakeLaunched] = field(default_factory=list)
    ahead: int = 0  # launches before the tokens of the one before were taken

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput, before: Launched | None = None) -> Launched:
        unsettled = [launch for launch in self.launched if not launch.waited]
        assert len(unsettled) <= 1, "more than a step ahead"
        if self.fails:
            self.fails -= 1
            raise RuntimeError("out of memory, say")
        tokens = {}
        for row in output.scheduled:
            request = row.request
            known = request.token_ids[:-1] if unsettled else request.token_ids
            assert PENDING not in known, "a token that was never taken"
            assert row.phase == "padding" or len(request.block_table) * 4 >= row.end
            if row.samples:
                drawn = random.Random(f"{request.seed} {request.num_output_tokens}")
                tokens[request.request_id] = SampledToken(drawn.randrange(self.vocab_size))
        self.ahead += len(unsettled)
        launch = _FakeLaunched(tokens)
        self.launched.append(launch)
        return launch

    def close(self) -> None:
        pass


# -- a real one ---------------------------------------------------------------------------------


class StaticShapeAttention(AttentionBackend):
    """Attention of one-token rows that takes nothing from the host, so that it can be captured."""

    def __init__(self) -> None:
        self.plain = PagedReferenceAttention()

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        if meta.num_decodes < len(meta.query_lens):
            self.plain.prepare(meta, kv_cache, dtype)

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        if meta.num_decodes < len(meta.query_lens):
            return self.plain.forward(q, kv_cache, layer, meta)
        batch = meta.num_decodes
        k, v = (pool[layer][meta.block_tables.long()].flatten(1, 2) for pool in
                (kv_cache.keys, kv_cache.values))  # fmt: skip
        live = torch.arange(k.shape[1]) < meta.seq_lens[:, None]  # [B, L]
        k, v = (torch.where(live[..., None, None], x, 0.0) for x in (k, v))
        group = q.shape[1] // k.shape[2]
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        scores = torch.einsum("bhd,blhd->bhl", q[:batch], k) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~live[:, None], -1e30).softmax(dim=-1)
        out = torch.einsum("bhl,blhd->bhd", weights, v)
        out = torch.where(meta.seq_lens[:, None, None] > 0, out, 0.0)
        return torch.cat([out, torch.zeros_like(q[batch:])])


class SwappingCache(StreamedSwaps, KVCache):
    """What a GPU gets, but for the kernels."""


def tiny_model(device: torch.device | str = "cpu") -> LlamaForCausalLM:
    """Random, and with large enough weights that greedy texts vary. The same on every device."""
    model = random_model(PRESETS["tiny"], seed=3)
    for name, view in model.checkpoint_views().items():
        if not name.endswith("norm.weight"):
            view.mul_(20.0 if "embed" in name or "lm_head" in name else 6.0)
    return model.to(device)


def plain_engine(model: LlamaForCausalLM, config: SchedulerConfig, **settings: Any) -> Engine:
    model.backend = PagedReferenceAttention()
    cache = make_cache(KVCache, model, config)
    return Engine(config, ModelRunner(model, cache, config.max_model_len), **settings)


def pipelined_engine(
    model: LlamaForCausalLM,
    config: SchedulerConfig,
    make_graph: Callable[[], Graph] | None = TapeGraph,
    *,
    backend: AttentionBackend | None = None,
    cache: type[KVCache] = SwappingCache,
    forward: Callable[..., Tensor] | None = None,
    **settings: Any,
) -> PipelinedEngine:
    model.backend = backend or StaticShapeAttention()
    runner = CudaModelRunner(
        model,
        make_cache(cache, model, config),
        config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        make_graph=make_graph,
        forward=forward,
    )
    return PipelinedEngine(config, runner, **settings)


def make_cache(kind: type[KVCache], model: LlamaForCausalLM, config: SchedulerConfig) -> KVCache:
    cache = kind(
        model.config, config.num_gpu_blocks, config.block_size,
        device=model.device, num_cpu_blocks=config.num_cpu_blocks,
    )  # fmt: skip
    for pool in (*cache.keys, *cache.values):
        pool.fill_(float("nan"))  # whoever reads what nobody wrote, shows it
    return cache


# -- workloads ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    step: int
    request_id: str
    prompt: list[int]
    params: SamplingParams


def small_config(policy: str, **knobs: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "policy": policy,
        "num_gpu_blocks": 24,
        "num_cpu_blocks": 24,
        "block_size": 4,
        "max_model_len": 32,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 40,
    }
    if policy in ("static", "dynamic"):  # they reserve
        settings["num_gpu_blocks"] = 40
    return SchedulerConfig(**(settings | knobs))


def random_arrivals(seed: int, count: int = 12, **params: Any) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals = []
    for number in range(count):
        prompt = [rng.randrange(2, 50) for _ in range(rng.randint(1, 14))]
        settings = {"max_tokens": rng.randint(1, 12), "ignore_eos": True, "temperature": 0.0}
        chosen = SamplingParams(**{**settings, **params}, seed=number)
        arrivals.append(Arrival(rng.randint(0, 15), chr(65 + number), prompt, chosen))
    return sorted(arrivals, key=lambda arrival: arrival.step)


def drive(
    engine: Engine,
    arrivals: list[Arrival],
    before_step: Callable[[int], None] | None = None,
) -> list[StepRecord]:
    """Run all to the end; returns the trace, which also has what ``step()`` did not return.

    Requests come in just before the step that they name is scheduled, whenever that is (or, which
    is as early as a real one can be, before the pipelined engine chooses whether to run ahead).
    """
    left, calls = list(arrivals), 0
    schedule = engine.scheduler.schedule

    def add() -> None:
        while left and left[0].step <= engine.scheduler.step:
            arrival = left.pop(0)
            engine.add_request(arrival.request_id, arrival.prompt, arrival.params, arrival_s=0.0)

    def add_and_schedule(now: float = 0.0) -> SchedulerOutput:
        add()
        return schedule(now)

    engine.scheduler.schedule = add_and_schedule  # type: ignore[method-assign]
    if isinstance(engine, PipelinedEngine):
        is_waited_for = type(engine)._is_waited_for

        def add_and_choose(flight: Any) -> bool:
            add()
            return is_waited_for(engine, flight)

        engine._is_waited_for = add_and_choose  # type: ignore[method-assign]
    while left or engine.has_unfinished:
        if before_step is not None:
            before_step(calls)
        engine.step()
        calls += 1
        for request in engine.scheduler.requests.values():
            assert PENDING not in request.token_ids
        assert calls < 1000
    return list(engine.trace.steps)


def decisions(record: StepRecord) -> dict[str, Any]:
    """All of a record but its times."""
    return {name: value for name, value in asdict(record).items() if name not in TIMES}


def answers(engine: Engine, arrivals: list[Arrival]) -> dict[str, Any]:
    """What every request said, and how it ended."""
    said = {}
    for arrival in arrivals:
        output = engine.output(arrival.request_id)
        assert output.finished
        said[arrival.request_id] = [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs
        ]
    return said
