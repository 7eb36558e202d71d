"""``python -m minibatch``, as a person at a terminal uses it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from minibatch.cli import main
from minibatch.config import EngineConfig
from minibatch.sampling_params import SamplingParams
from minibatch.trace import Trace

SMALL = ["--num-gpu-blocks", "24", "--block-size", "4", "--num-cpu-blocks", "24"]


def run(
    capsys: pytest.CaptureFixture[str], model: Path, *args: str, expect: int = 0
) -> tuple[str, str]:
    code = main(["run", *args, "--model", str(model)])
    out, err = capsys.readouterr()
    assert code == expect, err
    return out, err


def test_answers_steps_and_trace(
    capsys: pytest.CaptureFixture[str], tiny_chat_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl.gz"
    args = ["One", "Two", "Three", "--raw", "--max-tokens", "9", "--ignore-eos"]
    out, _ = run(
        capsys,
        tiny_chat_model,
        *args,
        *SMALL,
        "--show-steps",
        "--trace",
        str(file),
        "--temperature",
        "0",
    )
    steps = re.findall(r"^it +(\d+) \| (prefill|decode) (\d+) tok .* free \d+/24", out, re.M)
    assert [int(number) for number, _, _ in steps] == list(range(9))
    assert steps[0][1] == "prefill" and {kind for _, kind, _ in steps[1:]} == {"decode"}
    assert all(f"[{name}] {text}" in out for name, text in zip("ABC", args, strict=False))
    assert "3 requests, 27 tokens in 9 iterations" in out
    trace = Trace.load(file)
    assert trace.summary["num_generated_tokens"] == 27
    assert [f"it {record.step:3d}" in out for record in trace] == [True] * 9

    assert main(["trace", "show", str(file), "--steps", "2", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in shown[1:-1]] == ["it   2", "it   3"]
    assert json.loads(shown[-1])["num_steps"] == 9

    timeline = tmp_path / "timeline.json"
    assert main(["trace", "perfetto", str(file), str(timeline)]) == 0
    slices = [e for e in json.loads(timeline.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 27  # one a step and request


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous", "unified"])
def test_every_policy_gives_the_same_text(
    capsys: pytest.CaptureFixture[str], tiny_chat_model: Path, policy: str
) -> None:
    args = ["Hello", "A longer prompt than that", "--raw", "--max-tokens", "8", "--json"]
    knobs = ["--temperature", "0", "--max-model-len", "48", "--policy", policy]
    out, _ = run(capsys, tiny_chat_model, *args, *knobs, *SMALL)
    tokens = [json.loads(line)["outputs"][0]["token_ids"] for line in out.splitlines()]
    out, _ = run(capsys, tiny_chat_model, *args, "--temperature", "0", "--max-num-seqs", "1")
    assert tokens == [json.loads(line)["outputs"][0]["token_ids"] for line in out.splitlines()]


def test_prompts_from_a_file_and_from_standard_input(tiny_chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("from the file\n\nand another\n", encoding="utf-8")
    command = [sys.executable, "-m", "minibatch", "run", "argument", "-", "--json"]
    command += ["--model", str(tiny_chat_model), "--max-tokens", "2"]
    command += ["--file", str(tmp_path / "prompts.txt")]
    done = subprocess.run(command, input="piped 中文\n", capture_output=True, text=True, check=True)
    prompts = [json.loads(line)["prompt"] for line in done.stdout.splitlines()]
    assert prompts == ["argument", "piped 中文", "from the file", "and another"]


def test_the_chat_template_is_used_unless_raw(
    capsys: pytest.CaptureFixture[str], tiny_chat_model: Path
) -> None:
    args = ["Hello", "--json", "--max-tokens", "1"]
    chat = json.loads(run(capsys, tiny_chat_model, *args)[0])
    raw = json.loads(run(capsys, tiny_chat_model, *args, "--raw")[0])
    assert len(chat["prompt_token_ids"]) > 10 > len(raw["prompt_token_ids"])


def test_every_knob_has_an_option_and_help_that_says_what_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    names = {field.name for cls in (EngineConfig, SamplingParams) for field in fields(cls)}
    for name in names - {"stream"}:
        option = "--" + name.replace("_", "-")
        assert re.search(rf"^  {option}\b", text, re.M), option
        described = re.search(rf"^  {option}\b.*?(?=^  --|^\S)", text, re.M | re.S)
        assert described and len(described[0].split()) > 4, option
    assert "examples:" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["x", "--block-size", "0"], "block_size=0"),
        (["x", "--temperature", "-1"], "temperature=-1.0"),
        (["x", "--num-gpu-blocks", "1", "--max-tokens", "500"], "num_gpu_blocks"),
        ([" "], "no prompts"),
        (["--file", "no/such/file"], "no/such/file"),
        (["x", "--max-model-len", "999999"], "4096"),
    ],
)
def test_errors_are_one_line_with_the_knob(
    capsys: pytest.CaptureFixture[str], tiny_chat_model: Path, args: list[str], message: str
) -> None:
    out, err = run(capsys, tiny_chat_model, *args, expect=1)
    assert message in err and err.startswith("minibatch: ")
    assert "Traceback" not in err + out


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err = run(capsys, tmp_path, "x", expect=1)
    assert str(tmp_path) in err


def test_models_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m" in out and "llama-2-7b" in out and "512 KiB" in out


def test_a_file_that_is_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    assert main(["trace", "show", str(tmp_path / "x.jsonl")]) == 1
    assert main(["trace", "show", str(tmp_path / "none.jsonl")]) == 1
    assert "line 1" in capsys.readouterr().err


def test_ctrl_c_leaves_a_readable_trace(tiny_chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl.gz"
    command = [sys.executable, "-m", "minibatch", "run", "Hello", "there", "--raw", "--ignore-eos"]
    command += ["--model", str(tiny_chat_model), "--max-tokens", "3000", "--trace", str(file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not file.exists() or file.stat().st_size < 2000:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    trace = Trace.load(file)
    assert len(trace) > 3 and trace.summary["num_steps"] == len(trace)
    assert [record.step for record in trace] == list(range(len(trace)))


@pytest.mark.smollm2
def test_main_job_on_the_real_model(
    capsys: pytest.CaptureFixture[str], smollm2: Path, tmp_path: Path
) -> None:
    args = ["What is the capital of France?", "What is 2+2?", "用一句话介绍一下长城。"]
    file = tmp_path / "demo.jsonl.gz"
    out, _ = run(
        capsys,
        smollm2,
        *args,
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--show-steps",
        "--max-num-seqs",
        "2",
        "--trace",
        str(file),
    )
    assert "Paris" in out and "wait C" in out
    assert Trace.load(file).summary["num_finished"] == 3
