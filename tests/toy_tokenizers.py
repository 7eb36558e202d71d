"""Small real tokenizers, built with the `tokenizers` library: one of each family in use."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    Tokenizer as Backend,
)
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from minibatch.tokenizer import Tokenizer

LLAMA_WORDS = ["▁Hi", "▁there", "▁testing", "▁a", "▁am", "▁I", "ing", "▁The", "end"]
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def llama_style(chat_template: str | None = LLAMA_TEMPLATE) -> Tokenizer:
    """As Llama 2: ``▁`` marks word starts, unknown characters fall back to bytes, BOS in front."""
    words = [*LLAMA_WORDS, "▁", *"abcdefghijklmnopqrstuvwxyzHIT", ".", ",", "!", "你", "好"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = []
    for word in words:
        for end in range(1, len(word) + 1):
            if word[:end] not in vocab:
                vocab.append(word[:end])
            if end > 1 and (word[: end - 1], word[end - 1]) not in merges:
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocab)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            chat_template=chat_template,
        )
    )


def byte_level(tokens: Sequence[bytes] = ()) -> Tokenizer:
    """As GPT-2: every byte is a token (its value is its id); then ``tokens``, then ``<end>``."""
    spelling = gpt2_spelling()
    vocab = [spelling[byte] for byte in range(256)]
    vocab += ["".join(spelling[byte] for byte in token) for token in tokens]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def gpt2_spelling() -> dict[int, str]:
    """How byte-level vocabularies write each byte: printable ones as they are, others shifted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
