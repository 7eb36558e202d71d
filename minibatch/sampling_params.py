"""How a request wants to be continued: vLLM's names and defaults, checked on construction.

Nothing here needs torch, so that a scheduler or a simulation can carry these around for free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple, NoReturn

from minibatch.errors import InvalidSamplingParamsError

# Below this temperature a request is greedy (vLLM's `_SAMPLING_EPS`): dividing logits by less
# only rounds the distribution to a single token, or overflows.
GREEDY_TEMPERATURE = 1e-5


class Logprob(NamedTuple):
    """One token's place in the model's distribution (vLLM's ``Logprob``).

    ``logprob`` is a natural logarithm, ``rank`` counts from 1 (the likeliest token).
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's ``SamplingParams``, the part of it that this engine has.

    Numpy numbers are taken for what they are; booleans and strings are not numbers. After
    construction every field holds a plain Python value, ``stop`` and ``stop_token_ids`` tuples.

    Args:
        n: independent samples of one prompt.
        temperature: divides the logits; below ``GREEDY_TEMPERATURE`` the likeliest token is taken.
        top_p: keep the smallest set of tokens that holds this much probability.
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all, and so does any number
            above the vocabulary's size.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        repetition_penalty: above 1 makes tokens of the prompt and the output less likely.
        presence_penalty: taken once off the logit of each token of the output.
        frequency_penalty: taken off that logit once per occurrence.
        seed: fixes this request's draws; ``None`` lets the engine pick one.
        stop: text that ends the output, one string or several.
        stop_token_ids: token ids that do.
        ignore_eos: do not end at the model's own end tokens.
        max_tokens: output tokens at most; ``None`` means as many as the model has positions for.
        min_tokens: before that many output tokens neither an end token nor ``stop`` ends it.
        logprobs: return the sampled token's log-probability and those of this many top tokens.
        include_stop_str_in_output: leave the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        stream: deliver text as it comes (ours: vLLM decides that elsewhere).

    Raises:
        InvalidSamplingParamsError: names the knob, its value and the range it may have.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False

    def __post_init__(self) -> None:
        self._check_integer("n", least=1)
        self._check_number("temperature", least=0.0)
        self._check_number("top_p", least=0.0, most=1.0, open_below=True)
        self._check_integer("top_k", least=-1)
        self._check_number("min_p", least=0.0, most=1.0)
        self._check_number("repetition_penalty", least=0.0, open_below=True)
        self._check_number("presence_penalty", least=-2.0, most=2.0)
        self._check_number("frequency_penalty", least=-2.0, most=2.0)
        self._check_integer("seed", least=-(2**63), most=2**64 - 1, optional=True)
        self._check_integer("max_tokens", least=1, optional=True)
        self._check_integer("min_tokens", least=0)
        self._check_integer("logprobs", least=0, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "stream"):
            self._check_flag(name)
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_token_ids())
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParamsError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: "
                "lower min_tokens or raise max_tokens."
            )

    @property
    def greedy(self) -> bool:
        """No draw at all: the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Do earlier tokens change the logits?"""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    # Each check also replaces the value by a plain Python one: `np.int64(3)` becomes `3`.

    def _check_integer(
        self, name: str, *, least: int, most: int | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        wanted = f"an integer >= {least}" if most is None else f"an integer in [{least}, {most}]"
        if isinstance(value, bool) or not isinstance(value, Integral):
            _refuse(name, value, wanted)
        if value < least or (most is not None and value > most):
            _refuse(name, value, wanted)
        self._set(name, int(value))

    def _check_number(
        self, name: str, *, least: float, most: float | None = None, open_below: bool = False
    ) -> None:
        value = getattr(self, name)
        left = "(" if open_below else "["
        right = "inf)" if most is None else f"{most}]"
        wanted = f"a finite number in {left}{least}, {right}"
        if isinstance(value, bool) or not isinstance(value, Real):
            _refuse(name, value, wanted)
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            _refuse(name, value, wanted)
        too_small = number < least or (open_below and number == least)
        if not math.isfinite(number) or too_small or (most is not None and number > most):
            _refuse(name, value, wanted)
        self._set(name, number)

    def _check_flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            _refuse(name, value, "True or False")

    def _checked_stop(self) -> tuple[str, ...]:
        wanted = "a non-empty string, or a list of them"
        stop = () if self.stop is None else self.stop
        strings = (stop,) if isinstance(stop, str) else stop
        if not isinstance(strings, (list, tuple)):
            _refuse("stop", self.stop, wanted)
        for string in strings:
            if not isinstance(string, str) or not string:
                _refuse("stop", self.stop, wanted)
        return tuple(strings)

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        wanted = "a list of token ids >= 0"
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            _refuse("stop_token_ids", ids, wanted)
        ids = tuple(ids)
        for token_id in ids:
            is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
            if not is_integer or token_id < 0:
                _refuse("stop_token_ids", ids, wanted)
        return tuple(int(token_id) for token_id in ids)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only while being constructed


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise InvalidSamplingParamsError(f"{name}={value!r} is out of range: {name} must be {wanted}.")
