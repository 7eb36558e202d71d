"""Interview questions of a lesson, from ``data/interview``, with the lesson's own numbers.

An answer names its numbers (``{static_steps}``); the lesson computes and prints them. So no card
can say what no cell has shown.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "interview"
LANGUAGES = ("en", "zh")
PARTS = ("question", "answer", "wrong", "why_wrong", "follow_up", "follow_up_answer")
LABELS = {
    "en": {
        "blank": "Say your answer aloud, or write it down, before you open the next line.",
        "answer": "A 60-second answer",
        "wrong": "A common wrong answer",
        "follow_up": "Follow-up",
    },
    "zh": {
        "blank": "先自己说一遍或写下来，再展开下面的答案。",
        "answer": "60 秒参考答案",
        "wrong": "常见的错误回答",
        "follow_up": "追问",
    },
}


def load(lesson: str) -> list[dict[str, Any]]:
    """The questions of a lesson, as they stand in its file."""
    return json.loads((FOLDER / f"{lesson}.json").read_text(encoding="utf-8"))["questions"]


def names_in(text: str) -> set[str]:
    """Names of the values that a text refers to."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def interview(lesson: str, facts: Mapping[str, str], lang: str = "en") -> Deck:
    """The cards of a lesson.

    Args:
        lesson: ``"01"``...
        facts: what ``lessons.facts`` printed.
        lang: ``en`` or ``zh``.

    Raises:
        KeyError: an answer uses a value that is not among the facts.
    """
    cards = [{part: entry[part][lang].format(**facts) for part in PARTS} for entry in load(lesson)]
    return Deck(cards, lang)


@dataclass(frozen=True)
class Deck:
    """Questions with folded answers."""

    cards: list[dict[str, str]]
    lang: str = "en"

    def __repr__(self) -> str:
        return "\n".join(f"Q{n} {card['question']}" for n, card in enumerate(self.cards, 1))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        label = LABELS[self.lang]
        html = ""
        for number, raw in enumerate(self.cards, 1):
            card = {part: escape(text) for part, text in raw.items()}
            html += (
                f"<p><b>{number}. {card['question']}</b><br><i>{label['blank']}</i></p>"
                f"<details><summary>{label['answer']}</summary>{card['answer']}</details>"
                f"<details><summary>{label['wrong']}</summary>"
                f"<q>{card['wrong']}</q> {card['why_wrong']}</details>"
                f"<details><summary>{label['follow_up']}: {card['follow_up']}</summary>"
                f"{card['follow_up_answer']}</details>"
            )
        return {"text/plain": repr(self), "text/html": html}
