"""The player in a real browser, on a page without Jupyter."""

from __future__ import annotations

from typing import Any

import demo_traces
import pytest

from minibatch.trace import Trace
from widgets.picture import Picture
from widgets.view import View, view

pytestmark = pytest.mark.browser
ALL = list(demo_traces.DEMOS)


def show(stage: Any, *traces: Trace, **options: Any) -> Picture:
    picture = Picture(list(traces), **options)
    stage.mount(picture.state)
    return picture


def expected(shown: View) -> dict[str, Any]:
    """What the page's own bookkeeping must come to."""
    blocks = shown.blocks()
    known = [name for name in shown.requests] + list(shown.refused)
    return {
        "step": shown.step,
        "sentence": shown.sentence,
        "waiting": list(shown.waiting),
        "swapped": list(shown.swapped),
        "finishing": sorted(shown.finishing),
        "tables": {name: list(table) for name, table in shown.tables.items()},
        "cpu_tables": {name: list(table) for name, table in shown.cpu_tables.items()},
        "cached": sorted(shown.cached),
        "written": [number for number, block in enumerate(blocks) if block.written],
        "filled": [block.filled for block in blocks],
        "lost": {
            str(number): block.lost_by for number, block in enumerate(blocks) if block.lost_by
        },
        "why": {name: shown.why(name) for name in known},
    }


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", ALL)
def test_every_step_on_the_page_is_the_step_of_the_view(
    name: str, lang: str, stage: Any, demos: dict[str, Trace]
) -> None:
    trace = demos[name]
    show(stage, trace, lang=lang)
    order = [*range(len(trace)), *reversed(range(len(trace)))]
    found = stage.run(
        "(order) => order.map((t) => document.querySelector('.mb-root').player.probe(t))", order
    )
    for t, probe in zip(order, found, strict=True):
        shown = view(trace, t, lang=lang)
        wanted = expected(shown)
        lanes = [list(lane) for lane in shown.lanes]
        assert sorted(probe["lanes"]) == [
            [slot, name, phase, new, context, padding]
            for slot, name, phase, new, context, padding in lanes
        ]
        for key, value in wanted.items():
            assert probe[key] == value, (name, t, key)


@pytest.mark.parametrize("name", ALL)
def test_numbers_read_from_the_page_are_the_records(
    name: str, stage: Any, demos: dict[str, Trace]
) -> None:
    trace = demos[name]
    show(stage, trace)
    for t in range(len(trace)):
        record, totals = trace[t], view(trace, t).totals
        stage.settle()
        assert stage.step == record.step
        assert stage.number("free_blocks") == str(record.free_blocks)
        assert stage.number("batch") == str(len(record.running))
        assert stage.number("count_waiting") == str(len(record.waiting))
        assert stage.number("waiting") == str(len(record.waiting))
        assert stage.number("generated") == str(totals.generated_tokens)
        assert stage.number("preemptions") == str(totals.preemptions)
        assert stage.number("finished") == str(totals.finished)
        assert stage.number("tokens_per_s") == f"{totals.tokens_per_s:.1f}"
        assert stage.number("step_time") == f"{1e3 * record.duration_s:.1f} ms"
        told = stage.page.text_content(".mb-headline") + stage.page.text_content(".mb-details")
        assert told.replace(" ", "") == view(trace, t).sentence.replace(" ", "")
        stage.press("ArrowRight")


