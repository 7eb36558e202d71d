"""How fast the pictures are: encoding, first picture, stepping, playing, live updates.

    python benchmarks/widget_speed.py

Prints a table; needs chromium and playwright for all of it.

A run of 128 lanes x 600 iterations over 4,000 blocks is simulated, then shown in headless
Chromium on a bare page. The last part runs an engine whose executor sleeps like a real step, with
and without somebody watching, in turns.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import widgets
from minibatch.config import SchedulerConfig
from minibatch.engine import Engine
from minibatch.executor.base import SampledToken
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler.output import SchedulerOutput
from minibatch.simulation import simulate
from minibatch.trace import Trace
from minibatch.workload import RequestSpec
from widgets.assets import page_js
from widgets.columns import ColumnWriter, encode
from widgets.live_run import LiveRun
from widgets.names import Names
from widgets.picture import Picture

STEPS = 600
HOOK = """
window.mountState = async (text) => {
  const state = JSON.parse(text);
  for (const entry of state.series) entry.data = bytesOf(entry.data);
  const handlers = {};
  const model = { get: (name) => state[name], set() {}, save_changes() {}, send() {},
    on: (name, act) => { handlers[name] = act; }, off() {} };
  window.stop?.();
  const begin = performance.now();
  window.stop = render({ model, el: document.body });
  const root = () => document.querySelector(".mb-root");
  while (!root().dataset.ready) await new Promise(requestAnimationFrame);
  const took = performance.now() - begin;
  window.player = root().player;
  window.send = (content, data) => handlers["msg:custom"](content, [bytesOf(data)]);
  return took;
};
window.frame = () => new Promise(requestAnimationFrame);
"""
STEP_TIMES = """async ([how, count]) => {
  const times = [];
  for (let i = 0; i < count; i++) {
    await frame();
    const begin = performance.now();
    if (how === "key") {
      document.querySelector(".mb-root").dispatchEvent(
        new KeyboardEvent("keydown", { key: i % 3 ? "ArrowRight" : "ArrowLeft", bubbles: true }));
    } else {
      const slider = document.querySelector(".mb-slider");
      slider.value = (i * 37) % player.length;
      slider.dispatchEvent(new Event("input", { bubbles: true }));
    }
    const before = player.drawn;
    while (player.drawn === before) await frame();
    times.push(performance.now() - begin);
  }
  return times;
}"""
DRAW_TIMES = """([count, stride]) => {
  const times = [];
  for (let i = 0; i < count; i++) {
    player.position = (100 + i * stride) % player.length;
    const begin = performance.now();
    player.draw();
    times.push(performance.now() - begin);
  }
  return times;
}"""
PLAY = """async ([speed, seconds]) => {
  player.speed = speed;
  player.position = 0;
  const before = player.drawn;
  const begin = performance.now();
  player.start();
  while (performance.now() - begin < seconds * 1000) await frame();
  player.pause();
  return [player.position / ((performance.now() - begin) / 1000),
    (player.drawn - before) / ((performance.now() - begin) / 1000)];
}"""


def big_trace(steps: int = STEPS) -> Trace:
    """128 lanes, 4,000 blocks, at least ``steps`` iterations; cut to that many."""
    chance = random.Random(1)
    specs = [
        RequestSpec(f"r{i}", i * 0.02, chance.randint(50, 700), chance.randint(40, 260))
        for i in range(600)
    ]
    knobs = {
        "num_gpu_blocks": 4000,
        "max_num_seqs": 128,
        "max_model_len": 1024,
        "num_cpu_blocks": 0,
    }
    trace = simulate(specs, "a100-80gb", "llama-2-7b", "continuous", knobs)
    return Trace(trace.meta, trace.steps[200 : 200 + steps] if steps < 900 else trace.steps)


def report(name: str, value: str, target: str = "") -> None:
    print(f"{name:<58} {value:>16}   {target}", flush=True)


def summary(times: list[float]) -> str:
    times = sorted(times)
    return f"{statistics.median(times):.1f} / {times[int(0.95 * len(times))]:.1f} ms"


def measure_encoding(trace: Trace) -> None:
    begin = time.perf_counter()
    state = Picture([trace]).state
    report("trace -> packed and squeezed", f"{time.perf_counter() - begin:.2f} s")
    report("packed size", f"{len(state['series'][0]['data']) / 1024:.0f} KB")
    writer = ColumnWriter(trace.meta, Names([trace]))
    begin = time.process_time()
    sizes = []
    for record in trace:
        writer.add(record)
        sizes.append(len(writer.take()))
    cpu = (time.process_time() - begin) / len(trace)
    report("packing a step (CPU)", f"{1e3 * cpu:.2f} ms")
    report("bytes a step, median", f"{statistics.median(sizes):.0f} B")


def open_page(browser: Any, folder: Path) -> Any:
    path = folder / "bench.html"
    script = page_js().replace("\nstart();\nwindow.minibatch = { start };", HOOK)
    script = script.replace("</script", "<\\/script")
    path.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><script>addEventListener("load", () => '
        f"{{{script}}});</script>",
        encoding="utf-8",
    )
    page = browser.new_page(viewport={"width": 1180, "height": 1000})
    page.goto(path.as_uri())
    return page


def as_json(state: dict[str, Any]) -> str:
    series = [
        {**entry, "data": base64.b64encode(entry["data"]).decode()} for entry in state["series"]
    ]
    return json.dumps({**state, "series": series})


def measure_first_picture(page: Any, trace: Trace) -> None:
    """All that lies between a trace and its picture on the page.

    ``play`` packs the steps, the mimebundle draws the still form that is saved with the notebook,
    then the front end unpacks and draws. Left out: the wire between kernel and page.
    """
    begin = time.perf_counter()
    from widgets.player_widget import Player

    report("importing the widget, once a kernel", f"{1e3 * (time.perf_counter() - begin):.0f} ms")
    begin, used = time.perf_counter(), time.process_time()
    player = widgets.play(trace)
    packed = time.perf_counter()
    forms, _ = player._repr_mimebundle_()
    still, used = time.perf_counter(), time.process_time() - used
    assert isinstance(player, Player) and "image/png" in forms
    took = page.evaluate("(text) => mountState(text)", as_json(player.picture.state))
    player.close()
    report("play(trace)", f"{1e3 * (packed - begin):.0f} ms")
    report("the still form (HTML, PNG)", f"{1e3 * (still - packed):.0f} ms")
    report("both, CPU", f"{1e3 * used:.0f} ms")
    report("the page, from render() to the first picture", f"{took:.0f} ms")
    whole = 1e3 * (still - begin) + took
    report("first picture: all of it", f"{whole:.0f} ms", "< 1000 ms")


def main_thread_cpu(session: Any) -> float:
    """Seconds that the page's main thread has worked: scripts, layout, painting."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(entry["value"] for entry in metrics if entry["name"] == "TaskDuration")


