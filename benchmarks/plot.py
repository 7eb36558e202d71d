"""A bar chart as SVG, by hand: no plotting library for one picture."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

# Okabe and Ito's colours, told apart by most eyes.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
BAR, GAP, LEFT, WIDTH = 14, 10, 170, 860


def bars(title: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Groups of horizontal bars; a series has one colour throughout, and its name in the legend."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    colour = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(series)}
    most = max((value for group in groups.values() for value in group.values()), default=1.0)
    scale = (WIDTH - LEFT - 80) / most
    parts: list[str] = []
    x = 10.0
    for name in series:
        parts.append(f'<rect x="{x:.0f}" y="34" width="12" height="12" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="44">{escape(name)}</text>')
        x += 35 + 7.5 * len(name)
    y = 62
    for label, group in groups.items():
        middle = y + BAR * len(group) / 2 + 4
        parts.append(
            f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>'
        )
        for name, value in group.items():
            width = value * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" '
                f'fill="{colour[name]}"/>'
                f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}">{value:.0f}</text>'
            )
            y += BAR
        y += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="sans-serif" font-size="11">'
        f'<title>{escape(title)}</title><rect width="{WIDTH}" height="{y}" fill="white"/>'
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )
