"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minibatch.model.hub import resolve


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side; each gets by with one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    """One for all browser tests of a process: its loop runs in this thread until the end."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct, always the same bits."""
    return resolve("smollm2-135m-q4_1")


@pytest.fixture(scope="session")
def tiny_chat_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder: random 2-layer Llama with SmolLM2's tokenizer and chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from minibatch.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("tiny_chat_model")
    tokenizer = Tokenizer.from_path(smollm2)
    tokenizer._hf.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
