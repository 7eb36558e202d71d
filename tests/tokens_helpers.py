"""Engines over tiny Llamas, a driver that meddles with them, and transformers' word for each
prompt run alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from transformers import LlamaForCausalLM as HFLlama

from minibatch.builder import engine_for
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.executor.base import SampledToken
from minibatch.executor.model_runner import ModelRunner
from minibatch.model.llama import LlamaForCausalLM
from minibatch.record import Admission, Preemption, StepRecord
from minibatch.request import Request
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import SchedulerOutput

MAX_LEN = 64  # tokens of a sequence in a tiny engine
POOL_TOKENS = 512  # its KV pool, unless a test wants to be short of memory
LONGEST_OUTPUT = 20


# -- what each request must say ---------------------------------------------------------------


def greedy_alone(
    model: HFLlama,
    prompt: Sequence[int],
    count: int,
    *,
    least_margin: float,
    eos_token_id: int | None = None,
) -> list[int]:
    """transformers' greedy continuation of one prompt.

    Two float32 implementations may disagree where the best two tokens are nearly equal, so such
    a prompt proves nothing and is refused.
    """
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2).values  # [count, 2]
    margin = float((best[:, 0] - best[:, 1]).min())
    assert margin > least_margin, f"near tie ({margin:.1e}) after {prompt}: take another prompt"
    return output.sequences[0, len(prompt) :].tolist()


@torch.no_grad()
def amplify(model: HFLlama, factor: float) -> HFLlama:
    """Larger random weights: texts of more different tokens, and fewer near ties."""
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.mul_(factor)
    return model


class TinyModel:
    """One set of random weights, in transformers' model and in ours."""

    def __init__(self, theirs: HFLlama, ours: LlamaForCausalLM) -> None:
        self.theirs = theirs
        self.ours = ours
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What ``prompt`` alone is continued with."""
        assert count <= LONGEST_OUTPUT
        key = tuple(prompt)
        if key not in self._known:
            # A copy: transformers' dynamic rope remembers the longest sequence it has seen.
            model = copy.deepcopy(self.theirs)
            self._known[key] = greedy_alone(model, key, LONGEST_OUTPUT, least_margin=1e-3)
        return self._known[key][:count]


# -- running an engine ------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A request and the step before which it arrives."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int = 8
    arrives: int = 0
    n: int = 1
    stop: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            n=self.n,
            ignore_eos=True,
            stop_token_ids=list(self.stop),
        )

    @property
    def members(self) -> list[str]:
        """Ids of its sequences, as records tell them."""
        if self.n == 1:
            return [self.request_id]
        return [f"{self.request_id}#{index}" for index in range(self.n)]

    def expected(self, model: TinyModel) -> list[int]:
        """Its tokens when it runs alone."""
        tokens = model.greedy(self.prompt, self.max_tokens)
        ends = [index for index, token in enumerate(tokens) if token in self.stop]
        return tokens[: ends[0] + 1] if ends else tokens


def make_engine(model: TinyModel, **knobs: Any) -> Engine:
    """An engine that checks its books at every step; unwritten KV is NaN, so it cannot be read
    unnoticed.
    """
    size = knobs.setdefault("block_size", 4)
    settings: dict[str, Any] = {
        "model": "tiny",
        "max_model_len": MAX_LEN,
        "num_gpu_blocks": POOL_TOKENS // size,
        "num_cpu_blocks": POOL_TOKENS // size,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "check_invariants": True,
    }
    engine = engine_for(model.ours, EngineConfig(**(settings | knobs)))
    kv_cache = runner_of(engine).kv_cache
    assert kv_cache is not None
    for pool in (*kv_cache.keys, *kv_cache.values):
        pool.fill_(float("nan"))
    return engine


def runner_of(engine: Engine) -> ModelRunner:
    executor = engine.executor
    assert isinstance(executor, ModelRunner)
    return executor


def drive(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    before_step: Callable[[int], None] | None = None,
    when_interrupted: Callable[[int], None] | None = None,
) -> list[StepRecord]:
    """Run all jobs to their end. Both callbacks get the number of the step that comes next (or
    was interrupted and will be taken up again).
    """
    records: list[StepRecord] = []
    attempts = 0
    unborn = sorted(jobs, key=lambda job: job.arrives)
    while unborn or engine.has_unfinished:
        while unborn and unborn[0].arrives <= len(records):
            job = unborn.pop(0)
            engine.add_request(job.request_id, list(job.prompt), job.params)
        if before_step is not None:
            before_step(len(records))
        attempts += 1
        assert attempts < 1000, "it does not end"
        try:
            records.append(engine.step())
        except KeyboardInterrupt:
            if when_interrupted is not None:
                when_interrupted(len(records))
    return records


def assert_each_as_alone(
    engine: Engine, model: TinyModel, jobs: Sequence[Job], aborted: Collection[str] = ()
) -> None:
    """Every finished job said what it says alone, an aborted one the beginning of it, and no
    block is left with anybody.
    """
    for job in jobs:
        output = engine.output(job.request_id)
        assert output.finished and len(output.outputs) == job.n
        expected = job.expected(model)
        for sequence in output.outputs:
            said = sequence.token_ids
            if sequence.finish_reason == "abort":
                assert job.request_id in aborted, f"{job.request_id} was aborted by nobody"
                assert said == expected[: len(said)], f"{job.request_id} went wrong: {said}"
            else:
                assert said == expected, f"{job.request_id} says {said}, alone {expected}"
                assert sequence.finish_reason == ("stop" if said[-1] in job.stop else "length")
    assert_nothing_held(engine)


def assert_nothing_held(engine: Engine) -> None:
    blocks = engine.scheduler.block_manager
    assert not engine.has_unfinished
    assert not any(blocks.ref_counts)
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    assert blocks.num_free_cpu_blocks == blocks.num_cpu_blocks


# -- what the records say happened ------------------------------------------------------------


def preemptions(records: Sequence[StepRecord]) -> list[Preemption]:
    return [preemption for record in records for preemption in record.preempted]


def admissions(records: Sequence[StepRecord], request_id: str | None = None) -> list[Admission]:
    """Of one request, or of all."""
    return [
        admission
        for record in records
        for admission in record.admitted
        if request_id in (None, admission.request_id)
    ]


def hit_tokens(records: Sequence[StepRecord], request_id: str) -> int:
    """Prompt tokens that a request found computed when it first came in."""
    return admissions(records, request_id)[0].prefix_hit_tokens


def split_prompts(records: Sequence[StepRecord]) -> set[str]:
    """Requests whose prompt was computed in several steps."""
    seen: list[str] = [row.request_id for record in records for row in record.rows("prefill")]
    return {request_id for request_id in seen if seen.count(request_id) > 1}


def mixed_steps(records: Sequence[StepRecord]) -> int:
    """Steps in which some prefilled while others decoded."""
    return sum(bool(record.rows("prefill") and record.rows("decode")) for record in records)


def running_before(records: Sequence[StepRecord], step: int) -> list[str]:
    """Who runs when ``step`` begins."""
    last = records[step - 1]
    finished = {finish.request_id for finish in last.finished}
    return [request_id for request_id in last.running if request_id not in finished]


def is_mid_prompt(records: Sequence[StepRecord], step: int, request_id: str, length: int) -> bool:
    """Is part of its prompt of ``length`` tokens computed when ``step`` begins?"""
    rows = [row for record in records[:step] for row in record.scheduled]
    computed = [row.context_len for row in rows if row.request_id == request_id]
    return bool(computed) and computed[-1] < length


def state_of(engine: Engine, request_id: str) -> str:
    """In which state an abort would find it."""
    request: Request | None = engine.scheduler.requests.get(request_id)
    if request is None:
        return "finished"
    if request.status.value == "running" and request.is_prefill and request.num_computed_tokens:
        return "mid prompt"
    return request.status.value


# -- Ctrl-C -----------------------------------------------------------------------------------

#: Where it strikes: what the executor was about to call. Some are not reached in every step (one
#: that moves blocks only has no forward pass); it then strikes when all is done.
INTERRUPTION_POINTS: dict[str, Callable[[ModelRunner], tuple[Any, str]] | None] = {
    "before anything": None,
    "before swapping out": lambda runner: (runner.kv_cache, "swap_out"),
    "before swapping in": lambda runner: (runner.kv_cache, "swap_in"),
    "before copying": lambda runner: (runner.kv_cache, "copy_blocks"),
    "between moves and forward": lambda runner: (runner.model, "forward"),
    "between layers": lambda runner: (runner.model.layers[1], "forward"),
    "before sampling": lambda runner: (runner.model, "compute_logits"),
    "when all is done": None,
}


@dataclass
class InterruptedExecutor:
    """The real executor, struck by Ctrl-C ``times`` times in each of ``steps`` (None: in all)."""

    inner: ModelRunner
    point: str
    steps: Collection[int] | None = None
    times: int = 1
    struck: list[int] = field(default_factory=list)  # steps, one entry an interrupt

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        step = output.step
        spared = self.steps is not None and step not in self.steps
        if spared or self.struck.count(step) == self.times:
            return self.inner.execute(output)
        self.struck.append(step)
        place = INTERRUPTION_POINTS[self.point]
        if place is not None:
            target, method = place(self.inner)
            with mock.patch.object(target, method, side_effect=KeyboardInterrupt):
                self.inner.execute(output)
        elif self.point == "when all is done":
            self.inner.execute(output)
        raise KeyboardInterrupt

    def close(self) -> None:
        self.inner.close()


def interrupt(
    engine: Engine, point: str, steps: Collection[int] | None = None, times: int = 1
) -> InterruptedExecutor:
    """Put an ``InterruptedExecutor`` into an engine."""
    executor = InterruptedExecutor(runner_of(engine), point, steps, times)
    engine.executor = executor
    return executor


def nonempty_subsets(items: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The single ones first, all of them last."""
    masks = sorted(range(1, 2 ** len(items)), key=lambda mask: (mask.bit_count(), mask))
    for mask in masks:
        yield tuple(item for index, item in enumerate(items) if mask >> index & 1)
