"""Linear layers whose weights lie in memory the way the processor's matrix kernels read them.

``nn.Linear`` keeps a matrix row by row. The kernels of oneDNN (Intel's library inside torch, and
the fastest one on AMD too) walk over tiles of some rows by 64 columns. They rearrange a plain
matrix in every call, or read it against the grain. Here it is rearranged once, after loading: the
same numbers and the same sums, at 1.1 to 2.5 times the speed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.replace import replace_linears


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Does torch have packed kernels here, and the processor the instructions for this dtype?"""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float32


class PackedLinear(nn.Module):
    """A linear layer for inference, made from an ordinary one, whose matrix it does not keep.

    Args:
        linear: on the CPU, of a dtype that ``can_pack`` approves of.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # None: the number of rows is not known beforehand, it changes from step to step.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(
    model: LlamaForCausalLM, make: Callable[[nn.Linear], nn.Module] = PackedLinear
) -> None:
    """Replace every matrix of ``model`` by what ``make`` makes of it: it can then only be run.

    One by one, so that no second copy of the model exists at any time. Only a tied head is one:
    looking tokens up needs the plain embedding, multiplying by it the packed one.
    """
    replace_linears(model, make)
    model.lm_head = make(head_of(model))


def head_of(model: LlamaForCausalLM) -> nn.Linear:
    """The output layer; if it is tied, a linear layer over the embedding's own memory."""
    if model.lm_head is not None:
        return model.lm_head
    with torch.device("meta"):
        head = nn.Linear(
            model.config.hidden_size, model.config.vocab_size, bias=False, dtype=model.dtype
        )
    head.weight = model.embed_tokens.weight
    return head
