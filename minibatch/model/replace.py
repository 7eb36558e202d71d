"""Swap the matrices of a loaded model for others: packed ones, 8-bit ones.

Which matrices, and which stay as they are:

* the two of attention and the two of the MLP, in every layer: all but a few per cent of the bytes
  that a decode step reads;
* never the embedding: a step looks up a few rows of it, which costs nothing;
* the output layer only where the caller says so. It is one matrix of many: 2 % of Llama-2-7B's
  bytes, and 4 % once the others have 8 bits. Halving it would gain a decode step 2 % at batch 1,
  less the larger the batch, while its rounding goes straight into the logits, where no later
  layer averages it out. So on a GPU it keeps 16 bits. In a small model on a CPU it is another
  matter: it is a fifth of SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minibatch.model.llama import LlamaForCausalLM


def replace_linears(model: LlamaForCausalLM, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put ``make(linear)`` in the place of every linear layer of the transformer's layers.

    One by one, so that no second copy of the model exists at any time.
    """
    with torch.no_grad():
        for layer in model.layers:
            for owner in (layer.attention, layer.mlp):
                linears = {
                    name: child
                    for name, child in owner.named_children()
                    if isinstance(child, nn.Linear)
                }
                assert len(linears) == 2, "these layers are not plain any more"
                for name, linear in linears.items():
                    setattr(owner, name, make(linear))
