"""The checker finds what it should, and the baker and the text format lose nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from lessons import check
from lessons.__main__ import main
from lessons.build import bake, write
from lessons.text import METADATA, from_text, to_text
from widgets.bake import VIEW


@pytest.fixture
def lesson() -> NotebookNode:
    """The smallest lesson without a fault."""
    cells = [nbformat.v4.new_markdown_cell("# 07 A lesson\n\nLesson 06 ended badly.")]
    for number, heading in enumerate(check.HEADINGS):
        cells.append(nbformat.v4.new_markdown_cell(f"## {heading}\n\nIt takes 12 steps, not 21."))
        cells.append(nbformat.v4.new_code_cell(f"tell({number})"))
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    for count, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = count
    for cell in code_cells(notebook):
        cell.outputs = [nbformat.v4.new_output("stream", text="12 iterations and 21\n")]
    return notebook


def code_cells(notebook: NotebookNode) -> Iterator[NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def found(lesson: NotebookNode, folder: Path) -> list[str]:
    path = folder / "07_lesson.ipynb"
    write(lesson, path)
    return check.problems(path)


def test_a_sound_lesson_has_no_problems(lesson: NotebookNode, tmp_path: Path) -> None:
    assert found(lesson, tmp_path) == []


def plant_number(lesson: NotebookNode) -> None:
    lesson.cells[1].source += " That is 1.75x faster."


def plant_far_number(lesson: NotebookNode) -> None:
    """Printed under Predict, told under Compare."""
    by_heading = {cell.source.split("\n")[0]: n for n, cell in enumerate(lesson.cells)}
    lesson.cells[by_heading["## Predict"] + 1].outputs[0].text += "33\n"
    lesson.cells[by_heading["## Compare"]].source += " It takes 33."


def plant_words(lesson: NotebookNode) -> None:
    lesson.cells[1].source += " word" * 60


def plant_lines(lesson: NotebookNode) -> None:
    next(code_cells(lesson)).source = "x = 1\n" * 26


def plant_cells(lesson: NotebookNode) -> None:
    lesson.cells += [nbformat.v4.new_markdown_cell("More.") for _ in range(30)]


def plant_heading(lesson: NotebookNode) -> None:
    lesson.cells[1].source, lesson.cells[3].source = lesson.cells[3].source, lesson.cells[1].source


def plant_state(lesson: NotebookNode) -> None:
    lesson.metadata["widgets"] = {}


def plant_weight(lesson: NotebookNode) -> None:
    output = nbformat.v4.new_output("display_data", {"text/html": "x" * 200_000})
    next(code_cells(lesson)).outputs.append(output)


def plant_plotly(lesson: NotebookNode) -> None:
    output = nbformat.v4.new_output("display_data", {check.PLOTLY: {}, "text/plain": "Figure"})
    next(code_cells(lesson)).outputs.append(output)


def plant_long_text(lesson: NotebookNode) -> None:
    output = nbformat.v4.new_output("display_data", {"text/plain": "x" * 3000})
    next(code_cells(lesson)).outputs.append(output)


def plant_address(lesson: NotebookNode) -> None:
    output = nbformat.v4.new_output("display_data", {"text/plain": "<object at 0x7f12ab34cd>"})
    next(code_cells(lesson)).outputs.append(output)


def plant_error(lesson: NotebookNode) -> None:
    next(code_cells(lesson)).outputs.append(nbformat.v4.new_output("error", ename="KeyError"))


def plant_stderr(lesson: NotebookNode) -> None:
    output = nbformat.v4.new_output("stream", name="stderr", text="warning")
    next(code_cells(lesson)).outputs.append(output)


def plant_clock(lesson: NotebookNode) -> None:
    next(code_cells(lesson)).source = "start = time.perf_counter()"


def plant_unexecuted(lesson: NotebookNode) -> None:
    next(code_cells(lesson)).execution_count = None


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (plant_number, "1.75 is printed by no cell"),
        (plant_far_number, "33 is printed by no cell near it"),
        (plant_words, "words, at most 60"),
        (plant_lines, "26 lines, at most 25"),
        (plant_cells, "cells, at most 45"),
        (plant_heading, "headings are Question, Claim"),
        (plant_state, "widget state"),
        (plant_weight, "KB, at most 150 KB"),
        (plant_plotly, "plotly"),
        (plant_long_text, "3000 bytes of text/plain"),
        (plant_address, "memory address"),
        (plant_error, "KeyError"),
        (plant_stderr, "stderr"),
        (plant_clock, "reads a clock"),
        (plant_unexecuted, "not executed"),
    ],
)
def test_a_planted_fault_is_found(
    lesson: NotebookNode, tmp_path: Path, plant: object, told: str
) -> None:
    plant(lesson)  # type: ignore[operator]
    assert any(told in problem for problem in found(lesson, tmp_path))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("takes 12 iterations, 1.75x, 43% and 4,000 slots.", {"12", "1.75", "43", "4000"}),
        ("14 % of 512 KiB; 0.50 is 0.5", {"14", "512", "0.5"}),
        ("Eight requests, two queues, three ways, ninety", {"8"}),
        ("an H100, a V1, fp16, SmolLM2-135M, Llama-2-7B, int4", set()),
        ("vLLM 0.6.0 and 0.26.0; Kwon et al. 2023", set()),
        ("see lesson 02, and [step 7](http://x/99)", set()),
    ],
)
def test_which_numbers_need_evidence(text: str, numbers: set[str]) -> None:
    assert check.numbers_in(text) == numbers


def test_numbers_of_rendered_cards_are_no_evidence(lesson: NotebookNode, tmp_path: Path) -> None:
    plant_number(lesson)
    last = list(code_cells(lesson))[-1]
    last.outputs = [nbformat.v4.new_output("display_data", {"text/plain": "1.75"})]
    assert found(lesson, tmp_path) == []
    last.metadata["tags"] = ["cards"]
    assert found(lesson, tmp_path) != []


def test_baking_drops_what_changes_and_keeps_what_is_seen() -> None:
    cell = nbformat.v4.new_code_cell("x", metadata={"tags": ["stub"], "execution": {"a": "1"}})
    data = {VIEW: {}, "text/plain": "widget", "text/html": "<b>seen</b>"}
    cell.outputs = [nbformat.v4.new_output("display_data", data)]
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}, "papermill": 1})
    baked = bake(notebook)
    assert baked.metadata == METADATA
    assert baked.cells[0].metadata == {"tags": ["stub"]}
    assert set(baked.cells[0].outputs[0].data) == {"text/plain", "text/html"}


def test_a_picture_is_not_saved_twice() -> None:
    cell = nbformat.v4.new_code_cell("x")
    html = '<img src="data:image/png;base64,AAAA"/>'
    data = {"text/plain": "p", "text/html": html, "image/png": "AAAA"}
    cell.outputs = [nbformat.v4.new_output("display_data", data)]
    baked = bake(nbformat.v4.new_notebook(cells=[cell]))
    assert set(baked.cells[0].outputs[0].data) == {"text/plain", "text/html"}


def test_text_and_back() -> None:
    text = "--- markdown about\n# Title\n\nWords.\n\n--- code run [stub cards]\nprint(1)\n"
    notebook = from_text(text)
    assert [cell.id for cell in notebook.cells] == ["about", "run"]
    assert notebook.cells[1].metadata.tags == ["stub", "cards"]
    assert to_text(notebook) == text


def test_text_without_cells_or_with_an_id_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="no line"):
        from_text("print(1)")
    with pytest.raises(ValueError, match="twice: run"):
        from_text("--- code run\n1\n--- code run\n2\n")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "lesson.txt"
    source.write_text("--- markdown about\n# Title\n\n--- code run\nprint(1)\n")
    notebook = tmp_path / "07_lesson.ipynb"
    assert main(["read", str(source), str(notebook)]) == 0
    assert main(["text", str(notebook)]) == 0
    assert "--- code run\nprint(1)" in capsys.readouterr().out
    assert main(["check", str(notebook)]) == 1
    told = capsys.readouterr()
    assert "headings are ; expected Claim" in told.err
    assert "1 notebooks" in told.out
