"""``benchmarks/gpu.py`` in small, on whatever is here: every stage runs and writes its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import STAGES, Bench, main
from minibatch.cost_model import CostModel
from minibatch.model.loader import load_model


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize("stage", list(STAGES))
def test_stage(stage: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if stage in ("kernels", "prompts"):
        pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    common = ["--quick", "--model", "tiny", "--device", device, "--dtype", dtype]
    assert main([stage, *common, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(f"{stage}: ")
    if stage == "report":
        report = (out / "report.md").read_text()
        assert "## sweep" in report and "sweep.svg" in report
        assert (out / "sweep.svg").read_text().startswith("<svg")
        return
    content = json.loads((out / f"{stage}.json").read_text())
    assert content["rows"] and content["hardware"] and content["software"]["torch"]
    assert not any("error" in row for row in content["rows"])
    if stage == "sweep":
        assert len(content["rows"]) == 4 * 2
        assert all(0 < row["share"] < 1 for row in content["rows"])
    if stage == "traces":
        evictions = {row["run"]: row["evictions"] for row in content["rows"]}
        assert evictions["swap"] > 0 and evictions["recompute"] > 0
    if stage == "kernels":
        assert all(row["largest error"] < 0.05 for row in content["rows"])
        assert {row["cache"] for row in content["rows"]} == {"plain", "plain, by head", "fp8"}
    if stage == "prompts":
        assert all(row["largest error"] < 0.05 for row in content["rows"])
        assert {row["kernel"] for row in content["rows"]} >= {"SDPA", "ours"}
    if stage == "load":
        assert [row["same"] for row in content["rows"]] == [None, True, True]
    if stage == "verify":
        ours = content["rows"][1]
        assert ours["model"] == "minibatch" and ours["same where clear"] in (1.0, None)


def quick_bench(out: Path) -> Bench:
    return Bench("tiny", torch.device("cpu"), out, quick=True, dtype="float32")


def test_a_part_that_fails_costs_itself_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came before it is on disk already, what comes after it is measured, and the status says
    that something is missing.
    """
    run_load, seen = gpu.run_load, []

    def sometimes(bench: Bench, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.config.policy == "dynamic":
            seen.append(json.loads((tmp_path / "sweep.json").read_text())["rows"])
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        return run_load(bench, engine, *args, **kwargs)

    common = ["--quick", "--model", "tiny", "--device", "cpu", "--dtype", "float32"]
    with mock.patch.object(gpu, "run_load", sometimes):
        assert main(["sweep", *common, "--out", str(tmp_path)]) == 1
    assert [row["policy"] for row in seen[0]] == ["static", "static"]
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["policy"] for row in rows if "error" not in row] == [
        name for name in ("static", "continuous", "unified") for _ in range(2)
    ]
    errors = [row for row in rows if "error" in row]
    assert [row["concurrency"] for row in errors] == [1, 4]
    assert errors[0]["error"] == "OutOfMemoryError: CUDA out of memory."
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].endswith("2 failed")
    assert main(["report", *common, "--out", str(tmp_path)]) == 0
    assert "OutOfMemoryError" in (tmp_path / "report.md").read_text()
    # Only what failed need be run again: the other policies keep their rows.
    assert main(["sweep", *common, "--policies", "dynamic", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert len(rows) == 8 and not any("error" in row for row in rows)


def test_no_stage_needs_another_ones_file(tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text('{"chip": ')  # cut off
    bench = quick_bench(tmp_path)
    assert bench.chip().memory_bandwidth > 0
    bench.save("steps", [{"a": 1}])
    content = json.loads((tmp_path / "steps.json").read_text())
    assert content["rows"] == [{"a": 1}] and content["chip"]["memory_bandwidth"] > 0
    assert [file.name for file in tmp_path.glob("*.part")] == []


def test_bytes_of_quantised_weights_are_those_that_are_read(tmp_path: Path) -> None:
    """Layers in 8 bits, the output layer in the engine's dtype."""
    bench = quick_bench(tmp_path)
    with gpu.make_engine(bench, 4) as engine:
        run = gpu.run_load(bench, engine, 32, [8] * 4)
    rates = {
        kind: gpu.uniform_row(bench, "x", 4, run, 8, weight_dtype=kind)["decode GB/s"]
        for kind in (None, "int8")
    }
    model = CostModel.ideal(bench.shape, bench.chip(), "float32")
    decode_s = sum(r.duration_s for r in run.records if r.scheduled[0].phase == "decode")
    steps = sum(r.scheduled[0].phase == "decode" for r in run.records)
    saved = 3 * model.layer_parameters * steps / decode_s / 1e9
    assert rates[None] - rates["int8"] == pytest.approx(saved, rel=1e-6)


def test_a_large_checkpoint_is_written_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import gpu_model  # beside gpu.py, which has put its folder on the path

    model = quick_bench(tmp_path).model()
    with mock.patch.object(gpu_model, "SHARD_BYTES", 100_000):
        gpu_model.write_checkpoint(model, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert gpu_model.same_weights(model, load_model(tmp_path))


def test_static_batching_is_given_room_for_its_whole_batch(tmp_path: Path) -> None:
    bench = Bench("tiny", torch.device("cpu"), tmp_path, quick=False, dtype="float32")
    with mock.patch.object(gpu, "engine_for") as engine_for:
        for policy in ("static", "unified"):
            gpu.make_engine(bench, 64, policy=policy)
    budgets = [call.args[1].max_num_batched_tokens for call in engine_for.call_args_list]
    assert budgets == [64 * 512, 8192]


def test_tilings_fill_a_chip_and_never_end_empty() -> None:
    pytest.importorskip("triton")
    import gpu_attention  # beside gpu.py, which has put its folder on the path

    for batch in (1, 8, 32, 128, 256):
        many, few = (gpu_attention.tilings(batch, 32, few) for few in (False, True))
        assert len(many) >= 9 and len(few) == 3
        assert all(t in many for t in few)
        assert all(t.splits == 1 or 128 <= t.splits * batch * 32 <= 4096 for t in many)
