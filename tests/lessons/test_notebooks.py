"""Lessons and solutions as they are committed: complete, within budget, and reproducible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lessons.build import FOLDER, ROOT, lesson_paths
from lessons.cards import FOLDER as QUESTIONS
from lessons.check import interview_problems, problems

PATHS = lesson_paths()
LESSONS = [path for path in PATHS if path.parent == FOLDER]
NAMES = [str(path.relative_to(FOLDER)) for path in PATHS]


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_nothing_is_wrong_with_it(path: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_it_has_solutions_questions_and_a_place_in_the_index(path: Path) -> None:
    assert (FOLDER / "solutions" / path.name).is_file()
    assert (QUESTIONS / f"{path.stem[:2]}.json").is_file()
    index = nbformat.read(FOLDER / "index.ipynb", as_version=4)
    assert any(f"({path.name})" in cell.source for cell in index.cells)


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_it_opens_from_the_one_before_and_leads_to_the_next(path: Path) -> None:
    number = int(path.stem[:2])
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].source.startswith(f"# {path.stem[:2]} ")
    if number:
        assert f"Lesson {number - 1:02d}" in cells[0].source
    assert cells[-1].source.startswith("**Next:**")


@pytest.mark.parametrize("path", sorted(QUESTIONS.glob("*.json")), ids=lambda path: path.stem)
def test_questions_are_complete_in_both_languages(path: Path) -> None:
    assert interview_problems(path) == []


@pytest.mark.timeout(300)
def test_every_cell_gives_its_committed_output_again() -> None:
    """``pytest --nbval``, strict, as anybody may run it."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"),
        *("--nbval-current-env", "--nbval-sanitize-with", "notebooks/nbval_sanitize.cfg"),
        *(str(path.relative_to(ROOT)) for path in PATHS),
    ]
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:]
