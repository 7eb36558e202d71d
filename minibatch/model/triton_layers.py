"""The same Llama with its small operations fused. Import it only where Triton is.

Between two matrix products a layer does a dozen small things: add, square, mean, scale, turn,
copy, multiply. Each is a kernel that reads and writes the whole hidden state, and on a batch of
one each costs its launch, a few microseconds, where the matrices cost a few dozen. Three kernels
do the same in one pass each:

    hidden += delta; normed = rms_norm(hidden)     before attention and before the MLP
    turn queries and keys, store keys and values   behind the QKV product
    silu(gate) * up                                inside the MLP
"""

# ruff: noqa: ANN001, ANN202 - a kernel has no types: Triton compiles it for those it is given

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minibatch.model.attention import AttentionMetadata
from minibatch.model.fp8_kv_cache import Fp8KVCache
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM, RMSNorm
from minibatch.model.rotary import rope_frequencies


@triton.jit
def _add_rms_norm(
    hidden, delta,  # [T, H]; hidden += delta, unless that is None
    weight, normed,  # [H], [T, H]
    eps,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    mask = column < H
    x = tl.load(hidden + row + column, mask, 0.0)
    if delta is not None:
        x = x.to(tl.float32) + tl.load(delta + row + column, mask, 0.0).to(tl.float32)
        x = x.to(hidden.dtype.element_ty)  # rounded once, as it is kept
        tl.store(hidden + row + column, x, mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    y = x * scale * tl.load(weight + column, mask, 0.0).to(tl.float32)
    tl.store(normed + row + column, y.to(normed.dtype.element_ty), mask)


@triton.jit
def _rotate_and_store(
    qkv,  # [T, Hq + 2 Hkv, D]
    positions, slots,  # [T]; slot -1: nowhere
    cos, sin,  # float32 [max_model_len, D / 2]
    q,  # [T, Hq, D]
    keys, values,  # [slots, Hkv, D]
    key_scale, value_scale,  # float32 [Hkv], or None
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # of all HQ + 2 HKV
    pair = tl.arange(0, BLOCK)[None, :]
    half: tl.constexpr = D // 2
    mask = (head < HQ + 2 * HKV) & (pair < half)
    at = qkv + (token * (HQ + 2 * HKV) + head) * D + pair
    a, b = tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + half, mask, 0.0).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    turned = head < HQ + HKV  # values stay as they are
    c = tl.load(cos + position * half + pair, mask & turned, 1.0)
    s = tl.load(sin + position * half + pair, mask & turned, 0.0)
    a, b = a * c - b * s, b * c + a * s

    to_q = q + (token * HQ + head) * D + pair
    is_q = mask & (head < HQ)
    tl.store(to_q, a.to(q.dtype.element_ty), is_q)
    tl.store(to_q + half, b.to(q.dtype.element_ty), is_q)

    slot = tl.load(slots + token).to(tl.int64)
    kv_head = (head - HQ) % HKV
    first_stored = tl.where(slot < 0, HQ + 2 * HKV, HQ)
    is_k = mask & (head >= first_stored) & turned
    is_v = mask & (head >= first_stored) & (head >= HQ + HKV)
    if key_scale is not None:
        scale = tl.load(key_scale + kv_head, is_k, 1.0) * tl.load(value_scale + kv_head, is_v, 1.0)
        a = tl.minimum(tl.maximum(a / scale, -LIMIT), LIMIT)
        b = tl.minimum(tl.maximum(b / scale, -LIMIT), LIMIT)
    offset = (slot * HKV + kv_head) * D + pair
    a, b = a.to(keys.dtype.element_ty), b.to(keys.dtype.element_ty)
    tl.store(keys + offset, a, is_k)
    tl.store(keys + offset + half, b, is_k)
    tl.store(values + offset, a, is_v)
    tl.store(values + offset + half, b, is_v)


@triton.jit
def _silu_times(
    gate_up, out,  # [T, 2 I], [T, I]
    I: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E741
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < I
    gate = tl.load(gate_up + row * 2 * I + column, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + column, mask, 0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * I + column, y.to(out.dtype.element_ty), mask)


class FusedLlama:
    """The forward pass of a ``LlamaForCausalLM``, over its weights, its matrices and its backend.

    Not for ``dynamic`` rope, whose angles are no table. The cache is written here, so it must be
    one of the Triton caches or lie like them.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        config = model.config
        assert config.rope.kind != "dynamic"
        self.model = model
        positions = torch.arange(model.max_model_len, dtype=torch.float32)
        angles = positions[:, None] * rope_frequencies(config.rope, config.head_dim)
        self._cos, self._sin = angles.cos().to(model.device), angles.sin().to(model.device)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """See ``LlamaForCausalLM.forward``."""
        model = self.model
        model.backend.prepare(meta, kv_cache, model.dtype)
        hidden = model.embed_tokens(input_ids)  # [T, H]
        delta: Tensor | None = None  # what the last block adds to the stream
        for layer in model.layers:
            attention, mlp = layer.attention, layer.mlp
            normed = add_rms_norm(hidden, delta, layer.input_norm)
            qkv = attention.qkv_proj(normed)
            q = self._rotate_and_store(qkv, positions, kv_cache, layer.index, meta.slot_mapping)
            attended = model.backend.forward(q, kv_cache, layer.index, meta)
            delta = attention.o_proj(attended.flatten(1))
            normed = add_rms_norm(hidden, delta, layer.post_attention_norm)
            delta = mlp.down_proj(silu_times(mlp.gate_up_proj(normed)))
        return add_rms_norm(hidden, delta, model.norm)

    def _rotate_and_store(
        self, qkv: Tensor, positions: Tensor, kv_cache: KVCache, layer: int, slots: Tensor
    ) -> Tensor:
        config = self.model.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q = qkv.new_empty(len(qkv), heads, head_dim)
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        scales = kv_cache.scales(layer) if isinstance(kv_cache, Fp8KVCache) else (None, None)
        per_program = 8
        grid = (len(qkv), triton.cdiv(heads + 2 * kv_heads, per_program))
        _rotate_and_store[grid](
            qkv, positions, slots, self._cos, self._sin, q, keys, values, *scales,
            HQ=heads, HKV=kv_heads, D=head_dim, HEADS=per_program,
            BLOCK=triton.next_power_of_2(head_dim // 2), LIMIT=torch.finfo(keys.dtype).max,
        )  # fmt: skip
        return q


def add_rms_norm(hidden: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
    """``hidden += delta`` in place; returns ``norm(hidden)``."""
    tokens, size = hidden.shape
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(tokens,)](
        hidden, delta, norm.weight, normed, norm.eps, H=size, BLOCK=block, num_warps=8
    )
    return normed


def silu_times(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 I]``: ``[T, I]``."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    block = 1024
    _silu_times[(tokens, triton.cdiv(inner, block))](gate_up, out, I=inner, BLOCK=block)
    return out