def measure_page(page: Any, steps: int = 150) -> None:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    for name, stride in (("the next step", 1), ("any step", 37)):
        draws = page.evaluate(DRAW_TIMES, [200, stride])
        report(f"drawing {name} (script only), median / p95", summary(draws))
    for how in ("key", "slider"):
        page.evaluate(STEP_TIMES, [how, 20])
        before = main_thread_cpu(session)
        times = page.evaluate(STEP_TIMES, [how, steps])
        cpu = (main_thread_cpu(session) - before) / steps
        report(f"a step by {how} -> drawn, median / p95", summary(times), "median < 20 ms")
        report(f"a step by {how}, main thread's CPU", f"{1e3 * cpu:.1f} ms", "< 16.7 ms: a frame")
    for speed in (30, 60):
        steps, frames = page.evaluate(PLAY, [speed, 4])
        report(f"play at {speed} steps/s", f"{steps:.0f} at {frames:.0f} fps", ">= 30 steps/s")


def measure_live_page(page: Any, trace: Trace, updates: int = 2000) -> None:
    """Updates of a page, one a step; records are sent round and round to reach the number."""
    from widgets.columns import describe

    state = {
        "mode": "live",
        "lang": "en",
        "axis": "iterations",
        "step": 0,
        "panels": ["timeline", "queues", "blocks", "throughput"],
        "series": [{"about": describe(trace.meta), "data": b""}],
    }
    page.evaluate("(text) => mountState(text)", as_json(state))
    writer = ColumnWriter(trace.meta, Names([trace]))
    session = page.context.new_cdp_session(page)

    def heap() -> float:
        session.send("HeapProfiler.collectGarbage")
        return page.evaluate("() => performance.memory.usedJSHeapSize") / 2**20

    begin, heaps = time.perf_counter(), []
    for number in range(updates):
        record = trace[number % len(trace)]
        writer.add(record)
        page.evaluate(
            "([n, data]) => send({ kind: 'append', from: n, n: 1 }, data)",
            [number, base64.b64encode(writer.take()).decode()],
        )
        if number in (updates // 4, updates - 1):
            heaps.append(heap())
    rate = updates / (time.perf_counter() - begin)
    report(f"{updates} live updates of a page", f"{rate:.0f}/s", ">= 30/s")
    report("page heap after a quarter / all of them", f"{heaps[0]:.1f} / {heaps[1]:.1f} MB")


class SleepingExecutor:
    """Computes nothing, but takes its time like a model."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        time.sleep(self.seconds)
        output.moves_made = len(output.MOVES)
        return {row.request.request_id: SampledToken(7) for row in output.scheduled if row.samples}

    def close(self) -> None: ...


def sleeping_engine(rows: int, step_s: float, steps: int) -> Engine:
    """``rows`` requests, all admitted at once, of ``steps`` tokens each."""
    config = SchedulerConfig(num_gpu_blocks=4000, max_num_seqs=rows, max_model_len=1024)
    made = Engine(config, SleepingExecutor(step_s))
    for i in range(rows):
        made.add_request(
            f"r{i}",
            prompt_token_ids=[1] * 16,
            sampling_params=SamplingParams(max_tokens=steps, ignore_eos=True),
        )
    return made


KERNEL = """
import sys, time
sys.path.insert(0, {folder!r})
import widgets, widget_speed
run = widgets.live(widget_speed.sleeping_engine(128, 0.012, 900))
spent, sent = [0.0], [0]

def timed(act, counts):
    def wrapper(*args):
        begin = time.thread_time()
        try:
            return act(*args)
        finally:
            spent[0] += time.thread_time() - begin
            sent[0] += counts
    return wrapper

inner = run.run
inner.writer.add = timed(inner.writer.add, 0)
inner.writer.take = timed(inner.writer.take, 0)
inner._send = timed(inner._send, 1)
run.start()
time.sleep(1)
spent[0], sent[0], steps = 0.0, 0, len(run.trace)
time.sleep({seconds})
print(spent[0] / sent[0], sent[0] / {seconds}, (len(run.trace) - steps) / {seconds})
run.stop()
"""


def measure_live_kernel(seconds: float = 5) -> None:
    """In a kernel of its own: what an update costs the engine's thread, sending included."""
    try:
        from jupyter_client.manager import start_new_kernel
    except ImportError:
        print("no jupyter_client: live updates of a kernel are not measured")
        return
    manager, client = start_new_kernel(stderr=subprocess.DEVNULL)
    told: list[str] = []
    try:
        code = KERNEL.format(folder=str(Path(__file__).parent), seconds=seconds)
        client.execute_interactive(
            code, output_hook=lambda message: told.append(message["content"].get("text", ""))
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    cpu, updates, steps = map(float, "".join(told).split())
    report("live, 128 rows: packing and sending an update (CPU)", f"{1e3 * cpu:.2f} ms", "< 1 ms")
    report("live: steps and updates a second", f"{steps:.0f}/s, {updates:.0f}/s", "30 updates/s")


def watched_and_alone(step_s: float = 0.02, rounds: int = 4, steps: int = 60) -> float:
    """How much longer an engine takes when it is watched, in turns with and without."""

    def engine() -> Engine:
        return sleeping_engine(64, step_s, steps)

    alone, watched, cpu = [], [], []
    for _ in range(rounds):
        made = engine()
        begin = time.perf_counter()
        for _ in made.run():
            pass
        alone.append(time.perf_counter() - begin)
        made = engine()
        run = LiveRun(made, lambda data, first, count: None, lambda state, error: None)
        begin, used = time.perf_counter(), time.process_time()
        run.order("run")
        run.wait()
        watched.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
        run.order("stop")
    loss = statistics.median(watched) / statistics.median(alone) - 1
    report(
        f"engine of {1e3 * step_s:.0f} ms steps, watched against alone",
        f"{100 * loss:+.2f} %",
        "< 5 %",
    )
    return loss


def main() -> int:
    trace = big_trace()
    rows = max(len(step.scheduled) for step in trace)
    report("the run", f"{rows} x {len(trace)}", "128 lanes x 600 iterations, 4,000 blocks")
    begin = time.perf_counter()
    encode(trace)
    report("encode(trace)", f"{time.perf_counter() - begin:.2f} s")
    measure_encoding(trace)
    watched_and_alone()
    measure_live_kernel()
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no chromium or no playwright: the page is not measured")
        return 0
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = open_page(browser, Path(folder))
        measure_first_picture(page, trace)
        measure_page(page)
        measure_live_page(page, trace)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
