"""One frozen record an iteration: all that widgets, the CLI, metrics and tests ever read.

The field names are part of the public trace format (version 1, see ``trace.py``). Request ids
stand in the order of the queue or batch that they come from; times are seconds on the engine's
clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Why the head of a queue stayed out.
HELD_BACK_REASONS = (
    "no_blocks",  # the blocks that it needs are not free
    "watermark",  # they are free, but then too few would be left
    "no_slot",  # max_num_seqs sequences run already
    "no_token_budget",  # max_num_batched_tokens is spent
    "preempted_this_step",  # a step that evicts admits nobody
    "batch_not_drained",  # static: the batch is kept until its longest member ends
    "batch_filling",  # static with max_wait: more requests may come
    "slot_released_late",  # dynamic: the slot was freed in the last iteration
    "swapped_first",  # continuous: evicted requests return before new ones enter
)


class Scheduled(NamedTuple):
    """One request's part of the step.

    ``num_tokens`` tokens were computed for it, on top of ``context_len - num_tokens`` computed
    before. ``num_padding_tokens`` went through the model beside them and served nobody.
    """

    request_id: str
    slot: int  # lane of the timeline
    phase: str  # "prefill" | "decode" | "padding"
    num_tokens: int
    context_len: int  # tokens with KV once the step has run
    num_padding_tokens: int = 0


class Arrival(NamedTuple):
    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int


class Admission(NamedTuple):
    request_id: str
    how: str  # "new" | "recomputed" | "swapped_in" | "forked"
    prefix_hit_tokens: int = 0


class HeldBack(NamedTuple):
    """The head of the queue that stayed out, and the numbers: ``needed`` of what ``available``."""

    request_id: str
    reason: str
    needed: int = 0
    available: int = 0


class Preemption(NamedTuple):
    """``victim_of`` needed ``needed`` blocks when ``free`` were free (None: asked for by hand)."""

    request_id: str
    mode: str  # "swap" | "recompute"
    victim_of: str | None
    needed: int
    free: int


class Finish(NamedTuple):
    request_id: str
    reason: str  # "stop" | "length" | "abort"


class Refusal(NamedTuple):
    """A request that was turned away at the door because it could never run."""

    request_id: str
    reason: str
    needed: int
    available: int
    knob: str


@dataclass(frozen=True)
class StepRecord:
    """What one iteration decided and did.

    Queues and free blocks are those right after ``schedule()``, before the step's finished
    requests leave. ``free_blocks`` counts every block that nobody holds; ``cached_blocks`` says
    how many of these still hold a findable prefix. ``num_batched_tokens`` counts useful tokens,
    ``num_padding_tokens`` those computed for nobody; together they are what the model saw.

    Block tables can be told from records alone: a request's table is what was allocated to it, in
    order, less the first entry of each block freed; the finished give theirs back at the end.
    """

    step: int
    start_s: float = 0.0
    duration_s: float = 0.0
    schedule_s: float = 0.0
    predicted_s: float | None = None
    arrived: tuple[Arrival, ...] = ()
    admitted: tuple[Admission, ...] = ()
    held_back: HeldBack | None = None
    scheduled: tuple[Scheduled, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    swapped_in: dict[str, int] = field(default_factory=dict)  # blocks moved, by request
    swapped_out: dict[str, int] = field(default_factory=dict)
    finished: tuple[Finish, ...] = ()
    refused: tuple[Refusal, ...] = ()
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    num_batched_tokens: int = 0
    num_padding_tokens: int = 0
    blocks_allocated: dict[str, list[int]] = field(default_factory=dict)
    blocks_freed: dict[str, list[int]] = field(default_factory=dict)
    blocks_copied: tuple[tuple[int, int], ...] = ()  # copy-on-write (from, to)
    blocks_cached: tuple[int, ...] = ()  # became free but findable, and still were at the end
    cpu_blocks_allocated: dict[str, list[int]] = field(default_factory=dict)
    cpu_blocks_freed: dict[str, list[int]] = field(default_factory=dict)
    free_blocks: int = 0
    free_cpu_blocks: int = 0
    cached_blocks: int = 0
    sampled: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_generated_tokens(self) -> int:
        return sum(map(len, self.sampled.values()))

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def rows(self, phase: str) -> list[Scheduled]:
        """The scheduled rows of one phase, in batch order."""
        return [row for row in self.scheduled if row.phase == phase]

    def __str__(self) -> str:
        return one_line(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, ready for JSON; empty fields are left out."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name in _ROW_TYPES:
                value = [row._asdict() for row in value]
            elif isinstance(value, HeldBack):
                value = value._asdict()
            if value not in (None, [], (), {}):
                out[name] = value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepRecord:
        """Inverse of ``to_dict``; fields of later versions are passed over."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name, row_type in _ROW_TYPES.items():
            if name in known:
                known[name] = tuple(_build(row_type, row) for row in known[name])
        if known.get("held_back"):
            known["held_back"] = _build(HeldBack, known["held_back"])
        for name in ("waiting", "running", "swapped"):
            known[name] = tuple(known.get(name, ()))
        known["blocks_cached"] = tuple(known.get("blocks_cached", ()))
        known["blocks_copied"] = tuple(map(tuple, known.get("blocks_copied", ())))
        return cls(**known)


_ROW_TYPES: dict[str, Any] = {
    "arrived": Arrival,
    "admitted": Admission,
    "scheduled": Scheduled,
    "preempted": Preemption,
    "finished": Finish,
    "refused": Refusal,
}


def _build(row_type: Any, row: dict[str, Any]) -> Any:
    return row_type(**{name: row[name] for name in row_type._fields if name in row})


def one_line(record: StepRecord, total_blocks: int | None = None) -> str:
    """The step in a line, for a terminal.

    ``it  17 | decode 6 tok | run A B D E F G | wait H(+3) | swap C | free 3/64 | 412 tok/s``
    """
    prefill = sum(row.num_tokens for row in record.rows("prefill"))
    decode = sum(row.num_tokens for row in record.rows("decode"))
    work = [f"{name} {n} tok" for name, n in (("prefill", prefill), ("decode", decode)) if n]
    if record.num_padding_tokens:
        work.append(f"padding {record.num_padding_tokens} tok")
    parts = [f"it {record.step:3d}", " + ".join(work) or "idle"]
    parts.append("run " + _names([row.request_id for row in record.scheduled], 8))
    if record.waiting:
        parts.append("wait " + _names(record.waiting, 1))
    if record.swapped:
        parts.append("swap " + _names(record.swapped, 4))
    parts += [
        f"evict {p.request_id} ({p.mode}, " + (f"for {p.victim_of})" if p.victim_of else "by hand)")
        for p in record.preempted
    ]
    if record.finished:
        parts.append("done " + _names([f.request_id for f in record.finished], 6))
    parts += [f"refused {r.request_id}: {r.reason}" for r in record.refused]
    total = "" if total_blocks is None else f"/{total_blocks}"
    parts.append(f"free {record.free_blocks}{total}")
    if record.duration_s > 0:
        parts.append(f"{record.num_generated_tokens / record.duration_s:.0f} tok/s")
    return " | ".join(parts)


def _names(ids: list[str] | tuple[str, ...], most: int) -> str:
    shown = " ".join(ids[:most])
    return (shown or "-") + (f"(+{len(ids) - most})" if len(ids) > most else "")
