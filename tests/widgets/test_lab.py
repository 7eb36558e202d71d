"""The pictures in a real JupyterLab, driven by a script. The bare page has most of the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import demo_traces
import pytest
from conftest import ARTEFACTS, Outside

from minibatch.trace import Trace
from widgets.view import view

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytest.importorskip("anywidget", reason="anywidget is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

from lab import Lab, LabPage

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
TRACE = demo_traces.FOLDER / "demo_continuous.jsonl.gz"
LOAD = f"import widgets\nfrom minibatch.trace import Trace\ntrace = Trace.load({str(TRACE)!r})"
ENGINE = """
import sys; sys.path.insert(0, {tests!r})
import demo_traces, widgets
simulation = demo_traces.simulation("continuous")
run = widgets.live(simulation, speed=10)
run
"""


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.wait()
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="session")
def lab_page(browser: Any, lab_server: Lab) -> Iterator[tuple[LabPage, Outside]]:
    outside = Outside()
    context = browser.new_context(viewport={"width": 1400, "height": 1150})
    context.route("**/*", outside.route)
    page = context.new_page()
    page.goto(lab_server.url)
    page.wait_for_function("() => window.jupyterapp?.restored")
    page.evaluate("async () => { await window.jupyterapp.restored; }")
    yield LabPage(page, lab_server), outside
    context.close()


@pytest.fixture
def lab(lab_page: tuple[LabPage, Outside]) -> Iterator[LabPage]:
    page, outside = lab_page
    yield page
    page.close_notebook()
    assert outside.asked == []  # nothing leaves the machine


def settled(lab: LabPage, step: int) -> None:
    lab.page.wait_for_selector(f'.mb-root[data-step="{step}"]')


def shot(lab: LabPage, name: str) -> None:
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    lab.page.screenshot(path=ARTEFACTS / f"{name}.png")


def test_a_player_appears_steps_and_saves_small(lab: LabPage) -> None:
    trace = demo_traces.load("continuous")
    lab.open("player.ipynb", [LOAD, "player = widgets.play(trace)\nplayer"])
    lab.run_all()
    page = lab.page
    page.wait_for_selector('.mb-root[data-ready="1"]')
    page.click('[data-control="next"]')
    settled(lab, 1)
    page.focus(".mb-root")
    page.keyboard.press("e")
    settled(lab, 4)
    assert page.text_content('[data-number="free_blocks"]') == str(trace[4].free_blocks)
    assert "request D is evicted" in page.text_content(".mb-headline")
    page.keyboard.press("ArrowLeft")
    settled(lab, 3)
    # Keys must not have reached the notebook: still two cells, none of them new.
    assert page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length") == 2
    shot(lab, "lab-light")
    page.wait_for_timeout(300)
    assert lab.kernel("print(player.step)").strip() == "3"  # where the reader came to rest
    drag_the_slider(lab, trace)
    lab.kernel("player.step = 7")
    settled(lab, 7)
    saved = json.loads(lab.save().read_text())
    assert "widgets" not in saved["metadata"]
    assert lab.lab.notebooks.joinpath(lab.name).stat().st_size < 150_000
    forms = saved["cells"][1]["outputs"][0]["data"]
    assert "".join(forms["text/html"]).startswith('<div data-minibatch="1"><img')
    assert "".join(forms["text/plain"]).startswith("continuous | it 0 of 28")


def drag_the_slider(lab: LabPage, trace: Trace) -> None:
    """With the mouse, as a person would: the picture follows while it moves; then with keys."""
    page = lab.page
    slider = page.locator(".mb-slider")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    seen = []
    for share in (0.45, 0.6, 0.75):
        page.mouse.move(box["x"] + box["width"] * share, y, steps=3)
        wanted = slider.evaluate("(node) => Number(node.value)")
        settled(lab, wanted)
        assert page.text_content('[data-number="free_blocks"]') == str(trace[wanted].free_blocks)
        assert page.text_content('[data-number="position"]') == f"{wanted} / {len(trace) - 1}"
        seen.append(wanted)
    page.mouse.up()
    assert 10 < seen[0] < seen[1] < seen[2] < len(trace) - 1
    page.keyboard.press("ArrowRight")  # the slider has the focus: one step, not two
    settled(lab, seen[2] + 1)
    assert slider.get_attribute("aria-valuetext") == view(trace, seen[2] + 1).sentence
    page.wait_for_timeout(300)
    assert lab.kernel("print(player.step)").strip() == str(seen[2] + 1)


def test_dark_theme_is_followed(lab: LabPage) -> None:
    lab.open("dark.ipynb", [LOAD, "widgets.play(trace, step=4)"])
    lab.run_all()
    page = lab.page
    page.wait_for_selector('.mb-root[data-ready="1"]')
    command = "window.jupyterapp.commands.execute('apputils:change-theme', {theme: '%s'})"
    try:
        page.evaluate(f"async () => {{ await {command % 'JupyterLab Dark'}; }}")
        page.wait_for_selector('.mb-root[data-theme="dark"]')
        page.wait_for_selector("#jupyterlab-splash", state="detached")
        shot(lab, "lab-dark")
        colours = page.evaluate(
            "() => { const s = getComputedStyle(document.querySelector('.mb-root'));"
            " return [s.backgroundColor, s.color]; }"
        )
        assert colours == ["rgb(20, 23, 28)", "rgb(230, 233, 237)"]
    finally:
        page.evaluate(f"async () => {{ await {command % 'JupyterLab Light'}; }}")
    page.wait_for_selector('.mb-root[data-theme="light"]')


def test_a_live_run_starts_pauses_steps_and_stops(lab: LabPage) -> None:
    """While a cell awaits, buttons are heeded at once; other cells' outputs stay clean."""
    tests = str(demo_traces.FOLDER.parents[1] / "tests" / "widgets")
    cells = [
        ENGINE.format(tests=tests),
        "trace = await run.done()\nprint('ended with', len(trace), 'steps')",
        "print('clean')",
    ]
    lab.open("live.ipynb", cells)
    lab.run_all(wait=False)
    page = lab.page
    page.wait_for_selector('.mb-root[data-live="running"]')
    page.wait_for_function("() => Number(document.querySelector('.mb-root').dataset.have) > 5")
    page.click('[data-live="run"]')  # it says Pause now
    page.wait_for_selector('.mb-root[data-live="paused"]')
    paused = int(page.get_attribute(".mb-root", "data-have"))
    shot(lab, "lab-live-paused")
    page.wait_for_timeout(250)
    assert int(page.get_attribute(".mb-root", "data-have")) == paused
    page.click('[data-live="step"]')
    page.wait_for_selector(f'.mb-root[data-have="{paused + 1}"]')
    page.click('[data-live="add"]')
    page.click(".mb-chip[data-phase='decode'], .mb-chip[data-phase='sits_out']")
    who = page.text_content('[data-live="preempt"]')
    assert who.startswith("Preempt ") and len(who) > len("Preempt ")
    page.click('[data-live="preempt"]')
    page.click('[data-live="step"]')
    page.wait_for_selector(f'.mb-root[data-have="{paused + 2}"]')
    assert "asked for by hand" in page.text_content(".mb-headline")
    page.click('[data-live="run"]')
    page.wait_for_function("() => window.ranAll === true", timeout=20000)
    steps = int(page.get_attribute(".mb-root", "data-have"))
    assert f"ended with {steps} steps" in lab.output(1)
    assert lab.output(2).strip() == "clean"
    assert page.get_attribute(".mb-root", "data-live") == "done"
    number = page.text_content('[data-number="generated"]')
    told = lab.kernel("print(sum(s.num_generated_tokens for s in run.trace))").strip()
    assert number == told
    page.click('[data-live="stop"]')
    page.wait_for_selector('.mb-root[data-live="stopped"]')
    # A page that comes late gets everything: show it again.
    lab.run_cell(0)
    page.wait_for_selector('.mb-root[data-live="paused"]')


