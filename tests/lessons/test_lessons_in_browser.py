"""Lessons in JupyterLab, and the website, as a reader meets them: a real browser, no network."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lessons.build import FOLDER, ROOT, lesson_paths
from lessons.site import build_site

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
LESSONS = [path for path in lesson_paths() if path.parent == FOLDER]
NAMES = [path.stem for path in LESSONS]
THEMES = ("JupyterLab Light", "JupyterLab Dark")
ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter((cell) => cell.model.type === "code")
  .flatMap((cell) => cell.model.outputs.toJSON())
  .filter((output) => output.output_type === "error")
  .map((output) => output.ename + ": " + output.evalue)"""
IMAGES = """() => [...document.querySelectorAll("img")]
  .filter((image) => !image.closest(".mb-root"))
  .map((image) => [image.src.slice(0, 60), image.naturalWidth, image.alt])"""


class Watch:
    """What a page asked of the network, and what went wrong on it."""

    def __init__(self, page: Any) -> None:
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.route("**/*", self._route)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)

    def _route(self, route: Any) -> None:
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:", "about:", "http://127.0.0.1")):
            route.continue_()
        else:
            self.asked.append(url)
            route.abort()

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)


@pytest.fixture(scope="module")
def chromium(playwright: Any) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
    yield browser
    browser.close()


# -- the website ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def website(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("myst_nb", reason="the site's tools are not installed")
    out = tmp_path_factory.mktemp("site") / "html"
    assert build_site(out) == 0
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_the_site_shows_every_picture_and_its_players_play(
    chromium: Any, website: Path, name: str, scheme: str
) -> None:
    page = chromium.new_page(color_scheme=scheme, viewport={"width": 1300, "height": 1000})
    watch = Watch(page)
    page.goto((website / "notebooks" / f"{name}.html").as_uri())
    page.wait_for_selector('.mb-root[data-ready="1"]')
    for source, width, alt in page.evaluate(IMAGES):
        assert width > 0, f"{source} is blank"
        assert alt, f"{source} has no words"
    root = page.locator(".mb-root").first
    before = int(root.get_attribute("data-step"))
    root.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "(step) => document.querySelector('.mb-root').dataset.step === String(step)",
        arg=before + 1,
    )
    assert page.locator("h2").all_text_contents()[0].startswith("Claim")
    assert watch.asked == []
    assert watch.errors == []
    page.close()


def test_every_page_of_the_site_stands_alone(chromium: Any, website: Path) -> None:
    page = chromium.new_page()
    watch = Watch(page)
    pages = sorted(website.rglob("*.html"))
    assert len(pages) > 2 * len(LESSONS)
    for path in pages:
        page.goto(path.as_uri())
    assert watch.asked == []
    assert watch.errors == []
    page.close()


# -- JupyterLab -----------------------------------------------------------------------------------


def lab_tools() -> Any:
    """The widgets' own test helper: a JupyterLab with its own settings and port."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    path = ROOT / "tests" / "widgets" / "lab.py"
    spec = importlib.util.spec_from_file_location("lessons_lab", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lab(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, str]]:
    tools = lab_tools()
    server = tools.Lab(tmp_path_factory.mktemp("lab"))
    try:
        for path in LESSONS:
            shutil.copy(path, server.notebooks)
        server.wait()
        page = chromium.new_page(viewport={"width": 1400, "height": 1150})
        watch = Watch(page)
        page.goto(server.url)
        page.wait_for_function("() => window.jupyterapp?.restored")
        page.evaluate("async () => { await window.jupyterapp.restored; }")
        yield tools.LabPage(page, server), watch, tools.READY
        page.close()
    finally:
        server.close()


@pytest.mark.parametrize("name", NAMES)
def test_run_all_in_light_and_dark(lab: tuple[Any, Any, str], name: str) -> None:
    page, watch, ready = lab
    assert page.page.evaluate(ready, f"{name}.ipynb"), "no kernel"
    page.name = f"{name}.ipynb"
    try:
        for theme in THEMES:
            page.page.evaluate(
                "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
                theme,
            )
            watch.errors.clear()
            page.run_all()
            assert page.page.evaluate(ERRORS) == []
            page.page.wait_for_selector('.mb-root[data-ready="1"]')
            assert watch.asked == []
            assert watch.errors == []
    finally:
        page.close_notebook()
