"""The attention stages of ``gpu.py``: decodes over tilings and layouts, prompts beside torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import Bench, Row, print_table
from torch import Tensor

from minibatch.model.attention import AttentionMetadata, PagedReferenceAttention
from minibatch.model.config import ModelConfig
from minibatch.model.fp8_kv_cache import Fp8KVCache, UnpackingAttention, fp8_format
from minibatch.model.kv_cache import KVCache

BLOCK_SIZE = 16
CACHE_BYTES = 2**28  # several times what a chip's cache holds

# -- decodes ------------------------------------------------------------------------------------


def kernels(bench: Bench) -> None:
    """Errors of decodes against float32, and GB/s, over tilings and two layouts of the cache."""
    rows: list[Row] = []
    for batch in (1, 2) if bench.quick else (1, 8, 32, 128, 256):
        for kind in ("plain", "plain, by head", "fp8"):
            with bench.attempt("kernels", rows, cache=kind, batch=batch):
                decode_rows(bench, kind, batch, rows)
    header = ("cache", "batch", "keys", "splits", "warps", "largest error", "us", "GB/s",
              "share of copy")  # fmt: skip
    print_table(header, best_first(rows))


def decode_rows(bench: Bench, kind: str, batch: int, rows: list[Row]) -> None:
    """Add a row for each tiling."""
    from minibatch.model.triton_attention import TritonAttention
    from minibatch.model.triton_kernels import Tiling

    shape, device, dtype = bench.shape, bench.device, bench.torch_dtype
    context = 48 if bench.quick else 576
    width = -(-context // BLOCK_SIZE)
    number = fp8_format(device) if kind == "fp8" else dtype
    moved = 2 * batch * context * shape.num_kv_heads * shape.head_dim * number.itemsize
    layers = 1 if bench.quick else max(1, min(16, CACHE_BYTES // moved))
    cache = noisy_cache(replace(shape, num_layers=layers), batch * width, dtype, device, kind)
    q = torch.randn(batch, shape.num_heads, shape.head_dim, device=device).to(dtype)
    meta = decode_step(batch, context, width, device)
    expected = in_float32(q, cache, meta)
    if kind == "plain, by head":
        cache = by_head(cache)
    few = kind == "plain, by head"
    choices = [Tiling(16)] if bench.quick else tilings(batch, shape.num_kv_heads, few)
    for tiling in choices:
        backend = TritonAttention(shape.num_heads // shape.num_kv_heads, decode=tiling)
        backend.prepare(meta, cache, dtype)
        found = backend.forward(q, cache, 0, meta).float()
        runs = [
            lambda backend=backend, layer=layer: backend.forward(q, cache, layer, meta)
            for layer in range(layers)
        ]
        seconds = bench.device_seconds(runs)
        rows.append(
            {
                "cache": kind,
                "batch": batch,
                "keys": tiling.keys,
                "splits": tiling.splits,
                "warps": tiling.warps,
                "largest error": float((found - expected).abs().max()),
                "us": 1e6 * seconds,
                "GB/s": moved / seconds / 1e9,
                "share of copy": moved / seconds / bench.chip().memory_bandwidth,
            }
        )


def tilings(batch: int, kv_heads: int, few: bool) -> list[Any]:
    """What is worth a try: enough programs for the chip, tiles of 32 to 128 keys."""
    from minibatch.model.triton_kernels import Tiling

    splits = [n for n in (1, 2, 4, 8, 16, 32) if 128 <= n * batch * kv_heads <= 4096] or [1]
    if few:
        splits = splits[len(splits) // 2 :][:1]
    warps = (4,) if few else (2, 4, 8)
    return [
        Tiling(16, keys, count, num_warps)
        for keys in (32, 64, 128)
        for count in splits
        for num_warps in warps
    ]


def noisy_cache(
    shape: ModelConfig, blocks: int, dtype: torch.dtype, device: torch.device, kind: str
) -> KVCache:
    """The same normal noise in every layer, in 16 or in 8 bits."""
    size = (2, blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    noise = torch.randn(size, device=device)
    cache: KVCache
    if kind == "fp8":
        scales = torch.full((shape.num_layers, 2, shape.num_kv_heads), 0.02)
        cache = Fp8KVCache(
            shape, blocks, BLOCK_SIZE, scales=scales, number=fp8_format(device), device=device
        )
    else:
        cache = KVCache(shape, blocks, BLOCK_SIZE, dtype=dtype, device=device)
    slots = torch.arange(blocks * BLOCK_SIZE, device=device)
    k, v = noise.to(dtype).flatten(1, 2)
    for layer in range(shape.num_layers):
        cache.store(layer, k, v, slots)
    return cache


def by_head(cache: KVCache) -> KVCache:
    """The same numbers as [blocks, Hkv, block_size, D]: 4 KiB in one piece for each head, instead
    of 256 B apiece. Our cache could be laid out so if it paid: the kernel reads by strides.
    """
    other = copy.copy(cache)
    other.keys, other.values = (
        [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in pools]
        for pools in (cache.keys, cache.values)
    )
    return other


def decode_step(batch: int, context: int, width: int, device: torch.device) -> AttentionMetadata:
    """Metadata of ``batch`` rows, their ``width`` blocks each dealt at random."""
    tables = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((batch,), context, dtype=torch.int32)
    return AttentionMetadata(
        slot_mapping=torch.full((batch,), -1, device=device),
        block_tables=tables.view(batch, width).int().to(device),
        query_start=torch.arange(batch + 1, dtype=torch.int32, device=device),
        seq_lens=lengths.to(device),
        query_lens=[1] * batch,
        seq_lens_host=lengths.tolist(),
        num_decodes=batch,
    )


def in_float32(q: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
    """The plain backend on the numbers that the cache's first layer holds."""
    meta = replace(meta)  # of its own: the backend leaves a plan there
    if isinstance(cache, Fp8KVCache):
        backend = UnpackingAttention(PagedReferenceAttention())
        backend.prepare(meta, cache, torch.float32)
        return backend.forward(q.float(), cache, 0, meta)
    exact = copy.copy(cache)
    exact.keys, exact.values = [cache.keys[0].float()], [cache.values[0].float()]
    exact._key_slots, exact._value_slots = (
        [pool.flatten(0, 1) for pool in pools] for pools in (exact.keys, exact.values)
    )
    plain = PagedReferenceAttention()
    plain.prepare(meta, exact, torch.float32)
    return plain.forward(q.float(), exact, 0, meta)