def test_threads_write_into_no_other_cell_and_interrupts_arrive(lab: LabPage) -> None:
    tests = str(demo_traces.FOLDER.parents[1] / "tests" / "widgets")
    cells = [
        ENGINE.format(tests=tests) + "\nrun.start();",
        "import time; time.sleep(0.2); print('one')",
        "print('two')",
        "run.wait(20); print(run.state)",
    ]
    lab.open("clean.ipynb", cells)
    lab.run_all()
    assert [lab.output(i).strip() for i in (1, 2, 3)] == ["one", "two", "done"]


def test_making_a_widget_again_closes_the_former_one(lab: LabPage) -> None:
    count = "import ipywidgets; print(len(ipywidgets.widgets.widget._instances))"
    lab.open("again.ipynb", [LOAD, "player = widgets.play(trace)\nplayer"])
    lab.run_all()
    lab.page.wait_for_selector('.mb-root[data-ready="1"]')
    first = lab.kernel(count)
    for _ in range(3):
        lab.run_cell(1)
        lab.page.wait_for_selector('.mb-root[data-ready="1"]')
    assert lab.kernel(count) == first
    assert lab.page.locator(".mb-root").count() == 1
    lab.kernel("player.close()")
    lab.page.wait_for_selector(".mb-root", state="detached")
    assert int(lab.kernel(count)) < int(first)
    assert view(demo_traces.load("continuous"), 0)


