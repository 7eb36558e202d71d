"""Latency, throughput and utilisation of any recorded run: measured, simulated, or from a file.

Every definition stands here, once:

* **queue**: arrival -> start of the first step that computes some of the request.
* **prefill**: from there -> end of the step that gives its first token.
* **TTFT**, time to first token: queue + prefill. If all requests come at once, most of it is
  queueing, and says more about the load than about the engine.
* **TPOT**, time per output token: (last token - first token) / (tokens - 1). None for one token.
* **ITL**, inter-token latencies: the gaps themselves; their tail shows stalls that TPOT hides.
* **E2E**: arrival -> last token.
* **goodput**: finished requests per second that met every limit. Aborted, refused and unfinished
  ones are not good.
* **input, output, total tokens/s**: prompt tokens of the requests that got a first token, sampled
  token ids, and their sum, over the run's duration. Never one for another.
* **duration**: first arrival (or first step, if that is earlier) -> end of the last step.
* **slot utilisation**: rows that computed something for somebody / (steps x ``max_num_seqs``).
* **KV utilisation**: tokens with KV / tokens that the blocks held could hold, over time. The rest
  is reserved for nothing: internal fragmentation.
* **pool use**: blocks held / all blocks, over time.
* **MBU**, model bandwidth utilisation: bytes that the steps had to move / (busy time x the chip's
  bandwidth). **MFU**: the same of FLOPs, padding not counted.

Output tokens are counted as ids, never by tokenising text again. A token's time is the end of its
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from minibatch.cost_model import CostModel
from minibatch.record import StepRecord
from minibatch.trace import Trace


@dataclass(frozen=True)
class RequestTimes:
    """What one request lived through. Seconds; None where it did not get that far."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_scheduled_s: float | None
    token_times_s: tuple[float, ...]  # one for each output token
    finish_reason: str | None  # "stop" | "length" | "abort" | "error" | "refused" | None
    num_preemptions: int
    prefix_hit_tokens: int

    @property
    def finished(self) -> bool:
        """Came to its own end."""
        return self.finish_reason in ("stop", "length")

    @property
    def queue_s(self) -> float | None:
        if self.first_scheduled_s is None:
            return None
        return self.first_scheduled_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        if self.first_scheduled_s is None or not self.token_times_s:
            return None
        return self.token_times_s[0] - self.first_scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))

    @property
    def e2e_s(self) -> float | None:
        return self.token_times_s[-1] - self.arrival_s if self.finished else None


