"""Cards: both languages, and no number that a cell has not printed."""

from __future__ import annotations

import re

import nbformat
import pytest

from lessons import cards
from lessons.build import FOLDER, lesson_paths
from lessons.cards import LANGUAGES, PARTS, interview, load, names_in

LESSONS = [path for path in lesson_paths() if path.parent == FOLDER]


def printed_facts(path: object) -> dict[str, str]:
    """What the cell ``facts`` of a lesson printed."""
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.id == "facts")
    lines = "".join(output.get("text", "") for output in cell.outputs).splitlines()
    return dict(line.split(" = ", 1) for line in lines if " = " in line)


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
@pytest.mark.parametrize("lang", LANGUAGES)
def test_cards_are_filled_from_what_the_lesson_printed(path: object, lang: str) -> None:
    facts = printed_facts(path)
    deck = interview(path.stem[:2], facts, lang=lang)
    assert len(deck.cards) >= 3
    for card in deck.cards:
        assert all(card[part] and "{" not in card[part] for part in PARTS)
        assert bool(re.search(r"[\u4e00-\u9fff]", card["question"])) == (lang == "zh")
    html = deck._repr_mimebundle_()["text/html"]
    assert html.count("<details>") == 3 * len(deck.cards)


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_every_fact_is_used_and_every_answer_has_one(path: object) -> None:
    used: set[str] = set()
    for entry in load(path.stem[:2]):
        for part in PARTS:
            used |= names_in(entry[part]["en"])
    assert used == printed_facts(path).keys()


def test_a_missing_fact_is_an_error() -> None:
    with pytest.raises(KeyError, match="slots"):
        interview("01", {})


def test_html_in_a_card_is_escaped() -> None:
    deck = cards.Deck([dict.fromkeys(PARTS, "a < b")])
    assert "a < b" not in deck._repr_mimebundle_()["text/html"]
