"""The compiled kernels where the model looks for its operations and its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minibatch.model.attention import AttentionBackend, AttentionMetadata
from minibatch.model.cpu.kernels import CpuKernels
from minibatch.model.flat_llama import AddNorm, LayerOps
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import RMSNorm


class CompiledOps(LayerOps):
    """A pass over the numbers each, instead of one for each of torch's operations."""

    def __init__(self, kernels: CpuKernels, num_heads: int) -> None:
        self.kernels = kernels
        self.num_heads = num_heads

    def add_norm(self, norm: RMSNorm) -> AddNorm:
        weight, eps, kernel = norm.weight.detach(), norm.eps, self.kernels.add_norm

        def add_norm(stream: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
            return stream, kernel(stream, added, weight, eps)

        return add_norm

    def turn_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_cache: KVCache, layer: int, slots: Tensor
    ) -> Tensor:
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        self.kernels.turn_and_store(qkv, cos, sin, keys, values, slots)
        return qkv[:, : self.num_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.kernels.silu_mul(gate_up)


@dataclass(frozen=True)
class Plan:
    tiles: Tensor | None  # int32 [N, 4], see CpuKernels.attend_chunks
    no_padding: bool  # every token of the step is somebody's


class CompiledAttention(AttentionBackend):
    """Decodes and chunks read keys and values where they lie, each with a kernel of its own."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        tiles, start, most = [], meta.num_decodes, self.kernels.tile_queries
        for sequence in range(meta.num_decodes, len(meta.query_lens)):
            length, queries = meta.seq_lens_host[sequence], meta.query_lens[sequence]
            for first in range(0, queries, most):
                position, count = length - queries + first, min(most, queries - first)
                tiles.append((sequence, start + first, position, count))
            start += queries
        meta.plan = Plan(
            torch.tensor(tiles, dtype=torch.int32) if tiles else None,
            no_padding=start == len(meta.slot_mapping),
        )

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        plan: Plan = meta.plan
        # Padding, which the kernels do not write, is 0.
        out = q.new_empty(q.shape) if plan.no_padding else q.new_zeros(q.shape)
        if meta.num_decodes:
            self.kernels.attend_decodes(
                out, q, keys, values, meta.block_tables, meta.seq_lens, meta.num_decodes
            )
        if plan.tiles is not None:
            self.kernels.attend_chunks(out, q, keys, values, meta.block_tables, plan.tiles)
        return out
