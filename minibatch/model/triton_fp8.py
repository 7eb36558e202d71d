"""``quantize_rows`` of ``fp8`` in one kernel. Import it only where Triton is.

Written with torch it is six small kernels: to float32, magnitude, maximum, scale, divide, round.
A model of 32 layers quantises activations 128 times a step. On a batch of one each of those kernels
costs its launch, and together they would cost as much as reading all the weights.
"""

# ruff: noqa: ANN001, ANN202 - a kernel has no types: Triton compiles it for those it is given

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minibatch.model.fp8 import E4M3, E4M3_MAX, SMALLEST


@triton.jit
def _quantize_rows(
    x, rows, scale,  # [T, K], e4m3 [T, K], float32 [T]
    x_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        part = tl.load(x + row * x_stride + k + column, column < K - k, 0.0)
        largest = tl.maximum(largest, tl.abs(part.to(tl.float32)))
    s = tl.maximum(tl.max(largest, axis=0), SMALLEST) / LIMIT
    tl.store(scale + row, s)
    for k in range(0, K, BLOCK):  # the row comes from the cache this time
        part = tl.load(x + row * x_stride + k + column, column < K - k, 0.0).to(tl.float32)
        tl.store(rows + row * K + k + column, (part / s).to(rows.dtype.element_ty), column < K - k)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``fp8.quantize_rows``; columns must be contiguous."""
    tokens, inner = x.shape
    rows = torch.empty(tokens, inner, dtype=E4M3, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(inner))
    _quantize_rows[(tokens,)](
        x, rows, scale, x.stride(0),
        K=inner, BLOCK=block, LIMIT=E4M3_MAX, SMALLEST=SMALLEST, num_warps=8,
    )  # fmt: skip
    return rows, scale
