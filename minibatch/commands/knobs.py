"""Command-line options made from a dataclass: every knob, under its own name, once."""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import inspect
import re
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints


def add_knobs(parser: argparse.ArgumentParser, title: str, cls: type, skip: set[str]) -> None:
    """An option ``--knob-name`` for each field of ``cls``; those not given stay out of ``args``."""
    group = parser.add_argument_group(title)
    hints, texts = get_type_hints(cls), argument_texts(cls)
    for field in dataclasses.fields(cls):
        if field.name not in skip:
            text = texts[field.name] + describe_default(field.default)
            group.add_argument(
                "--" + field.name.replace("_", "-"),
                dest=field.name,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                **options_for(hints[field.name]),
            )


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of ``cls`` that the command line sets."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def options_for(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint))}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"choices": [member.value for member in hint]}
    if get_origin(hint) is collections.abc.Sequence:  # may be given several times
        return {"type": parts[0], "action": "append"}
    if parts:  # `str | Sequence[str] | None`: the most general member is the last
        return options_for(parts[-1])
    return {"type": hint}


def argument_texts(cls: type) -> dict[str, str]:
    """What the ``Args:`` of a docstring say of each field, so that it is said only once."""
    lines = inspect.getdoc(cls).partition("Args:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    texts: dict[str, str] = {}
    for entry in re.split(r"^    (?=\w)", lines, flags=re.MULTILINE)[1:]:
        name, _, text = entry.partition(":")
        texts[name] = re.sub(r"\s+", " ", text).strip().rstrip(".").replace("``", "")
    return texts


def describe_default(default: Any) -> str:
    if isinstance(default, Enum):
        default = default.value
    return "" if default is None else f" (default: {default})"
