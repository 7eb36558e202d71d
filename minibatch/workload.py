"""What to serve: request lengths and arrival times, drawn from a seed or written down.

A workload says how long each prompt and each answer is and when the request comes; it holds no
text. Answers have the length that the workload says (``ignore_eos``), so that two policies serve
exactly the same work. Which prompts begin alike is said by *segments*: equal keys, equal tokens.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from minibatch.config import check_count, check_number
from minibatch.errors import ConfigError

FIRST_TOKEN_ID = 3  # invented prompts leave alone the ids that commonly are pad, begin and end


class Segment(NamedTuple):
    """A piece of a prompt. Pieces with one key hold the same tokens, as far as they reach.

    ``token_ids`` are the tokens, where they are known (a tokenised text); else they are drawn
    from the key.
    """

    key: int
    length: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RequestSpec:
    """One request: when it comes, how much it brings, how much it wants.

    Args:
        request_id: unique within the workload.
        arrival_s: seconds from the start of the run.
        prompt_len: tokens in.
        output_len: tokens out.
        segments: what the prompt begins with; the rest of it is the request's own.

    Raises:
        ConfigError: a length below 1, a negative time, segments longer than the prompt.
    """

    request_id: str
    arrival_s: float
    prompt_len: int
    output_len: int
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        check_count("prompt_len", self.prompt_len)
        check_count("output_len", self.output_len)
        check_number("arrival_s", self.arrival_s, 0.0, math.inf)
        covered = sum(segment.length for segment in self.segments)
        if covered > self.prompt_len:
            raise ConfigError(
                f"segments of {covered} tokens in a prompt of prompt_len={self.prompt_len}."
            )

    def prompt_token_ids(self, vocab_size: int) -> list[int]:
        """The prompt. The same for the same spec, in any run and on any machine."""
        tokens: list[int] = []
        for segment in self.segments:
            if segment.token_ids is not None:
                tokens += segment.token_ids
            else:
                tokens += _draw_tokens(f"shared {segment.key}", segment.length, vocab_size)
        own = self.prompt_len - len(tokens)
        if own:
            tokens += _draw_tokens(f"own {self.request_id}", own, vocab_size)
        return tokens


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, where they are from, and what was done to them."""

    requests: tuple[RequestSpec, ...]
    name: str = "workload"
    note: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.requests)

    def scaled(self, tokens: float = 1.0, time: float = 1.0) -> Workload:
        """All lengths times ``tokens`` (at least 1 token stays), all arrival times times ``time``.

        For serving a trace of a large model with a small one. What began alike still does.
        """
        requests = tuple(_scale(request, tokens, time) for request in self.requests)
        return self._changed(requests, f"tokens x {tokens:g}, times x {time:g}")

    def fitting(self, max_model_len: int) -> Workload:
        """Only the requests whose prompt and answer fit in ``max_model_len`` tokens."""
        kept = tuple(r for r in self.requests if r.prompt_len + r.output_len <= max_model_len)
        dropped = len(self) - len(kept)
        return self._changed(kept, f"{dropped} of more than {max_model_len} tokens left out")

    def first(self, num_requests: int) -> Workload:
        """The first ``num_requests`` only."""
        return self._changed(self.requests[:num_requests], f"the first {num_requests}")

    def describe(self) -> str:
        """Count, token totals and time span, in a line."""
        prompt = sum(request.prompt_len for request in self.requests)
        output = sum(request.output_len for request in self.requests)
        span = max((request.arrival_s for request in self.requests), default=0.0)
        note = f" ({self.note})" if self.note else ""
        return (
            f"{self.name}{note}: {len(self)} requests, {prompt} prompt and {output} output "
            f"tokens, arriving over {span:.6g} s"
        )

    def _changed(self, requests: tuple[RequestSpec, ...], note: str) -> Workload:
        return replace(self, requests=requests, note=f"{self.note}; {note}".lstrip("; "))


