"""Published ceilings, and ceilings measured on the spot."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from minibatch.errors import ConfigError
from minibatch.hardware import Hardware, all_hardware, hardware, measure_this_machine


@pytest.mark.parametrize(
    ("name", "tflops", "terabytes_per_s", "gib", "ridge"),
    [
        ("a100-80gb", 312.0, 2.039, 80.0, 153),
        ("h100", 989.4, 3.35, 80.0, 295),
        ("h200", 989.4, 4.8, 140.4, 206),
        ("rtx-4090", 165.2, 1.008, 24.0, 164),
    ],
)
def test_published_figures(
    name: str, tflops: float, terabytes_per_s: float, gib: float, ridge: int
) -> None:
    chip = hardware(name)
    assert chip.peak_flops("float16") == pytest.approx(tflops * 1e12)
    assert chip.memory_bandwidth == pytest.approx(terabytes_per_s * 1e12)
    assert chip.memory_bytes / 2**30 == pytest.approx(gib, abs=0.05)
    assert round(chip.ridge("float16")) == ridge


def test_every_chip_names_its_source_and_date() -> None:
    assert len(all_hardware()) >= 4
    for name, chip in all_hardware().items():
        assert chip.name == name
        assert len(chip.source) > 20
        assert chip.date[:2] == "20"
        assert chip.source in chip.describe() and chip.date in chip.describe()
        # A rate "with sparsity" is twice the dense one: half precision never beats bytes by more.
        assert chip.peak_flops("float16") <= chip.flops.get("int8", float("inf"))


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no hardware 'b9000'; there are a100-80gb"):
        hardware("b9000")
    with pytest.raises(ConfigError, match="no figure for float8; it has float32"):
        hardware("a100-80gb").peak_flops("float8")


def test_a_chip_passes_through_and_survives_json() -> None:
    chip = hardware("l4")
    assert hardware(chip) is chip
    assert Hardware.from_dict(chip.to_dict()) == chip


@pytest.mark.parametrize("field", ["memory_bandwidth", "link_bandwidth"])
def test_impossible_rates_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0"):
        dataclasses.replace(hardware("l4"), **{field: 0})
    with pytest.raises(ConfigError, match="float16"):
        dataclasses.replace(hardware("l4"), flops={"float16": -1.0})


def test_this_machine_is_measured_in_plausible_units() -> None:
    chip = measure_this_machine("cpu", seconds=0.05)
    assert 1e8 < chip.memory_bandwidth < 1e13  # any computer since 2000
    assert 1e8 < chip.peak_flops("float32") < 1e15
    assert chip.memory_bytes > 2**28
    assert "measured" in chip.source
    assert f"{chip.memory_bandwidth / 1e9:.4g} GB/s" in chip.describe()


def test_importing_it_does_not_import_torch() -> None:
    code = "import minibatch.hardware, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
