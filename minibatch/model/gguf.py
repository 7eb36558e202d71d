"""GGUF files (llama.cpp's format), memory mapped: metadata, and tensors under our names.

Layout: magic, version, counts; metadata as typed key-value pairs; one descriptor a tensor; then,
aligned, the data. Everything is little-endian. Specification: ggml's ``docs/gguf.md``.

The ``gguf`` package does the dequantising. Its reader builds an object per vocabulary entry, which
takes seconds; walking the header ourselves takes a tenth of one.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minibatch.errors import CheckpointError, UnsupportedModelError
from minibatch.model.config import DEFAULT_ROPE_THETA, ModelConfig, RopeConfig

STRING, ARRAY = 8, 9  # the two value types that are not plain numbers
NUMBER_FORMATS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

# GGUF's name of a tensor, without its layer, to Hugging Face's.
MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UNQUANTISED = {0: "float32", 1: "float16", 32: "bfloat16"}  # by general.file_type
ROPE_DIVISORS = "rope_freqs.weight"  # llama3 rope, worked out by the converter
BYTES_AT_ONCE = 2**20  # of a quantised tensor


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file, and as what."""

    shape: tuple[int, ...]  # as torch has it; the file counts dimensions the other way round
    quantisation: int  # ggml's type number: F32, F16, Q8_0, ...
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """A GGUF file's header, read once, and its tensors, read when asked for.

    ``metadata`` holds plain Python values (a vocabulary is a list of strings), ``tensors`` one
    ``TensorInfo`` a name.

    Raises:
        CheckpointError: if the file is missing, cut short, or not GGUF.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._offset = 0
        try:
            self._read_header()
        except (struct.error, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} is cut short or damaged: its header breaks at byte {self._offset} of "
                f"{len(self._bytes)}"
            ) from error

    def read(self, name: str) -> np.ndarray:
        """The tensor ``name``, dequantised to float32, in torch's order of dimensions.

        Raises:
            UnsupportedModelError: if its quantisation cannot be undone.
        """
        values = np.empty(self.tensors[name].shape, np.float32)
        flat = values.reshape(math.prod(values.shape[:-1]), -1)
        for rows, piece in self.pieces(name):
            flat[rows] = piece
        return values

    def pieces(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """The same as ``[rows, columns]``, some rows at a time: undoing a quantisation takes
        several times a tensor's memory. Raises as above.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        quantisation = GGMLQuantizationType(info.quantisation)
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.offset)
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)  # quantised blocks run along a row
        if quantisation in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            rows = rows.view(np.float32 if quantisation == GGMLQuantizationType.F32 else np.float16)
        at_once = max(1, BYTES_AT_ONCE // rows[0].nbytes)
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            try:
                yield part, dequantize(rows[part], quantisation)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} is stored as {quantisation.name}, which the "
                    "gguf package cannot dequantise"
                ) from error

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file")
        self._offset = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; 2 and 3 are read")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        descriptors = [self._tensor_descriptor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        data_start = math.ceil(self._offset / alignment) * alignment
        for name, shape, quantisation, offset in descriptors:
            self.tensors[name] = self._tensor_info(name, shape, quantisation, data_start + offset)

    def _tensor_descriptor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("<I")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _tensor_info(
        self, name: str, shape: tuple[int, ...], quantisation: int, offset: int
    ) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(quantisation)]
        num_bytes = math.prod(shape) // block_elements * block_bytes
        if offset + num_bytes > len(self._bytes):
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {offset + num_bytes}, "
                f"the file at {len(self._bytes)}"
            )
        return TensorInfo(shape, quantisation, offset, num_bytes)

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._bytes, self._offset)
        self._offset += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        start, self._offset = self._offset, self._offset + length
        text = self._bytes[start : self._offset]
        if len(text) < length:
            raise ValueError("the file ends inside a string")
        return text.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            if kind in (STRING, ARRAY):
                return [self._value(kind) for _ in range(count)]
            return self._numbers(kind, count)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(NUMBER_FORMATS[kind])
        values = np.frombuffer(self._bytes, dtype, count, self._offset)
        self._offset += values.nbytes
        return values.tolist()


