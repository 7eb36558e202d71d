"""The executor that computes nothing: a cost model says how long a step takes, a clock obeys.

The engine, its schedulers and its records are the real ones. Only time is invented, and the
tokens: whoever samples gets an id that depends on the request's seed and the position, so that a
step executed twice gives the same.
"""

from __future__ import annotations

from minibatch.clock import VirtualClock
from minibatch.cost_model import CostModel
from minibatch.executor.base import SampledToken
from minibatch.scheduler.output import SchedulerOutput

NUM_INVENTED_TOKENS = 997  # a prime: a request's ids do not repeat for as long as can be


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
        size = min(NUM_INVENTED_TOKENS, cost_model.model.vocab_size)
        self._tokens = [SampledToken(token_id) for token_id in range(size)]

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """Advance the clock by the step's cost; returns invented tokens."""
        work = self.cost_model.output_work(output, self.block_size)
        self.clock.advance(self.cost_model.cost(work).total_s)
        output.moves_made = len(output.MOVES)
        tokens, size = self._tokens, len(self._tokens)
        return {
            row.request.request_id: tokens[(row.request.seed + row.end) % size]
            for row in output.scheduled
            if row.samples
        }

    def close(self) -> None:
        """There is nothing to give back."""
