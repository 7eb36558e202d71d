"""Pictures without a kernel: SVG, PNG, words."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from collections import Counter
from typing import Any

import demo_traces
import numpy as np
import pytest

from minibatch.simulation import simulate
from minibatch.trace import Trace
from minibatch.workload import RequestSpec
from widgets import static, timeline
from widgets.canvas import PixelCanvas, SvgCanvas, wrap
from widgets.names import Names
from widgets.picture import Picture
from widgets.replay import PHASES, Replay
from widgets.strokes import glyph
from widgets.view import view
from widgets.words import Words

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


def long_run(requests: int = 8, **knobs: Any) -> Trace:
    """Four lanes, so many iterations that a column is narrower than a letter."""
    specs = [RequestSpec(f"q{i}", 0.0, 20 + i, 14 + 9 * (i % 4)) for i in range(requests)]
    sizes = {"num_gpu_blocks": 60, "max_model_len": 128, "max_num_batched_tokens": 128}
    return simulate(
        specs, "a100-80gb", "llama-2-7b", "continuous", {**demo_traces.SMALL, **sizes, **knobs}
    )


class Notes(SvgCanvas):
    """Boxes and letters in the order in which they are drawn."""

    def __init__(self) -> None:
        super().__init__(static.WIDTH, 400, "#FFFFFF")
        self.drawn: list[tuple] = []

    def _box(self, box: Any) -> None:
        self.drawn.append(("box", box.x, box.y, box.x + box.w, box.y + box.h))

    def text(self, x: float, y: float, text: str, fill: str, size: float = 12, **more: Any) -> None:
        if more.get("bold"):
            end = x + self.measure(text, size, True)
            self.drawn.append(("letter", x, y - 0.7 * size, end, y, text))


@pytest.mark.parametrize("axis", ["iterations", "ms"])
@pytest.mark.parametrize("name", ["long", *ALL])
def test_no_letter_is_cropped(name: str, axis: str) -> None:
    """A letter lies within a box of its own, and nothing is painted over it afterwards."""
    trace = long_run() if name == "long" else demo_traces.load(name)
    notes, names, words = Notes(), Names([trace]), Words("en")
    layout = timeline.plan(trace)
    timeline.TimelineDrawing(notes, trace, layout, 0, names, words, axis=axis).draw()
    told = set()
    for at, (kind, left, top, right, bottom, *text) in enumerate(notes.drawn):
        if kind != "letter":
            continue
        told.update(text)
        _, x1, y1, x2, y2 = notes.drawn[at - 1]  # its box
        assert x1 <= left and right <= x2 + 0.05 and y1 <= top and bottom <= y2
        for later, a, b, c, d, *_ in notes.drawn[at + 1 :]:
            apart = a >= right or c <= left or b >= bottom or d <= top
            assert apart, (text, later)
    if name == "long":
        assert told == {f"q{i}" for i in range(8)}  # each finds a place that is wide enough
        x = timeline._axis(trace, static.WIDTH, axis)
        assert x(1) - x(0) < 12 or axis == "ms"


def test_a_letter_without_room_is_left_out() -> None:
    trace = long_run(120)
    text = static.timeline_svg(trace)
    x = timeline._axis(trace, static.WIDTH, "iterations")
    assert x(1) - x(0) < 2
    letters = re.findall(r'font-weight="600">(q\d+)<', text)
    assert len(letters) < 120


def wide_run() -> Trace:
    """128 lanes, 4,000 blocks; half as long as that of the benchmark."""
    specs = [RequestSpec(f"r{i}", i * 0.01, 60 + i % 50, 60 + 7 * (i % 20)) for i in range(300)]
    knobs = {"num_gpu_blocks": 4000, "max_num_seqs": 128, "max_model_len": 1024}
    trace = simulate(specs, "a100-80gb", "llama-2-7b", "continuous", knobs)
    trace = Trace(trace.meta, trace.steps[100:400])
    assert max(len(step.scheduled) for step in trace) == 128
    return trace


def test_fine_lanes_say_what_stays_say() -> None:
    """A grid of colours, or boxes: the same facts."""
    trace = wide_run()
    fine = timeline.plan(trace)
    assert fine.codes is not None and fine.stays == []
    rows = timeline._Rows(fine.lanes)
    replay = Replay(128)
    for t, record in enumerate(trace):
        rows.add(t, replay.advance(record).rows, bool(record.waiting or record.swapped))
    stays, bubbles, _, phases, idles = rows.done(len(trace))
    codes = np.full((fine.lanes, len(trace)), -1)
    for t, lane in bubbles:
        codes[lane, t] = 0
    for stay in stays:
        codes[stay.lane, stay.begin : stay.end] = 1 + PHASES.index(stay.phase)
    assert np.array_equal(codes, fine.codes)
    assert (phases, idles) == (fine.phases, fine.idles)


def test_the_twin_of_a_large_run_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the run is read three times (for the page, the timeline, the steps of
    the film strip), thin lanes are one grid, and what is saved stays small.
    """
    trace, counts = wide_run(), Counter()

    def counted(owner: type, name: str) -> None:
        act = getattr(owner, name)

        def wrapper(*args: Any) -> Any:
            counts[name] += 1
            return act(*args)

        monkeypatch.setattr(owner, name, wrapper)

    counted(Replay, "begin")
    counted(PixelCanvas, "_box")
    counted(PixelCanvas, "grid")
    picture = Picture([trace])
    assert picture.state
    forms = picture.bundle()
    assert counts["begin"] <= 3 * len(trace) + 200
    assert counts["grid"] == 2  # with the film strip, and without
    assert counts["_box"] < 12_000
    assert len(forms["text/html"]) < 150_000 and len(forms["image/png"]) < 40_000
    assert forms["text/html"].count("<img") == 1


def test_a_step_number_stays_on_the_picture() -> None:
    """That of the last step stood half outside."""
    trace = wide_run()
    notes = Notes()
    layout = timeline.plan(trace)
    marked = (0, 1, len(trace) - 1)
    args = (0, Names([trace]), Words("en"), "light", "iterations", marked)
    timeline.TimelineDrawing(notes, trace, layout, *args).draw()
    numbers = [entry for entry in notes.drawn if entry[0] == "letter" and entry[5].isdigit()]
    assert [entry[5] for entry in numbers] == [str(trace[0].step), str(trace[-1].step)]
    assert all(entry[3] <= notes.width for entry in numbers)