def test_buttons_keys_slider_and_jumps(stage: Any, demos: dict[str, Trace]) -> None:
    trace = demos["continuous"]
    evictions = [t for t, step in enumerate(trace) if step.preempted]
    show(stage, trace)
    click = stage.page.click

    def at() -> int:
        stage.settle()
        return stage.step

    click('[data-control="next"]')
    click('[data-control="next"]')
    assert at() == 2
    click('[data-control="back"]')
    assert at() == 1
    click('[data-control="last"]')
    assert at() == len(trace) - 1
    click('[data-control="first"]')
    assert at() == 0
    click('[data-control="jump_next"]')
    assert at() == evictions[0]
    stage.press("e")
    assert stage.step == evictions[1]
    stage.press("Shift+E")
    assert stage.step == evictions[0]
    stage.press("End", "Home", "n", "n", "p")
    assert stage.step == 1
    stage.press("a")
    assert trace[stage.step].admitted
    stage.press("f")
    assert trace[stage.step].finished
    stage.run(
        "() => { const s = document.querySelector('.mb-slider'); s.value = 7;"
        " s.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    assert at() == 7
    stage.page.focus(".mb-slider")
    stage.page.keyboard.press("ArrowRight")
    assert at() == 8


def test_swaps_can_be_jumped_to(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["swap"])
    stage.press("s")
    assert demos["swap"][stage.step].swapped_out
    stage.press("s")
    assert demos["swap"][stage.step].swapped_in


def test_it_plays_only_when_asked_and_stops_at_the_end(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["prefix"])
    stage.page.wait_for_timeout(700)
    assert stage.step == 0  # no autoplay
    stage.page.select_option('[data-control="speed"]', "60")
    stage.press(" ")
    stage.page.wait_for_selector(f'.mb-root[data-step="{len(demos["prefix"]) - 1}"]')
    stage.page.wait_for_selector('[data-control="play"][aria-label="Play"]')


def test_following_a_request_tells_why_it_does_not_run(stage: Any, demos: dict[str, Trace]) -> None:
    trace = demos["continuous"]
    show(stage, trace)
    stage.page.click(".mb-chip:text-is('F')")
    stage.settle()
    assert stage.number("why") == view(trace, 0).why("F")
    stage.press("e")
    assert stage.number("why") == view(trace, 4).why("F")
    stage.press("Escape")
    assert stage.number("why") == view(trace, 4).why("E")  # the head of the queue


def test_a_block_can_be_clicked(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["continuous"])
    stage.page.click(".mb-blocks", position={"x": 15, "y": 15})
    stage.settle()
    assert stage.page.get_attribute(".mb-chip.mb-followed", "data-request") == "0"


def test_hovering_shows_numbers(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["continuous"])
    box = stage.page.locator(".mb-timeline").bounding_box()
    stage.page.mouse.move(box["x"] + 130, box["y"] + 85)
    stage.page.wait_for_selector(".mb-tip:visible")
    assert "KV" in stage.page.text_content(".mb-tip")


@pytest.mark.parametrize("name", ["continuous", "prefix"])
def test_the_frame_never_jumps(name: str, stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos[name])
    sizes = set()
    for _ in range(len(demos[name])):
        box = stage.page.locator(".mb-root").bounding_box()
        sizes.add((box["width"], box["height"]))
        stage.press("ArrowRight")
    assert len(sizes) == 1


def test_chips_never_overlap_and_the_rest_is_counted(stage: Any) -> None:
    from minibatch.simulation import simulate
    from minibatch.workload import RequestSpec

    specs = [RequestSpec(f"{'w' * (1 + i % 4)}"[:2] + str(i), 0.0, 4, 3) for i in range(90)]
    knobs = {**demo_traces.SMALL, "num_gpu_blocks": 40, "max_num_seqs": 12}
    trace = simulate(specs, "a100-80gb", "llama-2-7b", "continuous", knobs)
    for width in (1180, 620):
        stage.page.set_viewport_size({"width": width, "height": 900})
        show(stage, trace)
        stage.press("n", "n", "n")
        stage.page.wait_for_timeout(300)
        boxes = stage.run(
            "() => [...document.querySelectorAll('.mb-chip')].map((c) => {"
            " const b = c.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"
        )
        assert len(boxes) > 10
        for i, (left, top, right, bottom) in enumerate(boxes):
            for other in boxes[i + 1 :]:
                apart = (
                    right <= other[0] + 0.5
                    or other[2] <= left + 0.5
                    or bottom <= other[1] + 0.5
                    or other[3] <= top + 0.5
                )
                assert apart
        shown = len(stage.page.query_selector_all(".mb-chip"))
        assert shown < 90
        more = stage.page.text_content('[data-place="waiting"] .mb-more')
        assert more.startswith("+") and "more" in more
    stage.page.set_viewport_size({"width": 1180, "height": 900})


def test_time_axis_and_table(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["swap"], axis="ms")
    stage.press("n", "n")
    assert stage.step == 2
    stage.page.click('[data-control="table"]')
    rows = stage.page.locator(".mb-table tr")
    assert rows.count() == 1 + len(demos["swap"])
    assert view(demos["swap"], 4).clauses[0] in rows.nth(5).text_content()


def test_compared_runs_share_a_slider(stage: Any, demos: dict[str, Trace]) -> None:
    names = ["static", "dynamic", "continuous", "unified"]
    show(stage, *[demos[name] for name in names])
    stage.press(*["n"] * 9)

    def steps() -> list[int]:
        return [
            int(node.get_attribute("data-step"))
            for node in stage.page.query_selector_all(".mb-series")
        ]

    assert steps() == [9, 9, 9, 9]
    stage.press("Home", "e")
    positions = sorted({t for name in names for t, s in enumerate(demos[name]) if s.preempted})
    assert steps() == [positions[0]] * 4
    stage.press("End")
    lengths = [len(demos[name]) for name in names]
    assert steps() == [n - 1 for n in lengths]
    for index, name in enumerate(names):
        totals = view(demos[name], -1).totals
        cell = f'[data-total="{{}}"][data-series="{index}"]'
        text = stage.page.text_content
        assert text(cell.format("steps")) == str(lengths[index])
        assert text(cell.format("padding")) == str(totals.padding_tokens)
        assert text(cell.format("idle")) == str(totals.idle_slots)
        assert text(cell.format("tokens_per_s")) == f"{totals.tokens_per_s:.1f}"
        assert text(cell.format("recomputed")) == str(totals.recomputed_tokens)
    stage.shot("compare-light")


def test_compared_runs_can_be_aligned_on_time(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["static"], demos["continuous"], axis="ms")
    stage.press(*["n"] * 12)
    ticks = stage.run(
        "() => { const p = document.querySelector('.mb-root').player;"
        " return [p.ticks[p.position], p.series.map((s) => s.t)]; }"
    )
    now, found = ticks
    for name, t in zip(("static", "continuous"), found, strict=True):
        trace = demos[name]
        started = [i for i, step in enumerate(trace) if step.start_s - trace[0].start_s <= now]
        assert t == started[-1]
    stage.press("Home", "e")
    where = int(stage.page.query_selector_all(".mb-series")[1].get_attribute("data-step"))
    assert where == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["continuous", "swap", "prefix", "static"])
