"""The slot timeline of a whole trace, on any canvas: who ran where and when, who waited above,
who was swapped out below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from minibatch.record import Preemption
from minibatch.trace import Trace
from widgets.canvas import Canvas
from widgets.columns import num_lanes
from widgets.names import Names
from widgets.palette import PHASES, THEMES, ink_on, request_colour
from widgets.replay import PHASES as REPLAY_PHASES
from widgets.replay import LaneRows, Replay
from widgets.words import Words

LEFT, RIGHT = 86, 14
MOST_QUEUE_ROWS = 8
MOST_PIXELS_OF_LANES = 320
SMALLEST_LETTERED_ROW = 13
LETTER_SIZES = (10, 9, 7.5)
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
    """What is to be drawn, in steps and rows; and how large.

    Lanes that are too thin for letters and edges are a grid of colours (``codes``); others are
    ``stays`` and ``bubbles``.
    """

    stays: list[Stay]  # lane by lane, in order
    bubbles: list[tuple[int, int]]  # (step, lane): idle while others wait
    codes: np.ndarray | None  # [lane, step]: 1 + phase, 0 a bubble, -1 nothing
    phases: frozenset[str]
    idles: bool
    evictions: list[tuple[int, int, Preemption]]  # (step, lane that was lost, ...)
    lanes: int
    queue_rows: int
    swap_rows: int
    row: float  # height of a lane
    queue_row: float
    height: int


def plan(trace: Trace, theme_rows: float = 22) -> TimelinePlan:
    """Read the trace once."""
    lanes = num_lanes(trace)
    row = max(3.0, min(theme_rows, MOST_PIXELS_OF_LANES / lanes))
    rows = _FineRows(lanes, len(trace)) if row < SMALLEST_ROW else _Rows(lanes)
    evictions: list[tuple[int, int, Preemption]] = []
    lane_before: dict[str, int] = {}
    replay = Replay(int(trace.meta.knobs.get("max_num_seqs", 0)))
    for t, record in enumerate(trace):
        seen = replay.advance(record).rows
        for preemption in record.preempted:
            slot = lane_before.get(preemption.request_id)
            if slot is not None:
                evictions.append((t, slot, preemption))
        rows.add(t, seen, bool(record.waiting or record.swapped))
        lane_before.update(zip(seen.request_id, seen.slot, strict=True))
    queue_rows = min(MOST_QUEUE_ROWS, max((len(s.waiting) for s in trace), default=0))
    swap_rows = min(MOST_QUEUE_ROWS, max((len(s.swapped) for s in trace), default=0))
    queue_row = 10.0
    height = 24 + (queue_rows + swap_rows) * queue_row + 8 + lanes * row + 8 + 20
    return TimelinePlan(
        *rows.done(len(trace)),
        evictions,
        lanes,
        queue_rows,
        swap_rows,
        row,
        queue_row,
        round(height),
    )


# The first fields of a TimelinePlan.
Drawn = tuple[list[Stay], list[tuple[int, int]], np.ndarray | None, frozenset[str], bool]


class _Rows:
    """Lanes as stays."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.stays: list[Stay] = []
        self.bubbles: list[tuple[int, int]] = []
        self.shown: dict[int, tuple[str, str]] = {}  # lane -> (request, phase)
        self.since: dict[int, tuple[int, bool]] = {}  # lane -> (since when, whether it entered)

    def add(self, t: int, rows: LaneRows, others_wait: bool) -> None:
        shown, since = self.shown, self.since
        seen = dict(zip(rows.slot, zip(rows.request_id, rows.phase, strict=True), strict=True))
        if seen != shown:
            for slot in [slot for slot, entry in shown.items() if seen.get(slot) != entry]:
                self.stays.append(_stay(since.pop(slot), t, slot, shown[slot]))
            for slot, (name, _) in seen.items():
                if slot not in since:
                    since[slot] = (t, slot not in shown or shown[slot][0] != name)
            self.shown = seen
        if others_wait:
            self.bubbles += [(t, slot) for slot in range(self.lanes) if slot not in seen]

    def done(self, steps: int) -> Drawn:
        stays = self.stays + [
            _stay(self.since[slot], steps, slot, entry) for slot, entry in self.shown.items()
        ]
        stays.sort(key=lambda stay: (stay.lane, stay.begin))
        phases = frozenset(stay.phase for stay in stays)
        return stays, self.bubbles, None, phases, bool(self.bubbles)


class _FineRows:
    """Lanes as cells of a grid: of a long and wide run there are too many stays."""

    def __init__(self, lanes: int, steps: int) -> None:
        self.codes = np.full((steps, lanes), -1, dtype=np.int8)
        self.phases: set[str] = set()
        self.idles = False

    def add(self, t: int, rows: LaneRows, others_wait: bool) -> None:
        cells = self.codes[t]
        if others_wait and len(rows.slot) < len(cells):
            cells[:] = 0
            self.idles = True
        cells[rows.slot] = [_CODES[phase] for phase in rows.phase]
        self.phases.update(rows.phase)

    def done(self, steps: int) -> Drawn:
        return [], [], self.codes.T, frozenset(self.phases), self.idles


_CODES = {phase: 1 + code for code, phase in enumerate(REPLAY_PHASES)}


def _stay(since: tuple[int, bool], end: int, slot: int, entry: tuple[str, str]) -> Stay:
    return Stay(since[0], end, slot, *entry, since[1])