@dataclass(frozen=True)
class SLO:
    """Limits that a request must keep, in seconds; None: no such limit. One token has no TPOT, and
    keeps any limit on it.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, request: RequestTimes) -> bool:
        """Did it finish, within every limit?"""
        limits = (
            (self.ttft_s, request.ttft_s),
            (self.tpot_s, request.tpot_s),
            (self.e2e_s, request.e2e_s),
        )
        return request.finished and all(
            limit is None or value is None or value <= limit for limit, value in limits
        )


@dataclass
class _Open:
    """A request of which more may be told."""

    arrival_s: float
    num_prompt_tokens: int
    first_scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0


class _MemoryMeter:
    """Tokens held and tokens filled, summed over time. A shared block counts for each holder."""

    def __init__(self, num_gpu_blocks: int, block_size: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.held_token_s = self.filled_token_s = self.pool_s = 0.0
        self._blocks: dict[str, int] = {}  # in each request's table
        self._context: dict[str, int] = {}  # tokens with KV, of those who still need them

    def add(self, step: StepRecord) -> None:
        """Who is evicted frees its blocks before the step runs; who finishes, after it."""
        blocks, context = self._blocks, self._context
        for request_id, taken in step.blocks_allocated.items():
            blocks[request_id] = blocks.get(request_id, 0) + len(taken)
        for preemption in step.preempted:
            context.pop(preemption.request_id, None)
        for row in step.scheduled:
            if row.num_tokens and row.request_id in blocks:
                context[row.request_id] = row.context_len
        late: dict[str, int] = {}
        if step.blocks_freed:
            ran = {row.request_id for row in step.scheduled}
            copied = len(step.blocks_copied)  # copy-on-write drops one block and goes on
            for request_id, freed in step.blocks_freed.items():
                if request_id in ran and not (copied and len(freed) == 1):
                    late[request_id] = len(freed)
                else:
                    self._drop(request_id, len(freed))
        self.held_token_s += step.duration_s * sum(blocks.values()) * self.block_size
        self.filled_token_s += step.duration_s * sum(context.values())
        self.pool_s += step.duration_s * (1 - step.free_blocks / self.num_gpu_blocks)
        for request_id, count in late.items():
            self._drop(request_id, count)
        for finish in step.finished:
            context.pop(finish.request_id, None)

    def _drop(self, request_id: str, count: int) -> None:
        left = self._blocks.get(request_id, 0) - count
        if left > 0:
            self._blocks[request_id] = left
        else:
            self._blocks.pop(request_id, None)


class MetricsCollector:
    """Takes records one by one, and needs none of them afterwards: for runs too long to keep.

    Of requests that arrived before the first record nothing is told.

    Args:
        max_num_seqs, num_gpu_blocks, block_size: knobs of the run.
    """

    def __init__(self, max_num_seqs: int, num_gpu_blocks: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_padding_tokens = 0
        self._requests: dict[str, _Open] = {}
        self._start_s = math.inf
        self._end_s = 0.0
        self._useful_rows = 0
        self._memory = _MemoryMeter(num_gpu_blocks, block_size)

    def add(self, step: StepRecord) -> None:
        """Take the next record."""
        for arrival in step.arrived:
            self._requests[arrival.request_id] = _Open(arrival.arrival_s, arrival.num_prompt_tokens)
        for refusal in step.refused:
            self._requests[refusal.request_id] = _Open(step.start_s, 0, finish_reason="refused")
        for admission in step.admitted:
            request = self._requests.get(admission.request_id)
            if request is not None and request.first_scheduled_s is None:
                request.first_scheduled_s = step.start_s
                request.prefix_hit_tokens = admission.prefix_hit_tokens
        for preemption in step.preempted:
            if (request := self._requests.get(preemption.request_id)) is not None:
                request.num_preemptions += 1
        end_s = step.end_s
        for request_id, tokens in step.sampled.items():
            if (request := self._requests.get(request_id)) is not None:
                request.token_times_s.extend([end_s] * len(tokens))
        for finish in step.finished:
            if (request := self._requests.get(finish.request_id)) is not None:
                request.finish_reason = finish.reason
        self._start_s = min([self._start_s, step.start_s, *(a.arrival_s for a in step.arrived)])
        self._end_s = max(self._end_s, end_s)
        self.num_steps += 1
        self.busy_s += step.duration_s
        self.num_padding_tokens += step.num_padding_tokens
        self._useful_rows += sum(row.num_tokens > 0 for row in step.scheduled)
        self._memory.add(step)

    def result(self) -> RunMetrics:
        """The figures so far."""
        requests = tuple(
            RequestTimes(
                request_id,
                request.arrival_s,
                request.num_prompt_tokens,
                len(request.token_times_s),
                request.first_scheduled_s,
                tuple(request.token_times_s),
                request.finish_reason,
                request.num_preemptions,
                request.prefix_hit_tokens,
            )
            for request_id, request in self._requests.items()
        )
        return RunMetrics(
            requests=requests,
            duration_s=max(0.0, self._end_s - self._start_s),
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            num_padding_tokens=self.num_padding_tokens,
            slot_utilization=_ratio(self._useful_rows, self.num_steps * self.max_num_seqs),
            kv_utilization=_ratio(self._memory.filled_token_s, self._memory.held_token_s),
            pool_use=_ratio(self._memory.pool_s, self.busy_s),
        )


@dataclass(frozen=True)
class RunMetrics:
    """A run in figures. Shares are between 0 and 1."""

    requests: tuple[RequestTimes, ...]
    duration_s: float
    busy_s: float
    num_steps: int
    num_padding_tokens: int
    slot_utilization: float
    kv_utilization: float
    pool_use: float

    @property
    def num_finished(self) -> int:
        return sum(request.finished for request in self.requests)

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests)

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of the requests that got a first token."""
        return sum(r.num_prompt_tokens for r in self.requests if r.token_times_s)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def input_tokens_per_s(self) -> float:
        return _ratio(self.num_input_tokens, self.duration_s)

    @property
    def output_tokens_per_s(self) -> float:
        return _ratio(self.num_output_tokens, self.duration_s)

    @property
    def total_tokens_per_s(self) -> float:
        return self.input_tokens_per_s + self.output_tokens_per_s

    @property
    def requests_per_s(self) -> float:
        return _ratio(self.num_finished, self.duration_s)

    @property
    def open_loop(self) -> bool:
        """Do requests come at times of their own (and not all at once)?"""
        accepted = [r for r in self.requests if r.finish_reason != "refused"]
        return len({request.arrival_s for request in accepted}) > 1

    def goodput(self, slo: SLO) -> float:
        """Finished requests a second that met every limit."""
        return _ratio(sum(map(slo.met_by, self.requests)), self.duration_s)

    def values(self, name: str) -> list[float]:
        """One figure of every request that has it: ``queue_s``, ``prefill_s``, ``ttft_s``,
        ``tpot_s``, ``e2e_s``; or all the gaps there are: ``itl_s``.
        """
        found: list[float] = []
        for request in self.requests:
            value = getattr(request, name)
            if isinstance(value, tuple):
                found.extend(value)
            elif value is not None:
                found.append(value)
        return found

    def percentile(self, name: str, percent: float) -> float:
        """That percentile of ``values(name)``; NaN if there are none."""
        return percentile(self.values(name), percent)

    def mean(self, name: str) -> float:
        """The mean over requests (of gaps, for ``itl_s``); NaN if there are none."""
        values = self.values(name)
        return sum(values) / len(values) if values else math.nan


