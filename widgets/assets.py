"""The front end as text: plain scripts, joined in order, with the palette and the words on top.

There is no build step: joining is all that happens, and each file under ``static/`` can be read
on its own.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files

from widgets.palette import css_variables, for_browser
from widgets.words import WORDS

PLAYER = (
    "decode",
    "replay",
    "words",
    "paint",
    "timeline",
    "board",
    "blocks",
    "charts",
    "totals",
    "controls",
    "live",
    "series",
    "player",
    "widget",
)


def source(name: str) -> str:
    return (files("widgets") / "static" / name).read_text(encoding="utf-8")


@cache
def player_js(lang: str | None = None) -> str:
    """All of the player, ending before any export."""
    words = WORDS if lang is None else {lang: WORDS[lang]}
    head = f"const PALETTE = {_json(for_browser())};\nconst WORDS = {_json(words)};\n"
    return head + "\n".join(source(f"{name}.js") for name in PLAYER)


@cache
def player_esm() -> str:
    """What Jupyter loads."""
    return player_js() + "\nexport default { render };\n"


@cache
def player_css() -> str:
    return css_variables() + "\n" + source("player.css")


@cache
def page_js(lang: str | None = None) -> str:
    """What a page without a kernel runs: the same player, and a model of data in the page.

    Args:
        lang: leave the other languages out; None: all are in.
    """
    style = f"const STYLE = {_json(player_css())};\n"
    ending = "\naddStyle();\nstart();\nwindow.minibatch = { start };\n"
    return style + player_js(lang) + "\n" + source("page.js") + ending


@cache
def learn_esm() -> str:
    return source("learn.js")


@cache
def learn_css() -> str:
    return css_variables() + "\n" + source("learn.css")


def shorten(script: str) -> str:
    """Without comments on lines of their own and without indentation."""
    script = re.sub(r"^\s*/\*\*.*?\*/\s*$", "", script, flags=re.MULTILINE | re.DOTALL)
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