def test_screens_in_both_themes(
    name: str, scheme: str, stage: Any, demos: dict[str, Trace]
) -> None:
    stage.page.emulate_media(color_scheme=scheme)
    show(stage, demos[name])
    stage.press("e" if name != "static" else "f", "n")
    stage.press("p")
    stage.page.wait_for_timeout(250)
    assert stage.page.get_attribute(".mb-root", "data-theme") == scheme
    background = stage.run(
        "() => getComputedStyle(document.querySelector('.mb-root')).backgroundColor"
    )
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")
    stage.shot(f"{name}-{scheme}")


def test_a_theme_that_changes_is_followed(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["continuous"])
    stage.run("() => { document.body.dataset.jpThemeLight = 'false'; }")
    stage.page.wait_for_selector('.mb-root[data-theme="dark"]')
    stage.run("() => { delete document.body.dataset.jpThemeLight; }")
    stage.page.wait_for_selector('.mb-root[data-theme="light"]')


def test_every_text_has_contrast_in_both_themes(stage: Any, demos: dict[str, Trace]) -> None:
    script = """() => {
      const lum = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
        .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
      const back = (node) => { for (; node; node = node.parentElement) {
        const c = getComputedStyle(node).backgroundColor;
        if (!/^rgba.*, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
      const bad = [];
      for (const node of document.querySelectorAll('.mb-root *')) {
        const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || node.closest('option') || node.disabled || !node.checkVisibility()) continue;
        const [a, b] = [lum(getComputedStyle(node).color), lum(back(node))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) bad.push([node.className, node.textContent.slice(0, 30), ratio]);
      } return bad; }"""
    for scheme in ("light", "dark"):
        stage.page.emulate_media(color_scheme=scheme)
        show(stage, demos["continuous"])
        for _ in range(8):
            stage.press("n")
            assert stage.run(script) == []
        show(stage, demos["static"], demos["continuous"])
        stage.press("End")
        assert stage.run(script) == []