def measure(trace: Trace) -> RunMetrics:
    """The figures of a trace. Its knobs say how many slots and blocks there were; where a trace
    does not name them, its peaks stand in.
    """
    knobs = trace.meta.knobs
    peak_rows = max((len(step.scheduled) for step in trace), default=1)
    peak_free = max((step.free_blocks for step in trace), default=1)
    collector = MetricsCollector(
        max_num_seqs=knobs.get("max_num_seqs", max(peak_rows, 1)),
        num_gpu_blocks=knobs.get("num_gpu_blocks", max(peak_free, 1)),
        block_size=knobs.get("block_size", 16),
    )
    for step in trace:
        collector.add(step)
    return collector.result()


@dataclass(frozen=True)
class ChipUse:
    """How much of a chip's ceilings a run reached: ``mbu`` of its bandwidth, ``mfu`` of its
    FLOP/s, and the share of busy time that each bound took.
    """

    mbu: float
    mfu: float
    bound_share: dict[str, float]


def chip_use(trace: Trace, cost_model: CostModel) -> ChipUse:
    """Bytes and FLOPs of a trace against the *chip's* figures (efficiencies play no part).

    ``bound_share`` says by which of the cost model's terms each step was bound; a measured step
    counts with the time that it really took.
    """
    block_size = trace.meta.knobs.get("block_size", 16)
    moved = computed = busy_s = 0.0
    shares: dict[str, float] = {}
    for step in trace:
        work = cost_model.record_work(step, block_size)
        moved += work.weight_bytes + work.kv_bytes
        computed += cost_model.useful_flops(step)
        busy_s += step.duration_s
        bound = cost_model.cost(work).bound
        shares[bound] = shares.get(bound, 0.0) + step.duration_s
    chip = cost_model.hardware
    return ChipUse(
        mbu=_ratio(moved, busy_s * chip.memory_bandwidth),
        mfu=_ratio(computed, busy_s * chip.peak_flops(cost_model.dtype)),
        bound_share={name: _ratio(seconds, busy_s) for name, seconds in sorted(shares.items())},
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between neighbours, as numpy's default; NaN for no values.

    Raises:
        ValueError: ``percent`` is outside [0, 100].
    """
    if not 0.0 <= percent <= 100.0:
        raise ValueError(f"percent={percent!r}: expected a number in [0, 100].")
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
