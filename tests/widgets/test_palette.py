"""Contrast and colour-blindness of the palette, by the numbers."""

from __future__ import annotations

from itertools import combinations

import pytest

from widgets.palette import PHASES, REQUESTS, THEMES, channels, contrast, ink_on

# Severity 1.0 matrices of Machado, Oliveira and Fernandes (2009), on linear RGB.
DEFICIENCIES = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


def linear(colour: str) -> list[float]:
    values = [value / 255 for value in channels(colour)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(1.0, max(0.0, value)) for value in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, deficiency: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    rows = DEFICIENCIES[deficiency]
    return lab([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in rows])


def distance(one: str, other: str, deficiency: str) -> float:
    pairs = zip(seen(one, deficiency), seen(other, deficiency), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


@pytest.mark.parametrize("theme", list(THEMES))
def test_text_reads_on_every_background(theme: str) -> None:
    colours = THEMES[theme]
    for background in ("bg", "panel"):
        for ink in ("text", "muted", "accent", "alarm", "good"):
            assert contrast(colours[ink], colours[background]) >= 4.5, (ink, background)
    for ink in ("text", "alarm"):
        assert contrast(colours[ink], colours["bubble"]) >= 4.5
    for mark in ("strong", "cursor", "bubble_mark"):
        assert contrast(colours[mark], colours["bg"]) >= 3, mark


@pytest.mark.parametrize("theme", list(THEMES))
@pytest.mark.parametrize("name", list(PHASES))
def test_phases_stand_out_and_their_letters_read(name: str, theme: str) -> None:
    phase = PHASES[name]
    edge = phase.edge if theme == "light" else phase.edge_dark
    assert contrast(edge, THEMES[theme]["bg"]) >= 3
    assert contrast(edge, THEMES[theme]["panel"]) >= 3
    assert contrast(phase.ink, phase.fill) >= (4.2 if name == "finished" else 4.5)


@pytest.mark.parametrize("fill", REQUESTS)
def test_letters_read_on_every_request(fill: str) -> None:
    assert contrast(ink_on(fill), fill) >= 4.5


@pytest.mark.parametrize("deficiency", list(DEFICIENCIES))
def test_phases_keep_apart_for_everybody(deficiency: str) -> None:
    main = ("waiting", "prefill", "decode", "swapped", "recompute", "finished")
    closest = min(
        distance(PHASES[a].fill, PHASES[b].fill, deficiency) for a, b in combinations(main, 2)
    )
    assert closest >= 16


def test_phases_that_look_alike_in_grey_differ_in_pattern() -> None:
    lanes = ("prefill", "recompute", "decode", "padding", "sits_out")
    assert len({PHASES[name].pattern for name in lanes}) == len(lanes)
