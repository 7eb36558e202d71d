"""Rotary position embedding (RoPE): a token's position turns its queries and keys.

The head is read as ``head_dim / 2`` pairs (i, i + head_dim / 2); at position p pair i turns by
``p * frequency[i]``. A dot product of two turned vectors then depends on their distance only.
Su et al., "RoFormer" (2021). The pairing is Hugging Face's, not the paper's (2i, 2i + 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minibatch.model.config import ModelConfig, RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians that each pair turns per position: float32 ``[head_dim / 2]``, on the CPU.

    For ``dynamic`` these are the frequencies up to the original length.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents  # [D / 2]
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "divisors":
        return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow pairs are divided by ``factor``, fast ones kept, and between them a linear ramp.

    Fast and slow are told by how many turns a pair makes over the original length: more than
    ``high_freq_factor``, or fewer than ``low_freq_factor``.
    """
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # [D / 2]
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)  # 1: kept as it is; 0: divided by the factor
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


class RotaryEmbedding(nn.Module):
    """Cosines and sines by position, gathered once a step and used by every layer.

    **Dynamic NTK.** Past the original length, theta depends on a length n:
    ``theta * (factor * n / original - (factor - 1)) ** (D / (D - 2))``. Which n? transformers takes
    the longest sequence of the forward pass: the prompt length L for the whole prompt, then the
    current length p + 1 for each generated token (keys in the cache keep the turn they got). In
    a shared batch that rule would let a neighbour's length change a request's tokens, and with
    chunked prefill the chunk size would. So each token's n here is its own request's:
    ``max(L, p + 1)``. That is transformers' answer for the request run alone, and it does not
    change with neighbours, chunks, or a recompute after preemption. It needs L of every sequence
    (``AttentionMetadata.prompt_lens``), and two prompts of different length beyond the original
    one must not share cached blocks (``RopeConfig.depends_on_prompt_length``).
    """

    def __init__(
        self, config: ModelConfig, max_model_len: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.rope = config.rope
        self.head_dim = config.head_dim
        if self.rope.kind == "dynamic":  # no table: the angle is not the position's alone
            return
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = positions[:, None] * rope_frequencies(self.rope, self.head_dim)
        table = torch.stack(_cos_sin(angles)).to(device)  # [2, max_model_len, D]
        self.register_buffer("table", table, persistent=False)

    def forward(
        self, positions: Tensor, prompt_lens: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of each token, ``[T, 1, D]`` in ``dtype``, for ``rotate``.

        Args:
            positions: ``[T]``, each below ``max_model_len``.
            prompt_lens: ``[T]``, the prompt length of each token's request; read by ``dynamic``.

        Raises:
            ValueError: if rope is ``dynamic`` and ``prompt_lens`` is missing.
        """
        if self.rope.kind == "dynamic":
            if prompt_lens is None:
                raise ValueError("dynamic rope needs AttentionMetadata.prompt_lens")
            cos, sin = self._dynamic_cos_sin(positions, prompt_lens)
        else:
            cos, sin = self.table.index_select(1, positions)
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)

    def _dynamic_cos_sin(self, positions: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor]:
        original, factor = self.rope.original_max_position, self.rope.factor
        lengths = torch.maximum(prompt_lens, positions + 1).clamp(min=original).float()  # [T]
        stretch = factor * lengths / original - (factor - 1)  # 1 up to the original length
        theta = self.rope.theta * stretch ** (self.head_dim / (self.head_dim - 2))  # [T]
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = theta[:, None] ** (-pairs / self.head_dim)  # [T, D / 2]
        return _cos_sin(positions[:, None] * frequencies)


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, D / 2]`` angles to ``[N, D]`` cosines and sines, the sines' first half negated.

    The sign belongs to ``rotate``, where it saves one pass over queries and keys a layer.
    """
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x [T, heads, D]`` by its tokens' angles: (a, b) to (a cos - b sin, b cos + a sin).

    ``sin`` carries the minus sign in its first half, so swapping the halves of ``x`` is enough.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (a, b) -> (b, a)
    return torch.addcmul(x * cos, swapped, sin)
