"""The attention backend of GPUs: deals a step's queries to tiles, ``triton_kernels`` does the rest.

Import it only where Triton is installed (on Linux it comes with torch's CUDA build).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import triton
from torch import Tensor

from minibatch.model.attention import AttentionBackend, AttentionMetadata
from minibatch.model.fp8_kv_cache import Fp8KVCache
from minibatch.model.kv_cache import KVCache
from minibatch.model.swap_stream import StreamedSwaps
from minibatch.model.triton_kernels import Tiles, Tiling, attend, store_kv


class TritonAttention(AttentionBackend):
    """Decodes in one launch, longer rows in a second one, of the same kernel.

    Args:
        group: query heads that share a KV head.
        decode: tiling of one-token rows; by default its ``splits`` follow the batch size.
        chunk: tiling of prompts and pieces of prompts.
        num_processors: streaming multiprocessors to keep busy.
    """

    def __init__(
        self,
        group: int,
        *,
        decode: Tiling | None = None,
        chunk: Tiling | None = None,
        num_processors: int = 132,
    ) -> None:
        self.group = group
        self.decode = decode
        self.chunk = self._wide_enough(chunk or Tiling(rows=64, warps=8))
        self.num_processors = num_processors

    @classmethod
    def for_device(cls, group: int, device: torch.device) -> TritonAttention:
        """Tilings that suit this GPU: Hopper's matrix unit takes 128 rows at a time, where an A100
        would run out of registers.
        """
        hopper = torch.cuda.get_device_capability(device) >= (9, 0)
        return cls(
            group,
            chunk=Tiling(rows=128 if hopper else 64, warps=8),
            num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
        )

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        """Deal queries to tiles. For decodes nothing comes from the host, so it can be captured."""
        device, batch = meta.seq_lens.device, meta.num_decodes
        parts = []
        if batch:
            sequences = torch.arange(batch, dtype=torch.int32, device=device)
            tiling = self.decode or self._decode_tiling(batch, kv_cache.keys[0].shape[2])
            firsts = torch.zeros_like(sequences)
            parts.append(Tiles(0, batch, sequences, firsts, self._wide_enough(tiling)))
        if len(meta.query_lens) > batch:
            parts.append(self._chunk_tiles(meta, device))
        meta.plan = parts

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        end = 0
        scales = kv_cache.scales(layer) if isinstance(kv_cache, Fp8KVCache) else None
        sequences = (meta.block_tables, meta.query_start, meta.seq_lens)
        for tiles in meta.plan:
            attend(q, out, kv_cache.keys[layer], kv_cache.values[layer], sequences, tiles, scales)
            end = tiles.end
        if end < len(q):
            out[end:] = 0  # static batching's padding
        return out

    def _wide_enough(self, tiling: Tiling) -> Tiling:
        return replace(tiling, rows=max(tiling.rows, triton.next_power_of_2(self.group)))

    def _decode_tiling(self, batch: int, num_kv_heads: int) -> Tiling:
        """About four programs a processor."""
        wanted = 4 * self.num_processors / (batch * num_kv_heads)
        return Tiling(rows=16, splits=2 ** max(0, min(5, round(math.log2(wanted)))))

    def _chunk_tiles(self, meta: AttentionMetadata, device: torch.device) -> Tiles:
        per_tile = self.chunk.rows // self.group
        tiles = [
            (sequence, first)
            for sequence in range(meta.num_decodes, len(meta.query_lens))
            for first in range(0, meta.query_lens[sequence], per_tile)
        ]
        # The second array begins at a multiple of 16 bytes too: see `step_inputs`.
        numbers = np.zeros((2, -(-len(tiles) // 4) * 4), dtype=np.int32)
        numbers[:, : len(tiles)] = np.array(tiles, dtype=np.int32).T
        host = torch.from_numpy(numbers)
        if device.type == "cuda":
            host = host.pin_memory()  # so that the copy need not be waited for
        tile_sequence, tile_first = host.to(device, non_blocking=True)[:, : len(tiles)]
        tokens = sum(meta.query_lens)
        return Tiles(meta.num_decodes, tokens, tile_sequence, tile_first, self.chunk)


class TritonKVCache(StreamedSwaps):
    """Stores keys and values in one launch, swaps on a stream of its own."""

    def store(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        store_kv(k, v, self.keys[layer], self.values[layer], slot_mapping)


class TritonFp8KVCache(StreamedSwaps, Fp8KVCache):
    """Scales, rounds and stores keys and values in one launch."""

    def store(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        keys, values = self.keys[layer], self.values[layer]
        store_kv(k, v, keys, values, slot_mapping, self.scales(layer))
