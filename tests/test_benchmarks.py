"""The measuring itself: what counts as quiet, what is drawn, what is written. Nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import cpu, engines, machine, quiet, scheduler
from benchmarks.plot import bars
from minibatch.hardware import Hardware
from minibatch.model.presets import preset

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

CHIP = Hardware("here", "a CPU", {"float32": 5e11}, 4e10, 0, 1.0, "made up", "2026-01-01")


def run(rate: float, foreign: float | None = 0.0, tokens: int = 100) -> dict:
    return {"tokens": tokens, "wall_s": tokens / rate, "cpu_s": 1.0, "foreign": foreign,
            "peak_mb": 500.0}  # fmt: skip


# -- what is measured -----------------------------------------------------------------------------


def test_quiet_runs_count_and_disturbed_ones_only_if_there_is_nothing_else() -> None:
    row = cpu.Row("c1", "minibatch", "float32", [run(50), run(10, 0.5), run(70), run(60)])
    assert row.rate == pytest.approx(60) and row.foreign == 0.0
    row = cpu.Row("c1", "minibatch", "float32", [run(10, 0.5), run(20, 0.4), run(30, 0.9)])
    assert row.rate == pytest.approx(20) and row.foreign == 0.9


def test_where_foreign_time_cannot_be_seen_every_run_counts() -> None:
    row = cpu.Row("c1", "minibatch", "float32", [run(10, None), run(20, None), run(30, None)])
    assert row.rate == pytest.approx(20)


def test_a_stopwatch_counts_own_time_apart_from_that_of_others() -> None:
    before = os.times().user
    with quiet.Stopwatch() as watch:
        while os.times().user - before < 0.3:
            sum(i * i for i in range(30_000))
    assert watch.span.wall_s > 0.2 and watch.span.cpu_s > 0.2
    assert watch.span.foreign is None or 0 <= watch.span.foreign <= 1


# -- what is run ----------------------------------------------------------------------------------


def test_loads_are_those_that_are_announced() -> None:
    found = {load.name: load for load in cpu.loads(1000, None)}
    assert list(found) == ["c1", "c8", "c16", "c32", "c64", "mixed", "prefix"]
    for batch in (1, 8, 16, 32, 64):
        load = found[f"c{batch}"]
        assert load.concurrency == len(load.jobs) == batch
        assert {(len(job.prompt), job.max_tokens) for job in load.jobs} == {(128, 64)}
    outputs = [job.max_tokens for job in found["mixed"].jobs]
    assert len(outputs) == 64 and outputs[:5] == [8, 64, 16, 128, 32]
    shared = found["prefix"]
    assert shared.shared_prefix
    assert len({tuple(job.prompt[:512]) for job in shared.jobs}) == 1
    assert len({tuple(job.prompt) for job in shared.jobs}) == len(shared.jobs)


def test_prompts_are_the_same_in_every_process() -> None:
    assert cpu.draw(1000, [(20, 4)] * 3) == cpu.draw(1000, [(20, 4)] * 3)
    prompts = [tuple(job.prompt) for job in cpu.draw(1000, [(20, 4)] * 3)]
    assert len(set(prompts)) == 3 and all(0 <= t < 1000 for p in prompts for t in p)


def test_a_real_trace_is_cut_and_scaled(tmp_path: Path) -> None:
    csv = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    rows = [f"2023-11-16 18:15:{i % 60:02d}.0000000,{160 + i},{32}" for i in range(300)]
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    azure = cpu.loads(1000, csv)[-1]
    assert azure.name == "azure" and len(azure.jobs) == 200
    assert (len(azure.jobs[0].prompt), azure.jobs[0].max_tokens) == (10, 2)


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous", "unified"])
def test_every_policy_serves_more_jobs_than_fit_at_once(policy: str, tiny_chat_model: Path) -> None:
    engine = engines.make(f"minibatch:{policy}", "", str(tiny_chat_model), "float32", 1)
    jobs = cpu.draw(1000, [(9, 3), (5, 7), (12, 1), (9, 4), (6, 2)])
    first, again = (engine.run(jobs, 2, shared_prefix=False) for _ in range(2))
    assert [len(row) for row in first] == [3, 7, 1, 4, 2]
    assert first == again  # an engine that has served before serves the same


def test_a_worker_answers_a_line_with_a_line(tiny_chat_model: Path) -> None:
    task = {"jobs": [[[5, 6, 7], 4], [[8, 9], 2]], "concurrency": 2, "shared_prefix": True,
            "want_tokens": True}  # fmt: skip
    command = [sys.executable, str(BENCHMARKS / "worker.py"), "minibatch", "--model", "",
               "--gguf", str(tiny_chat_model), "--threads", "1"]  # fmt: skip
    done = subprocess.run(
        command, input=json.dumps(task) + "\n", capture_output=True, text=True, timeout=240,
        cwd=BENCHMARKS.parent, env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    hello, answer = map(json.loads, done.stdout.splitlines())
    assert hello["loaded_mb"] >= hello["imported_mb"] > 0
    assert answer["tokens"] == 6 and [len(ids) for ids in answer["ids"]] == [4, 2]
    assert answer["wall_s"] > 0 and answer["peak_mb"] > 0


def test_a_worker_that_dies_is_told_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    worker = cpu.Worker("no such engine", "float32", Path(sys.executable), [])
    assert worker.run(cpu.Load("c1", "", cpu.draw(10, [(2, 1)]), 1)) is None
    assert "no such engine" in (worker.trouble or "") and worker.trouble in capsys.readouterr().err
    assert worker.run(cpu.Load("c8", "", cpu.draw(10, [(2, 1)]), 1)) is None


def test_the_scheduler_is_measured_under_every_policy() -> None:
    rows = scheduler.measure([3], steps=4)
    assert [row[0] for row in rows] == ["static", "dynamic", "continuous", "unified"]
    assert all(0 <= decide <= late for _, _, decide, _, late in rows)


# -- what is written ------------------------------------------------------------------------------


def test_report(tmp_path: Path) -> None:
    found = [load for load in cpu.loads(1000, None) if load.name in ("c1", "mixed")]
    then = (CHIP.memory_bandwidth, CHIP.flops["float32"])
    rows = [
        cpu.Row("c1", "minibatch", "float32", [run(40)], *then),
        cpu.Row("c1", "generate", "float32", [run(20)], 2 * then[0], 2 * then[1]),
        cpu.Row("c1", "minibatch", "int8", [run(90)], *then),
        cpu.Row("mixed", "generate", "float32", [run(10, 0.3)], *then),
    ]
    info = machine.describe()
    text = cpu.write(tmp_path / "cpu", info, rows, found, CHIP, preset("smollm2-135m"), ["x: no"])
    ours, theirs, int8, disturbed = text.splitlines()[1:]
    assert "2.00x" in theirs and "2.00x" not in ours
    shares = [float(line.partition(" %")[0].split()[-1]) for line in (ours, theirs)]
    assert shares[0] == pytest.approx(4 * shares[1], abs=2.1)  # half the rate, twice the roof
    assert "of roofline" in text
    assert "(!)" in disturbed and "(!)" not in theirs
    assert int8.split()[1] == "int8"
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert data["not_measured"] == ["x: no"] and data["commit"] and data["versions"]["torch"]
    assert [row["engine"] for row in data["rows"]][:2] == ["minibatch", "generate"]
    assert "| c1" in (tmp_path / "cpu.md").read_text()
    ElementTree.fromstring((tmp_path / "cpu.svg").read_text())


def test_a_picture_says_what_it_shows() -> None:
    picture = bars("tokens & such", {"c1 <fp32>": {"ours": 10.0, "theirs": 5.0}})
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter() if element.text]
    assert "tokens & such" in texts and "c1 <fp32>" in texts and "10" in texts
    widths = [float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[-2] == pytest.approx(2 * widths[-1], rel=0.01)


def test_a_workers_memory_is_its_own(tmp_path: Path) -> None:
    """Not that of the process that started it, which may have been larger."""
    code = (
        "import subprocess, sys; ballast = b'x' * (800 * 2**20); "
        "print(subprocess.run([sys.executable, '-c', sys.argv[1]], capture_output=True, "
        "text=True, check=True).stdout)"
    )
    child = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
        "import worker; print(worker.peak_mb())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, child], capture_output=True, text=True, check=True
    )
    assert 0 < float(done.stdout) < 400
