"""A KV cache of one byte a number: twice the tokens in the same memory, half the bytes to read.

An 8-bit float (e4m3: 4 bits of exponent, 3 of mantissa) has no range to waste, so every layer and
KV head has a scale of its own, for keys and for values: stored are ``x / scale``. The scales are
fixed once, before the first request, so that what a request says never depends on who came
before it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minibatch.model.attention import (
    AttentionBackend,
    AttentionMetadata,
    PagedReferenceAttention,
)
from minibatch.model.config import ModelConfig
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.one_prompt import one_prompt

# Real prompts may go beyond what calibration saw. A spare factor costs a float nothing: it only
# moves exponents, and the mantissa stays as it is.
HEADROOM = 2.0


class Fp8KVCache(KVCache):
    """Keys and values in an 8-bit float format, with a scale a layer and KV head.

    The pools are bytes, so that moving blocks is the parent's business; ``keys`` and ``values``
    show them as floats.

    Args:
        scales: float32 ``[layers, 2, Hkv]``, for keys and values; see ``calibrate``.
        number: the format. e4m3 needs compute capability 8.9; older chips read e5m2, which has
            one bit of mantissa less.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        scales: Tensor,
        number: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str = "cpu",
        num_cpu_blocks: int = 0,
    ) -> None:
        super().__init__(
            config,
            num_blocks,
            block_size,
            dtype=torch.uint8,
            device=device,
            num_cpu_blocks=num_cpu_blocks,
        )
        self.config = config
        self.number = number
        self.keys = [pool.view(number) for pool in self.keys]
        self.values = [pool.view(number) for pool in self.values]
        self._scales = scales.to(self.device, torch.float32)

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """Of the keys and of the values, ``[Hkv]`` each."""
        keys, values = self._scales[layer]
        return keys, values

    def store(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        key_scale, value_scale = self.scales(layer)
        super().store(
            layer,
            pack(k, key_scale, self.number).view(torch.uint8),
            pack(v, value_scale, self.number).view(torch.uint8),
            slot_mapping,
        )


def pack(x: Tensor, scale: Tensor, number: torch.dtype) -> Tensor:
    """``x [..., Hkv, D]`` divided by ``scale [Hkv]``, in an 8-bit format; too large is cut off."""
    limit = torch.finfo(number).max
    return (x.float() / scale[:, None]).clamp(-limit, limit).to(number)


def unpack(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack``, but for the rounding."""
    return (x.float() * scale[:, None]).to(dtype)


def fp8_format(device: torch.device) -> torch.dtype:
    """The best 8-bit float that kernels for ``device`` can read."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return torch.float8_e5m2
    return torch.float8_e4m3fn


class UnpackingAttention(AttentionBackend):
    """Attention over 8-bit blocks where no kernel reads them: unpack, then the plain backend.

    The reference for the kernels that do, and the CPU's way. One layer's worth of unpacked blocks
    is kept beside the cache, so on a CPU this saves memory only. Plain caches are left to the
    plain backend.
    """

    def __init__(self, inner: AttentionBackend | None = None) -> None:
        self.inner = inner or PagedReferenceAttention()
        self._unpacked: KVCache | None = None

    def prepare(self, meta: AttentionMetadata, kv_cache: KVCache, dtype: torch.dtype) -> None:
        if not isinstance(kv_cache, Fp8KVCache):
            self.inner.prepare(meta, kv_cache, dtype)
            return
        one = self._unpacked
        if one is None or (one.num_blocks, one.dtype) != (kv_cache.num_blocks, dtype):
            one_layer = replace(kv_cache.config, num_layers=1)
            one = self._unpacked = KVCache(
                one_layer,
                kv_cache.num_blocks,
                kv_cache.block_size,
                dtype=dtype,
                device=kv_cache.device,
            )
        self.inner.prepare(meta, one, dtype)

    def forward(self, q: Tensor, kv_cache: KVCache, layer: int, meta: AttentionMetadata) -> Tensor:
        if not isinstance(kv_cache, Fp8KVCache):
            return self.inner.forward(q, kv_cache, layer, meta)
        assert self._unpacked is not None
        one, (key_scale, value_scale) = self._unpacked, kv_cache.scales(layer)
        blocks = _blocks_in_use(meta, kv_cache.block_size)
        one.keys[0][blocks] = unpack(_take(kv_cache.keys[layer], blocks), key_scale, one.dtype)
        one.values[0][blocks] = unpack(
            _take(kv_cache.values[layer], blocks), value_scale, one.dtype
        )
        return self.inner.forward(q, one, 0, meta)


def _blocks_in_use(meta: AttentionMetadata, block_size: int) -> Tensor:
    """The blocks that this step's sequences read, each once."""
    entries = torch.arange(meta.block_tables.shape[1], device=meta.block_tables.device)
    used = entries * block_size < meta.seq_lens[:, None]  # [S, max_blocks]
    return meta.block_tables[used].long().unique()


def _take(pool: Tensor, blocks: Tensor) -> Tensor:
    return pool.view(torch.uint8)[blocks].view(pool.dtype)


# -- scales -------------------------------------------------------------------------------------


class _Watcher(KVCache):
    """Notes the largest key and value of each layer and head."""

    def __init__(self, model: LlamaForCausalLM, num_blocks: int, block_size: int) -> None:
        config = model.config
        super().__init__(config, num_blocks, block_size, dtype=model.dtype, device=model.device)
        sizes = (config.num_layers, 2, config.num_kv_heads)
        self.largest = torch.zeros(sizes, device=model.device)

    def store(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        seen = torch.stack([k.abs().amax(dim=(0, 2)), v.abs().amax(dim=(0, 2))])  # [2, Hkv]
        self.largest[layer] = torch.maximum(self.largest[layer], seen.float())
        super().store(layer, k, v, slot_mapping)


@torch.inference_mode()
def calibrate(
    model: LlamaForCausalLM,
    token_ids: Tensor | None = None,
    number: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """Scales for ``Fp8KVCache``: run a prompt, and let its largest numbers fit with HEADROOM.

    Args:
        token_ids: the prompt, ``[T]``; by default up to 512 random ids, the same ones each time.
    """
    if token_ids is None:
        count = min(512, model.max_model_len)
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(model.config.vocab_size, (count,), generator=generator)
    block_size = 16
    count = len(token_ids)
    watcher = _Watcher(model, -(-count // block_size), block_size)
    positions = torch.arange(count, device=model.device)
    meta = one_prompt(count, block_size, model.device)
    model(token_ids.to(model.device), positions, watcher, meta)
    largest = watcher.largest.clamp(min=1e-6)
    return HEADROOM * largest / torch.finfo(number).max
