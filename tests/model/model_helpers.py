"""Tiny Llamas made by transformers, and a small driver of the paged model to compare them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as HFLlama

from minibatch.model.attention import AttentionMetadata
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM

VOCAB = 97


def hf_config(**overrides: Any) -> LlamaConfig:
    """A Llama of two layers, with four heads on two KV heads unless told otherwise."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    return LlamaConfig(**(settings | overrides))


def hf_model(config: LlamaConfig, seed: int = 0) -> HFLlama:
    """Random weights everywhere, biases and norms too, large enough that attention is not flat."""
    model = HFLlama(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: HFLlama, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    return folder


def config_json(config: LlamaConfig) -> dict[str, Any]:
    """What config.json holds for this config, ready to be tampered with."""
    return json.loads(config.to_json_string(use_diff=False)) | {
        "architectures": ["LlamaForCausalLM"]
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A checkpoint written by hand, so that it may be wrong."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    unshared = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    save_file(unshared, folder / "model.safetensors")
    return folder


def random_tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def hf_logits(model: HFLlama, tokens: list[int]) -> Tensor:
    """Logits of every position, ``[len(tokens), V]``, with no cache and no batch."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


class PagedDriver:
    """Runs sequences through the paged model, any number of tokens of each a step.

    Blocks are dealt in random order from a pool that is poisoned with NaN if ``poison`` is set,
    and unused entries of the block tables are -1.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        sequences: list[list[int]],
        *,
        block_size: int = 4,
        poison: bool = True,
        prompt_lens: list[int] | None = None,
    ) -> None:
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.prompt_lens = prompt_lens or [len(tokens) for tokens in sequences]
        self.done = [0] * len(sequences)  # tokens with KV
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        num_blocks = sum(needed) + 3
        self.kv_cache = KVCache(model.config, num_blocks, block_size, dtype=model.dtype)
        if poison:
            for pool in (*self.kv_cache.keys, *self.kv_cache.values):
                pool.fill_(float("nan"))
        deck = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = torch.full((len(sequences), max(needed) + 1), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count] = torch.tensor([deck.pop() for _ in range(count)])

    @torch.inference_mode()
    def step(self, counts: dict[int, int], padding: int = 0) -> dict[int, Tensor]:
        """Run ``counts[i]`` more tokens of each sequence i. Returns their logits ``[count, V]``."""
        order = sorted(counts, key=lambda index: counts[index] > 1)  # one-token rows first
        input_ids, positions, slots = [], [], []
        for index in order:
            for position in range(self.done[index], self.done[index] + counts[index]):
                block = int(self.tables[index, position // self.block_size])
                input_ids.append(self.sequences[index][position])
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            self.done[index] += counts[index]
        query_lens = [counts[index] for index in order]
        seq_lens = [self.done[index] for index in order]
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int()
        meta = AttentionMetadata(
            slot_mapping=torch.tensor(slots + [-1] * padding),
            block_tables=self.tables[order],
            query_start=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_lens=query_lens,
            seq_lens_host=seq_lens,
            num_decodes=query_lens.count(1),
            prompt_lens=torch.tensor([self.prompt_lens[i] for i in order], dtype=torch.int32),
        )
        hidden = self.model(
            torch.tensor(input_ids + [0] * padding),
            torch.tensor(positions + [0] * padding),
            self.kv_cache,
            meta,
        )
        logits = self.model.compute_logits(hidden)
        rows = zip(order, starts.tolist(), query_lens, strict=False)
        return {index: logits[start : start + count] for index, start, count in rows}

    def run(self, chunk: int) -> list[Tensor]:
        """Run every sequence to its end, ``chunk`` tokens of each a step: logits ``[len, V]``."""
        logits: list[list[Tensor]] = [[] for _ in self.sequences]
        while counts := {
            index: min(chunk, len(tokens) - self.done[index])
            for index, tokens in enumerate(self.sequences)
            if self.done[index] < len(tokens)
        }:
            for index, rows in self.step(counts).items():
                logits[index].append(rows)
        return [torch.cat(rows) for rows in logits]


def paged_logits(
    model: LlamaForCausalLM, tokens: list[int], chunk: int | None = None, **settings: Any
) -> Tensor:
    """Logits of one sequence run alone, ``[len(tokens), V]``."""
    return PagedDriver(model, [tokens], **settings).run(chunk or len(tokens))[0]


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