def test_screen_readers_are_told_the_sentence_at_rest(stage: Any, demos: dict[str, Trace]) -> None:
    trace = demos["continuous"]
    show(stage, trace)
    stage.press("e")
    stage.settle()
    assert stage.page.text_content(".mb-spoken") == view(trace, 4).sentence
    assert stage.page.get_attribute(".mb-slider", "aria-valuetext") == view(trace, 4).sentence
    unnamed = stage.run(
        "() => [...document.querySelectorAll('.mb-root button, .mb-root select, .mb-root input')]"
        ".filter((n) => !n.textContent.trim() && !n.getAttribute('aria-label')).length"
    )
    assert unnamed == 0


def test_less_motion_where_it_is_asked_for(stage: Any, demos: dict[str, Trace]) -> None:
    stage.page.emulate_media(reduced_motion="reduce")
    show(stage, demos["continuous"])
    stage.press("e")
    moving = stage.run(
        "() => getComputedStyle(document.querySelector('.mb-chip')).transitionDuration"
    )
    assert moving in ("0s", "")


def test_keys_stay_in_the_player(stage: Any, demos: dict[str, Trace]) -> None:
    show(stage, demos["continuous"])
    assert stage.page.get_attribute(".mb-root", "data-lm-suppress-shortcuts") == "true"
    stage.run(
        "() => { window.leaked = []; document.addEventListener('keydown',"
        " (e) => leaked.push(e.key)); }"
    )
    stage.press("n", "a", "e", " ", " ", "Home", "End")
    assert stage.run("() => leaked") == []
    stage.press("Tab")
    assert stage.run("() => leaked") == ["Tab"]


def test_a_refused_request_is_drawn(stage: Any) -> None:
    from minibatch.simulation import simulate
    from minibatch.workload import RequestSpec

    specs = [RequestSpec("big", 0.0, 40, 4), RequestSpec("ok", 0.0, 4, 2)]
    knobs = {**demo_traces.SMALL, "num_gpu_blocks": 4, "max_model_len": 64}
    trace = simulate(
        specs, "a100-80gb", "llama-2-7b", "continuous", {**knobs, "max_num_batched_tokens": 64}
    )
    show(stage, trace)
    assert "is refused" in stage.page.text_content(".mb-headline")
    stage.page.click(".mb-chip.mb-refused")
    stage.settle()
    assert stage.number("why") == view(trace, 0).why("big")
    stage.shot("refused")


def test_measured_and_predicted_step_times_stand_side_by_side(stage: Any) -> None:
    from dataclasses import replace

    trace = demo_traces.load("unified")
    trace.steps = [replace(step, predicted_s=1.1 * step.duration_s) for step in trace]
    show(stage, trace)
    assert stage.number("step_time") == f"{1e3 * trace[0].duration_s:.1f} ms"
    head = stage.page.text_content(".mb-chart-head:has([data-number=step_time])")
    assert f"predicted {1e3 * trace[0].predicted_s:.1f} ms" in head


def test_the_badge_says_where_the_numbers_come_from(stage: Any) -> None:
    trace = demo_traces.load("static")
    show(stage, trace)
    assert stage.page.text_content(".mb-badge") == "cost model: a100-80gb"
    trace.meta.source, trace.meta.hardware = "measured", "some CPU"
    show(stage, trace)
    assert stage.page.text_content(".mb-badge") == "recorded on some CPU"


def test_the_pictures_pixels_show_the_phases(stage: Any, demos: dict[str, Trace]) -> None:
    """The lanes are painted in the phases' colours where the record has these phases."""
    from widgets.palette import PHASES, channels

    show(stage, demos["continuous"])
    stage.press("End")
    script = """([t, slot]) => {
      const { timeline } = document.querySelector('.mb-root').player.series[0];
      const { scale, context } = timeline.sheet;
      const x = timeline.x(t + 1) - 4, y = timeline.laneY(slot) + 4;
      return [...context.getImageData(x * scale, y * scale, 1, 1).data].slice(0, 3); }"""
    trace = demos["continuous"]
    for t in (0, 2, 6, 12):
        for lane in view(trace, t).lanes:
            if lane.phase in ("decode",):
                assert stage.run(script, [t, lane.slot]) == list(channels(PHASES["decode"].fill))


