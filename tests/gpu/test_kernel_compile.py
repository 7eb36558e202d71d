"""The kernels compiled ahead of time for an A100 and an H100, where there need be neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # of one thread block at most
RESIDENT = 65536 // (4 * 32)  # registers a thread at which one block of 4 warps fills the file


@pytest.mark.parametrize("arch", [80, 90])
def test_no_kernel_spills(arch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(HERE.parent.parent),
    }
    script = [sys.executable, "-W", "ignore", str(HERE / "compile_kernels.py"), str(arch)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 11
    with capsys.disabled():
        print()
        for row in rows:
            print("  sm_{arch} {variant:26} {registers:3} registers, {stack_bytes} B of stack, "
                  "{shared_bytes:6} B shared, {matrix_instruction}".format(**row))  # fmt: skip
    for row in rows:
        assert row["stack_bytes"] == 0, row  # nothing that should be in a register is in memory
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        if "decode" in row["variant"]:  # memory-bound: several blocks must hide each other's waits
            assert 2 * row["registers"] <= RESIDENT, row
            assert 2 * row["shared_bytes"] <= SHARED_BYTES[arch], row
        if "chunk" in row["variant"]:
            assert row["matrix_instruction"] == ("wgmma" if arch >= 90 else "mma"), row
