"""Linear layers over ``matmul.c``: weights packed in the order in which it reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibatch.errors import ConfigError
from minibatch.model.cpu.compiler import COUNT, POINTER, declare, dtype_defines, library
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.quantization import quantize_rows

SIGNATURES = {"matmul": (POINTER,) * 4 + (COUNT,) * 3}


class CompiledLinear(nn.Module):
    """A linear layer for inference, made from an ordinary one, whose matrix it does not keep.

    Args:
        linear: on the CPU, float32 or bfloat16.
        int8: keep the weights in 8 bits, with a scale for each output. Activations and sums stay
            what they are.

    Raises:
        ConfigError: it cannot be compiled here, or not for this shape; it says why.
    """

    packed: Tensor
    scale: Tensor | None

    def __init__(self, linear: nn.Linear, int8: bool = False) -> None:
        super().__init__()
        weight, scale = linear.weight.detach(), None
        self.dtype, self.bias = weight.dtype, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        functions = library("matmul.c", *dtype_defines(weight.dtype), *(["INT8"] * int8))
        declare(functions, SIGNATURES)
        self._matmul, columns = functions.matmul, functions.columns()
        inputs = 4 if int8 else 2 if weight.dtype is torch.bfloat16 else 1  # in one go
        if int8:
            weight, scale = quantize_rows(weight)  # int8 [out, in], float32 [out, 1]
            scale = F.pad(scale.flatten(), (0, -self.out_features % columns))
        self.register_buffer("packed", pack(weight, columns, inputs), persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        assert x.dtype is self.dtype and x.shape[1] == self.in_features
        x = x.contiguous()
        y = x.new_empty(len(x), self.out_features)
        self._matmul(
            y.data_ptr(),
            x.data_ptr(),
            self.packed.data_ptr(),
            None if self.scale is None else self.scale.data_ptr(),
            len(x),
            self.in_features,
            self.out_features,
        )
        return y if self.bias is None else y.add_(self.bias)


def compiled_linear(model: LlamaForCausalLM, int8: bool) -> Callable[[nn.Linear], CompiledLinear]:
    """What makes compiled layers of the model's linear ones, once it is sure to work for all.

    Raises:
        ConfigError: it does not; it says why.
    """
    shape = model.config
    widths = (shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size)
    at_once = 4 if int8 else 2
    if any(width % at_once for width in widths):
        raise ConfigError(
            f"the CPU kernels take {at_once} inputs at once, and not all of {widths} are a "
            "multiple of that."
        )
    library("matmul.c", *dtype_defines(model.dtype), *(["INT8"] * int8))
    return partial(CompiledLinear, int8=int8)


def pack(weight: Tensor, columns: int, inputs: int) -> Tensor:
    """``weight [out, in]`` in panels: ``[panels, in / inputs, columns, inputs]``.

    Args:
        columns: outputs of a panel; behind the last output the last panel is 0.
        inputs: that are multiplied in one go.
    """
    out_features, in_features = weight.shape
    panels = -(-out_features // columns)
    if missing := panels * columns - out_features:
        weight = F.pad(weight, (0, 0, 0, missing))
    parts = weight.view(panels, columns, in_features // inputs, inputs)
    return parts.transpose(1, 2).contiguous()
