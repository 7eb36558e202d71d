"""``quantization="int8"`` on a GPU: 8-bit weights, 16-bit arithmetic.

Each row of the weights (an output channel) is stored as int8 with one scale. They are read as
bytes, which is what a decode step spends its time on, and become 16-bit numbers in registers on
their way into the matrix unit. Works on any GPU that Triton knows. Import it only where Triton is.
"""

# ruff: noqa: ANN001, ANN202 - a kernel has no types: Triton compiles it for those it is given

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.replace import replace_linears
from minibatch.model.triton_kernels import INTERPRET


@triton.jit(do_not_specialize=["M"])  # it changes from step to step
def _int8_linear(
    x, weight, scale, out,  # [M, K], int8 [N, K], float32 [N], [M, N]
    M, N, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    weight_at = weight + channel.to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = column[None, :] < K - k
        x_tile = tl.load(x_at + k, (row[:, None] < M) & inside, 0.0)
        if INTERPRET:
            x_tile = x_tile.to(tl.float32)
        w_tile = tl.load(weight_at + k, (channel[:, None] < N) & inside, 0).to(x_tile.dtype)
        total += tl.dot(x_tile, tl.trans(w_tile), input_precision="ieee")
    # The scale of a channel is the same in all its terms: it can wait until they are added up.
    total *= tl.load(scale + channel, channel < N, 0.0)[None, :]
    to = out + row.to(tl.int64)[:, None] * N + channel[None, :]
    tl.store(to, total.to(out.dtype.element_ty), (row[:, None] < M) & (channel[None, :] < N))


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """``x [M, K]`` times ``weight [N, K]`` transposed, times ``scale [N]``: ``[M, N]``."""
    (rows, inner), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    # Few rows: narrow strips of channels, so that all processors have some to read. Many: square
    # tiles, which use each number that they read most often.
    small = rows <= 32
    block_m = min(32, max(16, triton.next_power_of_2(rows))) if small else 128
    block_n, block_k = (32, 256) if small else (128, 64)
    grid = (triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))
    _int8_linear[grid](
        x, weight, scale, out, rows, outputs, inner, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4 if small else 8,
    )  # fmt: skip
    return out


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [N, K]`` as int8 and float32 scales ``[N]``; the largest of a row becomes 127."""
    scale = weight.float().abs().amax(dim=-1).clamp(min=1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


class TritonInt8Linear(nn.Module):
    """A linear layer with 8-bit weights, made from an ordinary one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize_channels(linear.weight)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``[T, K]`` to ``[T, N]``."""
        out = int8_linear(x, self.weight, self.scale)
        return out if self.bias is None else out + self.bias


def quantize_int8(model: LlamaForCausalLM) -> None:
    """Replace the matrices of all layers; embedding and output layer stay (see ``replace``)."""
    replace_linears(model, TritonInt8Linear)
