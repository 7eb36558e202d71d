"""Text to token ids and back, for a model's folder or a single ``.gguf`` file.

A thin wrapper of transformers' tokenizers, which are imported only when one is loaded. What it
adds: one BOS where transformers may give two, decoding that never rewrites text, a GGUF
pre-tokenizer that transformers overlooks, and errors that say what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minibatch.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Values of `tokenizer.ggml.pre` for byte-level vocabularies whose digits were split one by one
# before GPT-2's pattern (llama.cpp's `llm_tokenizer_bpe`). transformers has patterns for many
# other values but takes these for plain GPT-2, and then groups spaces before digits differently.
SINGLE_DIGIT_PRE_TOKENIZERS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}


class ChatTemplateError(InvalidRequestError):
    """The model has no chat template, or the template does not take these messages."""


class Tokenizer:
    """A model's tokenizer. Use it from one thread at a time.

    Special tokens written out in a text (``<|im_end|>``) become those tokens, as in vLLM.

    Args:
        hf_tokenizer: a tokenizer of transformers that has a Rust backend ("fast").
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        # Some tokenizer.json files carry the truncation and padding of their training.
        self._backend.no_truncation()
        self._backend.no_padding()
        bos = hf_tokenizer.bos_token_id
        self._adds_bos = bos is not None and self._backend.encode("").ids[:1] == [bos]

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Load from a folder with tokenizer files, or from a ``.gguf`` file.

        Raises:
            CheckpointError: if there is no tokenizer, or not one that can be used.
        """
        path = Path(path)
        if not path.exists():
            raise CheckpointError(f"there is no tokenizer at {path}: no such file or folder")
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if path.suffix == ".gguf":
                # Not AutoTokenizer: it would parse the model's config as well, which takes seconds.
                tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    path.parent, gguf_file=path.name
                )
                _mend_pre_tokenizer(tokenizer, path)
            else:
                tokenizer = AutoTokenizer.from_pretrained(path)
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises whatever went wrong inside
            raise CheckpointError(f"cannot load a tokenizer from {path}: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise CheckpointError(
                f"{path} has only a slow tokenizer ({type(tokenizer).__name__}); save a "
                "tokenizer.json beside it with transformers' save_pretrained."
            )
        return cls(tokenizer)

    # ---- ids ---------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. A model may have more rows of logits."""
        return self._backend.get_vocab_size()

    @property
    def bos_token_id(self) -> int | None:
        return self._hf.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token; the model's ``eos_token_ids`` may name others."""
        return self._hf.eos_token_id

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that ``skip_special_tokens`` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def byte_token_ids(self) -> dict[int, int]:
        """Byte-fallback tokens, ``<0x00>`` to ``<0xFF>``, and their bytes. Empty if none."""
        ids = {self._backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        ids.pop(None, None)
        return ids

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token (``Ġhello``), ``None`` for an id it has not."""
        return self._backend.id_to_token(token_id)

    # ---- text --------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids, with a BOS in front if the model's tokenizer is in the habit of adding one.

        Warns:
            UserWarning: if the text begins with the BOS string already (a rendered chat template,
                most likely). No second one is added.
        """
        ids = self._backend.encode(text).ids
        bos = self.bos_token_id
        if self._adds_bos and ids[:2] == [bos, bos]:
            warnings.warn(
                f"the prompt already begins with {self._hf.bos_token!r}; no second one is added",
                stacklevel=2,
            )
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text, with no "clean-up" of spaces before punctuation. Unknown ids are skipped."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's Jinja template; rarely several by name, one of them ``default``."""
        return self._hf.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Nothing is added to what the template writes, BOS included.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.
            add_generation_prompt: open the assistant's turn at the end.
            chat_template: a Jinja template in place of the model's own.

        Raises:
            ChatTemplateError: without a template, or if it cannot render these messages.
        """
        text = self.render_chat_template(messages, add_generation_prompt, chat_template)
        return self._backend.encode(text, add_special_tokens=False).ids

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> str:
        """The text behind ``apply_chat_template``."""
        if chat_template is None and not self._hf.chat_template:
            raise ChatTemplateError(
                "this model has no chat template (a base model?): pass chat_template=..., or "
                "write the prompt out and use generate()."
            )
        if not messages:
            raise ChatTemplateError("messages is empty: a chat needs at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ChatTemplateError(
                    f'messages[{i}] must be {{"role": ..., "content": ...}}, not {message!r}'
                )
        try:
            return self._hf.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template may call its own raise_exception, or fail anyhow
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def _mend_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Split digits one by one where the GGUF's pre-tokenizer says so."""
    from tokenizers import pre_tokenizers

    from minibatch.model.gguf import GGUFFile

    metadata = GGUFFile(path).metadata
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    if is_byte_level and metadata.get("tokenizer.ggml.pre") in SINGLE_DIGIT_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
