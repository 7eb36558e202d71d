"""The executor that computes nothing: a cost model says how long a step takes, a clock obeys.

The engine, its schedulers and its records are the real ones. Only time is invented, and the
tokens: whoever samples gets an id that depends on the request and the position, so that a step
executed twice gives the same, and two requests hardly ever get the same text.
"""

from __future__ import annotations

from zlib import crc32

from minibatch.clock import VirtualClock
from minibatch.cost_model import CostModel
from minibatch.executor.base import SampledToken
from minibatch.request import Request
from minibatch.scheduler.output import SchedulerOutput


class SimulatedExecutor:
    """See ``Executor``.

    Args:
        cost_model: seconds a step.
        clock: the engine's; each executed step moves it on.
        block_size: tokens a block, for the size of swaps.
    """

    def __init__(self, cost_model: CostModel, clock: VirtualClock, block_size: int) -> None:
        self.cost_model = cost_model
        self.clock = clock
        self.block_size = block_size

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """Advance the clock by the step's cost; returns invented tokens."""
        work = self.cost_model.output_work(output, self.block_size)
        self.clock.advance(self.cost_model.cost(work).total_s)
        output.moves_made = len(output.MOVES)
        return {
            row.request.request_id: SampledToken(self._token(row.request))
            for row in output.scheduled
            if row.samples
        }

    def close(self) -> None:
        """There is nothing to give back."""

    def _token(self, request: Request) -> int:
        seed = crc32(request.request_id.encode())
        return (seed + 7919 * len(request.token_ids)) % self.cost_model.model.vocab_size
