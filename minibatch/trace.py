"""A run, kept: in memory, as a JSON Lines file, or as a timeline for Perfetto.

A trace file (gzip if its name ends in ``.gz``) holds a ``meta`` line, one line a step, and a
``summary`` line. It can be written while the engine runs, and read when it was cut short: a
reader passes over fields that it does not know and over a cut last line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from minibatch.closing import Closing
from minibatch.errors import TraceFormatError
from minibatch.record import Arrival, StepRecord, one_line

FORMAT = "minibatch-trace"
VERSION = 1


@dataclass
class TraceMeta:
    """What was run, on what.

    ``source`` is ``"measured"`` (a model ran) or ``"simulated"`` (a cost model did). ``knobs``
    holds every knob of the scheduler, ``software`` versions by name, ``simulation`` what it takes
    to run a simulated run again.
    """

    source: str = "measured"
    model: str = ""
    hardware: str = ""
    policy: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    simulation: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION


class Trace:
    """The records of a run, oldest first.

    Args:
        meta: what was run.
        steps: its records.
        summary: totals; computed from the records where a file had none.
    """

    def __init__(
        self,
        meta: TraceMeta | None = None,
        steps: list[StepRecord] | None = None,
        summary: dict[str, Any] | None = None,
    ) -> None:
        self.meta = meta or TraceMeta()
        self.steps = steps if steps is not None else []
        self._summary = summary

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> StepRecord:
        return self.steps[index]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __repr__(self) -> str:
        tokens = sum(step.num_generated_tokens for step in self.steps)
        return (
            f"<Trace {self.meta.policy}, {self.meta.source}: {len(self.steps)} steps, "
            f"{len(self.requests)} requests, {tokens} tokens>"
        )

    @property
    def requests(self) -> dict[str, Arrival]:
        """Every request that came in, by id, in order of arrival."""
        return {arrival.request_id: arrival for step in self.steps for arrival in step.arrived}

    @property
    def summary(self) -> dict[str, Any]:
        return self._summary if self._summary is not None else summarize(self.steps)

    def lines(self) -> Iterator[str]:
        """The run for a terminal, a line a step."""
        total = self.meta.knobs.get("num_gpu_blocks")
        return (one_line(step, total) for step in self.steps)

    def fork(self, step: int, **knobs: Any) -> Trace:
        """What if, from ``step`` on, other knobs or another ``policy`` had ruled? Simulated runs
        only; see ``minibatch.simulation.fork``.
        """
        from minibatch.simulation import fork  # it needs traces itself

        return fork(self, step, **knobs)

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the whole trace; ``meta.requests`` is filled in from the records."""
        self.meta.requests = list(request_table(self.steps).values())
        with TraceWriter(path, self.meta) as writer:
            for step in self.steps:
                writer.write(step)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace file, also one that was cut short.

        Raises:
            TraceFormatError: not a trace, or of a later version; names the file and the line.
        """
        path = Path(path)
        meta: TraceMeta | None = None
        steps: list[StepRecord] = []
        summary: dict[str, Any] | None = None
        for number, data in _json_lines(path):
            kind = data.get("kind")
            if meta is None:
                meta = _read_meta(path, number, data)
            elif kind == "step":
                try:
                    steps.append(StepRecord.from_dict(data))
                except (TypeError, AttributeError) as error:
                    raise TraceFormatError(f"{path}, line {number}: no step ({error}).") from error
            elif kind == "summary":
                summary = {key: value for key, value in data.items() if key != "kind"}
        if meta is None:
            raise TraceFormatError(f"{path}: empty, expected a {FORMAT} meta line.")
        return cls(meta, steps, summary)

    def to_perfetto(self, path: str | Path | None = None) -> dict[str, Any]:
        """The timeline in the Chrome trace format, for ui.perfetto.dev or chrome://tracing.

        One track a slot, one slice a step and request, counters for batch size, free blocks and
        the queue. Also written to ``path``, if given.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "minibatch"}}
        ]
        lanes = {row.slot for step in self.steps for row in step.scheduled}
        events += [
            {
                "ph": "M",
                "pid": 1,
                "tid": lane + 1,
                "name": "thread_name",
                "args": {"name": f"slot {lane}"},
            }
            for lane in sorted(lanes)
        ]
        for step in self.steps:
            start_us = step.start_s * 1e6
            counters = {
                "batch size": len(step.scheduled),
                "free blocks": step.free_blocks,
                "waiting": len(step.waiting),
            }
            for name, value in counters.items():
                args = {name: value}
                events.append({"ph": "C", "pid": 1, "name": name, "ts": start_us, "args": args})
            for row in step.scheduled:
                events.append(
                    {
                        "ph": "X",
                        "pid": 1,
                        "tid": row.slot + 1,
                        "name": row.request_id,
                        "cat": row.phase,
                        "ts": start_us,
                        "dur": step.duration_s * 1e6,
                        "args": {"step": step.step, **row._asdict()},
                    }
                )
            for preemption in step.preempted:
                events.append(
                    {
                        "ph": "i",
                        "pid": 1,
                        "s": "p",
                        "name": f"preempt {preemption.request_id}",
                        "ts": start_us,
                        "args": preemption._asdict(),
                    }
                )
        timeline = {"traceEvents": events, "displayTimeUnit": "ms"}
        if path is not None:
            Path(path).write_text(json.dumps(timeline))
        return timeline


