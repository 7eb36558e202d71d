"""``minibatch simulate`` from outside: a table on stdout, the rest on stderr, files as asked."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from minibatch.commands import simulate as command
from minibatch.errors import ConfigError
from minibatch.metrics import measure
from minibatch.simulation import fork, simulate
from minibatch.trace import Trace
from minibatch.workload import generate
from minibatch.workload_files import WorkloadFormatError, save_workload

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--model", "smollm2-135m", "--hardware", "l4", "--num-gpu-blocks", "200"]
SMALL += ["--max-model-len", "512", "--prompt-len", "32", "--output-len", "uniform:4:20"]


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["simulate", *options])
    return args.run(args)


def test_several_policies_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["static", "dynamic", "continuous", "unified"]
    assert run(*SMALL, "--num-requests", "20", "--policy", *policies, "--style", "csv") == 0
    out, err = capsys.readouterr()
    title, *lines = out.strip().splitlines()
    assert title == "simulated: NVIDIA L4 24GB, smollm2-135m in float16"
    rows = {row["run"]: row for row in csv.DictReader(lines)}
    assert list(rows) == policies
    assert all(row["finished"] == "20/20" for row in rows.values())
    assert "20 requests, 640 prompt" in err
    workload = generate(20, 32, command.parse_lengths("uniform:4:20"))
    knobs = {"num_gpu_blocks": 200, "max_model_len": 512}
    expected = measure(simulate(workload, "l4", "smollm2-135m", "unified", knobs))
    assert rows["unified"]["out tok/s"] == f"{expected.output_tokens_per_s:.0f}"
    assert rows["unified"]["time s"] == f"{expected.duration_s:.2f}"


def test_traces_and_requests_go_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, requests = tmp_path / "run.jsonl.gz", tmp_path / "requests.csv"
    options = ["--num-requests", "6", "--trace", str(trace), "--requests", str(requests)]
    assert run(*SMALL, *options, "--policy", "unified") == 0
    loaded = Trace.load(trace)
    assert loaded.meta.policy == "unified" and loaded.meta.source == "simulated"
    assert loaded.summary["num_finished"] == 6
    assert len(requests.read_text().splitlines()) == 7
    assert run(*SMALL, *options, "--policy", "static", "unified") == 0
    for policy in ("static", "unified"):
        assert Trace.load(tmp_path / f"run.{policy}.jsonl.gz").meta.policy == policy
        assert (tmp_path / f"requests.{policy}.csv").exists()
    assert fork(loaded, 3, policy="static").summary["num_finished"] == 6


def test_a_workload_file_scaled_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_workload(generate(9, 64, 32, seed=1), tmp_path / "w.jsonl")
    assert (
        run(*SMALL, "--workload", str(path), "--num-requests", "5", "--scale-tokens", "0.25") == 0
    )
    out, err = capsys.readouterr()
    assert "the first 5" in err and "tokens x 0.25" in err
    assert "5 requests, 80 prompt and 40 output tokens" in err
    assert "5/5" in out


def test_goodput_is_printed_when_limits_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--num-requests", "4", "--rate", "100", "--slo-ttft", "1e-9") == 0
    assert "goodput continuous: 0.000 of" in capsys.readouterr().out
    assert run(*SMALL, "--num-requests", "4") == 0
    assert "goodput" not in capsys.readouterr().out


def test_an_ideal_chip_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*options: str) -> float:
        assert run(*SMALL, "--num-requests", "4", "--style", "csv", *options) == 0
        return float(next(csv.DictReader(capsys.readouterr().out.splitlines()[1:]))["E2E p99 s"])

    assert 0.0 < seconds("--ideal") < seconds()


def test_calibrated_on_a_recorded_run(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "data" / "traces" / "smollm2_cpu_unified.jsonl.gz"
    options = ["--dtype", "float32", "--hardware", "l4", "--calibrate", str(path)]
    assert run(*SMALL, *options, "--num-requests", "4") == 0
    out, err = capsys.readouterr()
    assert "median error" in err and "missed most" in err
    # As slow as the CPU of the recording: some ten tokens a second, not thousands.
    rate = float(out.splitlines()[2].split()[5])
    assert 5 < rate < 500


@pytest.mark.parametrize(
    ("text", "values"),
    [("7", {7}), ("uniform:2:3", {2, 3}), ("list:10,500", {10, 500}), ("lognormal:5:0", {5})],
)
def test_lengths_on_the_command_line(text: str, values: set[int]) -> None:
    workload = generate(40, command.parse_lengths(text), 1)
    assert {request.prompt_len for request in workload} == values


@pytest.mark.parametrize("text", ["", "x", "-4", "uniform:5", "list:1,x", "lognormal:1:2:3", "7:8"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        command.parse_lengths(text)


def test_a_bad_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(WorkloadFormatError, match=r"none\.csv, line 1"):
        run(*SMALL, "--workload", str(tmp_path / "none.csv"))
    with pytest.raises(ConfigError, match="uniform"):
        run(*SMALL[:-1], "uniform:9:3x")


def test_the_bar_goes_to_stderr_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--num-requests", "4") == 0
    out, err = capsys.readouterr()
    assert "it/s" not in out + err and "req" not in out
