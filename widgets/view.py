"""``view(trace, t)``: everything that a picture of step ``t`` may show, and nothing else.

A view shows the middle of the step: the model has run, so newcomers hold their blocks and KV is
written, and whoever finishes with this step still stands in its lane (``finishing``). Totals
include the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from minibatch.record import HeldBack, StepRecord
from minibatch.trace import Trace, TraceMeta
from widgets.names import Names
from widgets.replay import Facts, Lane, Move, Passenger, Replay, Totals, history
from widgets.sentences import Narrator
from widgets.words import Words

__all__ = ["Block", "Lane", "Move", "Totals", "View", "view"]


class Block(NamedTuple):
    """A KV block at one step. ``owners``: first come first; more than one: shared."""

    owners: tuple[str, ...]
    state: str  # "free" | "cached" | "owned" | "shared" | "null"
    filled: int  # tokens with KV in it, as its first owner has it
    written: bool  # this step writes into it
    taken: bool  # gained in this step
    lost_by: str | None  # evicted in this step


@dataclass(frozen=True)
class View:
    """Step ``t`` of a trace, told."""

    t: int
    step: int
    record: StepRecord
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    swapped: tuple[str, ...]
    finishing: tuple[str, ...]  # with this step
    finished: tuple[str, ...]  # before it
    refused: tuple[str, ...]
    lanes: tuple[Lane, ...]  # the occupied ones, by slot
    moves: tuple[Move, ...]
    held_back: HeldBack | None
    tables: dict[str, tuple[int, ...]]
    cpu_tables: dict[str, tuple[int, ...]]
    cached: frozenset[int]
    totals: Totals
    clauses: tuple[str, ...]
    sentence: str
    requests: dict[str, Passenger] = field(repr=False)
    narrator: Narrator = field(repr=False)
    meta: TraceMeta = field(repr=False)
    finish_reasons: dict[str, str] = field(repr=False)
    lost: dict[str, list[int]] = field(repr=False)
    gained: dict[str, list[int]] = field(repr=False)

    @property
    def headline(self) -> str:
        return self.clauses[0]

    def place(self, request_id: str) -> str:
        """Where it is: outside, waiting, running, swapped, finished or refused."""
        if request_id in self.running or any(x.request_id == request_id for x in self.lanes):
            return "running"
        if request_id in self.refused:
            return "refused"
        request = self.requests.get(request_id)
        return request.place if request is not None else "outside"

    def lane_of(self, request_id: str) -> Lane | None:
        return next((lane for lane in self.lanes if lane.request_id == request_id), None)

    # -- blocks -------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        """The device pool, block by block."""
        size = block_size(self.meta)
        total = num_blocks(self.meta, self.tables)
        owners: list[list[str]] = [[] for _ in range(total)]
        filled = [0] * total
        written: set[int] = set()
        for name, table in self.tables.items():
            context = self.requests[name].context_len
            for index, block in enumerate(table):
                if not owners[block]:
                    filled[block] = max(0, min(size, context - index * size))
                owners[block].append(name)
            lane = self.lane_of(name)
            if lane is not None and lane.num_tokens:
                first = (context - lane.num_tokens) // size
                written.update(table[first : (context - 1) // size + 1])
        taken = {block for blocks in self.gained.values() for block in blocks}
        lost = {block: name for name, blocks in self.lost.items() for block in blocks}
        null = 0 if self.meta.policy == "unified" else -1

        def state(block: int) -> str:
            if owners[block]:
                return "shared" if len(owners[block]) > 1 else "owned"
            return "null" if block == null else "cached" if block in self.cached else "free"

        return [
            Block(
                tuple(owners[block]),
                state(block),
                filled[block],
                block in written,
                block in taken and bool(owners[block]),
                lost.get(block),
            )
            for block in range(total)
        ]

    @property
    def free_blocks(self) -> int:
        """Counted from the tables; the record's number must agree."""
        held = {block for table in self.tables.values() for block in table}
        reserved = 1 if self.meta.policy == "unified" else 0
        return num_blocks(self.meta, self.tables) - reserved - len(held)

    # -- why ----------------------------------------------------------------------------------

    def why(self, request_id: str) -> str:
        """Why this request runs, or does not, in a sentence with the numbers."""
        words, who = self.narrator.words, self.narrator.label(request_id)
        text = self._why(request_id, who)
        request = self.requests.get(request_id)
        evictions = request.preemptions if request is not None else 0
        if evictions:
            key = "evictions.one" if evictions == 1 else "evictions"
            text += words("semicolon") + words(key, n=evictions)
        return text + words("stop")

    def _why(self, name: str, who: str) -> str:
        words, request = self.narrator.words, self.requests.get(name)
        if name in self.refused:
            knob = next((m.how for m in self.moves if m.request_id == name), None)
            return words("turned_away", who=who, knob=knob or self.finish_reasons.get(name, ""))
        if request is None:
            return words("not_yet", who=who)
        blocks = words.count("block", len(self.tables.get(name, ())))
        context = words.count("token", request.context_len)
        lane = self.lane_of(name)
        if name in self.finishing:
            return words("finishing", who=who, reason=self.finish_reasons[name])
        if lane is not None and lane.phase == "padding":
            return words("padding", who=who, blocks=blocks)
        if lane is not None and lane.phase == "sits_out":
            if self.narrator.mixes_phases:
                return words("budget_out", who=who)
            return words("sits_out", who=who, context=context, blocks=blocks)
        if lane is not None:
            return words(
                "runs",
                who=who,
                phase=words(f"phase.{lane.phase}"),
                tokens=words.count("token", lane.num_tokens),
                context=context,
                blocks=blocks,
            )
        if name in self.finish_reasons:
            return words("done", who=who, reason=self.finish_reasons[name])
        if name in self.swapped:
            if self.held_back is not None and self.held_back.request_id == name:
                reason = self.narrator.held_reason(self.held_back)
                return words("swapped.head", who=who, reason=reason)
            cpu_blocks = words.count("block", len(self.cpu_tables.get(name, ())))
            return words("swapped", who=who, blocks=cpu_blocks)
        return self._why_waiting(name, who)

    def _why_waiting(self, name: str, who: str) -> str:
        words, held = self.narrator.words, self.held_back
        if any(p.request_id == name for p in self.record.preempted):
            return words("waits.evicted", who=who)
        place = self.waiting.index(name) + 1 if name in self.waiting else 0
        if held is None or place == 0:
            return words("waits.free", who=who, place=place)
        reason = self.narrator.held_reason(held)
        if held.request_id == name:  # it may stand behind somebody evicted since
            return words("waits.head" if place == 1 else "held", who=who, reason=reason)
        head = self.narrator.label(held.request_id)
        return words("waits.behind", who=who, place=place, head=head, reason=reason)

    def __repr__(self) -> str:
        return f"<View {self.sentence}>"