def best_first(rows: Sequence[Row], most: int = 3) -> list[Row]:
    """The fastest few of each cache and batch, and all errors; the file has the rest."""
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["batch"], row["cache"]), []).append(row)
    return [
        row
        for group in groups.values()
        for row in sorted(group, key=lambda row: row.get("us", 0.0))[:most]
    ]


# -- prompts ------------------------------------------------------------------------------------


def prompts(bench: Bench) -> None:
    """Prompts, and a chunk behind earlier context: our paged kernel beside torch's, which need
    packed keys (the copying from pages is not in their time).
    """
    rows: list[Row] = []
    cases = [(1, 24, 24), (1, 8, 24)] if bench.quick else [(16, 512, 512), (4, 2048, 2048),
             (16, 512, 2048)]  # fmt: skip
    for batch, queries, context in cases:
        name = f"{batch} x {queries} of {context}"
        case: PromptCase | None = None
        with bench.attempt("prompts", rows, tokens=name):
            case = PromptCase(bench, batch, queries, context)
        for kernel, make in case.kernels().items() if case is not None else ():
            with bench.attempt("prompts", rows, tokens=name, kernel=kernel):
                run = make()
                found = run().float().reshape(batch, queries, *case.q.shape[1:])[0]
                seconds = bench.device_seconds([run], repeats=10)
                peak = bench.chip().peak_flops(bench.dtype)
                rows.append(
                    {
                        "tokens": name,
                        "kernel": kernel,
                        "largest error": float((found - case.expected).abs().max()),
                        "ms": 1e3 * seconds,
                        "TFLOP/s": case.flops / seconds / 1e12,
                        "share of peak": case.flops / seconds / peak,
                    }
                )
    header = ("tokens", "kernel", "largest error", "ms", "TFLOP/s", "share of peak")
    print_table(header, rows)


