"""What lessons print and draw: real source, tables, facts, a request's life, a timeline."""

from __future__ import annotations

import ast
import inspect
import platform
import textwrap
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minibatch.record import one_line
from minibatch.trace import Trace

MOST_LINES = 12
ROOT = Path(__file__).parents[1]


def setting() -> None:
    """Versions and device: the first line of every lesson."""
    names = ("minibatch-lab", "torch", "ipywidgets", "anywidget")
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} -")
    print(f"Python {platform.python_version()}, {', '.join(found)}, {platform.machine()}")


def source(function: Callable[..., Any], first: str = "", last: str = "") -> None:
    """Print a function as it stands in the package, without its docstring.

    Args:
        function: or a method, or a class.
        first: print from the first line that contains this...
        last: ...to the first line from there that contains this.

    Raises:
        ValueError: there is no such line, or more than 12 would be printed.
    """
    lines = _without_docstring(textwrap.dedent(inspect.getsource(function))).splitlines()
    begin = _find(lines, first, 0) if first else 0
    end = _find(lines, last, begin) + 1 if last else len(lines)
    if end - begin > MOST_LINES:
        raise ValueError(f"{function.__qualname__}: {end - begin} lines, show {MOST_LINES}.")
    path = Path(inspect.getsourcefile(function) or "").resolve()
    home = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    print(f"# {home}: {function.__qualname__}")
    print(textwrap.dedent("\n".join(lines[begin:end])))


def _find(lines: Sequence[str], text: str, start: int) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"no line with {text!r}.")


def _without_docstring(code: str) -> str:
    body = ast.parse(code).body[0].body  # type: ignore[attr-defined]
    if not (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)):
        return code
    lines = code.splitlines()
    del lines[body[0].lineno - 1 : body[0].end_lineno]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print columns: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for number, row in enumerate(cells):
        parts = [row[0].ljust(widths[0])]
        parts += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(parts).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def facts(**values: Any) -> dict[str, str]:
    """Print named values and hand them on to ``interview``. Floats keep two digits."""
    told = {name: as_text(value) for name, value in values.items()}
    for name, text in told.items():
        print(f"{name} = {text}")
    return told


def as_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)


def tell(trace: Trace, *steps: int) -> None:
    """Print the run, a line a step (or only those steps), without its rates."""
    total = trace.meta.knobs.get("num_gpu_blocks")
    for t in steps or range(len(trace)):
        parts = one_line(trace[t], total).split(" | ")
        print(" | ".join(part for part in parts if not part.endswith("tok/s")))


def life(trace: Trace, request_id: str) -> str:
    """Where a request stood, step by step: ``w`` waiting, ``P`` prefill, ``d`` decode, ``s``
    swapped, ``.`` running but sitting the step out, a blank before it came and after it left.
    """
    marks: list[str] = []
    for step in trace:
        phase = {row.request_id: row.phase for row in step.scheduled}.get(request_id)
        if phase == "padding":
            marks.append("x")
        elif phase:
            marks.append("P" if phase == "prefill" else "d")
        elif request_id in step.waiting:
            marks.append("w")
        elif request_id in step.swapped:
            marks.append("s")
        else:
            marks.append("." if request_id in step.running else " ")
    return "".join(marks).rstrip()


class Picture:
    """An SVG and a PNG of the same thing, and words for who sees neither."""

    def __init__(self, svg: str, png: bytes, text: str) -> None:
        self.svg = svg
        self.png = png
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": self.text,
            "image/svg+xml": self.svg,
            "image/png": b64encode(self.png).decode(),
        }


def timeline(trace: Trace | Mapping[str, Trace], *more: Trace, lang: str = "en") -> Picture:
    """The slots of one run, or of several under each other on one scale."""
    from widgets import static

    first = list(trace.values()) if isinstance(trace, Mapping) else [trace]
    traces = [*first, *more]
    svg = (
        static.timeline_svg(*traces, lang=lang)
        if len(traces) == 1
        else (static.film_strip_svg(*traces, lang=lang))
    )
    text = "\n".join(
        f"{run.meta.policy}: {len(run)} iterations, {len(run.requests)} requests" for run in traces
    )
    return Picture(svg, static.png(*traces, scale=1.0, strip=False), text)
