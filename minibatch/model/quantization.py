"""``quantization="int8"`` on a CPU without a C compiler: a quarter of float32's bytes to read.

A weight row w becomes whole numbers q in [-127, 127] and one scale s, w being about s * q. A
row of activations is treated the same way when it comes, so a dot product is one of whole numbers
(exact, in 32 bits) times the two scales:

    y[t, o] = (sum over i of a[t, i] * q[o, i]) * activation_scale[t] * weight_scale[o]

Every row has a scale of its own: no token's precision depends on which tokens are beside it.
Where there is a compiler, ``cpu/linear.py`` takes the same weights and leaves activations alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minibatch.model.linear import head_of
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.replace import replace_linears


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights, made from an ordinary one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        quantized, scale = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", quantized)  # int8 [out, in]
        self.register_buffer("scale", scale.flatten())  # float32 [out]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        quantized, scale = quantize_rows(x)
        y = torch._int_mm(quantized, self.weight.t()) * scale  # [T, out]
        y *= self.scale
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)


def quantize_int8(model: LlamaForCausalLM) -> None:
    """Replace the matrices of all layers and the output layer; the embedding stays as it is."""
    head = Int8Linear(head_of(model))
    replace_linears(model, Int8Linear)
    model.lm_head = head


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [N, K]`` to int8 ``[N, K]`` and float32 scales ``[N, 1]`` of about that product."""
    scale = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.clamp_(min=1e-30).div_(127)  # a row of zeros stays one
    return (x / scale).round_().to(torch.int8), scale
