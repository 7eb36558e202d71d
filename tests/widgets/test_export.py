"""Pages without a kernel and without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import demo_traces
import pytest
from conftest import Outside

from widgets import bake, page
from widgets.picture import Picture
from widgets.view import view

pytestmark = pytest.mark.browser
TRACE = demo_traces.FOLDER / "demo_swap.jsonl.gz"


@pytest.fixture
def visit(browser: Any) -> Any:
    """Opens a file with everything outside blocked."""
    outside, pages = Outside(), []

    def open_page(path: Path, scripts: bool = True) -> Any:
        context = browser.new_context(java_script_enabled=scripts)
        context.route("**/*", outside.route)
        shown = context.new_page()
        shown.goto(path.as_uri())
        pages.append(context)
        return shown

    open_page.outside = outside
    yield open_page
    for context in pages:
        context.close()


def test_an_exported_page_steps_without_kernel_and_network(visit: Any, tmp_path: Path) -> None:
    trace = demo_traces.load("swap")
    path = tmp_path / "swap.html"
    text = Picture([trace], step=2).to_html(path)
    assert not re.search(r'(src|href)="https?:', text)
    shown = visit(path)
    shown.wait_for_selector('.mb-root[data-ready="1"][data-step="2"]')
    shown.focus(".mb-root")
    shown.keyboard.press("e")
    shown.wait_for_selector('.mb-root[data-step="4"]')
    assert shown.text_content('[data-number="free_blocks"]') == str(trace[4].free_blocks)
    told = shown.text_content(".mb-headline")
    assert view(trace, 4).headline in told
    assert visit.outside.asked == []


def test_an_exported_comparison_works_too(visit: Any, tmp_path: Path) -> None:
    traces = [demo_traces.load(name) for name in ("static", "continuous")]
    path = tmp_path / "both.html"
    Picture(traces, ["static & co", "</script>"]).to_html(path)
    shown = visit(path)
    shown.wait_for_selector('.mb-root[data-ready="1"]')
    assert shown.locator(".mb-series").count() == 2
    assert shown.text_content(".mb-series >> nth=1 >> .mb-policy") == "</script>"


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook that was run and saved as a committed one would be."""
    pytest.importorskip("nbclient")
    import nbformat

    path = tmp_path_factory.mktemp("baked") / "baked.ipynb"
    cells = [
        f"import sys; sys.path.insert(0, {str(TRACE.parents[2])!r})\n"
        "import widgets\nfrom minibatch.trace import Trace\n"
        f"trace = Trace.load({str(TRACE)!r})",
        "widgets.play(trace)",
        "widgets.play(trace)",
        "widgets.quiz([('Lost?', ('yes', 'no'), 1, 'Swap keeps it.')])",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbformat.write(book, path)
    bake.write(path, bake.run(path))
    return path


def test_a_notebook_as_html_is_alive_without_network(
    baked: Path, visit: Any, tmp_path: Path
) -> None:
    nbconvert = pytest.importorskip("nbconvert")
    html, _ = nbconvert.HTMLExporter().from_filename(str(baked))
    path = tmp_path / "notebook.html"
    path.write_text(html, encoding="utf-8")
    shown = visit(path)
    # Two equal pictures, one script: both come to life and do not disturb each other.
    shown.wait_for_function("() => document.querySelectorAll('[data-ready=\"1\"]').length === 2")
    shown.click('.mb-root >> nth=1 >> [data-control="next"]')
    shown.wait_for_selector('.mb-root[data-step="1"]')
    steps = [node.get_attribute("data-step") for node in shown.query_selector_all(".mb-root")]
    assert steps == ["0", "1"]
    assert not shown.locator(".mb-still-picture").first.is_visible()
    assert "Swap keeps it." in shown.content()


def test_without_scripts_the_picture_and_its_words_are_there(
    baked: Path, visit: Any, tmp_path: Path
) -> None:
    """What is left where scripts and styles are stripped."""
    book = json.loads(baked.read_text())
    html = "".join(book["cells"][1]["outputs"][0]["data"]["text/html"])
    stripped = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    stripped = re.sub(r' (style|class|data-\w+)="[^"]*"', "", stripped)
    path = tmp_path / "stripped.html"
    path.write_text(f"<!DOCTYPE html>{stripped}", encoding="utf-8")
    shown = visit(path, scripts=False)
    image = shown.locator("img")
    assert image.bounding_box()["width"] == 960
    assert "is evicted (swap)" in image.get_attribute("alt")


def test_the_script_is_in_the_first_picture_only() -> None:
    page.forget_script()
    forms = [Picture([demo_traces.load("static")]).bundle()["text/html"] for _ in range(2)]
    assert "DecompressionStream" in forms[0]
    assert "DecompressionStream" not in forms[1]
    assert len(forms[1]) < 45_000
