"""The slot timeline of a whole trace, on any canvas: who ran where and when, who waited above,
who was swapped out below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minibatch.trace import Trace
from widgets.canvas import Canvas
from widgets.columns import num_lanes
from widgets.names import Names
from widgets.palette import PHASES, THEMES, ink_on, request_colour
from widgets.replay import Facts, Replay
from widgets.words import Words

LEFT, RIGHT = 86, 14
MOST_QUEUE_ROWS = 8
MOST_PIXELS_OF_LANES = 460


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


def draw_timeline(
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
    """Draw into ``canvas`` from ``top`` on. ``marked`` steps get a line through all rows."""
    colours = THEMES[theme]
    x = _axis(trace, canvas.width, axis)
    queue_top = top + 24
    lanes_top = queue_top + layout.queue_rows * layout.queue_row + 8
    swap_top = lanes_top + layout.lanes * layout.row + 8
    bottom = swap_top + layout.swap_rows * layout.queue_row

    def lane_y(slot: int) -> float:
        return lanes_top + slot * layout.row

    _labels(canvas, layout, words, colours, queue_top, lane_y, swap_top)
    for slot in range(layout.lanes):
        canvas.rect(LEFT, lane_y(slot) + 1, x(len(trace)) - LEFT, layout.row - 2, colours["panel"])
    for t, slot in layout.bubbles:
        box = (x(t), lane_y(slot) + 1, x(t + 1) - x(t), layout.row - 2)
        canvas.rect(*box, colours["bubble"], tip=words("phase.bubble"))
    for stay in layout.stays:
        _stay(canvas, stay, x, lane_y, layout, names, words, theme)
    _queues(canvas, layout, x, queue_top, swap_top, names, theme)
    for t in marked:
        canvas.line(x(t), top + 16, x(t), bottom + 2, colours["accent"], 1)
        canvas.text(x(t) + 2, top + 21, str(trace[t].step), colours["accent"], 9, bold=True)
    _evictions(canvas, layout, x, lane_y, queue_top, swap_top, colours)
    _ruler(canvas, trace, x, bottom, colours, axis)


def _axis(trace: Trace, width: int, axis: str) -> Callable[[int], float]:
    room = width - LEFT - RIGHT
    if axis == "iterations":
        cell = min(34.0, room / max(1, len(trace)))
        return lambda t: LEFT + t * cell
    start = trace[0].start_s if len(trace) else 0.0
    span = (trace[-1].end_s - start) or 1.0
    edges = [LEFT + room * (step.start_s - start) / span for step in trace] + [LEFT + room]
    return lambda t: edges[t]


def _labels(canvas, layout, words, colours, queue_top, lane_y, swap_top) -> None:  # noqa: ANN001
    def label(y: float, text: str) -> None:
        canvas.text(LEFT - 8, y, text, colours["muted"], 10, anchor="end")

    if layout.queue_rows:
        label(queue_top + layout.queue_rows * layout.queue_row / 2 + 4, words("place.waiting"))
    step = 1 if layout.row >= 12 else max(1, round(24 / layout.row))
    for slot in range(0, layout.lanes, step):
        label(lane_y(slot) + min(layout.row, 12 if step > 1 else layout.row) / 2 + 4, str(slot))
    if layout.swap_rows:
        label(swap_top + layout.swap_rows * layout.queue_row / 2 + 4, words("place.swapped"))


def _stay(canvas, stay, x, lane_y, layout, names, words, theme) -> None:  # noqa: ANN001
    phase = PHASES[stay.phase]
    left, right, y = x(stay.begin), x(stay.end), lane_y(stay.lane) + 1
    height = layout.row - 2
    label = names.label(stay.request_id)
    number = names.number(stay.request_id)
    edge = phase.edge if theme == "light" else phase.edge_dark
    fine = layout.row >= 8
    tip = f"{stay.request_id}: {words('phase.' + stay.phase)}, {stay.begin}-{stay.end - 1}"
    canvas.rect(
        left, y, right - left, height, phase.fill, edge if fine else None,
        pattern=phase.pattern if fine else "", ink=phase.ink, tip=tip,
    )  # fmt: skip
    if not fine:
        return
    colour = request_colour(number)
    canvas.rect(left, y + height - 4, right - left, 4, colour, edge)
    if stay.enters and layout.row >= 13:
        room = max(13, canvas.measure(label, 10, True) + 6)
        canvas.rect(left, y, min(room, max(13, right - left)), height, colour, "#1B1F24")
        canvas.text(left + 3, y + height / 2 + 4, label, ink_on(colour), 10, bold=True)


def _queues(canvas, layout, x, queue_top, swap_top, names, theme) -> None:  # noqa: ANN001
    """A thin line a request, the head of the queue next to the lanes."""
    edge = THEMES[theme]["strong"]
    rows = layout.queue_rows
    for key, most, place in (
        ("waiting", rows, lambda i: queue_top + (rows - 1 - i) * layout.queue_row),
        ("swapped", layout.swap_rows, lambda i: swap_top + i * layout.queue_row),
    ):
        open_lines: dict[int, tuple[int, str]] = {}
        last_seen: dict[str, int] = {}
        for t in range(len(layout.facts) + 1):
            queue = getattr(layout.facts[t].record, key)[:most] if t < len(layout.facts) else ()
            for row in range(most):
                name = queue[row] if row < len(queue) else None
                if row in open_lines and open_lines[row][1] != name:
                    begin, who = open_lines.pop(row)
                    new = last_seen.get(who, -2) < begin - 1
                    _queue_line(canvas, x(begin), x(t), place(row), who, names, edge, new)
                    last_seen[who] = t - 1
                if name is not None and row not in open_lines:
                    open_lines[row] = (t, name)


def _queue_line(canvas, left, right, y, who, names, edge, new) -> None:  # noqa: ANN001
    colour = request_colour(names.number(who))
    canvas.rect(left, y + 2, right - left, 5, colour, edge, tip=who)
    if new:
        label = names.label(who)
        width = canvas.measure(label, 9, True) + 5
        canvas.rect(left, y - 0.5, width, 10, colour, "#1B1F24")
        canvas.text(left + 2.5, y + 7.5, label, ink_on(colour), 9, bold=True)


def _evictions(canvas, layout, x, lane_y, queue_top, swap_top, colours) -> None:  # noqa: ANN001
    """A cross where the lane was lost, a line to where the request went."""
    lane_before: dict[str, int] = {}
    for t, facts in enumerate(layout.facts):
        record = facts.record
        for preemption in record.preempted:
            slot = lane_before.get(preemption.request_id)
            if slot is None:
                continue
            y = lane_y(slot) + layout.row / 2
            swap = preemption.mode == "swap"
            queue = record.swapped if swap else record.waiting
            row = queue.index(preemption.request_id) if preemption.request_id in queue else 0
            if swap:
                target = swap_top + min(row, layout.swap_rows - 1) * layout.queue_row + 4
            else:
                row = min(row, layout.queue_rows - 1)
                target = queue_top + (layout.queue_rows - 1 - row) * layout.queue_row + 4
            canvas.line(x(t), y, x(t), target, colours["alarm"], 1.5)
            canvas.cross(x(t), y, min(5, layout.row / 3), colours["alarm"], 2)
        for lane in facts.lanes:
            if lane.request_id is not None:
                lane_before[lane.request_id] = lane.slot


def _ruler(canvas, trace, x, bottom, colours, axis) -> None:  # noqa: ANN001
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if len(trace) / n <= 24)
    start = trace[0].start_s if len(trace) else 0.0
    last = -100.0
    for t in range(0, len(trace), every):
        if x(t) - last < 34 and axis == "ms":
            continue
        last = x(t)
        text = str(trace[t].step) if axis == "iterations" else f"{_ms(trace[t].start_s - start)}"
        canvas.line(x(t), bottom + 2, x(t), bottom + 5, colours["strong"], 1)
        canvas.text(x(t), bottom + 16, text, colours["muted"], 10, anchor="middle")
    unit = "ms" if axis == "ms" else ""
    if unit:
        canvas.text(LEFT - 8, bottom + 16, unit, colours["muted"], 10, anchor="end")


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"
