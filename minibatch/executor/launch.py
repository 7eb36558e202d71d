"""What an executor offers that can be a step ahead: it hands back tokens before they exist."""

from __future__ import annotations

from typing import Protocol

from minibatch.executor.base import Executor, SampledToken
from minibatch.scheduler.output import ScheduledRequest, SchedulerOutput

PENDING = -1  # stands for a token that the device knows already and the host does not


class Launched(Protocol):
    """A step under way on the device."""

    def wait(self) -> dict[str, SampledToken]:
        """Its tokens by request id, once they are there. May be called again."""
        ...


class Launcher(Executor, Protocol):
    """An executor whose steps can be launched one behind the other."""

    def launch(self, output: SchedulerOutput, before: Launched | None = None) -> Launched:
        """Start a step without waiting for it.

        Args:
            before: the step that was launched last, if its tokens are not known yet. A row whose
                last token id is ``PENDING`` is fed that step's token on the device.
        """
        ...


def waits_for_tokens(row: ScheduledRequest) -> bool:
    """Must the host see this row's token before the next one can be sampled, or at all?

    Penalties count the tokens so far, ``min_tokens`` bars some, and log-probabilities are a
    table for the host.
    """
    params = row.request.sampling_params
    if params.has_penalties or params.logprobs is not None:
        return True
    return row.request.num_output_tokens < params.min_tokens
