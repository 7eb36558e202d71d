"""Traces, a browser with one page for all tests, and a bare page with the player on it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import demo_traces

from minibatch.trace import Trace
from widgets.assets import page_js

CHROMIUM = os.environ.get("MINIBATCH_CHROMIUM") or shutil.which("chromium")
ARTEFACTS = Path(os.environ.get("MINIBATCH_ARTEFACTS", "/tmp/minibatch-screens"))
LAUNCH = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--js-flags=--expose-gc",
    "--enable-precise-memory-info",
    "--disable-background-timer-throttling",
)

SHIM = """
window.minibatch = { render, Trace };
window.bytesOf = bytesOf;
window.mount = (state) => {
  for (const entry of state.series) entry.data = bytesOf(entry.data);
  const handlers = {};
  const model = {
    sent: [],
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; },
    save_changes() {},
    send: (message) => model.sent.push(message),
    on: (name, act) => { handlers[name] = act; },
    off: (name) => { delete handlers[name]; },
    message: (content, data) => handlers["msg:custom"](content, data ? [bytesOf(data)] : []),
  };
  const el = document.getElementById("stage");
  window.unmount?.();
  const stop = render({ model, el });
  window.model = model;
  window.unmount = () => { stop(); el.replaceChildren(); window.unmount = null; };
};
"""


def demo(name: str) -> Trace:
    return demo_traces.load(name)


@pytest.fixture(scope="session")
def demos() -> dict[str, Trace]:
    return {name: demo(name) for name in demo_traces.DEMOS}


@pytest.fixture(scope="session")
def browser(playwright: Any) -> Iterator[Any]:
    """Chromium, once a session."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(LAUNCH))
    yield browser
    browser.close()


def in_a_loop(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine in a thread of its own: playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


class Outside:
    """Requests that would leave the machine: blocked and noted."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def route(self, route: Any) -> None:
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:", "about:", "http://127.0.0.1")):
            route.continue_()
        else:
            self.asked.append(url)
            route.abort()


class Stage:
    """A page with the player's script on it, and a stand-in for Jupyter's model."""

    def __init__(self, page: Any, outside: Outside) -> None:
        self.page = page
        self.outside = outside
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def mount(self, state: dict[str, Any]) -> None:
        plain = {**state, "series": [dict(entry) for entry in state["series"]]}
        for entry in plain["series"]:
            entry["data"] = base64.b64encode(entry["data"]).decode()
        self.page.evaluate("(text) => mount(JSON.parse(text))", json.dumps(plain))
        self.page.locator('.mb-root[data-ready="1"]').wait_for()  # keeps no handle of the node
        self.settle()

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def press(self, *keys: str) -> None:
        self.page.focus(".mb-root")
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def run(self, script: str, *args: Any) -> Any:
        return self.page.evaluate(script, *args)

    def number(self, name: str) -> str:
        return self.page.text_content(f'[data-number="{name}"]')

    @property
    def step(self) -> int:
        return int(self.page.get_attribute(".mb-root", "data-step"))

    def shot(self, name: str) -> None:
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)


@pytest.fixture(scope="session")
def stage_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    outside = Outside()
    context = browser.new_context(viewport={"width": 1180, "height": 900})
    context.route("**/*", outside.route)
    page = context.new_page()
    script = page_js().replace("window.minibatch = { start };", SHIM)
    script = script.replace("</script", "<\\/script")
    path = tmp_path_factory.mktemp("stage") / "stage.html"
    path.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><body style="margin:8px"><div id="stage"></div>'
        f"<script>(() => {{{script}}})();</script>",
        encoding="utf-8",
    )
    page.goto(path.as_uri())
    yield Stage(page, outside)
    context.close()


@pytest.fixture
def stage(stage_page: Stage) -> Iterator[Stage]:
    """The page, empty; it must stay free of errors and of the network."""
    stage_page.errors.clear()
    stage_page.page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    yield stage_page
    stage_page.run("() => window.unmount?.()")
    assert stage_page.errors == []
    assert stage_page.outside.asked == []