MANY = """
import sys, time, threading; sys.path.insert(0, {tests!r})
import widgets, resource
from test_live import FakeExecutor, SchedulerConfig, Engine, SamplingParams

config = SchedulerConfig(num_gpu_blocks=4000, max_num_seqs=128, max_model_len=1024)
engine = Engine(config, FakeExecutor(0.012), keep_records=100)
for i in range(128):
    engine.add_request(f"r{{i}}", prompt_token_ids=[1] * 8,
                       sampling_params=SamplingParams(max_tokens=900, ignore_eos=True))
run = widgets.live(engine)
spent = [0.0, 0]

def timed(act, counts):
    def wrapper(*args):
        begin = time.thread_time()
        try:
            return act(*args)
        finally:
            spent[0] += time.thread_time() - begin
            spent[1] += counts
    return wrapper

run.run.writer.add = timed(run.run.writer.add, 0)
run.run.writer.take = timed(run.run.writer.take, 0)
run.run._send = timed(run.run._send, 1)
run
"""


def test_live_updates_are_cheap_in_the_kernel(lab: LabPage) -> None:
    """128 rows, about 70 steps a second; the target is 1 ms of CPU an update, four are allowed."""
    tests = str(demo_traces.FOLDER.parents[1] / "tests" / "widgets")
    lab.open("cheap.ipynb", [MANY.format(tests=tests)])
    lab.run_all()
    page = lab.page
    page.wait_for_selector('.mb-root[data-ready="1"]')
    page.click('[data-live="run"]')
    page.wait_for_function(
        "() => Number(document.querySelector('.mb-root').dataset.have) > 250", timeout=60000
    )
    before = page.text_content('[data-number="generated"]')
    page.wait_for_timeout(300)
    assert page.text_content('[data-number="generated"]') != before  # it moves while it runs
    page.click('[data-live="run"]')
    page.wait_for_selector('.mb-root[data-live="paused"]')
    cpu, count = map(float, lab.kernel("print(*spent)").split())
    print(f"{1e3 * cpu / count:.2f} ms of kernel CPU an update, {count:.0f} updates")
    assert cpu / count < 4e-3
    assert lab.kernel("print(len(run.trace) < 300)").strip() == "True"
    shot(lab, "lab-live-wide")
    page.click('[data-live="stop"]')
    page.wait_for_selector('.mb-root[data-live="stopped"]')


def test_a_notebook_that_was_not_run_shows_the_picture(lab: LabPage) -> None:
    """Not trusted, so no script runs: the image and its words must be there."""
    import nbformat

    from widgets.picture import Picture

    forms = Picture([demo_traces.load("swap")]).bundle()
    cell = nbformat.v4.new_code_cell("widgets.play(trace)")
    cell.outputs = [nbformat.v4.new_output("display_data", forms)]
    lab.lab.write_book("still.ipynb", [cell])
    lab.name = "still.ipynb"
    command = "window.jupyterapp.commands.execute('docmanager:open', { path: name })"
    lab.page.evaluate(f"async (name) => {{ await {command}; }}", lab.name)
    image = lab.page.locator(".jp-OutputArea-output img")
    image.wait_for()
    assert "is evicted (swap)" in image.get_attribute("alt")
    assert image.bounding_box()["width"] > 500


def test_the_gallery_runs_from_top_to_bottom(lab: LabPage) -> None:
    """The saved notebook, run again: pictures, learning aids, a live run that ends by itself."""
    path = demo_traces.FOLDER.parents[1] / "notebooks" / "widgets_gallery.ipynb"
    (lab.lab.notebooks / path.name).write_bytes(path.read_bytes())
    lab.open_saved(path.name)
    lab.run_all()
    page = lab.page
    page.wait_for_function("() => document.querySelectorAll('[data-ready=\"1\"]').length >= 6")
    assert page.locator(".mb-series").count() == 6  # one, four, and the live one
    assert page.get_attribute("[data-live]", "data-live") == "done"
    page.locator(".mb-learn input").fill("20")
    page.locator(".mb-learn input").press("Enter")
    page.wait_for_function(
        "() => document.querySelector('.mb-learn output').textContent.includes('20')"
    )
    assert lab.kernel("print(guess.guess)").strip() == "20"
    page.locator(".mb-root").first.scroll_into_view_if_needed()
    shot(lab, "lab-gallery")


def test_interrupting_a_waiting_cell_pauses_the_run(lab: LabPage) -> None:
    tests = str(demo_traces.FOLDER.parents[1] / "tests" / "widgets")
    lab.open("interrupt.ipynb", [ENGINE.format(tests=tests), "await run.done()"])
    lab.run_all(wait=False)
    page = lab.page
    page.wait_for_selector('.mb-root[data-live="running"]')
    page.wait_for_function("() => Number(document.querySelector('.mb-root').dataset.have) > 3")
    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.interrupt()"
    )
    page.wait_for_selector('.mb-root[data-live="paused"]')
    page.wait_for_function("() => window.ranAll === true")
    assert lab.kernel("print(run.state, run.error)").strip() == "paused None"
    page.click('[data-live="run"]')
    page.wait_for_selector('.mb-root[data-live="done"]')
