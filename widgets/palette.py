"""Colours, for both themes and every picture. Fill and ink are always set together.

Phases are told apart by colour, by pattern and by edge; requests by colour and letter. The fills
of ``PHASES`` keep apart under simulated protanopia, deuteranopia and tritanopia
(``tests/widgets/test_palette.py`` has the figures); ``REQUESTS`` are those of Okabe and Ito.
"""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """How a piece of work is painted. The edge stands out from the background, the ink from the
    fill.
    """

    fill: str
    ink: str  # letters and pattern on the fill
    edge: str  # on the light background
    edge_dark: str  # on the dark one
    pattern: str  # "" | "slash" | "cross" | "dots" | "back"


PHASES: dict[str, Phase] = {
    "prefill": Phase("#F0E442", "#1B1F24", "#7A7200", "#F0E442", "slash"),
    "recompute": Phase("#E69F00", "#1B1F24", "#8F5F00", "#FFC24D", "cross"),
    "decode": Phase("#0072B2", "#FFFFFF", "#00588A", "#5CB8F0", ""),
    "padding": Phase("#FFE3DC", "#7A1F0B", "#B3361B", "#FF9B85", "back"),
    "sits_out": Phase("#E4E8EC", "#1B1F24", "#6B7580", "#B4BDC7", "dots"),
    "swapped": Phase("#882255", "#FFFFFF", "#882255", "#E58AB8", "back"),
    "waiting": Phase("#D0D0D0", "#1B1F24", "#6B7580", "#B4BDC7", ""),
    "finished": Phase("#6E7B85", "#FFFFFF", "#4F5A63", "#9BA8B2", ""),
}

REQUESTS = (
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#F0E442",
    "#D55E00",
    "#0072B2",
    "#A7ADB4",
)

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "bg": "#FFFFFF",
        "panel": "#F6F8FA",
        "text": "#1B1F24",
        "muted": "#57606A",
        "line": "#D0D7DE",
        "strong": "#8C959F",
        "accent": "#0550AE",
        "alarm": "#B3261E",
        "good": "#116329",
        "bubble": "#F6DCD7",
        "bubble_mark": "#C4553F",
        "cursor": "#1B1F24",
    },
    "dark": {
        "bg": "#14171C",
        "panel": "#1C2128",
        "text": "#E6E9ED",
        "muted": "#A3ACB6",
        "line": "#363D47",
        "strong": "#7A8490",
        "accent": "#7CB7FF",
        "alarm": "#FF9B8F",
        "good": "#6FD08C",
        "bubble": "#43241F",
        "bubble_mark": "#E2806D",
        "cursor": "#FFFFFF",
    },
}


def request_colour(number: int) -> str:
    return REQUESTS[number % len(REQUESTS)]


def channels(colour: str) -> tuple[int, int, int]:
    """``#RRGGBB`` as numbers."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (value / 255 for value in channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio (WCAG 2), 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(fill: str) -> str:
    """Black or white, whichever reads better."""
    dark, light = "#000000", "#FFFFFF"
    return dark if contrast(fill, dark) >= contrast(fill, light) else light


def for_browser() -> dict[str, object]:
    """The whole palette, as the front end wants it."""
    return {
        "phases": {name: list(phase) for name, phase in PHASES.items()},
        "requests": [[fill, ink_on(fill)] for fill in REQUESTS],
        "themes": THEMES,
    }


def css_variables() -> str:
    """The themes as CSS custom properties."""
    rules = []
    for theme, colours in THEMES.items():
        pairs = {name.replace("_", "-"): value for name, value in colours.items()}
        for name, phase in PHASES.items():
            pairs[name.replace("_", "-")] = phase.edge if theme == "light" else phase.edge_dark
        body = "".join(f"--mb-{name}:{value};" for name, value in pairs.items())
        rules.append(f'.mb-root[data-theme="{theme}"]{{color-scheme:{theme};{body}}}')
    return "\n".join(rules)
