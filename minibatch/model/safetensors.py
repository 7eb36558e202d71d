"""Hugging Face folders: ``config.json`` and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minibatch.errors import CheckpointError
from minibatch.model.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsCheckpoint:
    """A folder of memory-mapped weights: a ``loader.Checkpoint``.

    Raises:
        CheckpointError: if the config, the weights or a shard is missing or damaged, or if there
            are only pickles.
    """

    def __init__(self, folder: str | Path) -> None:
        self.config = read_config(folder)
        self._file_of: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(Path(folder)):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 (a file handle, not a dict)
                self._file_of[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor ``name`` as it was saved, on the CPU: mapped memory, not a copy.

        Raises:
            CheckpointError: if it is not a floating-point tensor.
        """
        tensor = self._file_of[name].get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype}: quantised safetensors are not read"
            )
        return tensor

    def copy_to(self, view: Tensor, name: str) -> None:
        """Fill ``view`` with the tensor ``name``. Raises as above."""
        view.copy_(self.read(name))


def read_config(folder: str | Path) -> ModelConfig:
    """The shape in ``config.json``, with the end tokens of ``generation_config.json`` if any.

    Raises:
        CheckpointError: if the folder or its ``config.json`` is missing or is not JSON.
        UnsupportedModelError: for another architecture.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    generation = folder / "generation_config.json"
    return ModelConfig.from_dict(
        _read_json(folder / "config.json"), _read_json(generation) if generation.is_file() else None
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing or not shards:
            raise CheckpointError(
                f"{folder}: {INDEX_FILE} names {len(shards)} shards; missing are "
                f"{', '.join(missing) or 'all'}"
            )
        return [folder / name for name in shards]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has only pickled weights ({', '.join(pickles)}), which may run any code "
            "when opened: convert them to safetensors"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content