class PromptCase:
    """``batch`` sequences of ``context`` tokens, the last ``queries`` of which attend."""

    def __init__(self, bench: Bench, batch: int, queries: int, context: int) -> None:
        self.bench, self.batch, self.queries, self.context = bench, batch, queries, context
        shape, device, dtype = bench.shape, bench.device, bench.torch_dtype
        width = -(-context // BLOCK_SIZE)
        one_layer = replace(shape, num_layers=1)
        self.cache = noisy_cache(one_layer, batch * width, dtype, device, "plain")
        self.meta = decode_step(batch, context, width, device)
        self.meta.query_lens, self.meta.num_decodes = [queries] * batch, 0
        self.meta.query_start = queries * self.meta.query_start
        total = batch * queries
        self.q = torch.randn(total, shape.num_heads, shape.head_dim, device=device).to(dtype)
        self.group = shape.num_heads // shape.num_kv_heads
        seen = queries * (context - queries) + queries * (queries + 1) // 2
        self.flops = 4 * shape.head_dim * shape.num_heads * batch * seen
        tables = self.meta.block_tables.long()
        # [batch, context, Hq, D], as if every query head had keys of its own
        self.k, self.v = (
            pool[0][tables].flatten(1, 2)[:, :context].repeat_interleave(self.group, dim=2)
            for pool in (self.cache.keys, self.cache.values)
        )
        exact = self._sdpa(self.q[:queries].float(), self.k[:1].float(), self.v[:1].float())
        self.expected = exact().reshape(queries, *self.q.shape[1:])

    def kernels(self) -> dict[str, Callable[[], Callable[[], Tensor]]]:
        """Each makes a call of one kernel."""
        made: dict[str, Callable[[], Callable[[], Tensor]]] = {
            "SDPA": lambda: self._sdpa(self.q, self.k, self.v),
            "ours": lambda: self._ours(None),
        }
        if self.bench.device.type == "cuda":
            made["varlen_attn"] = self._varlen
            for rows, keys, warps in ((64, 64, 4), (64, 128, 8), (128, 32, 8), (128, 128, 8)):
                name = f"ours, {rows} x {keys}, {warps} warps"
                made[name] = lambda chosen=(rows, keys, 1, warps): self._ours(chosen)
        return made

    def _ours(self, chosen: tuple[int, int, int, int] | None) -> Callable[[], Tensor]:
        from minibatch.model.triton_attention import TritonAttention
        from minibatch.model.triton_kernels import Tiling

        if chosen is not None:
            backend = TritonAttention(self.group, chunk=Tiling(*chosen))
        elif self.bench.device.type == "cuda":
            backend = TritonAttention.for_device(self.group, self.bench.device)
        else:
            backend = TritonAttention(self.group, chunk=Tiling(32))
        meta = replace(self.meta)
        backend.prepare(meta, self.cache, self.q.dtype)
        return lambda: backend.forward(self.q, self.cache, 0, meta)

    @staticmethod
    def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Causal from the bottom right: the last query sees all keys."""
        from torch.nn.attention.bias import causal_lower_right

        batch, context = k.shape[:2]
        q = q.view(batch, -1, *q.shape[1:])
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [batch, Hq, tokens, D]
        mask = causal_lower_right(q.shape[2], context)
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def _varlen(self) -> Callable[[], Tensor]:
        """torch's kernel for packed prompts; ``test_oracles`` checks which way it is aligned."""
        from torch.nn.attention.varlen import varlen_attn

        starts = self.context * torch.arange(
            self.batch + 1, dtype=torch.int32, device=self.q.device
        )
        k, v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        return lambda: varlen_attn(
            self.q, k, v, self.meta.query_start, starts, self.queries, self.context,
            window_size=(-1, 0),
        )  # fmt: skip