def view(trace: Trace, t: int, *, lang: str = "en", names: Names | None = None) -> View:
    """Step ``t`` (an index into ``trace``; negative ones count from the end).

    Raises:
        IndexError: there is no such step.
    """
    t = range(len(trace))[t]
    replay, facts = history(trace).at(trace, t)
    teller = narrator(trace.meta, Words(lang), names or Names([trace]))
    return _build(replay, facts, teller, trace.meta)


def _build(replay: Replay, facts: Facts, teller: Narrator, meta: TraceMeta) -> View:
    state, record = replay.state, facts.record
    middle = {
        "tables": {name: tuple(table) for name, table in state.tables.items()},
        "cpu_tables": {name: tuple(table) for name, table in state.cpu_tables.items()},
        "cached": frozenset(state.cached),
    }
    finishing = [lane.request_id for lane in facts.lanes if lane.request_id is not None]
    reasons = {finish.request_id: finish.reason for finish in record.finished}
    replay.end(facts)
    gone = {name for name in finishing if name in reasons}
    clauses = teller.clauses(facts)
    words = teller.words
    head = words("step", step=record.step) + words("colon")
    return View(
        t=facts.t,
        step=record.step,
        record=record,
        waiting=record.waiting,
        running=record.running,
        swapped=record.swapped,
        finishing=tuple(name for name in reasons if name in gone),
        finished=tuple(name for name in state.finished if name not in gone),
        refused=tuple(state.refused),
        lanes=tuple(sorted(facts.lanes)),
        moves=tuple(facts.moves),
        held_back=record.held_back,
        **middle,
        totals=state.totals,
        clauses=tuple(clauses),
        sentence=head + words("semicolon").join(clauses) + words("stop"),
        requests=state.requests,
        narrator=teller,
        meta=meta,
        finish_reasons={**state.finished, **state.refused},
        lost=dict(facts.block_moves.lost),
        gained=dict(facts.block_moves.gained),
    )


def narrator(meta: TraceMeta, words: Words, names: Names) -> Narrator:
    knobs = meta.knobs
    mixes = meta.policy == "unified" or bool(knobs.get("enable_chunked_prefill"))
    return Narrator(words, names.label, int(knobs.get("max_num_seqs", 0)), mixes)


def block_size(meta: TraceMeta) -> int:
    return int(meta.knobs.get("block_size", 16))


def num_blocks(meta: TraceMeta, tables: dict[str, tuple[int, ...]]) -> int:
    """Size of the device pool; of a trace without knobs, what is seen of it."""
    seen = max((max(table) + 1 for table in tables.values() if table), default=0)
    return max(int(meta.knobs.get("num_gpu_blocks") or 0), seen)
