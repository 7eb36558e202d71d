"""The one door between scheduling and computing."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from minibatch.sampling_params import Logprob
from minibatch.scheduler.output import SchedulerOutput


class SampledToken(NamedTuple):
    """The next token of one row, and what it was drawn from, if asked for.

    No ``token_id``: none could be drawn (NaN logits); the engine ends that request alone.
    """

    token_id: int | None
    logprobs: dict[int, Logprob] | None = None


class Executor(Protocol):
    """Runs one step.

    ``execute`` may be interrupted at any point and called again with the same output; it must
    then come to the same result. Moves of blocks are made once each (``output.moves_made``),
    computing a token's KV again changes nothing, and a sampler's draw depends on the request's
    seed and position alone.
    """

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """Make the block moves, compute the scheduled tokens, sample where the last known token
        was computed. Returns the next token by request id.
        """
        ...

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        ...
