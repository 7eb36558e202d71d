"""From records to states: what stands where, step after step.

Nothing is decided here. ``Replay.advance`` books what a record says, and keeps copies of its
books now and then, so that any earlier step is found again without starting over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

from minibatch.record import StepRecord
from minibatch.trace import Trace
from widgets.blocks import BlockMoves, Tables, apply_moves, block_moves, remove_blocks

KEYFRAME_EVERY = 32

PLACES = ("outside", "waiting", "running", "swapped", "finished", "refused")
PHASES = ("prefill", "recompute", "decode", "padding", "sits_out")


class Lane(NamedTuple):
    """A slot of the timeline at one step. ``request_id`` None: the slot is free."""

    slot: int
    request_id: str | None
    phase: str  # one of PHASES, or "free"
    num_tokens: int = 0
    context_len: int = 0
    num_padding_tokens: int = 0


class LaneRows(NamedTuple):
    """Many lanes, a list a field of ``Lane``: a step of a live run must not cost much."""

    slot: list[int]
    request_id: list[str]
    phase: list[str]
    num_tokens: list[int]
    context_len: list[int]
    num_padding_tokens: list[int]

    def tokens_of(self, *phases: str) -> int:
        if not any(phase in self.phase for phase in phases):
            return 0
        pairs = zip(self.phase, self.num_tokens, strict=True)
        return sum(tokens for phase, tokens in pairs if phase in phases)


class Move(NamedTuple):
    """A request changes its place: one of PLACES."""

    request_id: str
    source: str
    target: str
    how: str


@dataclass
class Totals:
    """Sums over all steps so far, the present one included."""

    steps: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    batched_tokens: int = 0
    padding_tokens: int = 0
    preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    arrived: int = 0
    finished: int = 0
    refused: int = 0
    idle_slots: int = 0  # slot-steps that did nothing useful while somebody waited
    ttft_sum_s: float = 0.0
    ttft_count: int = 0
    tpot_sum_s: float = 0.0
    tpot_count: int = 0

    @property
    def elapsed_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prompts not counted."""
        return self.generated_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def useful_share(self) -> float:
        """Of the tokens that went through the model, those that served somebody."""
        computed = self.batched_tokens + self.padding_tokens
        return self.batched_tokens / computed if computed else 1.0

    @property
    def mean_ttft_s(self) -> float | None:
        return self.ttft_sum_s / self.ttft_count if self.ttft_count else None

    @property
    def mean_tpot_s(self) -> float | None:
        return self.tpot_sum_s / self.tpot_count if self.tpot_count else None


@dataclass
class Passenger:
    """What is known of a live request."""

    arrival_s: float = 0.0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    place: str = "waiting"
    slot: int = -1
    context_len: int = 0
    generated: int = 0
    preemptions: int = 0
    rebuilding: bool = False  # came in again after it was evicted
    admitted_at: int = -1
    first_token_s: float | None = None
    last_token_s: float = 0.0

    def copy(self) -> Passenger:
        twin = Passenger.__new__(Passenger)
        twin.__dict__.update(self.__dict__)
        return twin


@dataclass
class State:
    """The books, once a step is over."""

    tables: Tables = field(default_factory=dict)
    cpu_tables: Tables = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)  # free blocks that still hold a prefix
    requests: dict[str, Passenger] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)  # reasons, in order
    refused: dict[str, str] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)

    def copy(self) -> State:
        return State(
            {name: list(table) for name, table in self.tables.items()},
            {name: list(table) for name, table in self.cpu_tables.items()},
            set(self.cached),
            {name: request.copy() for name, request in self.requests.items()},
            dict(self.finished),
            dict(self.refused),
            Totals(**vars(self.totals)),
        )


@dataclass
class Facts:
    """One step: its record, what it changed, and the books before (of evicted requests)."""

    t: int
    record: StepRecord
    rows: LaneRows  # the occupied lanes
    took_part: set[str]  # requests that the model ran
    moves: list[Move]
    block_moves: BlockMoves
    evicted: dict[str, tuple[int, int, bool]]  # (tokens with KV, blocks, is it the newest)
    prefix_hits: int
    num_released: int = 0  # blocks that came free once the model had run

    @cached_property
    def lanes(self) -> list[Lane]:
        """The occupied lanes, one by one."""
        return [Lane(*row) for row in zip(*self.rows, strict=True)]


