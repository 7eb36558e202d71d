"""``report`` of ``gpu.py``: tables and a plot of what the other stages wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from gpu_bench import Row, shown


def write_report(out: Path, title: str, stages: Iterable[str]) -> int:
    """``report.md`` with a table a stage, and ``sweep.svg``; returns the number of tables."""
    parts, count = [f"# {title}\n"], 0
    for stage in stages:
        file = out / f"{stage}.json"
        if not file.exists():
            continue
        content = json.loads(file.read_text())
        rows: list[Row] = content["rows"]
        if not rows:
            continue
        count += 1
        names = list(dict.fromkeys(name for row in rows for name in row if name != "parts"))
        about = f"{content['hardware']}, {content['date']}, commit {content['commit'] or 'unknown'}"
        parts.append(f"## {stage}\n\n{about}, {content['software']}\n")
        parts.append("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        parts += ["| " + " | ".join(shown(row.get(name)) for name in names) + " |" for row in rows]
        parts.append("")
        measured = [row for row in rows if "error" not in row]
        if stage == "sweep" and measured:
            (out / "sweep.svg").write_text(sweep_plot(measured))
            parts.append("![throughput by concurrency](sweep.svg)\n")
    (out / "report.md").write_text("\n".join(parts))
    return count


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000")  # Okabe and Ito's


def sweep_plot(rows: list[Row]) -> str:
    """Tokens/s over concurrency, a line a policy and the serial bound dashed; SVG."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["policy"], []).append((row["concurrency"], row["tok/s"]))
    bound = {row["concurrency"]: row["serial bound"] for row in rows}  # every policy's
    lines["serial bound"] = sorted(bound.items())
    width, height, left, bottom = 640, 400, 70, 50
    most_x = max(x for points in lines.values() for x, _ in points)
    most_y = 1.05 * max(y for points in lines.values() for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - 130) * x / most_x,
            height - bottom - (height - bottom - 20) * y / most_y,
        )

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Generated tokens a second by concurrency</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for tick in range(5):
        y = most_y * tick / 4
        x0, y0 = place(0, y)
        x1, _ = place(most_x, y)
        svg.append(f'<path d="M{x0:.1f} {y0:.1f}H{x1:.1f}" stroke="#dddddd"/>')
        svg.append(f'<text x="{x0 - 6:.1f}" y="{y0 + 4:.1f}" text-anchor="end">{y:.0f}</text>')
    for x, _ in lines["serial bound"]:
        x0, y0 = place(x, 0)
        svg.append(f'<text x="{x0:.1f}" y="{y0 + 16:.1f}" text-anchor="middle">{x}</text>')
    svg.append(f'<text x="{left}" y="{height - 12}">requests at a time</text>')
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        places = [place(x, y) for x, y in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if name == "serial bound" else ""
        svg.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = places[-1]
        svg.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*svg, "</svg>\n"])
