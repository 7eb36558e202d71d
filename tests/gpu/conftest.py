"""Where no GPU is, Triton's interpreter runs the kernels: it must be chosen before they exist."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU with interpreted kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def e4m3(device: torch.device) -> torch.dtype:
    """The 8-bit float of Ada and Hopper. The interpreter has it; older GPUs have only e5m2."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3: compute capability below 8.9")
    return torch.float8_e4m3fn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
