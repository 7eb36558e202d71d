"""Troubles that notebooks and widgets like ours have had, each as a test (kernel side)."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo_traces
import pytest
from conftest import in_a_loop

import widgets
from widgets import bake, page
from widgets.picture import Picture

pytest.importorskip("anywidget", reason="anywidget is not installed")
from ipywidgets.widgets import widget as ipywidget

TRACE = demo_traces.FOLDER / "demo_continuous.jsonl.gz"


def notebook(cells: list[str]) -> dict[str, Any]:
    import nbformat

    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])


def bundle(thing: Any) -> dict[str, Any]:
    return thing._repr_mimebundle_()[0]


# -- anywidget missing: a static figure, and a word about it --------------------------------------


def test_without_anywidget_a_still_picture_is_shown_and_says_so() -> None:
    code = (
        "import sys; sys.modules['anywidget'] = None; sys.modules['ipywidgets'] = None\n"
        "import widgets; from minibatch.trace import Trace\n"
        f"shown = widgets.play(Trace.load({str(TRACE)!r}))\n"
        "forms = shown._repr_mimebundle_()[0]\n"
        "assert forms['text/html'].startswith('<div data-minibatch')\n"
        "assert 'anywidget' in forms['text/html'], forms['text/html'][-300:]\n"
        "assert 'image/png' in forms\n"
        "both = widgets.compare([Trace.load(%r)] * 2)\n"
        % str(TRACE)
        + "shown.close(); print(shown)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "anywidget" in done.stdout


# -- nbval: the same letters every time -----------------------------------------------------------


def test_what_is_compared_letter_by_letter_never_changes() -> None:
    forms = []
    for _ in range(2):
        page.forget_script()
        player = widgets.play(demo_traces.load("continuous"), step=4)
        forms.append({key: bundle(player)[key] for key in ("text/plain", "text/html")})
        player.close()
    assert forms[0] == forms[1]
    assert not re.search(r"0x[0-9a-f]{6,}", forms[0]["text/html"] + forms[0]["text/plain"])
    assert len(forms[0]["text/plain"]) < 200
    assert forms[0]["text/plain"] == (
        "continuous | it 4 of 28 | A B C . | wait D E F G | free 2/12"
    )


def test_two_equal_pictures_on_one_page_do_not_clash() -> None:
    html = "".join(Picture([demo_traces.load("static")]).bundle()["text/html"] for _ in range(2))
    assert not re.search(r'\sid="', html)


# -- threads: no print, no display, no values set -------------------------------------------------


def test_the_thread_only_sends(capfd: pytest.CaptureFixture[str]) -> None:
    run = widgets.live(demo_traces.simulation("continuous"))
    changes: list[Any] = []
    run.observe(changes.append)
    run.start()
    assert run.wait(10)
    assert changes == []
    assert capfd.readouterr() == ("", "")
    run.close()


# -- a running loop -------------------------------------------------------------------------------


def test_it_works_inside_a_running_loop() -> None:
    async def cell() -> str:
        player = widgets.play(demo_traces.load("static"))
        text = repr(player)
        player.close()
        return text

    assert in_a_loop(cell).startswith("static | it 0")


# -- leaks ----------------------------------------------------------------------------------------


def test_fifty_rounds_leave_no_widgets_behind() -> None:
    trace = demo_traces.load("continuous")
    before = len(ipywidget._instances)
    for number in range(50):
        player = widgets.play(trace)
        if number % 10 == 0:
            bundle(player)
        player.close()
        player.close()  # twice does no harm
    assert len(ipywidget._instances) == before


def test_live_pictures_leave_nothing_behind_either() -> None:
    import threading

    before, threads = len(ipywidget._instances), threading.active_count()
    for _ in range(10):
        run = widgets.live(demo_traces.simulation("continuous"))
        run.step_once()
        assert run.wait(5)
        run.close()
        assert run.run.wait(5)
    assert len(ipywidget._instances) == before
    for thread in threading.enumerate():
        if thread.name == "minibatch-live":
            thread.join(5)
    assert threading.active_count() <= threads


def test_making_it_again_closes_the_former_one() -> None:
    trace = demo_traces.load("continuous")
    first = widgets.play(trace, key="lesson")
    count = len(ipywidget._instances)
    for _ in range(5):
        again = widgets.play(trace, key="lesson")
        assert len(ipywidget._instances) == count
    assert first.comm is None and again.comm is not None
    again.close()


def test_a_player_that_was_dropped_lets_its_trace_go() -> None:
    import weakref

    trace = demo_traces.load("continuous")
    gone = weakref.ref(trace)
    player = widgets.play(trace)
    repr(player)
    player.close()
    del player, trace
    gc.collect()
    assert gone() is None


# -- saved notebooks ------------------------------------------------------------------------------


def test_saved_widget_state_is_found_and_taken_out() -> None:
    book = notebook(["1"])
    book["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}  # no "state"
    book["cells"][0]["metadata"]["execution"] = {"iopub.status.busy": "2024-01-01"}
    book["cells"][0]["outputs"] = [
        {"output_type": "display_data", "data": {bake.VIEW: {}, "text/plain": "x" * 3000}},
        {"output_type": "stream", "name": "stderr", "text": "object at 0x7f00aabbcc"},
        {"output_type": "display_data", "data": {"application/vnd.plotly.v1+json": {}}},
    ]
    found = " | ".join(bake.problems(book, 200_000))
    for word in (
        "200,000 bytes",
        "metadata.widgets",
        "widget-view",
        "3,000 characters",
        "address",
        "stderr",
        "plotly",
        "time stamps",
    ):
        assert word in found, word
    cleaned = bake.clean(book)
    left = " | ".join(bake.problems(cleaned, 1000))
    assert "widgets" not in left and "widget-view" not in left and "stamps" not in left


def test_a_baked_notebook_is_small_and_shows_without_a_kernel(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    path = tmp_path / "small.ipynb"
    cells = [
        f"import sys; sys.path.insert(0, {str(TRACE.parents[2])!r})\n"
        "import widgets\nfrom minibatch.trace import Trace\n"
        f"trace = Trace.load({str(TRACE)!r})",
        "widgets.play(trace, step=4)",
        "widgets.compare({'a': trace, 'b': trace})",
        "guess = widgets.predict('How many?')\nguess",
        "guess.check(28)",
    ]
    path.write_text(json.dumps(notebook(cells)))
    assert bake.main([str(path)]) == 0
    assert bake.main(["--check", str(path)]) == 0
    book = json.loads(path.read_text())
    assert path.stat().st_size < 220_000
    player = book["cells"][1]["outputs"][0]["data"]
    assert set(player) == {"text/plain", "text/html", "image/png"}
    html = "".join(player["text/html"])
    assert html.startswith('<div data-minibatch="1"><img')
    second = "".join(book["cells"][2]["outputs"][0]["data"]["text/html"])
    assert "DecompressionStream" in html and "DecompressionStream" not in second  # script once


# -- live plots: one message a step ---------------------------------------------------------------


def test_one_message_an_iteration() -> None:
    run = widgets.live(demo_traces.simulation("continuous"))
    sent: list[dict[str, Any]] = []
    run.send = lambda content, buffers=None: sent.append(content)
    for _ in range(20):
        run.step_once()
        assert run.wait(5)
    steps = [content for content in sent if content["kind"] == "append"]
    assert len(steps) == 20
    assert len(sent) <= 22  # and hardly any others
    run.close()


# -- themes ---------------------------------------------------------------------------------------


def css_rules() -> dict[str, str]:
    from widgets.assets import learn_css, player_css

    text = player_css() + learn_css()
    return dict(re.findall(r"([^{}]+)\{([^{}]*)\}", text))


def test_the_frame_brings_its_own_background_and_ink() -> None:
    rules = css_rules()
    for name in (".mb-root", ".mb-learn"):
        body = next(body for key, body in rules.items() if key.strip() == name)
        assert "background: var(--mb-bg)" in body and "color: var(--mb-text)" in body


def test_a_fill_never_comes_without_its_ink() -> None:
    """Where a rule paints behind text, it says which colour the text has, or keeps the theme's."""
    themed = ("var(--mb-bg)", "var(--mb-panel)", "var(--mb-bubble)", "none", "var(--mb-good)")
    for selector, body in css_rules().items():
        for fill in re.findall(r"(?<![-\w])background:\s*([^;]+);", body):
            decorative = "mb-swatch" in selector
            assert decorative or fill.startswith(themed) or "color:" in body, selector
