"""The simplest step there is: one whole prompt, in blocks 0, 1, 2... of a cache of its own."""

from __future__ import annotations

import torch

from minibatch.model.attention import AttentionMetadata


def one_prompt(num_tokens: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """Metadata of a prompt of ``num_tokens`` from position 0 on."""
    blocks = torch.arange(-(-num_tokens // block_size), dtype=torch.int32, device=device)
    length = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    return AttentionMetadata(
        slot_mapping=torch.arange(num_tokens, device=device),
        block_tables=blocks[None],
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=length,
        query_lens=[num_tokens],
        seq_lens_host=[num_tokens],
        num_decodes=1 if num_tokens == 1 else 0,
        prompt_lens=length,
    )
