"""Pictures that need no kernel, no script and no network: SVG and PNG, with words beside them."""

from __future__ import annotations

from html import escape

from minibatch.trace import Trace, TraceMeta
from widgets.canvas import Canvas, PixelCanvas, SvgCanvas
from widgets.names import Names
from widgets.palette import PHASES, THEMES, ink_on, request_colour
from widgets.timeline import TimelineDrawing, TimelinePlan, plan
from widgets.view import Block, View, view
from widgets.words import Words

WIDTH = 960
FRAME_HEIGHT = 226
HEADER = 46
LEGEND = 26


def timeline_svg(
    trace: Trace, *, axis: str = "iterations", theme: str = "light", lang: str = "en"
) -> str:
    """The whole run as one SVG: slots, waiting requests above, swapped ones below."""
    return _svg([trace], axis=axis, theme=theme, lang=lang, strip=False)


def film_strip_svg(
    *traces: Trace, axis: str = "iterations", theme: str = "light", lang: str = "en"
) -> str:
    """Up to four key steps, then the whole timeline; of several traces, their timelines."""
    return _svg(list(traces), axis=axis, theme=theme, lang=lang, strip=True)


def png(
    *traces: Trace,
    axis: str = "iterations",
    scale: float = 1.5,
    strip: bool = True,
    plans: list[TimelinePlan] | None = None,
) -> bytes:
    """What ``film_strip_svg`` shows, as a PNG (always light, with its own background).

    Args:
        plans: of the traces, where they have been made already.
    """
    job = _Job(list(traces), "light", Words("en"), axis, strip, plans)
    canvas = PixelCanvas(WIDTH, job.height, THEMES["light"]["bg"], scale)
    job.draw(canvas)
    return canvas.to_png()


def alt_text(trace: Trace, lang: str = "en") -> str:
    """The run in a sentence or two, for whoever cannot see it."""
    words, summary = Words(lang), trace.summary
    steps = key_steps(trace, most=3)
    told = " ".join(view(trace, t, lang=lang).sentence for t in steps)
    return words(
        "alt",
        policy=trace.meta.policy,
        steps=len(trace),
        requests=len(trace.requests),
        tokens=summary["num_generated_tokens"],
        preemptions=summary["num_preemptions"],
        sentence=told,
    )


