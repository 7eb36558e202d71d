"""What a caller gets back, under vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field

from minibatch.sampling_params import Logprob


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock (vLLM's names).

    A time is that of the *end* of the step which did it, but for ``first_scheduled_time``.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until a step first computed some of it."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from then until its first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: queue and prefill."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        span = _between(self.first_token_time, self.last_token_time)
        if span is None or self.num_generated_tokens < 2:
            return None
        return span / (self.num_generated_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end."""
        return _between(self.arrival_time, self.finished_time)


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    ``finish_reason`` is ``stop``, ``length``, ``abort``, ``error`` or None (not yet);
    ``stop_reason`` the stop string or stop token id that hit. While streaming, ``text`` and
    ``token_ids`` hold only what is new.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its ``n`` continuations. ``num_cached_tokens`` came from the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