class TraceWriter(Closing):
    """Writes a trace while the run goes on; holds one step in memory, plus totals.

    The file is a readable trace after every ``write``; ``close`` adds the summary line.
    """

    def __init__(self, path: str | Path, meta: TraceMeta) -> None:
        self._file = _open_to_write(Path(path))
        self._totals = _Totals()
        self._line({"kind": "meta", **asdict(meta)})

    def write(self, step: StepRecord) -> None:
        self._totals.add(step)
        self._line({"kind": "step", **step.to_dict()})

    def close(self) -> None:
        if not self._file.closed:
            self._line({"kind": "summary", **self._totals.as_dict()})
            self._file.close()

    def _line(self, data: dict[str, Any]) -> None:
        # Whole lines, flushed, so that an interrupted run leaves a readable file.
        self._file.write(json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n")
        self._file.flush()


def request_table(steps: list[StepRecord]) -> dict[str, dict[str, Any]]:
    """Each request's arrival, prompt length and the number of tokens that it got."""
    table = {
        arrival.request_id: {**arrival._asdict(), "num_output_tokens": 0}
        for step in steps
        for arrival in step.arrived
    }
    for step in steps:
        for request_id, tokens in step.sampled.items():
            if request_id in table:
                table[request_id]["num_output_tokens"] += len(tokens)
        for finish in step.finished:
            if finish.request_id in table:
                table[finish.request_id]["finish_reason"] = finish.reason
    return table


def summarize(steps: list[StepRecord]) -> dict[str, Any]:
    """Totals of a run."""
    totals = _Totals()
    for step in steps:
        totals.add(step)
    return totals.as_dict()


@dataclass
class _Totals:
    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_refused: int = 0
    num_batched_tokens: int = 0
    num_padding_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0
    start_s: float | None = None
    end_s: float = 0.0

    def add(self, step: StepRecord) -> None:
        self.num_steps += 1
        self.num_requests += len(step.arrived)
        self.num_finished += len(step.finished)
        self.num_refused += len(step.refused)
        self.num_batched_tokens += step.num_batched_tokens
        self.num_padding_tokens += step.num_padding_tokens
        self.num_generated_tokens += step.num_generated_tokens
        self.num_preemptions += len(step.preempted)
        self.num_swapped_out_blocks += sum(step.swapped_out.values())
        self.num_swapped_in_blocks += sum(step.swapped_in.values())
        self.prefix_hit_tokens += sum(a.prefix_hit_tokens for a in step.admitted)
        self.busy_s += step.duration_s
        self.start_s = step.start_s if self.start_s is None else self.start_s
        self.end_s = step.end_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _open_to_write(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8")  # type: ignore[return-value]
    return open(path, "w", encoding="utf-8")


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each whole line; a cut end is passed over."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:  # bytes: the cut may be inside a character
        number = 0
        while True:
            try:
                line = file.readline()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                if number == 0:
                    raise TraceFormatError(f"{path}: not a trace file ({error}).") from error
                return
            if not line:
                return
            number += 1
            try:
                data = json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                if number > 1 and not line.endswith(b"\n"):
                    return
                raise TraceFormatError(f"{path}, line {number}: {error}.") from error
            if not isinstance(data, dict):
                raise TraceFormatError(f"{path}, line {number}: expected an object.")
            yield number, data


def _read_meta(path: Path, number: int, data: dict[str, Any]) -> TraceMeta:
    if data.get("format") != FORMAT:
        raise TraceFormatError(f"{path}, line {number}: expected a {FORMAT} meta line.")
    version = data.get("version")
    if not isinstance(version, int):
        raise TraceFormatError(f"{path}, line {number}: version {version!r} is no number.")
    if version > VERSION:
        raise TraceFormatError(
            f"{path} is of version {version}; this minibatch reads up to {VERSION}. "
            "Upgrade minibatch-lab."
        )
    known = {name: data[name] for name in TraceMeta.__dataclass_fields__ if name in data}
    return TraceMeta(**known)
