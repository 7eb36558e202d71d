"""The slot timeline of a whole trace, on any canvas: who ran where and when, who waited above,
who was swapped out below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from minibatch.trace import Trace
from widgets.canvas import Canvas
from widgets.columns import num_lanes
from widgets.names import Names
from widgets.palette import PHASES, THEMES, ink_on, request_colour
from widgets.replay import PHASES as REPLAY_PHASES
from widgets.replay import Facts, Replay
from widgets.words import Words

LEFT, RIGHT = 86, 14
MOST_QUEUE_ROWS = 8
MOST_PIXELS_OF_LANES = 320
SMALLEST_ROW = 8  # below it, lanes are colours without letters and edges


class Stay(NamedTuple):
    """The same request doing the same thing in the same lane, ``[begin, end)`` in steps."""

    begin: int
    end: int
    lane: int
    request_id: str
    phase: str
    enters: bool  # it was not in this lane the step before


class TimelinePlan(NamedTuple):
    """What is to be drawn, in steps and rows; and how large."""

    stays: list[Stay]
    bubbles: list[tuple[int, int]]  # (step, lane)
    facts: list[Facts]
    lanes: int
    queue_rows: int
    swap_rows: int
    row: float  # height of a lane
    queue_row: float
    height: int


def plan(trace: Trace, theme_rows: float = 22) -> TimelinePlan:
    """Read the trace once."""
    replay = Replay(int(trace.meta.knobs.get("max_num_seqs", 0)))
    facts = [replay.advance(record) for record in trace]
    lanes = num_lanes(trace)
    stays: list[Stay] = []
    bubbles: list[tuple[int, int]] = []
    open_stays: dict[int, list] = {}
    for t, fact in enumerate(facts):
        seen: dict[int, tuple[str, str]] = {}
        for lane in fact.lanes:
            if lane.request_id is not None:
                seen[lane.slot] = (lane.request_id, lane.phase)
        for slot in list(open_stays):
            if seen.get(slot) != tuple(open_stays[slot][1:3]):
                begin, name, phase, enters = open_stays.pop(slot)
                stays.append(Stay(begin, t, slot, name, phase, enters))
                if slot in seen and seen[slot][0] == name:
                    open_stays[slot] = [t, *seen[slot], False]
        for slot, (name, phase) in seen.items():
            if slot not in open_stays:
                open_stays[slot] = [t, name, phase, True]
        if fact.record.waiting or fact.record.swapped:
            bubbles += [(t, slot) for slot in range(lanes) if slot not in seen]
    for slot, (begin, name, phase, enters) in open_stays.items():
        stays.append(Stay(begin, len(facts), slot, name, phase, enters))
    queue_rows = min(MOST_QUEUE_ROWS, max((len(f.record.waiting) for f in facts), default=0))
    swap_rows = min(MOST_QUEUE_ROWS, max((len(f.record.swapped) for f in facts), default=0))
    row = max(3.0, min(theme_rows, MOST_PIXELS_OF_LANES / lanes))
    queue_row = 10.0
    height = 24 + (queue_rows + swap_rows) * queue_row + 8 + lanes * row + 8 + 20
    return TimelinePlan(
        stays, bubbles, facts, lanes, queue_rows, swap_rows, row, queue_row, round(height)
    )


class TimelineDrawing:
    """Draws a plan into ``canvas``, from ``top`` on.

    Args:
        marked: steps that get a line through all rows.
    """

    def __init__(
        self,
        canvas: Canvas,
        trace: Trace,
        layout: TimelinePlan,
        top: float,
        names: Names,
        words: Words,
        theme: str = "light",
        axis: str = "iterations",
        marked: tuple[int, ...] = (),
    ) -> None:
        self.canvas = canvas
        self.trace = trace
        self.layout = layout
        self.names = names
        self.words = words
        self.theme = theme
        self.axis = axis
        self.marked = marked
        self.colours = THEMES[theme]
        self.x = _axis(trace, canvas.width, axis)
        self.roomy = self.x(1) - self.x(0) >= 8 if len(trace) else False  # letters fit a step
        self.top = top
        self.queue_top = top + 24
        self.lanes_top = self.queue_top + layout.queue_rows * layout.queue_row + 8
        self.swap_top = self.lanes_top + layout.lanes * layout.row + 8
        self.bottom = self.swap_top + layout.swap_rows * layout.queue_row

    def draw(self) -> None:
        canvas, layout, colours, x = self.canvas, self.layout, self.colours, self.x
        self._labels()
        end = x(len(self.trace))
        for slot in range(layout.lanes):
            box = (LEFT, self._lane_y(slot) + 1, end - LEFT, layout.row - 2)
            canvas.rect(*box, colours["panel"])
        if layout.row < SMALLEST_ROW and self.axis == "iterations":
            self._fine_rows()
        else:
            self._rows()
        self._queue("waiting", layout.queue_rows)
        self._queue("swapped", layout.swap_rows)
        for t in self.marked:
            canvas.line(x(t), self.top + 16, x(t), self.bottom + 2, colours["accent"], 1)
            step = str(self.trace[t].step)
            canvas.text(x(t) + 2, self.top + 21, step, colours["accent"], 9, bold=True)
        self._evictions()
        self._ruler()

    def _fine_rows(self) -> None:
        """Many thin lanes: colours only, a cell a step."""
        layout = self.layout
        colours = [self.colours["bubble"], *(PHASES[name].fill for name in REPLAY_PHASES)]
        codes = np.full((layout.lanes, len(self.trace)), -1, dtype=np.int8)
        for t, slot in layout.bubbles:
            codes[slot, t] = 0
        for stay in layout.stays:
            codes[stay.lane, stay.begin : stay.end] = 1 + REPLAY_PHASES.index(stay.phase)
        width = self.x(len(self.trace)) - LEFT
        box = (LEFT, self._lane_y(0), width, layout.lanes * layout.row)
        self.canvas.grid(*box, codes, colours)

    def _rows(self) -> None:
        canvas, layout, colours, x = self.canvas, self.layout, self.colours, self.x
        for t, slot in layout.bubbles:
            box = (x(t), self._lane_y(slot) + 1, x(t + 1) - x(t), layout.row - 2)
            canvas.rect(*box, colours["bubble"], tip=self.words("phase.bubble"))
        for stay in layout.stays:
            self._stay(stay)

    def _lane_y(self, slot: int) -> float:
        return self.lanes_top + slot * self.layout.row

    def _queue_y(self, queue: str, row: int) -> float:
        """The head of ``waiting`` lies next to the lanes, and so does that of ``swapped``."""
        height = self.layout.queue_row
        if queue == "swapped":
            return self.swap_top + row * height
        return self.queue_top + (self.layout.queue_rows - 1 - row) * height

    def _label(self, y: float, text: str) -> None:
        self.canvas.text(LEFT - 8, y, text, self.colours["muted"], 10, anchor="end")

    def _labels(self) -> None:
        layout = self.layout
        half = layout.queue_row / 2
        if layout.queue_rows:
            y = self.queue_top + layout.queue_rows * half + 4
            self._label(y, self.words("place.waiting"))
        step = 1 if layout.row >= 12 else max(1, round(24 / layout.row))
        for slot in range(0, layout.lanes, step):
            height = min(layout.row, 12) if step > 1 else layout.row
            self._label(self._lane_y(slot) + height / 2 + 4, str(slot))
        if layout.swap_rows:
            y = self.swap_top + layout.swap_rows * half + 4
            self._label(y, self.words("place.swapped"))

    def _stay(self, stay: Stay) -> None:
        canvas, layout, phase = self.canvas, self.layout, PHASES[stay.phase]
        left, right, y = self.x(stay.begin), self.x(stay.end), self._lane_y(stay.lane) + 1
        height = layout.row - 2
        edge = phase.edge if self.theme == "light" else phase.edge_dark
        fine = layout.row >= SMALLEST_ROW
        told = self.words(f"phase.{stay.phase}")
        canvas.rect(
            left,
            y,
            right - left,
            height,
            phase.fill,
            edge if fine else None,
            pattern=phase.pattern if fine else "",
            ink=phase.ink,
            tip=f"{stay.request_id}: {told}, {stay.begin}-{stay.end - 1}",
        )
        if not fine:
            return
        colour = request_colour(self.names.number(stay.request_id))
        canvas.rect(left, y + height - 4, right - left, 4, colour, edge)
        if stay.enters and layout.row >= 13:
            label = self.names.label(stay.request_id)
            room = max(13, canvas.measure(label, 10, True) + 6)
            canvas.rect(left, y, min(room, max(13, right - left)), height, colour, "#1B1F24")
            canvas.text(left + 3, y + height / 2 + 4, label, ink_on(colour), 10, bold=True)

    def _queue(self, queue: str, rows: int) -> None:
        """A thin line a request."""
        facts = self.layout.facts
        open_lines: dict[int, tuple[int, str]] = {}
        last_seen: dict[str, int] = {}
        for t in range(len(facts) + 1):
            ids = getattr(facts[t].record, queue)[:rows] if t < len(facts) else ()
            for row in range(rows):
                name = ids[row] if row < len(ids) else None
                if row in open_lines and open_lines[row][1] != name:
                    begin, who = open_lines.pop(row)
                    is_new = last_seen.get(who, -2) < begin - 1
                    self._queue_line(begin, t, self._queue_y(queue, row), who, is_new)
                    last_seen[who] = t - 1
                if name is not None and row not in open_lines:
                    open_lines[row] = (t, name)

    def _queue_line(self, begin: int, end: int, y: float, who: str, is_new: bool) -> None:
        canvas, left = self.canvas, self.x(begin)
        colour = request_colour(self.names.number(who))
        box = (left, y + 2, self.x(end) - left, 5)
        canvas.rect(*box, colour, self.colours["strong"], tip=who)
        if is_new and self.roomy:
            label = self.names.label(who)
            width = canvas.measure(label, 9, True) + 5
            canvas.rect(left, y - 0.5, width, 10, colour, "#1B1F24")
            canvas.text(left + 2.5, y + 7.5, label, ink_on(colour), 9, bold=True)

    def _evictions(self) -> None:
        """A cross where the lane was lost, a line to where the request went."""
        canvas, layout, alarm = self.canvas, self.layout, self.colours["alarm"]
        lane_before: dict[str, int] = {}
        for t, facts in enumerate(layout.facts):
            record = facts.record
            for preemption in record.preempted:
                slot = lane_before.get(preemption.request_id)
                if slot is None:
                    continue
                y = self._lane_y(slot) + layout.row / 2
                queue = "swapped" if preemption.mode == "swap" else "waiting"
                rows = layout.swap_rows if queue == "swapped" else layout.queue_rows
                ids = getattr(record, queue)
                row = ids.index(preemption.request_id) if preemption.request_id in ids else 0
                target = self._queue_y(queue, min(row, rows - 1)) + 4
                x = (self.x(t) + self.x(t + 1)) / 2
                canvas.line(x, y, x, target, alarm, 1.5)
                canvas.cross(x, y, min(5, layout.row / 3), alarm, 2)
            for lane in facts.lanes:
                if lane.request_id is not None:
                    lane_before[lane.request_id] = lane.slot

    def _ruler(self) -> None:
        canvas, trace, colours, in_ms = self.canvas, self.trace, self.colours, self.axis == "ms"
        spacings = (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9)
        every = next(n for n in spacings if len(trace) / n <= 24)
        last = -100.0
        for t in range(0, len(trace), every):
            x = self.x(t)
            if x - last < 34 and in_ms:
                continue
            last = x
            text = _ms(trace[t].start_s - trace[0].start_s) if in_ms else str(trace[t].step)
            canvas.line(x, self.bottom + 2, x, self.bottom + 5, colours["strong"], 1)
            canvas.text(x, self.bottom + 16, text, colours["muted"], 10, anchor="middle")
        if in_ms:
            self._label(self.bottom + 16, "ms")


def _axis(trace: Trace, width: int, axis: str) -> Callable[[int], float]:
    room = width - LEFT - RIGHT
    if axis == "iterations":
        cell = min(34.0, room / max(1, len(trace)))
        return lambda t: LEFT + t * cell
    start = trace[0].start_s if len(trace) else 0.0
    span = (trace[-1].end_s - start if len(trace) else 0.0) or 1.0
    edges = [LEFT + room * (step.start_s - start) / span for step in trace] + [LEFT + room]
    return lambda t: edges[t]


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