def test_letters_in_narrow_lanes_stay_within_their_visit(stage: Any) -> None:
    """Cells of ten pixels: a letter stands where it has room, and over no other request."""
    from minibatch.simulation import simulate
    from minibatch.workload import RequestSpec

    specs = [RequestSpec(f"q{i}", 0.0, 20 + i, 14 + 9 * (i % 4)) for i in range(16)]
    sizes = {"num_gpu_blocks": 60, "max_model_len": 128, "max_num_batched_tokens": 128}
    knobs = {**demo_traces.SMALL, **sizes}
    trace = simulate(specs, "a100-80gb", "llama-2-7b", "continuous", knobs)
    show(stage, trace)
    tags, wrong = stage.run(
        """() => {
          const { player } = document.querySelector('.mb-root');
          const { timeline, trace } = player.series[0];
          const tags = [];
          const { tag } = player.paint;
          player.paint.tag = (context, label, number, x, y, h) => {
            const width = player.paint.tagWidth(context, label, h);
            const slot = Math.round((y - timeline.lanesTop) / timeline.row - 0.2);
            if (y >= timeline.lanesTop) tags.push({ label, number, x, end: x + width, slot });
          };
          timeline.key = null;
          player.draw();
          player.paint.tag = tag;
          const within = ({ number, x, end, slot }) => {
            const stays = trace.stays[slot].filter((stay) => stay.request === number);
            return stays.some((first) => timeline.x(first.begin) <= x)
              && stays.some((last) => timeline.x(last.end) >= end);
          };
          return [tags.map(({ label }) => label), tags.filter((one) => !within(one))];
        }"""
    )
    assert set(tags) <= {f"q{i}" for i in range(16)} and len(set(tags)) >= 8
    assert wrong == []


def test_every_canvas_says_what_it_shows(stage: Any) -> None:
    """Also in steps in which nobody waits and nobody is followed."""
    trace = demo_traces.load("continuous")
    show(stage, trace)
    labels = """() => [...document.querySelectorAll('.mb-root canvas')]
      .filter((c) => c.getAttribute('aria-hidden') !== 'true')
      .map((c) => c.getAttribute('aria-label'))"""
    told = set()
    for t in (0, 4, len(trace) - 1):
        stage.run("(t) => document.querySelector('.mb-root').player.seek(t)", t)
        stage.settle()
        found = stage.run(labels)
        assert all(found), found
        shown = view(trace, t)
        assert shown.sentence in found
        assert f"KV blocks: {trace[t].free_blocks} free" in found
        assert f"batch {len(trace[t].running)}" in found
        told.add(bool(shown.waiting))
    assert told == {True, False}


def test_hovering_tells_waiting_from_swapped_out(stage: Any) -> None:
    trace = demo_traces.load("swap")
    show(stage, trace)
    t = next(t for t, step in enumerate(trace) if step.swapped and step.waiting)
    stage.run("(t) => document.querySelector('.mb-root').player.seek(t)", t)
    stage.settle()
    for queue, place in (("swapped", "swapped out"), ("waiting", "waiting")):
        x, y = stage.run(
            """([t, queue]) => {
              const { timeline } = document.querySelector('.mb-root').player.series[0];
              const box = timeline.sheet.canvas.getBoundingClientRect();
              const row = queue === "swapped" ? timeline.swapTop + 4
                : timeline.queueTop + timeline.queueRows * 9 - 5;
              return [box.left + (timeline.x(t) + timeline.x(t + 1)) / 2, box.top + row]; }""",
            [t, queue],
        )
        stage.page.mouse.move(x, y)
        told = stage.page.text_content(".mb-tip")
        assert told.startswith(getattr(trace[t], queue)[0]) and told.endswith(place)
