"""The same Llama in as few calls as possible, for a CPU.

On a CPU a step is launched by the cores that compute it. ``llama.py`` makes some fifty calls a
layer into torch and between its modules; each costs a few microseconds, more than its work on a
small batch, and all of them together up to a sixth of a decode step. Here a layer is one stretch
of code: no module is called but for its matrices, nothing is looked up twice, and a norm takes
five operations instead of eight.
"""

from __future__ import annotations

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


class _Layer(NamedTuple):
    norm_in: _Norm
    qkv: Linear
    out: Linear
    norm_mlp: _Norm
    gate_up: Linear
    down: Linear


class FlatLlama:
    """The forward pass of a ``LlamaForCausalLM``, over its weights, its matrices and its backend.

    Made after the weights are loaded and, where they are, packed or quantised. The matrices are
    called as modules, so that hooks on them see every step.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.layers = [
            _Layer(
                _Norm(layer.input_norm),
                layer.attention.qkv_proj,
                layer.attention.o_proj,
                _Norm(layer.post_attention_norm),
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            )
            for layer in model.layers
        ]
        self.norm = _Norm(model.norm)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """See ``LlamaForCausalLM.forward``."""
        model, backend, slots = self.model, self.model.backend, meta.slot_mapping
        heads, kv_heads = model.config.num_heads, model.config.num_kv_heads
        tokens = len(input_ids)
        cos, sin = model.prepare(positions, kv_cache, meta)
        hidden = F.embedding(input_ids, model.embed_tokens.weight)  # [T, H]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.norm_in(hidden)).view(tokens, heads + 2 * kv_heads, -1)
            qk = rotate(qkv[:, :-kv_heads], cos, sin)  # [T, Hq + Hkv, D]
            kv_cache.store(index, qk[:, heads:], qkv[:, -kv_heads:], slots)
            attended = backend.forward(qk[:, :heads], kv_cache, index, meta)
            hidden = hidden + layer.out(attended.view(tokens, -1))
            # [mlp] few tokens at a time: the widest layer bounds the memory of a step
            normed = layer.norm_mlp(hidden)
            parts = [normed] if tokens <= MLP_ROWS else normed.split(MLP_ROWS)
            outs = []
            for part in parts:
                gate, up = layer.gate_up(part).chunk(2, dim=-1)  # [rows, inner] each
                outs.append(layer.down(F.silu(gate).mul_(up)))
            hidden = hidden + (outs[0] if len(outs) == 1 else torch.cat(outs))
        return self.norm(hidden)


class _Norm:
    """RMS norm, from a vector's length: ``x / hypot(|x|, sqrt(H eps)) * (weight sqrt(H))``.

    The same as ``x / sqrt(mean(x squared) + eps) * weight``, in float32, rounded once.
    """

    def __init__(self, norm: RMSNorm) -> None:
        size = norm.weight.numel()
        self.gain = norm.weight.detach().float() * size**0.5  # [H]
        self.floor = torch.tensor((size * norm.eps) ** 0.5, device=norm.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self.floor)).mul_(self.gain).to(x.dtype)
