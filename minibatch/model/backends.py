"""Which attention a model uses, unless it is told."""

from __future__ import annotations

import torch

from minibatch.model.attention import AttentionBackend, PagedReferenceAttention
from minibatch.model.config import ModelConfig
from minibatch.model.paged_cpu_attention import PagedCPUAttention


def default_backend(config: ModelConfig, device: torch.device | str) -> AttentionBackend:
    """The fastest one that runs on ``device`` without anything installed beside torch."""
    if torch.device(device).type == "cpu":
        return PagedCPUAttention(config.num_heads)
    return PagedReferenceAttention()
