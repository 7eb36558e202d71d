"""Records -> columns: what the browser gets.

One entry a step, or a run of entries a step (lanes, queues, moves, block changes) with the run's
length in a ``*_n`` column. Nothing is left for the browser to decide: phases, sentences and
totals are told; it only applies block changes, and looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minibatch.record import HELD_BACK_REASONS, StepRecord
from minibatch.trace import Trace, TraceMeta
from widgets.codec import Column, pack, squeeze, unpack
from widgets.names import Names
from widgets.replay import PHASES, PLACES, Facts, Replay
from widgets.view import block_size, narrator
from widgets.words import Words

SCHEMA = 1
MOST_WAITING = 256  # of a longer queue only the front is sent, and the count

# What happened to a block. GAINED, then each REPLACED_OLD with its REPLACED_NEW, then LOST: as the
# model runs. RELEASED after it.
GAINED, REPLACED_OLD, REPLACED_NEW, LOST, RELEASED, CACHED, CPU_GAINED, CPU_LOST = range(8)

STEP_COLUMNS = {
    "step": "i4",
    "start_s": "f8",
    "duration_s": "f8",
    "predicted_s": "f8",
    "tokens": "i4",
    "padding": "i4",
    "generated": "i4",
    "free": "i4",
    "free_cpu": "i4",
    "cached": "i4",
    "waiting_count": "i4",
    "swapped_count": "i4",
    "running_count": "i4",
    "held_request": "i4",
    "held_reason": "i4",
    "held_needed": "i4",
    "held_available": "i4",
    "idle": "i4",
    "total_generated": "i4",
    "total_batched": "i4",
    "total_padding": "i4",
    "total_preemptions": "i4",
    "total_finished": "i4",
    "total_idle": "i4",
    "total_recomputed": "i4",
    "elapsed_s": "f8",
    "ttft_s": "f8",
    "tpot_s": "f8",
}
RUN_COLUMNS = {
    "lane": ("request", "slot", "phase", "new", "context", "padding"),
    "waiting": ("request",),
    "swapped": ("request",),
    "move": ("request", "source", "target", "how"),
    "evict": ("request", "mode", "culprit", "needed", "free"),
    "op": ("kind", "request", "block"),
}
_NARROW = {
    "lane_slot": "u2",
    "lane_phase": "u1",
    "move_source": "u1",
    "move_target": "u1",
    "op_kind": "u1",
}
_DTYPES = {f"{run}_{part}": "i4" for run, parts in RUN_COLUMNS.items() for part in parts} | _NARROW


class ColumnWriter:
    """Turns records into packed chunks, in order. ``take`` empties it; what comes next continues.

    Args:
        meta: of the run.
        names: labels, shared by pictures that stand side by side.
        lang: of the sentences.
    """

    def __init__(self, meta: TraceMeta, names: Names, lang: str = "en") -> None:
        self.meta = meta
        self.names = names
        self.words = Words(lang)
        self.replay = Replay(int(meta.knobs.get("max_num_seqs", 0)))
        self.narrator = narrator(meta, self.words, names)
        self.num_steps = 0
        self._texts: dict[str, int] = {}
        self._known: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._steps: list[tuple] = []
        self._runs: dict[str, dict[str, list[int]]] = {
            name: {part: [] for part in parts} for name, parts in RUN_COLUMNS.items()
        }
        self._counts: dict[str, list[int]] = {name: [] for name in RUN_COLUMNS}
        self._clauses: list[list[str]] = []
        self._requests: list[list[Any]] = []
        self._new_texts: list[str] = []

    def add(self, record: StepRecord) -> None:
        """One more step."""
        self._meet(record)
        idle_before = self.replay.state.totals.idle_slots
        facts = self.replay.advance(record)
        self._add_runs(facts)
        self._add_step(facts, idle_before)
        self._clauses.append(self.narrator.clauses(facts))
        self.num_steps += 1

    @property
    def pending(self) -> int:
        """Steps that ``take`` would hand over."""
        return len(self._steps)

    def take(self) -> bytes:
        """The steps since the last call, packed."""
        columns: dict[str, Column] = {}
        steps = list(zip(*self._steps, strict=True)) or [()] * len(STEP_COLUMNS)
        for (name, dtype), values in zip(STEP_COLUMNS.items(), steps, strict=True):
            columns[name] = dtype, values
        for name, parts in self._runs.items():
            columns[f"{name}_n"] = "i4", self._counts[name]
            for part, entries in parts.items():
                name_of_column = f"{name}_{part}"
                columns[name_of_column] = _DTYPES[name_of_column], entries
        header = {
            "steps": len(self._steps),
            "clauses": self._clauses,
            "requests": self._requests,
            "texts": self._new_texts,
        }
        data = pack(header, columns)
        self._clear()
        return data

    # -- parts --------------------------------------------------------------------------------

    def _meet(self, record: StepRecord) -> None:
        """Send what is known of a request once, before it is spoken of."""
        for arrival in record.arrived:
            self._introduce(
                arrival.request_id, arrival.num_prompt_tokens, arrival.max_tokens, arrival.arrival_s
            )
        for refusal in record.refused:
            self._introduce(refusal.request_id, 0, 0, record.start_s)

    def _introduce(self, name: str, prompt: int, most: int, arrival_s: float) -> int:
        number = self.names.number(name)
        if name not in self._known:
            self._known.add(name)
            label = self.names.labels[number]
            self._requests.append([number, name, label, prompt, most, arrival_s])
        return number

    def _number(self, name: str) -> int:
        if name in self._known:
            return self.names.index[name]
        return self._introduce(name, 0, 0, 0.0)  # its arrival was cut off

    def _text(self, text: str) -> int:
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts)
            self._new_texts.append(text)
        return number

    def _add_runs(self, facts: Facts) -> None:
        record, runs, counts, index = facts.record, self._runs, self._counts, self.names.index
        rows, lanes = facts.rows, runs["lane"]
        if not self._known.issuperset(rows.request_id):
            for name in rows.request_id:
                self._number(name)
        lanes["request"] += map(index.__getitem__, rows.request_id)
        lanes["slot"] += rows.slot
        lanes["phase"] += map(_PHASE_CODES.__getitem__, rows.phase)
        lanes["new"] += rows.num_tokens
        lanes["context"] += rows.context_len
        lanes["padding"] += rows.num_padding_tokens
        counts["lane"].append(len(rows.slot))
        for key, queue in (("waiting", record.waiting[:MOST_WAITING]), ("swapped", record.swapped)):
            runs[key]["request"] += [self._number(name) for name in queue]
            counts[key].append(len(queue))
        for move in facts.moves:
            source, target = PLACES.index(move.source), PLACES.index(move.target)
            how = self._text(move.how)
            self._append("move", self._number(move.request_id), source, target, how)
        counts["move"].append(len(facts.moves))
        for p in record.preempted:
            culprit = -1 if p.victim_of is None else self._number(p.victim_of)
            mode = self._text(p.mode)
            self._append("evict", self._number(p.request_id), mode, culprit, p.needed, p.free)
        counts["evict"].append(len(record.preempted))
        self._add_ops(facts)

    def _append(self, run: str, *entry: int) -> None:
        for column, value in zip(self._runs[run].values(), entry, strict=True):
            column.append(value)

    def _add_ops(self, facts: Facts) -> None:
        record, moves = facts.record, facts.block_moves
        kinds, requests, touched = self._runs["op"].values()
        before = len(kinds)
        for kind, tables in (
            (GAINED, moves.gained),
            (LOST, moves.lost),
            (RELEASED, moves.released),
            (CPU_GAINED, record.cpu_blocks_allocated),
            (CPU_LOST, record.cpu_blocks_freed),
        ):
            for name, blocks in tables.items():
                kinds += [kind] * len(blocks)
                requests += [self._number(name)] * len(blocks)
                touched += blocks
            if kind == GAINED:
                for name, old, new in moves.replaced:
                    kinds += (REPLACED_OLD, REPLACED_NEW)
                    requests += [self._number(name)] * 2
                    touched += (old, new)
        cached = record.blocks_cached
        kinds += [CACHED] * len(cached)
        requests += [-1] * len(cached)
        touched += cached
        self._counts["op"].append(len(kinds) - before)

    def _add_step(self, facts: Facts, idle_before: int) -> None:
        record, totals, held = facts.record, self.replay.state.totals, facts.record.held_back
        nan = float("nan")
        predicted, ttft, tpot = record.predicted_s, totals.mean_ttft_s, totals.mean_tpot_s
        reason = -1
        if held is not None:
            reason = (
                HELD_BACK_REASONS.index(held.reason) if held.reason in HELD_BACK_REASONS else -1
            )
        self._steps.append(
            (
                record.step,
                record.start_s,
                record.duration_s,
                nan if predicted is None else predicted,
                record.num_batched_tokens,
                record.num_padding_tokens,
                record.num_generated_tokens,
                record.free_blocks,
                record.free_cpu_blocks,
                record.cached_blocks,
                len(record.waiting),
                len(record.swapped),
                len(record.running),
                -1 if held is None else self._number(held.request_id),
                reason,
                0 if held is None else held.needed,
                0 if held is None else held.available,
                totals.idle_slots - idle_before,
                totals.generated_tokens,
                totals.batched_tokens,
                totals.padding_tokens,
                totals.preemptions,
                totals.finished,
                totals.idle_slots,
                totals.recomputed_tokens,
                totals.elapsed_s,
                nan if ttft is None else ttft,
                nan if tpot is None else tpot,
            )
        )


_PHASE_CODES = {phase: code for code, phase in enumerate(PHASES)}


def describe(meta: TraceMeta, trace: Trace | None = None) -> dict[str, Any]:
    """What the browser must know of a run before its first step; sizes fix the frame."""
    knobs = meta.knobs
    slots = int(knobs.get("max_num_seqs") or 0)
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "source": meta.source,
        "policy": meta.policy,
        "model": meta.model,
        "hardware": meta.hardware,
        "slots": slots,
        "block_size": block_size(meta),
        "blocks": int(knobs.get("num_gpu_blocks") or 0),
        "cpu_blocks": int(knobs.get("num_cpu_blocks") or 0),
        "null_block": meta.policy == "unified",
        "mixes": meta.policy == "unified" or bool(knobs.get("enable_chunked_prefill")),
        "lanes": slots,
        "swaps": meta.policy == "continuous" and knobs.get("preemption_mode") == "swap",
        "most_waiting": 0,
        "most_swapped": 0,
        "most_cpu": 0,
    }
    if trace is not None:
        about["lanes"] = num_lanes(trace)
        about["most_waiting"] = max((len(s.waiting) for s in trace), default=0)
        about["most_swapped"] = max((len(s.swapped) for s in trace), default=0)
        about["swaps"] = about["swaps"] or about["most_swapped"] > 0
        about["most_cpu"] = 1 + _highest(s.cpu_blocks_allocated for s in trace)
        about["blocks"] = max(about["blocks"], 1 + _highest(s.blocks_allocated for s in trace))
    return about


def join(chunks: Sequence[bytes]) -> bytes:
    """Chunks that follow each other, as one."""
    if len(chunks) == 1:
        return chunks[0]
    headers, columns = zip(*map(unpack, chunks), strict=True)
    lists = {
        key: [entry for header in headers for entry in header[key]]
        for key in ("clauses", "requests", "texts")
    }
    steps = sum(header["steps"] for header in headers)
    joined = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    packed = {name: (array.dtype.str[1:], array.tolist()) for name, array in joined.items()}
    return pack({"steps": steps, **lists}, packed)


def num_lanes(trace: Trace) -> int:
    """Rows of the timeline: the most that ever ran at once."""
    return 1 + max((row.slot for step in trace for row in step.scheduled), default=0)


def _highest(tables: Any) -> int:
    return max((max(blocks) for table in tables for blocks in table.values() if blocks), default=-1)


def encode(trace: Trace, names: Names | None = None, lang: str = "en") -> bytes:
    """A whole trace, packed and squeezed."""
    writer = ColumnWriter(trace.meta, names or Names([trace]), lang)
    for record in trace:
        writer.add(record)
    return squeeze(writer.take())