# -- lengths: (random numbers, index of the request) -> tokens -----------------------------------

Lengths = Callable[[random.Random, int], int]


def fixed(length: int) -> Lengths:
    """Everybody the same."""
    check_count("length", length)
    return lambda rng, index: length


def uniform(low: int, high: int) -> Lengths:
    """Any length from ``low`` to ``high``, both included, equally likely."""
    check_count("low", low)
    check_count("high", high, least=low)
    return lambda rng, index: rng.randint(low, high)


def lognormal(median: float, sigma: float, low: int = 1, high: int | None = None) -> Lengths:
    """Many short, few very long: the usual shape of real answers.

    Half are below ``median``; ``sigma`` is the spread of the logarithm (0: all equal; 1: a
    sixth are above 2.7 medians). Cut to ``low`` .. ``high``.
    """
    check_number("median", median, 1.0, math.inf)
    check_number("sigma", sigma, 0.0, math.inf)
    top = math.inf if high is None else high

    def draw(rng: random.Random, index: int) -> int:
        return int(min(max(round(rng.lognormvariate(math.log(median), sigma)), low), top))

    return draw


def listed(lengths: Sequence[int]) -> Lengths:
    """Those lengths, in that order, and from the front again when they run out."""
    if not lengths:
        raise ConfigError("listed lengths: the list is empty.")
    for length in lengths:
        check_count("length", length)
    return lambda rng, index: lengths[index % len(lengths)]


# -- arrivals: (random numbers, number of requests) -> seconds, ascending ------------------------

Arrivals = Callable[[random.Random, int], list[float]]


def all_at_once() -> Arrivals:
    """Everybody at 0: an offline batch. Time to first token is then mostly queueing."""
    return lambda rng, count: [0.0] * count


def poisson(rate: float, *, rescale: bool = False) -> Arrivals:
    """Independent users, ``rate`` requests a second on average (an open loop)."""
    return gamma(rate, 1.0, rescale=rescale)


def gamma(rate: float, burstiness: float, *, rescale: bool = False) -> Arrivals:
    """Gamma-distributed gaps, as vLLM's ``--burstiness``: 1 is Poisson, below 1 arrivals come in
    bursts, above 1 they are steadier.

    Args:
        rescale: stretch the gaps so that the last request comes at exactly count / rate, as
            vLLM's benchmark does. It takes the luck out of the mean rate, and with it a part of
            what makes the arrivals random.
    """
    check_number("rate", rate, 0.0, math.inf)
    check_number("burstiness", burstiness, 0.0, math.inf)
    if rate == 0.0 or burstiness == 0.0:
        raise ConfigError("rate and burstiness must be above 0.")

    def draw(rng: random.Random, count: int) -> list[float]:
        times: list[float] = []
        now = 0.0
        for _ in range(count):
            now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
            times.append(now)
        if rescale and now > 0.0:
            times = [time * (count / rate) / now for time in times]
        return times

    return draw


