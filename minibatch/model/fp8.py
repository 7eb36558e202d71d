"""``quantization="fp8"``: weights and activations in 8-bit floats (W8A8), for Hopper and Ada.

Half the bytes to read, which speeds up decodes, and twice the arithmetic, which speeds up
prompts: the matrix units multiply e4m3 numbers twice as fast as 16-bit ones. Each row of the
weights (an output channel) has a scale, fixed when the model is loaded; each row of the
activations (a token) gets one on the fly, so a token never depends on its neighbours.
``torch._scaled_mm`` multiplies and puts both scales back. It runs on a CPU too, slowly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minibatch.errors import ConfigError
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.replace import replace_linears

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
SMALLEST = 1e-12  # largest number of a row at least: one of zeros has a scale too

# ``x [rows, columns]`` to e4m3 and float32 scales ``[rows, 1]``
QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [rows, columns]`` as e4m3 and float32 scales ``[rows, 1]``; the largest of a row fits."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST) / E4M3_MAX
    return (x / scale).to(E4M3), scale


class Fp8Linear(nn.Module):
    """A linear layer in e4m3, made from an ordinary one.

    Args:
        quantize: what makes 8-bit rows of the activations.

    Raises:
        ConfigError: ``torch._scaled_mm`` multiplies multiples of 16 only.
    """

    def __init__(self, linear: nn.Linear, quantize: QuantizeRows = quantize_rows) -> None:
        super().__init__()
        self.quantize = quantize
        outputs, inputs = linear.weight.shape
        if outputs % 16 or inputs % 16:
            raise ConfigError(
                f"quantization='fp8' cannot split a matrix of {outputs} x {inputs}: both must be "
                "multiples of 16; use quantization='int8'."
            )
        weight, scale = quantize_rows(linear.weight)
        self.register_buffer("weight", weight)  # [N, K]
        self.register_buffer("scale", scale.T.contiguous())  # [1, N]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``[T, K]`` to ``[T, N]``."""
        rows, row_scale = self.quantize(x)
        # With scales by row a GPU writes bfloat16 only.
        dtype = torch.bfloat16 if x.is_cuda else x.dtype
        out = torch._scaled_mm(
            rows, self.weight.T, scale_a=row_scale, scale_b=self.scale, out_dtype=dtype
        ).to(x.dtype)
        return out if self.bias is None else out + self.bias


def quantize_fp8(model: LlamaForCausalLM, quantize: QuantizeRows = quantize_rows) -> None:
    """Replace the matrices of all layers; embedding and output layer stay (see ``replace``).

    Args:
        quantize: as for ``Fp8Linear``.

    Raises:
        ConfigError: the GPU has no 8-bit floats, or the model's sizes do not suit.
    """
    device = model.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"quantization='fp8' needs a GPU of compute capability 8.9 (Ada, Hopper); "
            f"{torch.cuda.get_device_name(device)} is older. Use quantization='int8'."
        )
    replace_linears(model, lambda linear: Fp8Linear(linear, quantize))
