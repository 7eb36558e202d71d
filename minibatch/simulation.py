"""Whole runs on a virtual clock: what would this workload do on that chip, under these rules?

The engine, its schedulers and its records are those of a real run; only the executor is another.
Every simulated trace carries its recipe, so that it can be run again, or *forked*: the same up to
a step, and from there under other rules.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from minibatch.clock import VirtualClock
from minibatch.config import POLICY_NAMES, PreemptionMode, SchedulerConfig
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.errors import ConfigError, RequestTooLargeError
from minibatch.executor.simulated import SimulatedExecutor
from minibatch.fork import take_over
from minibatch.hardware import Hardware
from minibatch.hardware import hardware as chip_named
from minibatch.model.config import ModelConfig
from minibatch.model.presets import PRESETS, preset
from minibatch.record import StepRecord
from minibatch.reservation import kv_memory
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import make_scheduler
from minibatch.trace import Trace, TraceMeta
from minibatch.workload import (
    RequestSpec,
    Workload,
    as_workload,
    spec_from_row,
    spec_to_row,
)

MEMORY_KNOBS = {"gpu_memory_utilization": 0.90, "activation_bytes": 0, "swap_space": 4.0}


@dataclass(frozen=True)
class Recipe:
    """All that a simulated run depends on. ``configs`` are (first step, knobs from there on)."""

    workload: Workload
    cost_model: CostModel
    configs: tuple[tuple[int, SchedulerConfig], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "workload": {
                "name": self.workload.name,
                "note": self.workload.note,
                "requests": [spec_to_row(request) for request in self.workload],
            },
            "cost_model": self.cost_model.to_dict(),
            "configs": [[step, config_to_dict(config)] for step, config in self.configs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of ``to_dict``."""
        rows = data["workload"]["requests"]
        return cls(
            Workload(
                tuple(spec_from_row(row) for row in rows),
                data["workload"]["name"],
                data["workload"]["note"],
            ),
            CostModel.from_dict(data["cost_model"]),
            tuple((step, SchedulerConfig(**knobs)) for step, knobs in data["configs"]),
        )


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for cyclic garbage meanwhile: records hold no cycles, and going through all that
    were kept, again and again, takes a third of a long run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def simulate(
    requests: Workload | Iterable[RequestSpec],
    hardware: str | Hardware = "a100-80gb",
    model: str | ModelConfig = "llama-2-7b",
    policy: str = "continuous",
    knobs: Mapping[str, Any] | None = None,
    *,
    cost_model: CostModel | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    trace_path: str | Path | None = None,
    keep_records: int | None = None,
) -> Trace:
    """Serve ``requests`` on a virtual clock.

    Args:
        requests: what comes, and when.
        hardware: the chip, or its name.
        model: the shape, or its name.
        policy: ``static``, ``dynamic``, ``continuous`` or ``unified``.
        knobs: of ``SchedulerConfig``, and ``gpu_memory_utilization``, ``activation_bytes``,
            ``swap_space`` (GiB), from which the pools are sized where ``num_gpu_blocks`` and
            ``num_cpu_blocks`` are not given. See ``scheduler_config`` for other defaults.
        cost_model: other constants than the default ones; it then decides chip and model.
        on_step: called with every record.
        trace_path: also write the trace there, step by step.
        keep_records: how many of the newest records the returned trace holds; None: all.

    Raises:
        ConfigError: knobs that cannot work, or a model that does not fit.
    """
    cost_model = cost_model or CostModel(as_model(model), chip_named(hardware))
    config = scheduler_config(policy, cost_model, knobs)
    recipe = Recipe(as_workload(requests), cost_model, ((0, config),))
    simulation = Simulation(recipe, trace_path=trace_path, keep_records=keep_records)
    return simulation.finish(on_step)


def compare(
    requests: Workload | Iterable[RequestSpec],
    policies: Iterable[str] = POLICY_NAMES,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Trace]:
    """``simulate`` once a policy: name -> trace. Further arguments are those of ``simulate``,
    without ``policy``.
    """
    workload = as_workload(requests)
    return {policy: simulate(workload, *args, policy=policy, **kwargs) for policy in policies}


@collector_paused()
def fork(trace: Trace, step: int, **knobs: Any) -> Trace:
    """The run of ``trace`` again, but from ``step`` on under other ``knobs`` (``policy`` too).

    Records before ``step`` come out as they were. See ``minibatch.fork`` for what happens to the
    requests in flight.

    Raises:
        ConfigError: the trace is not a simulated one, has no such step, or a knob cannot change
            (``max_model_len``) or work.
        RequestTooLargeError: a request in flight could never run under the new knobs.
    """
    data = getattr(trace.meta, "simulation", None)
    if not data:
        raise ConfigError("only a simulated run can be forked: a measured one cannot be repeated.")
    if not 0 <= step < trace.summary["num_steps"]:
        raise ConfigError(f"step={step}: the run has {trace.summary['num_steps']} steps.")
    if "max_model_len" in knobs:
        raise ConfigError("max_model_len cannot change during a run: requests rely on it.")
    recipe = Recipe.from_dict(data)
    before = [(first, config) for first, config in recipe.configs if first < step]
    config = [config for first, config in recipe.configs if first <= step][-1]
    changed = SchedulerConfig(**{**config_to_dict(config), **_only_knobs(knobs)})
    recipe = replace(recipe, configs=(*before, (step, changed)))
    return Simulation(recipe).finish()


