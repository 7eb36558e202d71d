"""The functions of ``layer.c`` and ``attention.c``, over tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from minibatch.errors import ConfigError
from minibatch.model.cpu.compiler import COUNT, POINTER, REAL, declare, dtype_defines, library
from minibatch.model.llama import LlamaForCausalLM

LAYER = {
    "add_norm": (POINTER,) * 4 + (COUNT,) * 2 + (REAL,),
    "turn_and_store": (POINTER,) * 6 + (COUNT,) * 3,
    "silu_mul": (POINTER,) * 2 + (COUNT,) * 2,
}
ATTENTION = {
    "attend_decodes": (
        *(POINTER, POINTER, COUNT, POINTER, POINTER, POINTER, COUNT, POINTER),
        *(COUNT,) * 4,
    ),
    "attend_chunks": (
        *(POINTER, POINTER, COUNT, POINTER, POINTER, POINTER, COUNT, POINTER),
        *(COUNT,) * 3,
    ),
}


class CpuKernels:
    """What a layer does between its matrices, in five functions.

    Tensors are of one dtype and contiguous, unless said otherwise. Shapes: T tokens, H hidden,
    Hq query heads, Hkv KV heads, D head size.

    Args:
        dtype: float32 or bfloat16.
        head_dim: D, a multiple of 8.
        group: Hq / Hkv.

    Raises:
        ConfigError: the kernels cannot be had here; it says why.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        if head_dim % 8:
            raise ConfigError(f"the CPU kernels need heads of a multiple of 8, not {head_dim}.")
        defines = (f"HEAD_DIM={head_dim}", *dtype_defines(dtype))
        self._layer = library("layer.c", *defines)
        self._attention = library("attention.c", f"GROUP={group}", *defines)
        declare(self._layer, LAYER)
        declare(self._attention, ATTENTION)
        self.tile_queries: int = self._attention.queries()  # of a tile of ``attend_chunks``

    def add_norm(self, stream: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``added [T, H]`` to ``stream [T, H]`` in place; returns its RMS norm, ``[T, H]``."""
        normed = torch.empty_like(stream)
        rows, size = stream.shape
        self._layer.add_norm(
            normed.data_ptr(),
            stream.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            rows,
            size,
            eps,
        )
        return normed

    def turn_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Turn the queries and keys of ``qkv [T, Hq + 2 Hkv, D]`` in place; store K and V.

        Args:
            cos, sin: ``[T, 1, D]``, see ``rotary.RotaryEmbedding``.
            keys, values: one layer's pools, ``[blocks, block_size, Hkv, D]``.
            slots: int64 ``[T]``; -1: nowhere.
        """
        tokens, all_heads, _ = qkv.shape
        kv_heads = keys.shape[2]
        self._layer.turn_and_store(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            slots.data_ptr(),
            tokens,
            all_heads - 2 * kv_heads,
            kv_heads,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``gate_up [T, 2 inner]``: ``[T, inner]``."""
        rows, both = gate_up.shape
        out = gate_up.new_empty(rows, both // 2)
        self._layer.silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, both // 2)
        return out

    def attend_decodes(
        self,
        out: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        sequences: int,
    ) -> None:
        """Attention of the first ``sequences`` tokens, each the last one of its sequence.

        Args:
            out: ``[T, Hq, D]``, of which ``[:sequences]`` is written.
            q: ``[T, Hq, D]``; tokens may lie apart, a token's heads not.
            keys, values: one layer's pools, ``[blocks, block_size, Hkv, D]``.
            block_tables: int32 ``[S, max_blocks]``.
            seq_lens: int32 ``[S]``.
        """
        _, block_size, kv_heads, _ = keys.shape
        parts = min(kv_heads, -(-torch.get_num_threads() // sequences))
        self._attention.attend_decodes(
            out.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0),
            seq_lens.data_ptr(),
            sequences,
            kv_heads,
            block_size,
            parts,
        )

    def attend_chunks(
        self,
        out: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        tiles: Tensor,
    ) -> None:
        """Attention of the tokens in ``tiles``, each seeing its sequence up to itself.

        Args:
            tiles: int32 ``[N, 4]``: a sequence, a token in ``q``, that token's position in the
                sequence, and how many tokens follow each other from there on, at most
                ``tile_queries``. Only these tokens of ``out`` are written.
            out, q, keys, values, block_tables: as for ``attend_decodes``.
        """
        _, block_size, kv_heads, _ = keys.shape
        self._attention.attend_chunks(
            out.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0),
            tiles.data_ptr(),
            len(tiles),
            kv_heads,
            block_size,
        )


def layer_kernels(model: LlamaForCausalLM, kv_cache_dtype: str = "auto") -> CpuKernels:
    """The kernels for one model.

    Raises:
        ConfigError: they cannot be had here, or not for this model; it says why.
    """
    if kv_cache_dtype == "fp8":
        raise ConfigError("the CPU kernels cannot read a KV cache of 8 bits.")
    shape = model.config
    return CpuKernels(model.dtype, shape.head_dim, shape.num_heads // shape.num_kv_heads)
