"""Exercises that answer: a task with a target, a check that runs at once, hints for wrong turns.

A check never raises: ``Run All`` on an untouched notebook must go through, and a learner's own
mistake is told in a sentence.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from types import FrameType
from typing import Any

MOST_LINES = 200_000  # that a learner's function may execute in one call


@dataclass(frozen=True)
class Verdict:
    """What a check says. ``passed`` is None while there is nothing to check."""

    passed: bool | None
    message: str

    @property
    def mark(self) -> str:
        return {True: "Passed", False: "Not yet", None: "Open"}[self.passed]

    def __repr__(self) -> str:
        return f"{self.mark}: {self.message}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        edge = {True: "#0072B2", False: "#D55E00", None: "#767676"}[self.passed]
        return {
            "text/plain": repr(self),
            "text/html": (
                f'<div style="border-left:4px solid {edge};padding:4px 10px">'
                f"<b>{self.mark}.</b> {escape(self.message)}</div>"
            ),
        }


def passed(message: str) -> Verdict:
    return Verdict(True, message)


def failed(message: str) -> Verdict:
    return Verdict(False, message)


UNTOUCHED = Verdict(None, "nothing to check yet. Fill in the cell above and run both again.")


class Mistake(Exception):
    """A learner's function did not get to its end; the message says why."""


def call(function: Callable[..., Any], *args: Any, most_lines: int = MOST_LINES) -> Any:
    """Call a learner's function, but not for ever.

    Raises:
        Mistake: it raised, or executed more than ``most_lines`` lines.
    """
    left = most_lines

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise Mistake(
                f"{function.__name__} does not end: is there a loop in which nothing gets smaller?"
            )
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return function(*args)
    except Mistake:
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        told = ", ".join(map(repr, args))
        raise Mistake(
            f"{function.__name__}({told}) raised {type(error).__name__}: {error} "
            f"(line {line.lineno}: {line.line})"
        ) from error
    finally:
        sys.settrace(before)


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson.

    Args:
        title: in a few words.
        task: what to do, in a sentence or two.
        target: how one knows that it is done.
        minutes: how long it may take.
        level: ``easy``, ``medium`` or ``hard``.
        judge: takes an answer that is not None; may raise ``Mistake``.
        hints: from a nudge to nearly all.
        solution: where the worked answer stands.
    """

    title: str
    task: str
    target: str
    minutes: int
    level: str
    judge: Callable[[Any], Verdict]
    hints: tuple[str, ...] = ()
    solution: str = ""

    def show(self) -> Card:
        """The task, as a card; hints are folded."""
        return Card(self)

    def check(self, answer: Any) -> Verdict:
        """Judge an answer. None and ``...`` mean: not tried yet."""
        if answer is None or answer is ...:
            return UNTOUCHED
        try:
            return self.judge(answer)
        except Mistake as mistake:
            return failed(str(mistake))


class Card:
    """An exercise's text, for display."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise

    def __repr__(self) -> str:
        e = self.exercise
        return f"{e.title} ({e.minutes} min, {e.level})\n{e.task}\nTarget: {e.target}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        e = self.exercise
        folded = "".join(
            f"<details><summary>Hint {number}</summary>{escape(hint)}</details>"
            for number, hint in enumerate(e.hints, 1)
        )
        if e.solution:
            folded += (
                "<details><summary>Solution</summary>In "
                f"<code>{escape(e.solution)}</code>, with the reasons.</details>"
            )
        html = (
            f"<p><b>{escape(e.title)}</b> ({e.minutes} min, {e.level})<br>{escape(e.task)}<br>"
            f"<b>Target:</b> {escape(e.target)}</p>{folded}"
        )
        return {"text/plain": repr(self), "text/html": html}