class Simulation:
    """A run under way: the engine, its clock, and the requests that are still to come."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        trace_path: str | Path | None = None,
        keep_records: int | None = None,
    ) -> None:
        (_, config), *self._changes = recipe.configs
        cost_model = recipe.cost_model
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(cost_model, self.clock, config.block_size)
        meta = TraceMeta(
            source="simulated",
            model=model_name(cost_model.model),
            hardware=cost_model.hardware.name,
            simulation=recipe.to_dict(),
        )
        self.engine = Engine(
            config, self.executor, clock=self.clock, meta=meta, keep_records=keep_records
        )
        if trace_path is not None:
            self.engine.record_to(trace_path)
        self._pending = deque(recipe.workload)
        self._vocab_size = cost_model.model.vocab_size

    def finish(self, on_step: Callable[[StepRecord], None] | None = None) -> Trace:
        """Run to the end; returns the trace."""
        with self.engine:
            for record in self.run():
                if on_step is not None:
                    on_step(record)
        return self.engine.trace

    def run(self) -> Iterator[StepRecord]:
        """Step until everybody is served, a record at a time."""
        engine, clock = self.engine, self.clock
        unseen_refusals = False
        while self._pending or engine.has_unfinished:
            unseen_refusals |= self._let_in()
            next_arrival = self._pending[0].arrival_s if self._pending else float("inf")
            if not engine.has_unfinished:
                if not self._pending:
                    break
                clock.advance_to(next_arrival)
                continue
            wake = engine.scheduler.wake_time(clock.now)
            if wake > clock.now:  # a batch that is still being filled
                clock.advance_to(min(wake, next_arrival))
                continue
            self._change_rules()
            record = engine.step()
            unseen_refusals = False
            for finish in record.finished:
                engine.outputs.release(finish.request_id)  # nobody will ask for its output
            yield record
        if unseen_refusals:
            yield engine.step()

    def _let_in(self) -> bool:
        """Queue everybody who has come by now. True: somebody was refused."""
        refused = False
        while self._pending and self._pending[0].arrival_s <= self.clock.now:
            spec = self._pending.popleft()
            params = SamplingParams(max_tokens=spec.output_len, ignore_eos=True)
            try:
                self.engine.add_request(
                    spec.request_id,
                    prompt_token_ids=spec.prompt_token_ids(self._vocab_size),
                    sampling_params=params,
                    arrival_s=spec.arrival_s,
                )
            except RequestTooLargeError:  # the next record will tell
                refused = True
        return refused

    def _change_rules(self) -> None:
        """[fork] Another scheduler takes over, if this is the step."""
        engine = self.engine
        if not self._changes or engine.scheduler.step < self._changes[0][0]:
            return
        _, config = self._changes.pop(0)
        if config == engine.config:
            return
        scheduler = make_scheduler(config)
        take_over(scheduler, engine.scheduler)
        engine.scheduler = scheduler
        engine.config = config
        self.executor.block_size = config.block_size
        engine.trace.meta.policy = config.policy
        engine.trace.meta.knobs = config_to_dict(config)


# -- knobs ----------------------------------------------------------------------------------------


def scheduler_config(
    policy: str, cost_model: CostModel, knobs: Mapping[str, Any] | None = None
) -> SchedulerConfig:
    """Knobs for a policy on a chip: those given, and the pools that the memory holds.

    ``max_model_len`` is by default all the model has; ``max_num_batched_tokens`` 2048 or what
    the policy cannot do without. ``static`` and ``dynamic`` prefill a whole batch in one step, as
    the servers that they stand for did, so by default nothing but memory and ``max_num_seqs``
    limits theirs.

    Raises:
        ConfigError: a knob that does not exist, or does not work.
    """
    given = dict(knobs or {})
    memory = {name: given.pop(name, default) for name, default in MEMORY_KNOBS.items()}
    given = _only_knobs(given)
    block_size = given.setdefault("block_size", SchedulerConfig.block_size)
    longest = given.setdefault("max_model_len", cost_model.model.context_length)
    rows = given.setdefault("max_num_seqs", SchedulerConfig.max_num_seqs)
    if "num_gpu_blocks" not in given:
        given["num_gpu_blocks"] = kv_memory(
            cost_model.hardware,
            cost_model.model,
            dtype=cost_model.dtype,
            weight_dtype=cost_model.weight_dtype,
            kv_dtype=cost_model.kv_dtype,
            gpu_memory_utilization=memory["gpu_memory_utilization"],
            activation_bytes=memory["activation_bytes"],
            block_size=block_size,
        ).num_blocks
    swaps = given.get("preemption_mode") == PreemptionMode.SWAP
    if policy == "continuous" and swaps and "num_cpu_blocks" not in given:
        block_bytes = block_size * cost_model.kv_token_bytes
        given["num_cpu_blocks"] = int(memory["swap_space"] * 2**30) // block_bytes
    whole_batches = policy in ("static", "dynamic")
    splits = policy == "unified" or given.get("enable_chunked_prefill", False)
    least = rows * longest if whole_batches else rows if splits else max(longest, rows)
    given.setdefault("max_num_batched_tokens", max(2048, least))
    return SchedulerConfig(policy=policy, **given)


def config_to_dict(config: SchedulerConfig) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    return {**asdict(config), "preemption_mode": config.preemption_mode.value}


def as_model(model: str | ModelConfig) -> ModelConfig:
    """A shape, or the shape of that name."""
    return model if isinstance(model, ModelConfig) else preset(model)


def model_name(model: ModelConfig) -> str:
    """The name of a known shape; of others, their size."""
    names = [name for name, shape in PRESETS.items() if shape == model]
    return names[0] if names else f"{model.num_parameters / 1e6:.0f}M parameters"


def _only_knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    known = {knob.name for knob in fields(SchedulerConfig)}
    unknown = sorted(knobs.keys() - known)
    if unknown:
        names = ", ".join(sorted(known | MEMORY_KNOBS.keys()))
        raise ConfigError(f"no knob {', '.join(unknown)}; there are {names}.")
    return dict(knobs)
