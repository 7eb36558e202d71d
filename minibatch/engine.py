"""The engine: one call of ``step()`` is one iteration, and leaves one record.

    schedule -> execute -> update -> record

It prints nothing, plots nothing and never sleeps; whoever wants to see, reads the record.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minibatch.clock import SystemClock
from minibatch.closing import Closing
from minibatch.config import PreemptionMode, SchedulerConfig
from minibatch.errors import (
    DuplicateRequestError,
    EngineClosedError,
    InvalidRequestError,
    InvariantError,
    RequestTooLargeError,
)
from minibatch.executor.base import Executor, SampledToken
from minibatch.interrupts import deferred_interrupts
from minibatch.output_processor import OutputProcessor, TokenizerLike
from minibatch.outputs import RequestOutput
from minibatch.prompt import read_prompt
from minibatch.record import Arrival, Finish, Refusal, Scheduled, StepRecord
from minibatch.request import FinishReason, Request
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import ForcedPreemption, SchedulerOutput, make_scheduler
from minibatch.trace import Trace, TraceMeta, TraceWriter


@dataclass
class _Step:
    """A step that was decided but whose results are not taken yet."""

    output: SchedulerOutput
    start_s: float
    schedule_s: float
    predicted_s: float | None
    arrived: tuple[Arrival, ...]  # since the step before was decided
    refused: tuple[Refusal, ...]


class Engine(Closing):
    """Continuous batching over any executor.

    Args:
        config: the scheduler's knobs.
        executor: computes what is scheduled.
        clock: seconds; real by default, virtual in a simulation.
        tokenizer: for text prompts, text output and stop strings; ids alone work without one.
        meta: describes the run in its trace.
        predict: seconds that a step should take, for the record.
        vocab_size: prompt ids must be below it; None does not check.
        eos_token_ids: ids that end a text.
        salt: tells prompts apart that must not share cached prefixes, see ``Request``.
        seed: of the seeds of unseeded requests.
        keep_records: how many of the newest records stay in ``trace``; None keeps all.
        check: verify the books at every step.

    A step may be interrupted (Ctrl-C, an error on the device) at any point: the next ``step()``
    takes up where it stopped, and no request is lost.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        *,
        clock: Callable[[], float] | None = None,
        tokenizer: TokenizerLike | None = None,
        meta: TraceMeta | None = None,
        predict: Callable[[SchedulerOutput], float] | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        salt: Callable[[Sequence[int]], Any] = lambda prompt_token_ids: None,
        seed: int = 0,
        keep_records: int | None = None,
        check: bool = False,
    ) -> None:
        self.config = config
        self.executor = executor
        self.clock = clock or SystemClock()
        self.tokenizer = tokenizer
        self.predict = predict
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.salt = salt
        self.keep_records = keep_records
        self.check = check
        self.scheduler = make_scheduler(config)
        self.outputs = OutputProcessor(tokenizer, config.max_model_len)
        meta = meta or TraceMeta()
        meta.policy = config.policy
        meta.knobs = {**asdict(config), "preemption_mode": config.preemption_mode.value}
        self.trace = Trace(meta)
        self.closed = False
        self._seeds = random.Random(seed)
        self._lock = threading.RLock()
        self._pending: _Step | None = None
        self._doomed: set[str] = set()  # aborted while their step is pending
        self._arrived: list[Arrival] = []
        self._ended: list[Finish] = []
        self._refused: list[Refusal] = []
        self._writer: TraceWriter | None = None

    # -- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int] | Mapping[str, Any] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        arrival_s: float | None = None,
    ) -> None:
        """Queue a prompt: text, token ids, or vLLM's ``{"prompt": ...}`` /
        ``{"prompt_token_ids": ...}``.

        With ``n > 1`` the sequences are called ``id#0``, ``id#1``... in records.

        Raises:
            InvalidRequestError: an empty prompt, ids outside the vocabulary, a duplicate id, or
                a request that could never run. Whatever is in flight goes on.
        """
        self._check_open()
        params = sampling_params or SamplingParams()
        given = prompt if prompt_token_ids is None else prompt_token_ids
        text, token_ids = read_prompt(request_id, given, self.tokenizer, self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                f"request {request_id!r}: stop strings need a tokenizer; use stop_token_ids."
            )
        with self._lock:
            group = self.outputs.groups.get(request_id)
            if group is not None and not group.finished:
                raise DuplicateRequestError(
                    f"request id {request_id!r} is in use by a live request; choose another, or "
                    "wait until that one finishes."
                )
            now = self.clock() if arrival_s is None else arrival_s
            family = self._make_family(request_id, token_ids, params, now)
            with deferred_interrupts():
                try:
                    self.scheduler.add(family[0], family[1:])
                except RequestTooLargeError as error:
                    self._refused.append(
                        Refusal(request_id, str(error), error.needed, error.available, error.knob)
                    )
                    raise
                self.outputs.release(request_id)  # an earlier, finished request of that name
                self.outputs.add(request_id, text, family)
                self._arrived += [
                    Arrival(r.request_id, now, r.num_prompt_tokens, r.max_tokens) for r in family
                ]

    def abort(self, request_id: str) -> bool:
        """Drop a request, in whatever state it is; False if there is no such live request."""
        with self._lock:
            group = self.outputs.groups.get(request_id)
            members = [state.request for state in group.members] if group else []
            live = [request for request in members if request.finish_reason is None]
            with deferred_interrupts():
                for request in live:
                    self._abort_one(request)
            return bool(live)

    def preempt(self, request_id: str, mode: PreemptionMode | str | None = None) -> None:
        """Evict a running request at the next step, as if memory had run out.

        Raises:
            PreemptionUnsupportedError: ``static`` and ``dynamic`` never preempt.
        """
        with self._lock:
            self.scheduler.preempt(request_id, mode)

    def force_preemption(self, plan: ForcedPreemption | None) -> None:
        """Evict requests by plan, for tests and lessons. Raises as ``preempt`` does."""
        self.scheduler.force_preemption(plan)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def output(self, request_id: str) -> RequestOutput:
        """What a request has so far, or had when it finished. ``KeyError``: never seen."""
        return self.outputs.output(request_id)

    # -- the step -----------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Run one iteration.

        Raises:
            EngineClosedError: after ``close()``.
            NoProgressError: the scheduler is going in circles.
        """
        self._check_open()
        with self._lock:
            with deferred_interrupts():
                step = self._pending or self._decide()
            sampled = self.executor.execute(step.output)  # may be cut short, and run again
            with deferred_interrupts():
                return self._take_results(step, sampled)

    @property
    def seconds_to_wait(self) -> float:
        """How long a step would find nothing to do, because the policy waits (``max_wait``)."""
        now = self.clock()
        return self.scheduler.wake_time(now) - now

    def run(self) -> Iterator[StepRecord]:
        """Step until nothing is left, a record at a time. While a policy waits (``max_wait``) the
        records are idle ones; who would rather sleep asks ``seconds_to_wait``.
        """
        while self.has_unfinished:
            yield self.step()

    def _decide(self) -> _Step:
        start = self.clock()
        output = self.scheduler.schedule(start)
        arrived, self._arrived = tuple(self._arrived), []
        refused, self._refused = tuple(self._refused), []
        schedule_s = self.clock() - start
        predicted_s = self.predict(output) if self.predict is not None else None
        self._pending = _Step(output, start, schedule_s, predicted_s, arrived, refused)
        return self._pending

    def _take_results(self, step: _Step, sampled: dict[str, SampledToken]) -> StepRecord:
        output = step.output
        tokens = {
            request_id: entry.token_id
            for request_id, entry in sampled.items()
            if entry.token_id is not None
        }
        finished = self.scheduler.update(
            output,
            tokens,
            lambda request: self.outputs.take_token(request, sampled[request.request_id]),
        )
        self._pending = None
        for request_id in sorted(sampled.keys() - tokens.keys()):
            self._end(request_id, FinishReason.ERROR)
        for request_id in sorted(self._doomed):
            self._end(request_id, FinishReason.ABORT)
        self._doomed.clear()
        record = self._record(step, tokens, finished)
        self.outputs.take_record(record)
        self._keep(record)
        if self.check:
            self._check_invariants(output)
        return record

    def _record(self, step: _Step, tokens: dict[str, int], finished: list[Request]) -> StepRecord:
        output = step.output
        changes = self.scheduler.block_manager.take_changes()
        untold = {arrival.request_id for arrival in self._arrived}  # told by the next record
        ended = [finish for finish in self._ended if finish.request_id not in untold]
        self._ended = [finish for finish in self._ended if finish.request_id in untold]
        done = [Finish(r.request_id, r.finish_reason.value) for r in finished if r.finish_reason]
        return StepRecord(
            step=output.step,
            start_s=step.start_s,
            duration_s=self.clock() - step.start_s,
            schedule_s=step.schedule_s,
            predicted_s=step.predicted_s,
            arrived=step.arrived,
            admitted=tuple(output.admitted),
            held_back=output.held_back,
            scheduled=tuple(
                [
                    Scheduled(r.request_id, slot, phase, n, start + n, padding)
                    for (r, start, n, phase, padding, slot) in output.scheduled
                ]
            ),
            preempted=tuple(output.preempted),
            swapped_in=output.swapped_in,
            swapped_out=output.swapped_out,
            finished=(*done, *ended),
            refused=step.refused,
            waiting=output.waiting,
            running=output.running,
            swapped=output.swapped,
            num_batched_tokens=output.num_batched_tokens,
            num_padding_tokens=output.num_padding_tokens,
            blocks_allocated=changes.allocated,
            blocks_freed=changes.freed,
            blocks_copied=tuple(output.copies),
            blocks_cached=tuple(changes.cached),
            cpu_blocks_allocated=changes.cpu_allocated,
            cpu_blocks_freed=changes.cpu_freed,
            free_blocks=output.free_blocks,
            free_cpu_blocks=output.free_cpu_blocks,
            cached_blocks=output.cached_blocks,
            sampled={request_id: [token] for request_id, token in tokens.items()},
        )

    # -- keeping ------------------------------------------------------------------------------

    def record_to(self, path: str | Path) -> TraceWriter:
        """Also write every further record to a trace file, readable at any time."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._writer = TraceWriter(path, self.trace.meta)
        return self._writer

    def _keep(self, record: StepRecord) -> None:
        steps, most = self.trace.steps, self.keep_records
        steps.append(record)
        if most is not None and len(steps) >= 2 * most:  # in bulk: dropping one moves the rest
            del steps[: len(steps) - most]
        if self._writer is not None:
            self._writer.write(record)

    def close(self) -> None:
        """Give the executor's memory back and finish the trace file. Idempotent.

        Aborts and refusals that no record has told yet get a last, idle one.
        """
        if not self.closed:
            untold = self._ended or self._refused
            if untold and self._pending is None and not self.has_unfinished:
                self.step()
            self.closed = True
            if self._writer is not None:
                self._writer.close()
            self.executor.close()

    # -- at the door --------------------------------------------------------------------------

    def _make_family(
        self, request_id: str, token_ids: list[int], params: SamplingParams, now: float
    ) -> list[Request]:
        """``n`` requests; the first leads the others."""
        room = max(1, self.config.max_model_len - len(token_ids))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        family: list[Request] = []
        for index in range(params.n):
            family.append(
                Request(
                    request_id if params.n == 1 else f"{request_id}#{index}",
                    token_ids,
                    params,
                    arrival_s=now,
                    max_tokens=min(params.max_tokens or room, room),
                    eos_token_ids=self.eos_token_ids,
                    seed=seed,
                    leader=family[0] if family else None,
                    sample_index=index,
                    cache_salt=self.salt(token_ids),
                )
            )
        return family

    def _abort_one(self, request: Request) -> None:
        step = self._pending
        rows = step.output.scheduled if step is not None else ()
        if step is not None and any(row.request is request for row in rows):
            # Others may build on what its part of the step computes: let it run once more,
            # unless nobody else is left in the step.
            self._doomed.add(request.request_id)
            ids = [row.request.request_id for row in rows if row.phase != "padding"]
            if not self._doomed.issuperset(ids):
                return
            self.scheduler.drop_rows(step.output)
            self._doomed.difference_update(ids)
            for request_id in ids:
                self._end(request_id, FinishReason.ABORT)
        else:
            self._end(request.request_id, FinishReason.ABORT)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        """End a request without its own doing; the next record will tell."""
        if self.scheduler.abort(request_id, reason) is not None:
            self._ended.append(Finish(request_id, reason.value))
            self.outputs.finish(request_id, self.clock())

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosedError("the engine is closed; make a new one.")

    def _check_invariants(self, output: SchedulerOutput) -> None:
        self.scheduler.check_invariants()
        budget = self.config.max_num_batched_tokens
        tokens = output.num_batched_tokens + output.num_padding_tokens
        if tokens > budget:
            raise InvariantError(f"{tokens} tokens scheduled, max_num_batched_tokens={budget}.")
