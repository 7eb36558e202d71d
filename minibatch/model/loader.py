"""From a checkpoint to a model: every tensor is copied once, straight to where it will be used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minibatch.errors import CheckpointError
from minibatch.model import gguf, safetensors
from minibatch.model.attention import AttentionBackend
from minibatch.model.config import ModelConfig
from minibatch.model.llama import LlamaForCausalLM

NAMES_SHOWN = 5  # of each kind of trouble, in an error


class Checkpoint(Protocol):
    """Weights on disk under Hugging Face's names, read one by one."""

    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """The tensor, floating point, on the CPU. It may be memory of the file itself."""

    def copy_to(self, view: Tensor, name: str) -> None:
        """Fill ``view``, of any floating-point dtype, with the tensor."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``: a ``.gguf`` file, or a folder with safetensors.

    Raises:
        CheckpointError: if there is nothing there, or it is damaged.
        UnsupportedModelError: if it is no Llama.
    """
    if _is_gguf(path):
        return gguf.GGUFCheckpoint(path)
    return safetensors.SafetensorsCheckpoint(path)


def load_config(path: str | Path) -> ModelConfig:
    """The shape of the model at ``path``, without touching its weights. Raises as above."""
    if _is_gguf(path):
        return gguf.read_config(gguf.GGUFFile(path))
    return safetensors.read_config(path)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    backend: AttentionBackend | None = None,
) -> LlamaForCausalLM:
    """Load the model at ``path`` (see ``hub.resolve`` for names).

    Weights are memory mapped and converted to ``dtype`` on their way into the fused parameters;
    no second copy of the model exists at any time.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or its tensors are not exactly
            those that its config calls for; both shapes are named.
        UnsupportedModelError: if it is no Llama.
    """
    checkpoint = open_checkpoint(path)
    _check_tensors(path, checkpoint)
    model = LlamaForCausalLM(
        checkpoint.config, max_model_len=max_model_len, dtype=dtype, device=device, backend=backend
    )
    for name, view in model.checkpoint_views().items():
        checkpoint.copy_to(view, name)
    _check_tied_head(path, checkpoint, model)
    return model.eval()


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    max_model_len: int | None = None,
    backend: AttentionBackend | None = None,
) -> LlamaForCausalLM:
    """A model of this shape with random weights, drawn on ``device``: normal(0, 0.02), norms 1.

    It speaks nonsense at a real model's speed. The same seed gives the same weights on the same
    kind of device and dtype.
    """
    model = LlamaForCausalLM(
        config, max_model_len=max_model_len, dtype=dtype, device=device, backend=backend
    )
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in model.checkpoint_views().items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
        else:
            view.normal_(0.0, 0.02, generator=generator)
    return model.eval()


def _is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


def _check_tensors(path: str | Path, checkpoint: Checkpoint) -> None:
    """Compare the checkpoint's tensors with those of its config, before any memory is taken."""
    skeleton = LlamaForCausalLM(checkpoint.config, device="meta", max_model_len=1)
    expected = {name: tuple(view.shape) for name, view in skeleton.checkpoint_views().items()}
    found = checkpoint.shapes
    allowed = set(expected)
    if checkpoint.config.tie_word_embeddings:
        allowed.add("lm_head.weight")  # saved all the same by some trainers; compared later
    troubles = []
    if missing := expected.keys() - found.keys():
        troubles.append(f"missing: {_some(missing)}")
    extra = {name for name in found.keys() - allowed if not name.endswith("rotary_emb.inv_freq")}
    if extra:
        troubles.append(f"not part of this model: {_some(extra)}")
    misshapen = [
        f"{name} is {list(found[name])} and should be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if misshapen:
        troubles.append(f"wrong shapes: {_some(misshapen)}")
    if troubles:
        raise CheckpointError(f"{path} does not match its config; " + "; ".join(troubles))


def _check_tied_head(path: str | Path, checkpoint: Checkpoint, model: LlamaForCausalLM) -> None:
    """A tied checkpoint may carry a head too, but only the same one."""
    if not checkpoint.config.tie_word_embeddings or "lm_head.weight" not in checkpoint.shapes:
        return
    head = checkpoint.read("lm_head.weight").to(model.device, model.dtype)
    if not torch.equal(head, model.embed_tokens.weight):
        raise CheckpointError(
            f"{path}: the config ties lm_head to the embedding, but lm_head.weight differs from it"
        )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + rest
