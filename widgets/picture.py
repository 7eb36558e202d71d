"""What every picture of runs has, whether or not a kernel stands behind it."""

from __future__ import annotations

import base64
from functools import cached_property
from pathlib import Path
from typing import Any

from minibatch.trace import Trace
from widgets import page, static
from widgets.columns import describe, encode
from widgets.names import Names
from widgets.replay import history
from widgets.timeline import TimelinePlan, plan
from widgets.view import view
from widgets.words import Words

PANELS = ("timeline", "queues", "blocks", "throughput")
LONGEST_ALT = 600
LARGEST_DATA = 60_000  # bytes of packed steps that an output cell carries


class Picture:
    """One to four traces, and how to show them.

    Args:
        traces: at least one.
        titles: by which compared traces are called; by default their policies.
        axis: ``"iterations"`` or ``"ms"``.
        panels: which of ``PANELS``.
        lang: ``"en"`` or ``"zh"``.
        step: the step that is shown first.
    """

    def __init__(
        self,
        traces: list[Trace],
        titles: list[str] | None = None,
        *,
        axis: str = "iterations",
        panels: tuple[str, ...] = PANELS,
        lang: str = "en",
        step: int = 0,
    ) -> None:
        if not 1 <= len(traces) <= 4:
            raise ValueError(f"{len(traces)} traces: one to four can be shown.")
        if axis not in ("iterations", "ms"):
            raise ValueError(f"axis={axis!r}: expected 'iterations' or 'ms'.")
        unknown = set(panels) - set(PANELS)
        if unknown:
            raise ValueError(f"no panel {', '.join(sorted(unknown))}; there are {PANELS}.")
        self.traces = traces
        self.titles = titles or [trace.meta.policy for trace in traces]
        self.axis = axis
        self.panels = panels
        self.words = Words(lang)
        self.step = step
        self.names = Names(traces)

    @property
    def mode(self) -> str:
        return "compare" if len(self.traces) > 1 else "play"

    @cached_property
    def state(self) -> dict[str, Any]:
        """What the front end is given."""
        series = []
        for trace, title in zip(self.traces, self.titles, strict=True):
            about = {**describe(trace.meta, trace), "title": title}
            series.append({"about": about, "data": encode(trace, self.names, self.words.lang)})
        return {
            "mode": self.mode,
            "lang": self.words.lang,
            "axis": self.axis,
            "panels": list(self.panels),
            "step": self.step,
            "series": series,
        }

    def text(self) -> str:
        """A few lines: the first trace's step as a terminal would show it, or totals."""
        return "\n".join(
            _text_of(trace, title, self.step if len(self.traces) == 1 else None, self.names)
            for trace, title in zip(self.traces, self.titles, strict=True)
        )

    def alt(self) -> str:
        told = " ".join(static.alt_text(trace, self.words.lang) for trace in self.traces)
        return told if len(told) <= LONGEST_ALT else told[: LONGEST_ALT - 2] + " …"

    def png(self, plans: list[TimelinePlan] | None = None) -> bytes:
        return static.png(*self.traces, axis=self.axis, scale=1, plans=plans)

    def timeline_png(self, plans: list[TimelinePlan] | None = None) -> bytes:
        return static.png(*self.traces, axis=self.axis, scale=1, strip=False, plans=plans)

    def svg(self, theme: str = "light") -> str:
        return static.film_strip_svg(
            *self.traces, axis=self.axis, theme=theme, lang=self.words.lang
        )

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of its own, with everything in it; also written to ``path``, if given."""
        html = page.whole_page(self.state, " / ".join(self.titles), self.alt())
        if path is not None:
            Path(path).write_text(html, encoding="utf-8")
        return html

    def bundle(self) -> dict[str, str]:
        """The saved forms of an output cell, none of which needs a kernel."""
        plans = [plan(trace) for trace in self.traces]  # of a long run the dearest part
        picture = self.png(plans)
        size = sum(len(entry["data"]) for entry in self.state["series"])
        if size <= LARGEST_DATA:
            html = page.snippet(self.state, picture, self.alt())
        else:  # a notebook must stay small
            html = page.still(picture, self.alt()) + f"<p>{self.words('still.large')}</p>"
        forms = {"text/plain": self.text(), "text/html": html}
        if len(self.traces) == 1:
            # For viewers that know no HTML: the timeline alone, since the whole is in the HTML.
            forms["image/png"] = base64.b64encode(self.timeline_png(plans)).decode()
        return forms


def _text_of(trace: Trace, title: str, step: int | None, names: Names) -> str:
    """``continuous | it 7 | A A B . | wait C D | free 3/12``, or the totals of a run."""
    if not len(trace):
        return f"{title} | no steps yet"
    if step is None:
        totals = trace.summary
        return (
            f"{title} | {len(trace)} iterations | {totals['num_generated_tokens']} tokens | "
            f"{totals['num_padding_tokens']} padding | {totals['num_preemptions']} evictions"
        )
    shown = view(trace, step, names=names)
    slots = [names.label(lane.request_id or "") for lane in shown.lanes]
    free = history(trace).num_slots - len(slots)
    lanes = " ".join([*slots[:12], *["."] * max(0, min(free, 12 - len(slots)))])
    waiting = " ".join(names.label(name) for name in shown.waiting[:6]) or "-"
    more = len(shown.waiting) - 6
    total = trace.meta.knobs.get("num_gpu_blocks")
    return (
        f"{title} | it {shown.step} of {len(trace)} | {lanes} | wait {waiting}"
        + (f" (+{more})" if more > 0 else "")
        + f" | free {shown.record.free_blocks}"
        + (f"/{total}" if total else "")
    )