class Replay:
    """Books a run record by record.

    Args:
        num_slots: rows that could run at once (``max_num_seqs``), for counting idle ones.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.state = State()
        self.t = 0
        self._running_before: tuple[str, ...] = ()

    def begin(self, record: StepRecord) -> Facts:
        """Book all that happens until the model has run; ``end`` must follow."""
        state = self.state
        if self.t == 0:
            state.totals.start_s = record.start_s
        moves: list[Move] = []
        self._arrive(record, moves)
        moves_of_blocks = block_moves(record, state.tables)
        evicted = self._evict(record, moves)
        took_part = {row.request_id for row in record.scheduled}
        for finish in record.finished:  # aborted before the step was decided
            if finish.request_id not in took_part:
                self._leave(finish.request_id, finish.reason, moves)
        self._admit(record, moves)
        self._move_blocks(record, moves_of_blocks)
        rows = self._rows(record, took_part)
        hits = sum(admission.prefix_hit_tokens for admission in record.admitted)
        facts = Facts(self.t, record, rows, took_part, moves, moves_of_blocks, evicted, hits)
        self._count(record, facts)
        return facts

    def end(self, facts: Facts) -> None:
        """The model has run: tokens arrive, whoever is done leaves."""
        record, state = facts.record, self.state
        self._receive(record)
        for finish in record.finished:
            if finish.request_id in facts.took_part:
                self._leave(finish.request_id, finish.reason, facts.moves)
        state.totals.finished += len(record.finished)
        self._release(facts)
        self._settle_cache(record)
        self._running_before = record.running
        self.t += 1

    def advance(self, record: StepRecord) -> Facts:
        facts = self.begin(record)
        self.end(facts)
        return facts

    def copy(self) -> Replay:
        twin = Replay(self.num_slots)
        twin.state, twin.t = self.state.copy(), self.t
        twin._running_before = self._running_before
        return twin

    # -- requests -----------------------------------------------------------------------------

    def _arrive(self, record: StepRecord, moves: list[Move]) -> None:
        state = self.state
        for arrival in record.arrived:
            name = arrival.request_id
            state.requests[name] = Passenger(
                arrival.arrival_s, arrival.num_prompt_tokens, arrival.max_tokens
            )
            state.finished.pop(name, None)
            moves.append(Move(name, "outside", "waiting", "arrived"))
        for refusal in record.refused:
            state.refused[refusal.request_id] = refusal.knob
            moves.append(Move(refusal.request_id, "outside", "refused", refusal.knob))
        state.totals.arrived += len(record.arrived)
        state.totals.refused += len(record.refused)

    def _evict(self, record: StepRecord, moves: list[Move]) -> dict[str, tuple[int, int, bool]]:
        state = self.state
        evicted: dict[str, tuple[int, int, bool]] = {}
        if not record.preempted:
            return evicted
        left = [name for name in self._running_before if name in state.requests]
        gone: set[str] = set()
        for preemption in record.preempted:
            name = preemption.request_id
            request = state.requests.get(name)
            if request is None:
                continue
            ages = [state.requests[other].admitted_at for other in left if other != name]
            newest = all(request.admitted_at >= age for age in ages)
            left = [other for other in left if other != name]
            gone.add(name)
            evicted[name] = (request.context_len, self._sole_blocks(name, gone), newest)
            request.preemptions += 1
            request.slot = -1
            swap = preemption.mode == "swap"
            if not swap:
                request.context_len = 0
            request.place = "swapped" if swap else "waiting"
            moves.append(Move(name, "running", request.place, preemption.mode))
        return evicted

    def _sole_blocks(self, name: str, gone: set[str]) -> int:
        """Blocks of ``name`` that nobody else holds but those who are ``gone`` as well."""
        own = set(self.state.tables.get(name, ()))
        for other, table in self.state.tables.items():
            if own and other not in gone:
                own.difference_update(table)
        return len(own)

    def _admit(self, record: StepRecord, moves: list[Move]) -> None:
        for admission in record.admitted:
            request = self.state.requests.get(admission.request_id)
            if request is None:  # its arrival was cut off
                request = self.state.requests[admission.request_id] = Passenger()
            moves.append(Move(admission.request_id, request.place, "running", admission.how))
            request.place = "running"
            request.admitted_at = self.t
            request.rebuilding = admission.how == "recomputed"

    def _leave(self, name: str, reason: str, moves: list[Move]) -> None:
        request = self.state.requests.get(name)
        place = "waiting"
        if request is not None:
            place, request.place = request.place, "finished"
            more = request.generated - 1
            if request.first_token_s is not None and more > 0:
                totals = self.state.totals
                totals.tpot_sum_s += (request.last_token_s - request.first_token_s) / more
                totals.tpot_count += 1
        self.state.finished[name] = reason
        moves.append(Move(name, place, "finished", reason))

    def _receive(self, record: StepRecord) -> None:
        """Tokens that the model gave."""
        requests, totals = self.state.requests, self.state.totals
        now = record.start_s + record.duration_s
        for request_id, tokens in record.sampled.items():
            if request_id not in requests:
                continue
            request = requests[request_id]
            count = len(tokens)
            totals.generated_tokens += count
            request.generated += count
            request.last_token_s = now
            if request.first_token_s is None:
                request.first_token_s = now
                totals.ttft_sum_s += now - request.arrival_s
                totals.ttft_count += 1

    # -- lanes and blocks ---------------------------------------------------------------------

    def _rows(self, record: StepRecord, busy: set[str]) -> LaneRows:
        """Who stands in which lane: scheduled rows, and those who run but sit this step out."""
        requests = self.state.requests
        names, slots, phases, tokens, contexts, padding = (
            map(list, zip(*record.scheduled, strict=True))
            if record.scheduled
            else ([] for _ in Lane._fields)
        )
        for name in busy.difference(requests):
            requests[name] = Passenger(place="running")
        for name, slot, phase, context_len in zip(names, slots, phases, contexts, strict=True):
            request = requests[name]
            if phase != "padding":
                request.context_len = context_len
            request.slot = slot
        if "prefill" in phases:
            for row, name in enumerate(names):
                if phases[row] == "prefill" and requests[name].rebuilding:
                    phases[row] = "recompute"
        rows = LaneRows(slots, names, phases, tokens, contexts, padding)
        if not busy.issuperset(record.running):
            for name in record.running:
                if name not in busy and name in requests:
                    request = requests[name]
                    lane = Lane(request.slot, name, "sits_out", 0, request.context_len)
                    for column, value in zip(rows, lane, strict=True):
                        column.append(value)
        return rows

    def _move_blocks(self, record: StepRecord, moves: BlockMoves) -> None:
        state = self.state
        apply_moves(state.tables, moves)
        for name, blocks in record.cpu_blocks_allocated.items():
            state.cpu_tables.setdefault(name, []).extend(blocks)
        remove_blocks(state.cpu_tables, record.cpu_blocks_freed)
        fresh = record.blocks_cached
        for blocks in moves.gained.values():
            state.cached.difference_update(blocks)
        if fresh:
            held = {block for table in state.tables.values() for block in table}
            state.cached.update(block for block in fresh if block not in held)

    def _release(self, facts: Facts) -> None:
        released = facts.block_moves.released
        if released:
            remove_blocks(self.state.tables, released)
            free = {block for table in released.values() for block in table}
            free.difference_update(*self.state.tables.values())  # others may share them
            facts.num_released = len(free)

    def _settle_cache(self, record: StepRecord) -> None:
        """What was cached by requests that finished in this step."""
        fresh = record.blocks_cached
        if fresh:
            held = {block for table in self.state.tables.values() for block in table}
            self.state.cached.update(block for block in fresh if block not in held)

    def _count(self, record: StepRecord, facts: Facts) -> None:
        totals = self.state.totals
        totals.steps += 1
        totals.end_s = record.start_s + record.duration_s
        totals.batched_tokens += record.num_batched_tokens
        totals.padding_tokens += record.num_padding_tokens
        totals.preemptions += len(record.preempted)
        totals.swapped_out_blocks += sum(record.swapped_out.values())
        totals.swapped_in_blocks += sum(record.swapped_in.values())
        totals.prefix_hit_tokens += facts.prefix_hits
        rows = facts.rows
        totals.prefill_tokens += rows.tokens_of("prefill", "recompute")
        totals.recomputed_tokens += rows.tokens_of("recompute")
        useful = len(rows.slot) - rows.num_tokens.count(0)
        if record.waiting or record.swapped:
            totals.idle_slots += max(0, self.num_slots - useful)


class History:
    """The states of a whole trace; a trace that grows is followed."""

    def __init__(self, trace: Trace) -> None:
        self.num_slots = int(trace.meta.knobs.get("max_num_seqs", 0))
        self.keyframes = [Replay(self.num_slots)]
        self.latest = Replay(self.num_slots)

    def at(self, trace: Trace, t: int) -> tuple[Replay, Facts]:
        """The replay in the middle of step ``t``: the model has run, nobody has left yet."""
        while self.latest.t < t:
            self._grow(trace)
        if self.latest.t == t:
            replay = self.latest.copy()
        else:
            replay = self.keyframes[t // KEYFRAME_EVERY].copy()
        while replay.t < t:
            replay.advance(trace[replay.t])
        return replay, replay.begin(trace[t])

    def _grow(self, trace: Trace) -> None:
        self.latest.advance(trace[self.latest.t])
        if self.latest.t % KEYFRAME_EVERY == 0:
            self.keyframes.append(self.latest.copy())


_histories: WeakKeyDictionary[Trace, History] = WeakKeyDictionary()


def history(trace: Trace) -> History:
    """The trace's states, made once."""
    found = _histories.get(trace)
    if found is None:
        found = _histories[trace] = History(trace)
    return found
