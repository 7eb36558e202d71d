"""Text from tokens as they come: never half a character, never a word without its space.

Two things stand between token ids and text that may be shown:

* **A token is not a piece of text.** A character may take several tokens, and the space before a
  word may show only next to the word before. So each token is decoded together with the few before
  it, and what is new at the end of the result is the token's text. Half a character decodes to the
  replacement mark U+FFFD, which waits until it is whole, or until the output ends.
* **Text may turn out to be a stop string.** The longest end of the text that is the beginning of
  one is held back until it is one, or is not.

The deltas joined are exactly ``decode(prompt + output)`` without ``decode(prompt)``, up to a stop
string. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from minibatch.errors import InvariantError

# Tokens decoded again as context of the next one. UTF-8 characters have at most 4 bytes and a
# token at least one, so 4 cover the unfinished character and one token before it.
CONTEXT_TOKENS = 6
REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """What the detokenizer needs of a tokenizer (``minibatch.tokenizer.Tokenizer`` has it)."""

    @property
    def special_token_ids(self) -> AbstractSet[int]: ...

    @property
    def byte_token_ids(self) -> Mapping[int, int]:
        """Ids of byte-fallback tokens such as ``<0xE4>``, and their byte. Empty if none."""
        ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The text of one request, token by token.

    The cost of a token does not grow with the output: at most ``2 * CONTEXT_TOKENS`` tokens are
    decoded again. The exception are byte-fallback tokens, of which a whole run is valid UTF-8 or
    all of it is replacement marks; a run is decoded once, when it ends.

    Args:
        tokenizer: turns ids into text.
        prompt_token_ids: context of the first tokens; their text is not part of the output.
        skip_special_tokens: leave special tokens out of the text.
        stop: strings that end the text.
        include_stop_str_in_output: end the text after the stop string, not before it.
        min_tokens: stop strings count only if they are completed after that many tokens.

    vLLM calls it ``IncrementalDetokenizer`` too. Of several stop strings vLLM takes the first in
    the list's order; here it is the one completed first, however the text is cut into tokens.
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._byte_tokens = tokenizer.byte_token_ids
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0  # output tokens appended

        self._window = self._end_of_prompt(prompt_token_ids)  # ids decoded with the next one
        self._num_known = len(self._decode_window())  # characters of the window's text seen before
        self._byte_run = bytearray()  # the window's last tokens, if they are byte tokens

        self._released: list[str] = []  # text that may be shown
        self._num_taken = 0  # entries of it that `take_delta` has given out
        self._held = ""  # text that may yet become part of a stop string

        self.stop_string: str | None = None
        """The stop string that ended the text, if one did."""
        self.finished = False
        """No more tokens: a stop string was found, or ``finish`` was called."""

    @property
    def text(self) -> str:
        """All text so far that may be shown."""
        return "".join(self._released)

    def append(self, token_id: int) -> str | None:
        """Take one more output token. Returns the stop string that it completes, if it does.

        Tokens that end the output by their id, and so are not part of its text, are not to be
        appended.
        """
        if self.finished:
            raise InvariantError(f"token {token_id} was appended to a text that has ended")
        self._num_tokens += 1
        if token_id in self._hidden or self._tokenizer.id_to_token(token_id) is None:
            return None
        self._window.append(token_id)
        if token_id in self._byte_tokens:
            self._byte_run.append(self._byte_tokens[token_id])
            if not self._byte_run_completes_a_stop():
                return None
        self._byte_run.clear()
        return self._add(self._new_text())

    def take_delta(self) -> str:
        """The text that has become safe to show since the last call."""
        delta = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return delta

    def finish(self) -> None:
        """The output has ended: release what was held back. Half a character becomes U+FFFD."""
        if self.finished:
            return
        self.finished = True
        self._released.append(self._held + self._decode_window()[self._num_known :])
        self._held = ""

    # ---- tokens to text ----------------------------------------------------------------------

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last visible tokens of the prompt, not cut inside a run of byte tokens."""
        window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id in self._hidden:
                continue
            inside_run = window and window[-1] in self._byte_tokens
            if len(window) >= CONTEXT_TOKENS and not (inside_run and token_id in self._byte_tokens):
                break
            window.append(token_id)
        return window[::-1]

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)  # hidden: not in it

    def _new_text(self) -> str:
        """The window's text that was not known before, without an unfinished last character.

        The window may begin inside a character. Its text then begins with replacement marks, the
        same ones each time, and is right from the next character on.
        """
        text = self._decode_window().removesuffix(REPLACEMENT)
        new_text = text[self._num_known :]
        self._num_known = max(self._num_known, len(text))
        if len(self._window) > 2 * CONTEXT_TOKENS:
            del self._window[:-CONTEXT_TOKENS]
            self._num_known = len(self._decode_window().removesuffix(REPLACEMENT))
        return new_text

    # ---- stop strings ------------------------------------------------------------------------

    def _add(self, new_text: str) -> str | None:
        """Release text, up to a stop string or to what may become one."""
        text = self._held + new_text
        found = self._find_stop(text, len(self._held))
        if found is not None:
            end, start = found
            self._released.append(text[: end if self._include_stop else start])
            self._held = ""
            self.stop_string = text[start:end]
            self.finished = True
            return self.stop_string
        num_safe = len(text) - self._num_to_hold(text)
        self._released.append(text[:num_safe])
        self._held = text[num_safe:]
        return None

    def _find_stop(self, text: str, num_old: int) -> tuple[int, int] | None:
        """(end, start) of the stop string completed first after the first ``num_old`` characters.

        It begins within the held text, as that is the longest possible beginning of one.
        """
        if self._num_tokens <= self._min_tokens:
            return None
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found, default=None)

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest end of ``text`` that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stop):
                return length
        return 0

    def _byte_run_completes_a_stop(self) -> bool:
        """Would the run's text, if the output ended here, bring a stop string?"""
        if not self._stop:
            return False
        try:
            text = self._byte_run.decode()
        except UnicodeDecodeError:
            return False
        return self._find_stop(self._held + text, len(self._held)) is not None
