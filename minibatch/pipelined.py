"""The engine, one step ahead of itself, so that a GPU never waits for Python.

    Engine            schedule 1 | execute 1 | take 1 | schedule 2 | execute 2 | take 2 | ...

    PipelinedEngine   schedule 1 | launch 1 | schedule 2 | launch 2 | take 1 | schedule 3 | ...
    the device                     [---- 1 ----][------------- 2 ------------][---- 3 ...

To decide step 2 the scheduler must know who is left after step 1, but not *what* was said: who
reaches ``max_tokens`` is known beforehand. So every row that samples is given ``PENDING`` for a
token, those that are full leave, and the decisions are the ones that ``Engine`` would make. The
token itself stays on the device and is fed to step 2 there.

What cannot be known is who stops early, by an end token or a stop string. That comes to light a
step late: the request has a row in step 2 too, whose token nobody ever sees, and the record of
step 2 names it as finished. That is the whole price.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from minibatch.engine import Engine, _Step
from minibatch.executor.base import SampledToken
from minibatch.executor.launch import PENDING, Launched, Launcher, waits_for_tokens
from minibatch.interrupts import deferred_interrupts
from minibatch.outputs import RequestOutput
from minibatch.record import Finish, StepRecord
from minibatch.request import FinishReason, Request


@dataclass
class _Flight:
    """A step that was launched and whose tokens are not taken yet."""

    step: _Step
    launched: Launched
    record: StepRecord | None = None  # once its outcome was guessed; lacks the tokens
    finished: list[Request] = field(default_factory=list)  # those that are full


class PipelinedEngine(Engine):
    """An ``Engine`` whose ``step()`` launches the next step before it takes this one's tokens.

    ``step()`` still returns the records in order, one a step. A step whose tokens somebody waits
    for (penalties, log-probabilities, sometimes a prefix cache) is taken first, as in ``Engine``.
    Ctrl-C is held back to the end of ``step()``, which is no more than a device step away.

    Args:
        config, executor, settings: as for ``Engine``; the executor can launch.
    """

    executor: Launcher

    def __init__(self, config: Any, executor: Launcher, **settings: Any) -> None:
        super().__init__(config, executor, **settings)
        self._flights: deque[_Flight] = deque()  # two at most: this step and the next
        self._last_end_s = 0.0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._flights) or self.scheduler.has_unfinished

    def step(self) -> StepRecord:
        """Run one iteration; see ``Engine.step``.

        If launching the next step fails, this one is not lost: the next call tries again.
        """
        self._check_open()
        with self._lock, deferred_interrupts():
            if not self._flights:
                self._launch(before=None)
            flight = self._flights[0]
            if flight.record is None:
                if self._is_waited_for(flight):
                    sampled = flight.launched.wait()
                    self._flights.popleft()
                    return self._take_results(flight.step, sampled)
                self._guess(flight)
            if len(self._flights) == 1 and self.scheduler.has_unfinished:
                self._launch(before=flight.launched)
            return self._settle(flight)

    def output(self, request_id: str) -> RequestOutput:
        """See ``Engine``. Only an error in mid-step can leave a token pending; it is not shown."""
        output = super().output(request_id)
        for completion in output.outputs:
            if completion.token_ids and completion.token_ids[-1] == PENDING:
                del completion.token_ids[-1]
        return output

    def _is_waited_for(self, flight: _Flight) -> bool:
        rows, scheduler = flight.step.output.scheduled, self.scheduler
        if scheduler.block_manager.enable_prefix_caching:
            size = self.config.block_size
            somebody_looks = scheduler.waiting or scheduler.samples  # in the next step
            # Will this row's token complete a block?
            due = (row.samples and (row.request.num_tokens + 1) % size == 0 for row in rows)
            if somebody_looks and any(due):
                return True
        return any(waits_for_tokens(row) for row in rows)

    def _launch(self, before: Launched | None) -> None:
        if self._pending is None and before is not None and not self.scheduler.waiting:
            self.scheduler.block_manager.hold_publishing()
        step = self._pending or self._decide()
        launched = self.executor.launch(step.output, before)
        self._pending = None
        self._flights.append(_Flight(step, launched))
        for request_id in sorted(self._doomed):  # aborted while it was pending
            self._end(request_id, FinishReason.ABORT)
        self._doomed.clear()

    def _guess(self, flight: _Flight) -> None:
        """Advance every request as if nobody stopped early, and begin the record."""
        step, output = flight.step, flight.step.output
        guesses = {row.request.request_id: PENDING for row in output.scheduled if row.samples}
        flight.finished = self.scheduler.update(output, guesses, self._length_reason)
        step.start_s = max(step.start_s, self._last_end_s)  # the device was busy until then
        flight.record = self._record(step, {}, [])

    def _length_reason(self, request: Request) -> FinishReason | None:
        full = request.num_output_tokens >= request.max_tokens
        if full or request.num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def _settle(self, flight: _Flight) -> StepRecord:
        """Take the tokens: fill them in, end those that stopped early, complete the record."""
        sampled = flight.launched.wait()
        self._flights.popleft()
        tokens: dict[str, int] = {}
        for row in flight.step.output.scheduled:
            request = row.request
            if request.token_ids[-1] == PENDING and row.phase != "padding":
                token = self._fill_in(request, sampled[request.request_id])
                if token is not None:
                    tokens[request.request_id] = token
        self.scheduler.block_manager.publish_held()
        assert flight.record is not None
        done = [Finish(r.request_id, r.finish_reason.value) for r in flight.finished]
        self._last_end_s = self.clock()
        record = replace(
            flight.record,
            sampled={request_id: [token] for request_id, token in tokens.items()},
            finished=(*done, *flight.record.finished),
            duration_s=self._last_end_s - flight.record.start_s,
        )
        self.outputs.take_record(record)
        self._keep(record)
        if self.check:
            self._check_invariants(flight.step.output)
        if self._flights and not self.scheduler.has_unfinished:
            # All have stopped early: the next step is nobody's, so nobody will ask for it.
            self._guess(self._flights[0])
            self._settle(self._flights[0])
        return record

    def _fill_in(self, request: Request, sampled: SampledToken) -> int | None:
        """Put the token in the place that was kept for it; returns it, if it counts."""
        reason: FinishReason | None
        if request.finish_reason is FinishReason.ABORT:
            request.token_ids.pop()
            return None
        if sampled.token_id is None:
            request.token_ids.pop()
            reason = FinishReason.ERROR
        else:
            request.token_ids[-1] = sampled.token_id
            reason = self.outputs.take_token(request, sampled)
        if request.finish_reason is not None:  # it was full, and has left already
            request.finish_reason = reason or request.finish_reason
        elif reason is not None:
            self._end(request.request_id, reason)
        return sampled.token_id
