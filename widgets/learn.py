"""Learning aids: guess before the run, answer questions, turn cards over.

None of them needs an answer: a notebook that is run from top to bottom passes, and says that
nothing was guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from widgets.words import Words

Value = float | int | str


@dataclass(frozen=True)
class Question:
    """One question of a quiz. ``answer`` is the index of the right choice."""

    text: str
    choices: tuple[str, ...]
    answer: int
    why: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(self.choices))
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer={self.answer} of {len(self.choices)} to {self.text!r}.")


@dataclass(frozen=True)
class Card:
    """A flash card."""

    front: str
    back: str


class Prediction:
    """A guess, made before the run and kept until after it.

    Args:
        text: what is asked.
        choices: to choose from; without them a number is asked for.
        unit: of the number.
        guess: made in code instead of by hand.
    """

    def __init__(
        self,
        text: str,
        choices: Sequence[str] | None = None,
        *,
        unit: str = "",
        guess: Value | None = None,
        lang: str = "en",
    ) -> None:
        self.text = text
        self.choices = tuple(choices or ())
        self.unit = unit
        self.words = Words(lang)
        self.guess: Value | None = None
        self._widget: Any = None
        if guess is not None:
            self.set(guess)

    def set(self, guess: Value) -> Prediction:
        """Guess. A number, or one of the choices."""
        if self.choices and guess not in self.choices:
            raise ValueError(f"guess={guess!r}: expected one of {', '.join(self.choices)}.")
        self.guess = guess
        return self

    def check(self, actual: Value) -> Verdict:
        """Put the guess beside what came of it."""
        if self.choices and actual not in self.choices:
            raise ValueError(f"actual={actual!r}: expected one of {', '.join(self.choices)}.")
        return Verdict(self, actual)

    def __repr__(self) -> str:
        return f"{self.text} {self._told(self.guess)}"

    def _told(self, value: Value | None) -> str:
        if value is None:
            return self.words("predict.none")
        return f"{value:g} {self.unit}".rstrip() if isinstance(value, (int, float)) else str(value)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        html = f"<p><b>{escape(self.text)}</b> {escape(self._told(self.guess))}</p>"
        state = {
            "text": self.text,
            "choices": list(self.choices),
            "unit": self.unit,
            "words": _texts(self.words),
        }
        self._widget = _shell("predict", state, self._take, self._widget)
        return _bundle(repr(self), html, self._widget), {}

    def _take(self, content: Mapping[str, Any]) -> None:
        if content.get("kind") == "guess" and content.get("value") is not None:
            self.set(content["value"])


class Verdict:
    """A guess and the truth, side by side."""

    def __init__(self, prediction: Prediction, actual: Value) -> None:
        self.prediction = prediction
        self.actual = actual

    @property
    def off(self) -> float | None:
        """How far off a guessed number was, as a share of the truth."""
        guess, actual = self.prediction.guess, self.actual
        if not isinstance(guess, (int, float)) or not isinstance(actual, (int, float)):
            return None
        return abs(guess - actual) / abs(actual) if actual else float(guess != actual)

    @property
    def right(self) -> bool | None:
        """None: nothing was guessed. A number may be 10 % off."""
        if self.prediction.guess is None:
            return None
        off = self.off
        return off <= 0.1 if off is not None else self.prediction.guess == self.actual

    def __repr__(self) -> str:
        words, told = self.prediction.words, self.prediction._told
        actual = told(self.actual)
        if self.right is None:
            return words("predict.unguessed", actual=actual)
        key = "predict.right" if self.right else "predict.wrong"
        return words(key, guess=told(self.prediction.guess), actual=actual)

    def _repr_html_(self) -> str:
        bars = ""
        guess, actual = self.prediction.guess, self.actual
        if isinstance(guess, (int, float)) and isinstance(actual, (int, float)):
            most = max(abs(guess), abs(actual)) or 1
            words = self.prediction.words
            for name, value, colour in (
                (words("predict.guess"), guess, "#E69F00"),
                (words("predict.actual"), actual, "#0072B2"),
            ):
                width = 300 * abs(value) / most
                bars += (
                    f'<tr><td>{escape(name)}</td><td style="text-align:left">'
                    f'<div style="background:{colour};color:#1b1f24;height:14px;'
                    f'width:{width:.0f}px"></div></td><td>{value:g}</td></tr>'
                )
            bars = f"<table>{bars}</table>"
        return f"<p><b>{escape(repr(self))}</b></p>{bars}"


class Quiz:
    """Multiple choice, an explanation after each answer.

    Args:
        questions: ``Question``s, or tuples of their fields.
    """

    def __init__(self, questions: Sequence[Question | tuple], *, lang: str = "en") -> None:
        self.questions = tuple(q if isinstance(q, Question) else Question(*q) for q in questions)
        self.words = Words(lang)
        self.answers: dict[int, int] = {}
        self._widget: Any = None

    def answer(self, number: int, choice: int) -> bool:
        """Answer question ``number`` (from 0); True if it is right."""
        self.answers[number] = choice
        return choice == self.questions[number].answer

    @property
    def score(self) -> tuple[int, int]:
        """(right answers, questions)."""
        right = sum(self.questions[n].answer == choice for n, choice in self.answers.items())
        return right, len(self.questions)

    def __repr__(self) -> str:
        right, total = self.score
        return self.words("quiz.score", right=right, answered=len(self.answers), total=total)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = []
        for question in self.questions:
            choices = "".join(f"<li>{escape(choice)}</li>" for choice in question.choices)
            right = escape(f"{question.choices[question.answer]}. {question.why}".strip())
            parts.append(
                f'<p><b>{escape(question.text)}</b></p><ol type="A">{choices}</ol>'
                f"<details><summary>{escape(self.words('quiz.show'))}</summary>{right}</details>"
            )
        state = {
            "questions": [asdict(question) for question in self.questions],
            "words": _texts(self.words),
        }
        self._widget = _shell("quiz", state, self._take, self._widget)
        return _bundle(repr(self), "".join(parts), self._widget), {}

    def _take(self, content: Mapping[str, Any]) -> None:
        if content.get("kind") == "answer":
            self.answer(int(content["number"]), int(content["choice"]))


class Flashcards:
    """Cards to turn over; those that were not known come again.

    Args:
        cards: ``Card``s, or (front, back) pairs, or front -> back.
    """

    def __init__(
        self, cards: Mapping[str, str] | Sequence[Card | tuple[str, str]], *, lang: str = "en"
    ) -> None:
        listed = list(cards.items()) if isinstance(cards, Mapping) else list(cards)
        self.cards = tuple(c if isinstance(c, Card) else Card(*c) for c in listed)
        self.words = Words(lang)
        self._widget: Any = None

    def __repr__(self) -> str:
        return self.words("cards.count", n=len(self.cards))

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        html = "".join(
            f"<details><summary>{escape(card.front)}</summary>{escape(card.back)}</details>"
            for card in self.cards
        )
        state = {"cards": [asdict(card) for card in self.cards], "words": _texts(self.words)}
        self._widget = _shell("cards", state, lambda content: None, self._widget)
        return _bundle(repr(self), html, self._widget), {}


def predict(
    text: str,
    choices: Sequence[str] | None = None,
    *,
    unit: str = "",
    guess: Value | None = None,
    lang: str = "en",
) -> Prediction:
    """Ask for a guess before the run; ``.check(actual)`` after it.

    ``guess = predict("How many iterations will static batching take?", unit="iterations")``
    """
    return Prediction(text, choices, unit=unit, guess=guess, lang=lang)


def quiz(questions: Sequence[Question | tuple], *, lang: str = "en") -> Quiz:
    """Multiple choice: ``quiz([("What limits a decode step?", ("FLOPs", "bandwidth"), 1)])``."""
    return Quiz(questions, lang=lang)


def flashcards(
    cards: Mapping[str, str] | Sequence[Card | tuple[str, str]], *, lang: str = "en"
) -> Flashcards:
    """Cards to turn over: ``flashcards({"What is TTFT?": "Time to the first token."})``."""
    return Flashcards(cards, lang=lang)


# -- the shell ------------------------------------------------------------------------------------


def _texts(words: Words) -> dict[str, str]:
    prefixes = ("predict.", "quiz.", "cards.")
    return {key: text for key, text in words.table.items() if key.startswith(prefixes)}


def _shell(kind: str, state: dict[str, Any], take: Any, before: Any) -> Any:
    """The widget in front of a learning aid; showing it again closes the former one. None: there
    is no anywidget here, and the static form must do.
    """
    try:
        from widgets.learn_widget import LearnWidget
    except ImportError:
        return None
    if before is not None:
        before.close()
    return LearnWidget(kind, json.dumps(state, ensure_ascii=False), take)


def _bundle(text: str, html: str, widget: Any) -> dict[str, Any]:
    forms: dict[str, Any] = {"text/plain": text, "text/html": html}
    if widget is not None and widget.comm is not None:
        forms["application/vnd.jupyter.widget-view+json"] = {
            "version_major": 2,
            "version_minor": 0,
            "model_id": widget.model_id,
        }
    return forms
