"""Compile the kernels for given GPUs without one; prints a JSON line a variant. Run as a script,
in a process without TRITON_INTERPRET: ``python compile_kernels.py 80 90``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minibatch.model import triton_fp8, triton_int8, triton_layers
from minibatch.model import triton_kernels as kernels


def shape(kv_heads: int, group: int, size: int = 128) -> dict[str, int]:
    """Constants of heads over blocks of 16 tokens."""
    strides = {"BLOCK_STRIDE": 16 * kv_heads * size, "TOKEN_STRIDE": kv_heads * size}
    sizes = {"BLOCK_SIZE": 16, "KV_HEADS": kv_heads, "G": group, "D": size, "BLOCK_D": size}
    return {**strides, "HEAD_STRIDE": size, **sizes}


LLAMA_2, LLAMA_3, SMOLLM2 = shape(32, 1), shape(8, 4), shape(3, 3, size=64)
FP8 = {80: "fp8e5", 90: "fp8e4nv"}


def attend(
    shape: dict[str, int], kv: str, rows: int, splits: int, warps: int, dtype: str = "bf16"
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    parts = "*fp32" if splits > 1 else "constexpr"
    scale = "*fp32" if kv.startswith("fp8") else "constexpr"
    types = {
        "q": f"*{dtype}", "out": f"*{dtype}", "part_a": parts, "part_m": parts, "part_d": parts,
        "keys": f"*{kv}", "values": f"*{kv}", "key_scale": scale, "value_scale": scale,
        "block_tables": "*i32", "query_start": "*i32", "seq_lens": "*i32",
        "tile_sequence": "*i32", "tile_first": "*i32", "q_stride": "i32", "table_stride": "i32",
        "score_scale": "fp32",
    }  # fmt: skip
    constants = {**shape, "M": rows, "N": 64, "SPLITS": splits}
    return kernels._attend, types, constants, warps


def variants(arch: int) -> Iterator[tuple[str, tuple[Any, dict[str, str], dict[str, Any], int]]]:
    fp8 = FP8[arch]
    wide = (128, 1, 8) if arch >= 90 else (64, 1, 8)  # what `for_device` chooses
    yield "decode", attend(LLAMA_2, "bf16", 16, 1, 4)
    yield "decode, split", attend(LLAMA_2, "bf16", 16, 16, 4)
    yield "decode, fp16", attend(LLAMA_2, "fp16", 16, 1, 4, dtype="fp16")
    yield "decode, 8-bit cache", attend(LLAMA_2, fp8, 16, 1, 4)
    yield "decode, 8-bit cache, split", attend(LLAMA_2, fp8, 16, 16, 4)
    yield "chunk", attend(LLAMA_2, "bf16", *wide)
    yield "chunk, G=4", attend(LLAMA_3, "bf16", *wide)
    yield "decode, G=3", attend(SMOLLM2, "bf16", 16, 4, 4)
    yield "chunk, G=3", attend(SMOLLM2, "bf16", *wide)
    yield "chunk, 8-bit cache", attend(LLAMA_2, fp8, *wide)
    merge = {"part_a": "*fp32", "part_m": "*fp32", "part_d": "*fp32", "out": "*bf16"}
    yield "merge", (kernels._merge, merge, {"D": 128, "BLOCK_D": 128, "SPLITS": 16}, 4)
    for name, kv, limit in (("store", "bf16", 0.0), ("store in 8 bits", fp8, 448.0)):
        scale = "*fp32" if kv != "bf16" else "constexpr"
        store = {
            "k": "*bf16", "v": "*bf16", "keys": f"*{kv}", "values": f"*{kv}", "slots": "*i32",
            "key_scale": scale, "value_scale": scale, "k_stride": "i32", "v_stride": "i32",
        }  # fmt: skip
        constants = {"WIDTH": 4096, "D": 128, "BLOCK": 4096, "LIMIT": limit}
        yield name, (kernels._store_kv, store, constants, 4)
    norm = {
        "hidden": "*bf16",
        "delta": "*bf16",
        "weight": "*bf16",
        "normed": "*bf16",
        "eps": "fp32",
    }
    yield "add, norm", (triton_layers._add_rms_norm, norm, {"H": 4096, "BLOCK": 4096}, 8)
    turn = {
        "qkv": "*bf16", "positions": "*i32", "slots": "*i64", "cos": "*fp32", "sin": "*fp32",
        "q": "*bf16", "keys": f"*{fp8}", "values": f"*{fp8}", "key_scale": "*fp32",
        "value_scale": "*fp32",
    }  # fmt: skip
    heads = {"HQ": 32, "HKV": 32, "D": 128, "HEADS": 8, "BLOCK": 64, "LIMIT": 448.0}
    yield "rotate, store in 8 bits", (triton_layers._rotate_and_store, turn, heads, 4)
    silu = {"gate_up": "*bf16", "out": "*bf16"}
    yield "silu, times", (triton_layers._silu_times, silu, {"I": 11008, "BLOCK": 1024}, 4)
    if arch >= 90:  # W8A8 is for chips with 8-bit matrix units
        rows = {"x": "*bf16", "rows": "*fp8e4nv", "scale": "*fp32", "x_stride": "i32"}
        sizes = {"K": 11008, "BLOCK": 4096, "LIMIT": 448.0, "SMALLEST": 1e-12}
        yield "quantize rows", (triton_fp8._quantize_rows, rows, sizes, 8)
    matrix = {
        "x": "*bf16", "weight": "*i8", "scale": "*fp32", "out": "*bf16", "M": "i32", "N": "i32",
        "K": "i32", "x_stride": "i32",
    }  # fmt: skip
    for name, sizes, warps in (
        ("int8 weights, few rows", (16, 32, 256), 4),
        ("int8 weights, many rows", (128, 128, 64), 8),
    ):
        blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), sizes, strict=True))
        yield name, (triton_int8._int8_linear, matrix, blocks, warps)


def compile_one(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, arch: int
) -> dict[str, Any]:
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    absent = {name: None for name, kind in types.items() if kind == "constexpr"}
    # What a launch finds out by itself: pointers and strides are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith("stride") or (kind == "i32" and name in "NK")
    }
    source = ASTSource(kernel, signature, {**constants, **absent}, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}
    )
    ptx = compiled.asm["ptx"]
    return {
        **resources(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "matrix_instruction": "wgmma" if "wgmma.mma" in ptx else "mma" if "mma.sync" in ptx else "",
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack: what did not fit into registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])}


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for name, variant in variants(arch):
            print(json.dumps({"arch": arch, "variant": name, **compile_one(*variant, arch)}))