def _visits(stays: list[Stay]) -> list[list[Stay]]:
    """Stays of one request in one lane, from when it enters to when it leaves."""
    visits: list[list[Stay]] = []
    for stay in stays:
        if stay.enters or not visits:
            visits.append([])
        visits[-1].append(stay)
    return visits


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
        if layout.codes is not None:
            self._fine_rows(layout.codes)
        else:
            self._rows()
        self._queue("waiting", layout.queue_rows)
        self._queue("swapped", layout.swap_rows)
        free = 0.0
        for t in self.marked:
            canvas.line(x(t), self.top + 16, x(t), self.bottom + 2, colours["accent"], 1)
            step = str(self.trace[t].step)
            width = canvas.measure(step, 9, True) + 4
            left = min(x(t) + 2, canvas.width - width)
            if left >= free:
                canvas.text(left, self.top + 21, step, colours["accent"], 9, bold=True)
                free = left + width
        self._evictions()
        self._ruler()

    def _fine_rows(self, codes: np.ndarray) -> None:
        """Many thin lanes: colours only, a cell a step; of milliseconds, a column a pixel."""
        layout = self.layout
        colours = [self.colours["bubble"], *(PHASES[name].fill for name in REPLAY_PHASES)]
        width = self.x(len(self.trace)) - LEFT
        if self.axis == "ms":
            edges = [self.x(t) - LEFT for t in range(len(self.trace))]
            middles = np.arange(round(width)) + 0.5
            codes = codes[:, np.searchsorted(edges, middles, side="right") - 1]
        box = (LEFT, self._lane_y(0), width, layout.lanes * layout.row)
        self.canvas.grid(*box, codes, colours)

    def _rows(self) -> None:
        canvas, layout, colours, x = self.canvas, self.layout, self.colours, self.x
        for t, slot in layout.bubbles:
            box = (x(t), self._lane_y(slot) + 1, x(t + 1) - x(t), layout.row - 2)
            canvas.rect(*box, colours["bubble"], tip=self.words("phase.bubble"))
        for stay in layout.stays:
            self._stay(stay)
        if layout.row >= SMALLEST_LETTERED_ROW:
            for visit in _visits(layout.stays):
                self._letter(visit)

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
        if fine:
            colour = request_colour(self.names.number(stay.request_id))
            canvas.rect(left, y + height - 4, right - left, 4, colour, edge)

    def _letter(self, visit: list[Stay]) -> None:
        """The request's letter, at the beginning of the first part of its visit that has room;
        of a visit of narrow parts only, across them.
        """
        name, y = visit[0].request_id, self._lane_y(visit[0].lane) + 1
        spans = [(stay.begin, stay.end) for stay in visit] + [(visit[0].begin, visit[-1].end)]
        for size in LETTER_SIZES:
            for begin, end in spans:
                left, room = self.x(begin), self.x(end) - self.x(begin)
                if self._tag(left, y, room, self.layout.row - 2, name, size, 3):
                    return

    def _tag(
        self, x: float, y: float, room: float, height: float, name: str, size: float, margin: float
    ) -> bool:
        """A request's letter on its colour. False: it does not fit, so nothing is drawn."""
        canvas, label = self.canvas, self.names.label(name)
        width = canvas.measure(label, size, True) + 2 * margin
        if width > room:
            return False
        colour = request_colour(self.names.number(name))
        canvas.rect(x, y, min(room, max(13, width)), height, colour, "#1B1F24")
        base = y + height / 2 + 0.36 * size
        canvas.text(x + margin, base, label, ink_on(colour), size, bold=True)
        return True

    def _queue(self, queue: str, rows: int) -> None:
        """A thin line a request."""
        trace = self.trace
        open_lines: dict[int, tuple[int, str]] = {}
        lettered: dict[str, int] = {}  # until when its letter stands for it
        for t in range(len(trace) + 1):
            ids = getattr(trace[t], queue)[:rows] if t < len(trace) else ()
            for row in range(rows):
                name = ids[row] if row < len(ids) else None
                if row in open_lines and open_lines[row][1] != name:
                    begin, who = open_lines.pop(row)
                    goes_on = lettered.get(who, -1) >= begin
                    if self._queue_line(begin, t, self._queue_y(queue, row), who, goes_on):
                        lettered[who] = t
                if name is not None and row not in open_lines:
                    open_lines[row] = (t, name)

    def _queue_line(self, begin: int, end: int, y: float, who: str, goes_on: bool) -> bool:
        """True: it has its letter, here or already before."""
        left, room = self.x(begin), self.x(end) - self.x(begin)
        colour = request_colour(self.names.number(who))
        self.canvas.rect(left, y + 2, room, 5, colour, self.colours["strong"], tip=who)
        return goes_on or any(
            self._tag(left, y - 0.5, room, 10, who, size, 2.5) for size in LETTER_SIZES[1:]
        )

    def _evictions(self) -> None:
        """A cross where the lane was lost, a line to where the request went."""
        canvas, layout, alarm = self.canvas, self.layout, self.colours["alarm"]
        for t, slot, preemption in layout.evictions:
            y = self._lane_y(slot) + layout.row / 2
            queue = "swapped" if preemption.mode == "swap" else "waiting"
            rows = layout.swap_rows if queue == "swapped" else layout.queue_rows
            ids = getattr(self.trace[t], queue)
            row = ids.index(preemption.request_id) if preemption.request_id in ids else 0
            target = self._queue_y(queue, min(row, rows - 1)) + 4
            x = (self.x(t) + self.x(t + 1)) / 2
            canvas.line(x, y, x, target, alarm, 1.5)
            canvas.cross(x, y, min(5, layout.row / 3), alarm, 2)

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
