"""The sampler for rows whose tokens nobody waits for: it never asks the device a question.

``Sampler`` reads results back and decides by them what to do next. Here every decision is made
beforehand, from the parameters alone, so that a step can be launched to its end. The tokens are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minibatch.executor.step_inputs import NUM_KNOBS
from minibatch.sampler import SamplingRow, uniforms

INVALID = -1  # no token can be drawn: NaN or infinite logits


@dataclass(frozen=True)
class Needs:
    """Which parts of the work some row asks for."""

    random: bool
    min_p: bool
    largest_top_k: int  # 0: none
    nucleus_size: int  # the heaviest weights among which every top_p row finds its edge; 0: none


def write_knobs(rows: Sequence[SamplingRow], vocab_size: int, knobs: np.ndarray) -> Needs:
    """Write temperature, uniform number, min_p, top_k and top_p into ``knobs [R, 5]``.

    A greedy row has temperature 0, a knob that drops nothing stands at 0 (top_p at 1).
    """
    params = [row.params for row in rows]
    if all(p.greedy for p in params):
        return Needs(random=False, min_p=False, largest_top_k=0, nucleus_size=0)
    top_ks = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    columns = (
        [0.0 if p.greedy else p.temperature for p in params],
        uniforms(rows),
        [p.min_p for p in params],
        top_ks,
        [p.top_p for p in params],
    )
    assert len(columns) == NUM_KNOBS
    knobs[:] = np.array(columns, dtype=np.float32).T
    drawn = [(p, k) for p, k in zip(params, top_ks, strict=True) if not p.greedy]
    return Needs(
        random=True,
        min_p=any(p.min_p > 0 for p, _ in drawn),
        largest_top_k=max(k for _, k in drawn),
        # A row with top_k too keeps no more than that many (or more, but equally heavy ones).
        nucleus_size=max((k or vocab_size for p, k in drawn if p.top_p < 1), default=0),
    )


@torch.inference_mode()
def sample(logits: Tensor, knobs: Tensor, needs: Needs) -> Tensor:
    """One token a row, ``INVALID`` where there is none: int64 ``[R]``, on the device.

    Args:
        logits: float32 ``[R, V]``. knobs: float32 ``[R, 5]``.
    """
    best, token_ids = logits.max(dim=-1)  # [R], [R]
    if needs.random:
        drawn = _draw(logits, best, token_ids, knobs, needs)
        token_ids = torch.where(knobs[:, 0] > 0, drawn, token_ids)
    return token_ids.where(best.isfinite(), INVALID)


def _draw(logits: Tensor, best: Tensor, argmax: Tensor, knobs: Tensor, needs: Needs) -> Tensor:
    """As ``sampler.draw``, step by step; greedy rows get something too, which is thrown away."""
    temperature, uniform, min_p, top_k, top_p = knobs.T.unsqueeze(-1)  # [R, 1] each
    temperature = temperature.where(temperature > 0, 1.0)
    weights = (logits - best.unsqueeze(-1)).div_(temperature).exp_()  # [R, V]
    if needs.min_p:
        weights.masked_fill_(weights < min_p, 0)
    if needs.largest_top_k:
        heaviest = weights.topk(needs.largest_top_k, dim=-1).values  # [R, K], descending
        edge = heaviest.gather(-1, (top_k.long() - 1).clamp_(min=0))
        weights.masked_fill_((weights < edge) & (top_k > 0), 0)
    if needs.nucleus_size:
        ordered = _heaviest(weights, needs.nucleus_size)  # [R, N], descending
        held = ordered.cumsum(dim=-1)
        goal = top_p * weights.cumsum(dim=-1)[:, -1:]
        last = (held < goal).sum(dim=-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
        weights.masked_fill_((weights < ordered.gather(-1, last)) & (top_p < 1), 0)
    cumulative = weights.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    drawn.clamp_(max=logits.shape[-1] - 1)
    kept = torch.where(weights.gather(-1, drawn) > 0, drawn, argmax.unsqueeze(-1))
    return kept.squeeze(-1)


def _heaviest(weights: Tensor, count: int) -> Tensor:
    """The ``count`` largest of each row, descending.

    Without a top_k that is the whole vocabulary, sorted. ``sampler.nucleus_edge`` looks at 1024
    first and asks whether they suffice, which they nearly always do; but to ask is to wait for the
    device, and to search for the edge by halving takes thirty passes over the weights, which is no
    less work than to sort them.
    """
    if count < weights.shape[-1]:
        return weights.topk(count, dim=-1).values
    return weights.sort(dim=-1, descending=True).values
