"""Curves for the end of a lesson: a small SVG or PNG that is saved, a plotly figure on demand.

A figure of plotly shows nothing where its script is missing, and weighs megabytes where it is
not; so what a notebook keeps is drawn here.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from minibatch.trace import Trace
from widgets.canvas import Canvas, PixelCanvas, SvgCanvas
from widgets.palette import REQUESTS, THEMES

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
MARKS = ("circle", "square", "cross", "plus")
INKS = ("#0072B2", "#B34700", "#00724F", "#8F3A76", *REQUESTS)


class Chart:
    """Curves by name.

    Args:
        curves: name -> points.
        x_label, y_label: with units.
        title: above it.
        log_x: a logarithmic x axis.
    """

    def __init__(
        self,
        curves: Mapping[str, Points],
        x_label: str,
        y_label: str,
        title: str = "",
        *,
        log_x: bool = False,
    ) -> None:
        self.curves = {name: [(float(x), float(y)) for x, y in c] for name, c in curves.items()}
        if not any(self.curves.values()):
            raise ValueError("no points to draw.")
        if log_x and any(x <= 0 for points in self.curves.values() for x, _ in points):
            raise ValueError("log_x: every x must be above 0.")
        self.x_label = x_label
        self.y_label = y_label
        self.title = title
        self.log_x = log_x

    def svg(self, theme: str = "light") -> str:
        canvas = SvgCanvas(WIDTH, HEIGHT, THEMES[theme]["bg"], self.title, self.alt())
        self._draw(canvas, theme)
        return canvas.to_svg()

    def png(self, scale: float = 1) -> bytes:
        canvas = PixelCanvas(WIDTH, HEIGHT, THEMES["light"]["bg"], scale)
        self._draw(canvas, "light")
        return canvas.to_png()

    def alt(self) -> str:
        """The end points of every curve."""
        told = [
            f"{name}: {points[0][1]:g} at {points[0][0]:g} to {points[-1][1]:g} at "
            f"{points[-1][0]:g}"
            for name, points in self.curves.items()
            if points
        ]
        return f"{self.title or self.y_label} against {self.x_label}. " + "; ".join(told) + "."

    def plotly(self) -> Any:
        """The same curves as a ``plotly.graph_objects.Figure``, to zoom and hover.

        Raises:
            ImportError: plotly is not installed.
        """
        import plotly.graph_objects as go

        figure = go.Figure(
            [
                go.Scatter(
                    x=[x for x, _ in points],
                    y=[y for _, y in points],
                    name=name,
                    mode="lines+markers",
                    line={"color": INKS[i % len(INKS)]},
                    marker={"symbol": ("circle", "square", "x", "cross")[i % 4]},
                )
                for i, (name, points) in enumerate(self.curves.items())
            ]
        )
        figure.update_layout(
            title=self.title,
            xaxis_title=self.x_label,
            yaxis_title=self.y_label,
            xaxis_type="log" if self.log_x else "linear",
            template="plotly_white",
        )
        return figure

    def __repr__(self) -> str:
        return self.alt()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        image = base64.b64encode(self.png()).decode()
        html = (
            f'<img alt="{escape(self.alt(), quote=True)}" style="max-width:100%;'
            f'background:#ffffff" src="data:image/png;base64,{image}"/>'
        )
        return {"text/plain": repr(self), "text/html": html, "image/png": image}, {}

    # -- drawing ------------------------------------------------------------------------------

    def _draw(self, canvas: Canvas, theme: str) -> None:
        colours = THEMES[theme]
        points = [point for curve in self.curves.values() for point in curve]
        xs = [self._x(x) for x, _ in points]
        low, high = min(xs), max(xs)
        span = (high - low) or 1.0
        top = nice_ticks(max(max(y for _, y in points), 0.0))[-1] or 1.0
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

        def place(x: float, y: float) -> tuple[float, float]:
            return LEFT + (self._x(x) - low) / span * width, TOP + (1 - y / top) * height

        canvas.text(LEFT, 18, self.title, colours["text"], 14, bold=True)
        for y in nice_ticks(top):
            at = place(points[0][0], y)[1]
            canvas.line(LEFT, at, WIDTH - RIGHT, at, colours["line"])
            canvas.text(LEFT - 6, at + 4, f"{y:g}", colours["muted"], 10, anchor="end")
        for x in self._x_ticks(points):
            at = place(x, 0)[0]
            canvas.line(at, HEIGHT - BOTTOM, at, HEIGHT - BOTTOM + 4, colours["strong"])
            canvas.text(at, HEIGHT - BOTTOM + 16, f"{x:g}", colours["muted"], 10, anchor="middle")
        canvas.text(WIDTH - RIGHT, HEIGHT - 8, self.x_label, colours["text"], 11, anchor="end")
        canvas.text(LEFT, 34, self.y_label, colours["text"], 11)
        self._legend(canvas, theme)
        for index, curve in enumerate(self.curves.values()):
            ink = self._ink(index, theme)
            placed = [place(x, y) for x, y in curve]
            for (x1, y1), (x2, y2) in itertools.pairwise(placed):
                canvas.line(x1, y1, x2, y2, ink, 2)
            if len(placed) <= 40:
                for x, y in placed:
                    self._mark(canvas, index, x, y, ink)

    def _legend(self, canvas: Canvas, theme: str) -> None:
        x = float(WIDTH - RIGHT)
        for index, name in reversed(list(enumerate(self.curves))):
            x -= canvas.measure(name, 11) + 4
            canvas.text(x, 18, name, THEMES[theme]["text"], 11)
            ink = self._ink(index, theme)
            canvas.line(x - 22, 14, x - 6, 14, ink, 2)
            self._mark(canvas, index, x - 14, 14, ink)
            x -= 34

    @staticmethod
    def _ink(index: int, theme: str) -> str:
        return REQUESTS[index % len(REQUESTS)] if theme == "dark" else INKS[index % len(INKS)]

    @staticmethod
    def _mark(canvas: Canvas, index: int, x: float, y: float, ink: str) -> None:
        kind = MARKS[index % len(MARKS)]
        if kind == "cross":
            canvas.cross(x, y, 3.5, ink)
        elif kind == "plus":
            canvas.line(x - 4, y, x + 4, y, ink, 2)
            canvas.line(x, y - 4, x, y + 4, ink, 2)
        else:
            canvas.rect(x - 3, y - 3, 6, 6, ink, radius=3 if kind == "circle" else 0)

    def _x(self, x: float) -> float:
        return math.log10(x) if self.log_x else x

    def _x_ticks(self, points: Points) -> list[float]:
        seen = sorted({x for x, _ in points})
        if len(seen) <= 12:
            return seen
        if self.log_x:
            powers = range(math.ceil(math.log10(seen[0])), math.floor(math.log10(seen[-1])) + 1)
            return [10.0**power for power in powers]
        return [x for x in nice_ticks(seen[-1]) if seen[0] <= x <= seen[-1]]


def nice_ticks(most: float, count: int = 5) -> list[float]:
    """0 and about ``count`` round numbers up to at least ``most``."""
    if most <= 0:
        return [0.0]
    raw = most / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= raw * 0.999)
    return [round(i * step, 10) for i in range(math.ceil(most / step - 1e-9) + 1)]


def tokens_over_time(traces: Mapping[str, Trace]) -> Chart:
    """Generated tokens against milliseconds, a curve a run."""
    curves: dict[str, Points] = {}
    for name, trace in traces.items():
        start, total, points = trace[0].start_s, 0, [(0.0, 0.0)]
        for step in trace:
            total += step.num_generated_tokens
            points.append((1e3 * (step.end_s - start), float(total)))
        curves[name] = points
    return Chart(curves, "milliseconds", "tokens", "Tokens generated")


def latency_cdf(seconds: Mapping[str, Sequence[float]], label: str = "seconds") -> Chart:
    """Share of requests that took at most so long, a curve a run."""
    curves = {
        name: [(value, (i + 1) / len(values)) for i, value in enumerate(sorted(values))]
        for name, values in seconds.items()
    }
    return Chart(curves, label, "share of requests", "Latency")