def generate(
    num_requests: int,
    prompt_lens: Lengths | int,
    output_lens: Lengths | int,
    arrivals: Arrivals | None = None,
    *,
    shared_prefix_len: int = 0,
    num_prefixes: int = 1,
    seed: int = 0,
    name: str = "generated",
) -> Workload:
    """Draw a workload. A plain number is a fixed length.

    Args:
        num_requests: how many, called ``r0``, ``r1``...
        prompt_lens: tokens of each prompt, after the shared prefix.
        output_lens: tokens of each answer.
        arrivals: by default all at once.
        shared_prefix_len: tokens that prompts begin with and share (a system prompt).
        num_prefixes: how many different such prefixes; each request has one of them at random.
        seed: prompts, answers, arrivals and prefixes are drawn independently from it, so that
            changing one leaves the others as they are.
    """
    check_count("num_requests", num_requests)
    check_count("shared_prefix_len", shared_prefix_len, least=0)
    check_count("num_prefixes", num_prefixes)
    draw_prompt = fixed(prompt_lens) if isinstance(prompt_lens, int) else prompt_lens
    draw_output = fixed(output_lens) if isinstance(output_lens, int) else output_lens
    streams = {
        purpose: random.Random(f"{purpose} {seed}")
        for purpose in ("prompt", "output", "arrival", "prefix")
    }
    times = (arrivals or all_at_once())(streams["arrival"], num_requests)
    requests: list[RequestSpec] = []
    for index, time in enumerate(times):
        prefix: tuple[Segment, ...] = ()
        if shared_prefix_len:
            prefix = (Segment(streams["prefix"].randrange(num_prefixes), shared_prefix_len),)
        own = draw_prompt(streams["prompt"], index)
        output = draw_output(streams["output"], index)
        requests.append(RequestSpec(f"r{index}", time, shared_prefix_len + own, output, prefix))
    return Workload(tuple(requests), name, f"seed {seed}")


def as_workload(requests: Workload | Iterable[RequestSpec]) -> Workload:
    """A workload, in order of arrival.

    Raises:
        ConfigError: two requests have the same id.
    """
    if not isinstance(requests, Workload):
        requests = Workload(tuple(requests))
    ids = {request.request_id for request in requests}
    if len(ids) < len(requests):
        raise ConfigError(f"{len(requests) - len(ids)} request ids are used twice.")
    ordered = tuple(sorted(requests, key=lambda request: request.arrival_s))
    return replace(requests, requests=ordered)


def spec_to_row(request: RequestSpec) -> dict[str, Any]:
    """Plain values, ready for JSON; no segments, no ``segments``."""
    row: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_s": request.arrival_s,
        "prompt_len": request.prompt_len,
        "output_len": request.output_len,
    }
    if request.segments:
        row["segments"] = [
            [s.key, s.length] if s.token_ids is None else [s.key, s.length, list(s.token_ids)]
            for s in request.segments
        ]
    return row


def spec_from_row(row: dict[str, Any]) -> RequestSpec:
    """Inverse of ``spec_to_row``.

    Raises:
        ConfigError: a field is missing, or has an impossible value.
    """
    try:
        segments = tuple(
            Segment(key, length, tuple(tokens[0]) if tokens else None)
            for key, length, *tokens in row.get("segments", ())
        )
        return RequestSpec(
            str(row["request_id"]),
            row["arrival_s"],
            row["prompt_len"],
            row["output_len"],
            segments,
        )
    except KeyError as error:
        raise ConfigError(f"the field {error} is missing.") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _scale(request: RequestSpec, tokens: float, time: float) -> RequestSpec:
    """Cut the prompt where the scaled ends of its segments lie: common beginnings stay common."""
    prompt_len = max(1, round(request.prompt_len * tokens))
    segments: list[Segment] = []
    end = scaled_end = 0
    for key, length, token_ids in request.segments:
        end += length
        new_end = min(round(end * tokens), prompt_len)
        new_length = new_end - scaled_end
        scaled_end = new_end
        if token_ids is not None:
            if new_length > length:
                raise ConfigError("a prompt of known tokens cannot be scaled up.")
            token_ids = token_ids[:new_length]
        if new_length:
            segments.append(Segment(key, new_length, token_ids))
    return RequestSpec(
        request.request_id,
        request.arrival_s * time,
        prompt_len,
        max(1, round(request.output_len * tokens)),
        tuple(segments),
    )


def _draw_tokens(key: str, length: int, vocab_size: int) -> list[int]:
    """``length`` token ids that depend on ``key`` alone; a shorter draw is a beginning of a longer
    one.
    """
    span = vocab_size - FIRST_TOKEN_ID
    words = array("I", random.Random(key).randbytes(4 * length))
    return [FIRST_TOKEN_ID + word % span for word in words]
