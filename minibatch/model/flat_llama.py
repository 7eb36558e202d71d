"""The same Llama in as few calls as possible, for a CPU.

On a CPU a step is launched by the cores that compute it. ``llama.py`` makes some fifty calls a
layer into torch and between its modules; each costs a few microseconds, more than its work on a
small batch. Here a layer is one stretch of code: four matrices, and between them four operations
that ``LayerOps`` names, from torch's own calls or from a C compiler (``compiled_ops.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minibatch.model.attention import AttentionMetadata
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import MLP_ROWS, LlamaForCausalLM, RMSNorm
from minibatch.model.rotary import rotate

Linear = Callable[[Tensor], Tensor]
AddNorm = Callable[[Tensor, "Tensor | None"], "tuple[Tensor, Tensor]"]


class LayerOps(ABC):
    """What a layer does between its matrices, but for attention, which the backend does."""

    @abstractmethod
    def add_norm(self, norm: RMSNorm) -> AddNorm:
        """A function from the stream ``[T, H]`` and what is added to it, if anything, to the new
        stream and its norm. The old stream may be overwritten.
        """

    @abstractmethod
    def turn_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_cache: KVCache, layer: int, slots: Tensor
    ) -> Tensor:
        """Rope, and keys and values into the cache: ``qkv [T, Hq + 2 Hkv, D]`` (which may be
        overwritten) to the turned queries ``[T, Hq, D]``.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``: ``[rows, 2 inner]`` to ``[rows, inner]``."""


class _Layer(NamedTuple):
    add_norm: AddNorm  # before attention
    qkv: Linear
    out: Linear
    add_norm_mlp: AddNorm
    gate_up: Linear
    down: Linear


class FlatLlama:
    """The forward pass of a ``LlamaForCausalLM``, over its weights, its matrices and its backend.

    Made after the weights are loaded and, where they are, packed or quantised. The matrices are
    called as modules, so that hooks on them see every step.
    """

    def __init__(self, model: LlamaForCausalLM, ops: LayerOps | None = None) -> None:
        self.model = model
        self.ops = ops or TorchOps(model.config.num_kv_heads)
        self.layers = [
            _Layer(
                self.ops.add_norm(layer.input_norm),
                layer.attention.qkv_proj,
                layer.attention.o_proj,
                self.ops.add_norm(layer.post_attention_norm),
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            )
            for layer in model.layers
        ]
        self.add_norm = self.ops.add_norm(model.norm)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """See ``LlamaForCausalLM.forward``."""
        model, backend, slots = self.model, self.model.backend, meta.slot_mapping
        tokens, head_dim = len(input_ids), model.config.head_dim
        cos, sin = model.prepare(positions, kv_cache, meta)
        stream = F.embedding(input_ids, model.embed_tokens.weight)  # [T, H]
        answer = None  # what the last part of the model has to add to the stream
        for index, layer in enumerate(self.layers):
            stream, normed = layer.add_norm(stream, answer)
            qkv = layer.qkv(normed).view(tokens, -1, head_dim)  # [T, Hq + 2 Hkv, D]
            q = self.ops.turn_and_store(qkv, cos, sin, kv_cache, index, slots)
            attended = backend.forward(q, kv_cache, index, meta)  # [T, Hq, D]
            stream, normed = layer.add_norm_mlp(stream, layer.out(attended.view(tokens, -1)))
            answer = self._mlp(layer, normed)
        return self.add_norm(stream, answer)[1]

    def _mlp(self, layer: _Layer, normed: Tensor) -> Tensor:
        """A limited number of tokens at a time: the widest layer bounds the memory of a step."""
        outs = [
            layer.down(self.ops.silu_mul(layer.gate_up(rows))) for rows in normed.split(MLP_ROWS)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class TorchOps(LayerOps):
    """Torch's own operations, as few as will do."""

    def __init__(self, num_kv_heads: int) -> None:
        self.num_kv_heads = num_kv_heads

    def add_norm(self, norm: RMSNorm) -> AddNorm:
        """RMS norm from a vector's length: ``x / hypot(|x|, sqrt(H eps)) * (weight sqrt(H))``.

        The same as ``x / sqrt(mean(x squared) + eps) * weight``, in float32, rounded once; and
        five operations, where ``F.rms_norm`` makes eight on a CPU.
        """
        size = norm.weight.numel()
        gain = norm.weight.detach().float() * size**0.5  # [H]
        floor = torch.tensor((size * norm.eps) ** 0.5, device=norm.weight.device)

        def add_norm(stream: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
            if added is not None:
                stream = stream + added
            length = torch.linalg.vector_norm(stream, dim=-1, keepdim=True, dtype=torch.float32)
            normed = (stream / torch.hypot(length, floor)).mul_(gain)
            return stream, normed.to(stream.dtype)

        return add_norm

    def turn_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_cache: KVCache, layer: int, slots: Tensor
    ) -> Tensor:
        kv_heads = self.num_kv_heads
        qk = rotate(qkv[:, :-kv_heads], cos, sin)  # [T, Hq + Hkv, D]
        kv_cache.store(layer, qk[:, -kv_heads:], qkv[:, -kv_heads:], slots)
        return qk[:, :-kv_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
