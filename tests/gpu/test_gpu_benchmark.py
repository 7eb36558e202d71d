"""``benchmarks/gpu.py`` in small, on whatever is here: every stage runs and writes its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import STAGES, main


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize("stage", list(STAGES))
def test_stage(stage: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if stage == "kernels":
        pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    common = ["--quick", "--model", "tiny", "--device", device, "--dtype", dtype]
    main([stage, *common, "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(f"{stage}: ")
    if stage == "report":
        report = (out / "report.md").read_text()
        assert "## sweep" in report and "sweep.svg" in report
        assert (out / "sweep.svg").read_text().startswith("<svg")
        return
    content = json.loads((out / f"{stage}.json").read_text())
    assert content["rows"] and content["hardware"] and content["software"]["torch"]
    if stage == "sweep":
        assert len(content["rows"]) == 4 * 2
        assert all(0 < row["share"] < 1 for row in content["rows"])
    if stage == "traces":
        evictions = {row["run"]: row["evictions"] for row in content["rows"]}
        assert evictions["swap"] > 0 and evictions["recompute"] > 0
    if stage == "kernels":
        assert all(row["largest error"] < 0.05 for row in content["rows"])
