"""Pictures without a kernel: SVG, PNG, words."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib

import demo_traces
import pytest

from minibatch.trace import Trace
from widgets import static
from widgets.canvas import PixelCanvas, SvgCanvas, wrap
from widgets.strokes import glyph
from widgets.view import view

ALL = list(demo_traces.DEMOS)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("axis", ["iterations", "ms"])
@pytest.mark.parametrize("name", ALL)
def test_every_svg_is_well_formed_and_told(
    name: str, axis: str, theme: str, demos: dict[str, Trace]
) -> None:
    for make in (static.timeline_svg, static.film_strip_svg):
        text = make(demos[name], axis=axis, theme=theme)
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img"
        assert root.find(f"{SVG}title").text == demos[name].meta.policy
        assert "iterations" in root.find(f"{SVG}desc").text
        assert "script" not in text and "href" not in text
        assert len(text) < 120_000


def test_svgs_and_pngs_are_the_same_every_time(demos: dict[str, Trace]) -> None:
    assert static.film_strip_svg(demos["swap"]) == static.film_strip_svg(demo_traces.load("swap"))
    assert static.png(demos["swap"]) == static.png(demo_traces.load("swap"))


def test_colours_never_stand_alone(demos: dict[str, Trace]) -> None:
    """Each phase of a lane has its pattern or is told in the legend, each request its letter."""
    text = static.timeline_svg(demos["continuous"])
    for pattern in ("mb-slash", "mb-cross", "mb-dots"):
        assert f'id="{pattern}-' in text
    letters = {node.text for node in ElementTree.fromstring(text).iter(f"{SVG}text")}
    assert letters >= set("ABCDEFGH") | {"prefill", "decode", "recompute", "sits out"}


def test_the_background_is_painted_with_the_ink() -> None:
    """A picture without a background of its own is unreadable in somebody's dark theme."""
    trace = demo_traces.load("static")
    for theme in ("light", "dark"):
        text = static.timeline_svg(trace, theme=theme)
        assert f'<rect width="100%" height="100%" fill="{static.THEMES[theme]["bg"]}"/>' in text


def test_pngs_are_small_and_whole(demos: dict[str, Trace]) -> None:
    for name in ALL:
        data = static.png(demos[name])
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(data) < 45_000
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1440 and 400 < height < 1400
        kinds = []
        at, raw = 8, b""
        while at < len(data):
            (length,) = struct.unpack(">I", data[at : at + 4])
            kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
            check = struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
            assert check == zlib.crc32(kind + body)
            kinds.append(kind)
            raw += body if kind == b"IDAT" else b""
            at += 12 + length
        assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND"
        assert len(zlib.decompress(raw)) == height * (width + 1)


def test_key_steps_tell_the_run() -> None:
    trace = demo_traces.load("swap")
    steps = static.key_steps(trace)
    assert 1 < len(steps) <= 4 and steps == sorted(steps)
    assert any(trace[t].preempted for t in steps)
    assert any(trace[t].swapped_in for t in steps)
    assert steps[-1] == len(trace) - 1


def test_words_for_those_who_cannot_see_it() -> None:
    trace = demo_traces.load("continuous")
    text = static.alt_text(trace)
    assert text.startswith("continuous batching, 28 iterations, 8 requests, 64 tokens generated")
    assert view(trace, 4).sentence in text
    table = static.data_table(trace)
    assert table.count("<tr>") == 1 + len(trace)
    assert "<td>B C D A" not in table


def test_a_long_table_is_cut_and_says_so() -> None:
    table = static.data_table(demo_traces.load("continuous"), most=5)
    assert "23 more" in table


def test_where_the_numbers_come_from_is_on_the_picture(demos: dict[str, Trace]) -> None:
    assert "cost model: a100-80gb" in static.timeline_svg(demos["static"])
    trace = demo_traces.load("static")
    trace.meta.source, trace.meta.hardware = "measured", "x86_64 CPU, 2 threads"
    assert "recorded on x86_64 CPU, 2 threads" in static.timeline_svg(trace)


def test_an_empty_trace_makes_a_picture() -> None:
    trace = Trace(demo_traces.load("static").meta, [])
    ElementTree.fromstring(static.film_strip_svg(trace))
    assert static.png(trace)


def test_several_traces_stand_below_each_other(demos: dict[str, Trace]) -> None:
    text = static.film_strip_svg(demos["static"], demos["unified"])
    assert ">static</text>" in text and ">unified</text>" in text


def test_lines_break_between_words() -> None:
    assert wrap("aa bb cc", 5, len) == ["aa bb", "cc"]
    assert wrap("aaaaaaaa b", 5, len) == ["aaaaaaaa", "b"]


def test_every_printable_character_has_strokes() -> None:
    unknown = glyph("\x00")
    plain = [chr(code) for code in range(33, 127) if chr(code) not in "$&@\\^`{}~"]
    assert [character for character in plain if glyph(character) == unknown] == []


def test_text_is_as_wide_as_it_was_measured() -> None:
    canvas = PixelCanvas(200, 30, "#FFFFFF", 2)
    canvas.text(5, 20, "evicted 17", "#000000", 12)
    dark = (canvas.pixels.sum(axis=2) < 300).any(axis=0).nonzero()[0]
    assert dark.min() >= 8
    assert abs((dark.max() - dark.min()) / 2 - canvas.measure("evicted 17", 12)) < 4
    assert SvgCanvas.measure("evicted", 12) > 20
