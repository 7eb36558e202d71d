"""Prompts at the door: text or token ids, checked before they queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from minibatch.errors import InvalidRequestError


class Encoder(Protocol):
    """What reading a prompt asks of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def read_prompt(
    request_id: str, prompt: Any, tokenizer: Encoder | None, vocab_size: int | None
) -> tuple[str | None, list[int]]:
    """The prompt's text, if it has one, and its token ids.

    Args:
        prompt: text, ids, or vLLM's ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``.
        tokenizer: for text; None refuses it.
        vocab_size: ids must be below it; None does not check.

    Raises:
        InvalidRequestError: nothing, or nothing that this model can read; names the request.
    """
    text: str | None = None
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError(f"request {request_id!r}: the prompt is empty.")
        if tokenizer is None:
            raise InvalidRequestError(
                f"request {request_id!r}: this engine has no tokenizer; give token ids."
            )
        text, prompt = prompt, tokenizer.encode(prompt)
    if prompt is None or isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
        raise InvalidRequestError(
            f"request {request_id!r}: a prompt is text or a list of token ids, not "
            f"{type(prompt).__name__}."
        )
    return text, read_token_ids(request_id, prompt, vocab_size)


def read_token_ids(request_id: str, ids: Iterable[Any], vocab_size: int | None) -> list[int]:
    """Plain integers within the vocabulary; numpy's and torch's are taken for what they are.

    Raises:
        InvalidRequestError: names the first position that holds something else.
    """
    token_ids = list(ids)
    if not token_ids:
        raise InvalidRequestError(f"request {request_id!r}: the prompt has no tokens.")
    limit = float("inf") if vocab_size is None else vocab_size
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < limit:
        return token_ids
    for position, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InvalidRequestError(
                f"request {request_id!r}: prompt position {position} holds {token_id!r}, "
                "not a token id."
            )
        if not 0 <= int(token_id) < limit:
            known = "at least 0" if vocab_size is None else f"in [0, {vocab_size})"
            raise InvalidRequestError(
                f"request {request_id!r}: token id {token_id} at prompt position {position} "
                f"is not {known}; is this another model's tokenizer?"
            )
    return [int(token_id) for token_id in token_ids]