class GGUFCheckpoint:
    """A GGUF Llama under Hugging Face's tensor names: a ``loader.Checkpoint``.

    Raises:
        CheckpointError: if the file is missing or damaged, or lacks a setting.
        UnsupportedModelError: for another architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        self.config = read_config(self._file)
        self._stored_names = {
            huggingface_name(name): name for name in self._file.tensors if name != ROPE_DIVISORS
        }
        self.shapes = {
            name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor with this Hugging Face name, float32 on the CPU."""
        values = self._file.read(self._stored_names[name])
        if ".q_proj." in name:
            values = unpermute(values, self.config.num_heads)
        elif ".k_proj." in name:
            values = unpermute(values, self.config.num_kv_heads)
        return torch.from_numpy(np.ascontiguousarray(values))

    def copy_to(self, view: Tensor, name: str) -> None:
        """Fill ``view`` with the tensor of this Hugging Face name."""
        if ".q_proj." in name or ".k_proj." in name:  # their rows change places
            view.copy_(self.read(name))
            return
        flat = view.view(-1, view.shape[-1])
        for rows, piece in self._file.pieces(self._stored_names[name]):
            flat[rows] = torch.from_numpy(np.require(piece, requirements=["W"]))


def huggingface_name(name: str) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``.

    A name that we do not know comes back unchanged, to be reported as such.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{MODEL_NAMES[stem]}.{kind}" if stem in MODEL_NAMES else name
    return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{kind}" if stem in LAYER_NAMES else name


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q (by heads) and k (by KV heads).

    llama.cpp turns neighbours (2i, 2i + 1) of a head, Hugging Face turns (i, i + D / 2): the
    converter interleaves the two halves of each head, and this parts them again.
    """
    halves = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, D / 2, 2, ...]
    return halves.swapaxes(1, 2).reshape(rows.shape)


def read_config(file: GGUFFile) -> ModelConfig:
    """The shape of the Llama in ``file``, from its metadata and its list of tensors.

    ``torch_dtype`` is that of an unquantised file; quantised weights count as float32.

    Raises:
        UnsupportedModelError: for another architecture.
        CheckpointError: for a setting that is missing.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path}: the architecture is {architecture!r}; minibatch runs 'llama'"
        )
    if metadata.get("llama.expert_count"):
        raise UnsupportedModelError(
            f"{file.path}: a mixture of {metadata['llama.expert_count']} experts; minibatch runs "
            "dense models"
        )
    hidden_size = _require(file, "llama.embedding_length")
    num_heads = _require(file, "llama.attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rope turns {metadata['llama.rope.dimension_count']} of {head_dim} "
            "dimensions of a head; minibatch turns all"
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks the tensor 'token_embd.weight'")
    end_ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=_require(file, "llama.feed_forward_length"),
        num_layers=_require(file, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=_require(file, "llama.context_length"),
        rms_norm_eps=_require(file, "llama.attention.layer_norm_rms_epsilon"),
        rope=_read_rope(file),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        eos_token_ids=tuple(dict.fromkeys(token for token in end_ids if token is not None)),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        torch_dtype=UNQUANTISED.get(metadata.get("general.file_type"), "float32"),
    )


def _read_rope(file: GGUFFile) -> RopeConfig:
    metadata: Mapping[str, Any] = file.metadata
    theta = metadata.get("llama.rope.freq_base", DEFAULT_ROPE_THETA)
    if ROPE_DIVISORS in file.tensors:
        return RopeConfig("divisors", theta, divisors=tuple(file.read(ROPE_DIVISORS).tolist()))
    kind = metadata.get("llama.rope.scaling.type", "none")
    old_factor = metadata.get("llama.rope.scale_linear")  # before there were several kinds
    if kind == "linear":
        return RopeConfig("linear", theta, _require(file, "llama.rope.scaling.factor"))
    if kind == "none" and old_factor is not None:
        return RopeConfig("linear", theta, old_factor)
    if kind == "none":
        return RopeConfig("plain", theta)
    raise UnsupportedModelError(
        f"{file.path}: rope scaling {kind!r}; minibatch runs 'none', 'linear' and llama3's "
        f"{ROPE_DIVISORS!r}"
    )


def _require(file: GGUFFile, key: str) -> Any:
    if key not in file.metadata:
        raise CheckpointError(f"{file.path} lacks the setting {key!r}")
    return file.metadata[key]
