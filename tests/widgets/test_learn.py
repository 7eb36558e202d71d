"""Guesses, quizzes, cards: all pass unanswered."""

from __future__ import annotations

import pytest

import widgets


def bundle(thing: object) -> dict:
    return thing._repr_mimebundle_()[0]  # type: ignore[attr-defined]


def test_without_a_guess_everything_still_runs() -> None:
    guess = widgets.predict("How many iterations?", unit="iterations")
    assert repr(guess) == "How many iterations? no prediction yet"
    verdict = guess.check(26)
    assert verdict.right is None and verdict.off is None
    assert repr(verdict) == "no prediction was made; it came to 26 iterations"


def test_a_guess_is_put_beside_the_result() -> None:
    guess = widgets.predict("How many iterations?", unit="iterations", guess=25)
    assert guess.check(26).right is True
    verdict = guess.check(50)
    assert verdict.right is False and verdict.off == 0.5
    assert repr(verdict) == "you said 25 iterations, and it came to 50 iterations"
    assert "width:150px" in verdict._repr_html_()


def test_a_choice_must_be_one_of_those_offered() -> None:
    guess = widgets.predict("Who is evicted?", ["oldest", "newest"])
    with pytest.raises(ValueError, match="oldest, newest"):
        guess.set("largest")
    assert guess.set("newest").check("newest").right is True
    with pytest.raises(ValueError, match="actual"):
        guess.check("nobody")


def test_a_guess_made_by_hand_arrives() -> None:
    guess = widgets.predict("How many?")
    guess._take({"kind": "guess", "value": 7})
    assert guess.guess == 7


def test_a_quiz_counts() -> None:
    made = widgets.quiz(
        [
            ("What limits decode?", ("FLOPs", "bandwidth"), 1, "Weights are read each step."),
            widgets.Question("2 + 2?", ("4", "5"), 0),
        ]
    )
    assert repr(made) == "0 right of 0 answered, 2 questions"
    assert made.answer(0, 1) is True
    made._take({"kind": "answer", "number": 1, "choice": 1})
    assert made.score == (1, 2)
    with pytest.raises(ValueError, match="answer=2"):
        widgets.Question("?", ("a",), 2)


def test_static_forms_need_no_script() -> None:
    html = bundle(widgets.quiz([("A < B?", ("yes", "no"), 0, "Because.")]))["text/html"]
    assert "<details>" in html and "A &lt; B?" in html and "<script" not in html
    cards = bundle(widgets.flashcards({"TTFT": "time to first token"}))
    assert cards["text/plain"] == "1 flash cards"
    assert "<summary>TTFT</summary>time to first token" in cards["text/html"]


def test_showing_again_closes_the_former_widget() -> None:
    pytest.importorskip("anywidget")
    from ipywidgets.widgets import widget

    cards = widgets.flashcards([("a", "b")])
    bundle(cards)
    count = len(widget._instances)
    for _ in range(5):
        bundle(cards)
    assert len(widget._instances) == count
    cards._widget.close()
    assert len(widget._instances) < count


@pytest.mark.browser
def test_they_work_in_a_browser(browser, tmp_path) -> None:  # noqa: ANN001
    import json

    from widgets.assets import learn_css, learn_esm
    from widgets.learn import _texts
    from widgets.words import Words

    texts = _texts(Words("en"))
    states = {
        "predict": {"text": "How many?", "choices": [], "unit": "steps", "words": texts},
        "quiz": {
            "questions": [{"text": "Q", "choices": ["x", "y"], "answer": 1, "why": "So."}],
            "words": texts,
        },
        "cards": {"cards": [{"front": "F", "back": "B"}], "words": texts},
    }
    page = browser.new_page()
    script = learn_esm().replace("export default { render };", "window.render = render;")
    path = tmp_path / "learn.html"
    path.write_text(
        f"<!DOCTYPE html><style>{learn_css()}</style><body><script>{script}</script>"
        f"<script>window.sent = []; for (const [kind, state] of Object.entries({json.dumps(states)}"
        ")) { const el = document.createElement('div'); el.id = kind; document.body.append(el);"
        " render({ el, model: { get: (n) => n === 'kind' ? kind : JSON.stringify(state),"
        " send: (m) => sent.push(m) } }); }</script>",
        encoding="utf-8",
    )
    page.goto(path.as_uri())
    page.fill("#predict input", "19")
    page.press("#predict input", "Enter")
    assert page.text_content("#predict output") == "noted: 19 steps"
    page.click("#quiz .mb-choice >> nth=0")
    assert page.text_content("#quiz output") == "Not so. So."
    assert page.text_content("#cards .mb-face") == "F"
    page.click("#cards button >> nth=0")
    assert page.text_content("#cards .mb-face") == "B"
    page.click("#cards button >> nth=2")
    assert "All known" in page.text_content("#cards .mb-face")
    assert page.evaluate("() => sent") == [
        {"kind": "guess", "value": 19},
        {"kind": "answer", "number": 0, "choice": 0},
    ]
    page.close()