def data_table(trace: Trace, lang: str = "en", most: int = 200) -> str:
    """The run as an HTML table, a row a step; of long runs the first ``most`` steps."""
    words, names = Words(lang), Names([trace])
    keys = ("number.steps", "place.running", "place.waiting", "place.swapped")
    head = [words(key) for key in keys] + [words("number.free_blocks"), ""]
    rows = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for t in range(min(most, len(trace))):
        shown = view(trace, t, lang=lang, names=names)
        record = shown.record
        cells = [
            str(record.step),
            *(
                " ".join(names.label(name) for name in queue)
                for queue in (record.running, record.waiting, record.swapped)
            ),
            str(record.free_blocks),
            shown.sentence,
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    if len(trace) > most:
        more = escape(words("more", n=len(trace) - most))
        rows.append(f'<tr><td colspan="6">{more}</td></tr>')
    return "<table>" + "".join(rows) + "</table>"


def badge(meta: TraceMeta, words: Words) -> str:
    """Where the numbers come from: ``recorded on ...`` or ``cost model: ...``."""
    key = "badge.simulated" if meta.source == "simulated" else "badge.measured"
    return words(key, hardware=meta.hardware) if meta.hardware else words(f"{key}.plain")


def key_steps(trace: Trace, most: int = 4) -> list[int]:
    """The steps that tell the run: first eviction, first return, first padding, first and last."""
    wanted = (
        lambda s: s.preempted,
        lambda s: any(a.how in ("recomputed", "swapped_in") for a in s.admitted),
        lambda s: s.refused,
        lambda s: any(row.phase == "padding" for row in s.scheduled),
        lambda s: any(a.prefix_hit_tokens for a in s.admitted),
        lambda s: s.admitted,
        lambda s: s.held_back is not None and s.held_back.reason == "no_blocks",
        lambda s: s.finished,
        lambda s: s.held_back is not None,
    )
    chosen: list[int] = []
    for test in wanted:
        found = next((t for t, s in enumerate(trace) if test(s) and t not in chosen), None)
        if found is not None and len(chosen) < most - 1:
            chosen.append(found)
    last = len(trace) - 1
    if last >= 0 and last not in chosen:
        chosen.append(last)
    return sorted(chosen)


def _svg(traces: list[Trace], axis: str, theme: str, lang: str, strip: bool) -> str:
    job = _Job(traces, theme, Words(lang), axis, strip)
    title = " / ".join(trace.meta.policy for trace in traces)
    told = " ".join(alt_text(trace, lang) for trace in traces)
    canvas = SvgCanvas(WIDTH, job.height, THEMES[theme]["bg"], title, told)
    job.draw(canvas)
    return canvas.to_svg()


class _Job:
    """One picture: measured first, then drawn on whichever canvas."""

    def __init__(
        self,
        traces: list[Trace],
        theme: str,
        words: Words,
        axis: str,
        strip: bool,
        plans: list[TimelinePlan] | None = None,
    ) -> None:
        self.traces = traces
        self.theme = theme
        self.words = words
        self.axis = axis
        self.names = Names(traces)
        self.plans = plans or [plan(trace) for trace in traces]
        self.steps = key_steps(traces[0]) if strip and len(traces) == 1 else []
        frames = FRAME_HEIGHT + 10 if self.steps else 0
        self.height = frames + LEGEND + sum(HEADER + p.height for p in self.plans)

    def draw(self, canvas: Canvas) -> None:
        top = 0.0
        for number, (trace, layout) in enumerate(zip(self.traces, self.plans, strict=True)):
            self._header(canvas, trace, top)
            top += HEADER
            if self.steps and number == 0:
                self._frames(canvas, trace, top)
                top += FRAME_HEIGHT + 10
            TimelineDrawing(
                canvas,
                trace,
                layout,
                top,
                self.names,
                self.words,
                self.theme,
                self.axis,
                tuple(self.steps),
            ).draw()
            top += layout.height
        self._legend(canvas, top + 6)

    def _header(self, canvas: Canvas, trace: Trace, top: float) -> None:
        colours, words = THEMES[self.theme], self.words
        summary = trace.summary
        canvas.text(14, top + 21, trace.meta.policy, colours["text"], 16, bold=True)
        seconds = summary["end_s"] - (summary["start_s"] or 0.0)
        rate = summary["num_generated_tokens"] / seconds if seconds else 0.0
        facts = [
            f"{len(trace)} {words('number.steps')}",
            f"{seconds * 1e3:.0f} ms",
            f"{summary['num_generated_tokens']} {words('number.generated')}",
            f"{rate:.0f} {words('number.tokens_per_s')}",
            f"{summary['num_preemptions']} {words('number.preemptions')}",
        ]
        if summary["num_padding_tokens"]:
            facts.append(f"{summary['num_padding_tokens']} {words('number.padding')}")
        canvas.text(14, top + 38, " · ".join(facts), colours["muted"], 11)
        text = badge(trace.meta, words)
        width = canvas.measure(text, 11) + 16
        box = (canvas.width - 14 - width, top + 8, width, 20)
        canvas.rect(*box, colours["panel"], colours["strong"], radius=10)
        canvas.text(
            canvas.width - 14 - width / 2, top + 22, text, colours["text"], 11, anchor="middle"
        )

    def _frames(self, canvas: Canvas, trace: Trace, top: float) -> None:
        gap = 10
        width = (canvas.width - 28 - gap * (len(self.steps) - 1)) / len(self.steps)
        width = min(width, 320)
        for number, t in enumerate(self.steps):
            shown = view(trace, t, lang=self.words.lang, names=self.names)
            _Frame(canvas, shown, 14 + number * (width + gap), top, width, self).draw()

    def _legend(self, canvas: Canvas, top: float) -> None:
        colours = THEMES[self.theme]
        phases = [
            name
            for name in ("prefill", "recompute", "decode", "padding", "sits_out")
            if any(name in layout.phases for layout in self.plans)
        ]
        x = 14.0
        for name in phases:
            phase = PHASES[name]
            edge = phase.edge if self.theme == "light" else phase.edge_dark
            canvas.rect(x, top, 22, 12, phase.fill, edge, pattern=phase.pattern, ink=phase.ink)
            x = self._entry(canvas, x + 27, top, self.words(f"phase.{name}"))
        if any(layout.idles for layout in self.plans):
            canvas.rect(x, top, 22, 12, colours["bubble"], colours["bubble_mark"])
            x = self._entry(canvas, x + 27, top, self.words("phase.bubble"))
        if any(step.preempted for trace in self.traces for step in trace):
            canvas.cross(x + 8, top + 6, 5, colours["alarm"])
            self._entry(canvas, x + 20, top, self.words("event.preemption"))

    def _entry(self, canvas: Canvas, x: float, top: float, text: str) -> float:
        canvas.text(x, top + 10, text, THEMES[self.theme]["text"], 11)
        return x + canvas.measure(text, 11) + 18


class _Frame:
    """A step on a card: the sentence, the queues, the blocks."""

    def __init__(
        self, canvas: Canvas, shown: View, x: float, y: float, width: float, job: _Job
    ) -> None:
        self.canvas = canvas
        self.view = shown
        self.x, self.y, self.width = x, y, width
        self.job = job
        self.colours = THEMES[job.theme]

    def draw(self) -> None:
        canvas, colours, x, y = self.canvas, self.colours, self.x, self.y
        canvas.rect(x, y, self.width, FRAME_HEIGHT, colours["panel"], colours["line"], radius=6)
        words, room = self.job.words, self.width - 20
        title = words("step", step=self.view.step)
        alarm = bool(self.view.record.preempted or self.view.refused)
        colour = colours["alarm" if alarm else "accent"]
        canvas.text(x + 10, y + 20, title, colour, 13, bold=True)
        told = words("semicolon").join(self.view.clauses[:3])
        canvas.paragraph(x + 10, y + 38, told, colours["text"], 10.5, room, 5)
        top = y + 112
        for place in ("running", "waiting", "swapped"):
            queue = getattr(self.view, place)
            if place != "swapped" or queue:
                self._chips(place, queue, top)
                top += 22
        self._blocks(top + 4)

    def _chips(self, place: str, queue: tuple[str, ...], top: float) -> None:
        canvas, names = self.canvas, self.job.names
        canvas.text(
            self.x + 10, top + 11, self.job.words(f"place.{place}"), self.colours["muted"], 10
        )
        x, most = self.x + 80, self.x + self.width - 10
        for index, name in enumerate(queue):
            label = names.label(name)
            width = max(16, canvas.measure(label, 10, True) + 7)
            left = len(queue) - index
            if x + width > most - (30 if left > 1 else 0):
                canvas.text(x, top + 11, f"+{left}", self.colours["text"], 10)
                return
            fill = request_colour(names.number(name))
            done = name in self.view.finishing
            canvas.rect(x, top, width, 15, fill, "#1B1F24", radius=3)
            canvas.text(
                x + width / 2, top + 11, label, ink_on(fill), 10, anchor="middle", bold=True
            )
            if done:
                canvas.line(x, top + 17, x + width, top + 17, self.colours["good"], 2)
            if any(p.request_id == name for p in self.view.record.preempted):
                canvas.rect(x - 2, top - 2, width + 4, 19, None, self.colours["alarm"], width=1.5)
            x += width + 4

    def _blocks(self, top: float) -> None:
        canvas, words, blocks = self.canvas, self.job.words, self.view.blocks()
        note = f"{words('panel.blocks')}: {self.view.record.free_blocks} {words('block.free')}"
        room_x, room_y = self.width - 20, self.y + FRAME_HEIGHT - 8 - (top + 14)

        def fitting(size: int) -> int:
            return int(room_x // size) * int(room_y // size)

        sizes = (18, 16, 14, 12, 10, 8, 6, 5, 4, 3)
        size = next((size for size in sizes if fitting(size) >= len(blocks)), sizes[-1])
        columns = int(room_x // size)
        if size >= 12 and blocks:
            columns = -(-len(blocks) // -(-len(blocks) // columns))  # rows of equal length
        shown = blocks[: fitting(size)]
        if len(shown) < len(blocks):
            note += f" (+{words('more', n=len(blocks) - len(shown))})"
        canvas.text(self.x + 10, top + 8, note, self.colours["muted"], 10)
        for number, block in enumerate(shown):
            row, column = divmod(number, columns)
            self._block(block, self.x + 10 + column * size, top + 14 + row * size, size)

    def _block(self, block: Block, x: float, y: float, size: int) -> None:
        canvas, colours, names = self.canvas, self.colours, self.job.names
        edged = size > 5
        side = size - 1 if edged else size
        if not block.owners:
            edge = colours["alarm" if block.lost_by else "line"]
            canvas.rect(x, y, side, side, colours["bg"], edge if edged else None)
            if block.state == "cached":
                at, r = side / 3, max(1.0, side / 4)
                canvas.rect(x + at, y + at, r, r, colours["muted"])
            return
        fill = request_colour(names.number(block.owners[0]))
        edge = colours["text"] if block.taken else colours["strong"]
        canvas.rect(
            x,
            y,
            side,
            side,
            fill,
            edge if edged or block.taken else None,
            pattern="slash" if block.state == "shared" and edged else "",
            width=2 if block.taken and edged else 1,
        )
        if size >= 14:
            label = names.label(block.owners[0])
            middle = (x + side / 2, y + side / 2 + 3.5)
            canvas.text(*middle, label, ink_on(fill), 9, anchor="middle", bold=True)
