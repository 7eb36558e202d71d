"""The compiled kernels where the model looks for its operations and its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minibatch.model.attention import AttentionMetadata
from minibatch.model.cpu.kernels import CpuKernels
from minibatch.model.flat_llama import AddNorm, LayerOps
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import RMSNorm
from minibatch.model.paged_cpu_attention import Chunk, PagedCPUAttention, plan_chunks


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
    chunks: list[Chunk]
    all_decodes: bool  # every token of the step is one


class CompiledAttention(PagedCPUAttention):
    """Decodes read keys and values where they lie; chunks as ``PagedCPUAttention`` does them.

    Prompts are bound by arithmetic, and torch's matrix products are good at that.
    """

    def __init__(self, kernels: CpuKernels, num_heads: int) -> None:
        super().__init__(num_heads)
        self.kernels = kernels

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        self._future = self._future.to(dtype)
        chunks = plan_chunks(meta, kv_cache.keys[0])
        meta.plan = Plan(chunks, all_decodes=meta.num_decodes == len(meta.slot_mapping))

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        keys, values = kv_cache.keys[layer], kv_cache.values[layer]
        plan: Plan = meta.plan
        shape = q.shape
        # Padding, which nobody writes, stays 0.
        out = q.new_empty(shape) if plan.all_decodes else q.new_zeros(shape)
        if meta.num_decodes:
            self.kernels.attend_decodes(
                out, q, keys, values, meta.block_tables, meta.seq_lens, meta.num_decodes
            )
        for chunk in plan.chunks:
            self._attend_chunk(q, keys.flatten(0, 2), values.flatten(0, 2), chunk, out)
        return out
