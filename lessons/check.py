"""What a lesson must keep: its skeleton, its budgets, and that every number was shown.

Nothing is executed here; ``pytest --nbval`` does that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import nbformat
from nbformat import NotebookNode

from lessons import cards

HEADINGS = (
    "Claim",
    "Question",
    "Predict",
    "Run",
    "Look",
    "Explain",
    "Compare",
    "Exercise",
    "Break it",
    "Interview answer",
    "Limits",
)
WHOLE_LESSON = ("", "Claim", "Question", "Limits")
MOST_CELLS = 45
MOST_WORDS = 1400
MOST_WORDS_A_CELL = 60
MOST_LINES_A_CELL = 25
MOST_MEDIAN_LINES = 6
MOST_BYTES = 150 * 1024
MOST_PLAIN = 2048
MOST_STREAM = 4096
MOST_ANSWER_WORDS = 150  # that one can say in a minute
MOST_ANSWER_CHARACTERS = 300  # of Chinese

IGNORED = "nbval-ignore-output"
PLOTLY = "application/vnd.plotly.v1+json"
CLOCKS = re.compile(r"perf_counter|monotonic\(|time\.time\(|%%?time|datetime\.now")
# A number that stands for itself. Not the digits of a name (H100, V1, Llama-2-7B), of a version,
# of a lesson (00 to 12), nor in a link.
NUMBER = re.compile(r"(?<![\w.\-/#])(\d[\d,]*(?:\.\d+)?)(?=x\b|%|\b)(?![\-]?[A-WYZa-wyz_])(?!\.\d)")
NAMES = re.compile(
    r"\[[^\]]*\]\([^)]*\)"  # links
    r"|vLLM\s+0\.\d+(?:\.\d+)?|\b0\.26(?:\.0)?\b|\b0\.6\.0\b"  # versions
    r"|\b[01]\d\b(?=[\s_,.:)'’]|$)(?<=\b0\d)"  # lessons
    r"|\b(?:19|20)\d\d\b"  # years
)

WORDS = {
    **{"four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"},
    **{"ten": "10", "eleven": "11", "twelve": "12", "fifteen": "15", "twenty": "20"},
}


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a notebook, a line each; lessons are checked in full."""
    notebook = nbformat.read(path, as_version=4)
    found = [*clean(notebook), *size(path)]
    if path.parent.name != "solutions":
        found += [*skeleton(notebook), *budgets(notebook), *numbers(notebook)]
    return [f"{path.name}: {problem}" for problem in found]


def size(path: Path) -> Iterator[str]:
    if path.stat().st_size > MOST_BYTES:
        yield f"{path.stat().st_size / 1024:.0f} KB, at most {MOST_BYTES // 1024} KB"


def skeleton(notebook: NotebookNode) -> Iterator[str]:
    """The same headings in every lesson, in order."""
    found = [
        match.group(1).strip()
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for match in re.finditer(r"^## (.+)$", cell.source, re.MULTILINE)
    ]
    if found != list(HEADINGS):
        yield f"headings are {', '.join(found)}; expected {', '.join(HEADINGS)}"


def budgets(notebook: NotebookNode) -> Iterator[str]:
    """Cells, words and lines."""
    cells = notebook.cells
    if len(cells) > MOST_CELLS:
        yield f"{len(cells)} cells, at most {MOST_CELLS}"
    words = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            count = len(cell.source.split())
            words += count
            if count > MOST_WORDS_A_CELL:
                yield f"cell {cell.id}: {count} words, at most {MOST_WORDS_A_CELL}"
    if words > MOST_WORDS:
        yield f"{words} words, at most {MOST_WORDS}"
    lines = [len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code"]
    if lines and max(lines) > MOST_LINES_A_CELL:
        yield f"a code cell of {max(lines)} lines, at most {MOST_LINES_A_CELL}"
    if lines and median(lines) > MOST_MEDIAN_LINES:
        yield f"code cells of {median(lines)} lines (median), at most {MOST_MEDIAN_LINES}"


def clean(notebook: NotebookNode) -> Iterator[str]:
    """Executed from the top, and nothing in it that should not be committed."""
    if "widgets" in notebook.metadata:
        yield "widget state in its metadata"
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code" and c.source]
    if counts != list(range(1, len(counts) + 1)):
        yield "not executed from top to bottom; run `python -m lessons build`"
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if set(cell.metadata) - {"tags"}:
            yield f"cell {cell.id}: metadata {', '.join(sorted(set(cell.metadata) - {'tags'}))}"
        tags = cell.metadata.get("tags", [])
        if IGNORED not in tags and CLOCKS.search(cell.source):
            yield f"cell {cell.id}: reads a clock, but its output is checked"
        for output in cell.outputs:
            yield from _clean_output(cell.id, output, tags)


def _clean_output(name: str, output: NotebookNode, tags: list[str]) -> Iterator[str]:
    if output.output_type == "error" and "raises-exception" not in tags:
        yield f"cell {name}: {output.ename}"
    if output.output_type == "stream":
        if output.name == "stderr":
            yield f"cell {name}: writes to stderr"
        if len(output.text) > MOST_STREAM:
            yield f"cell {name}: prints {len(output.text)} characters, at most {MOST_STREAM}"
    data = output.get("data", {})
    if PLOTLY in data:
        yield f"cell {name}: a plotly figure, which is blank without plotly's script"
    plain = data.get("text/plain", "")
    if len(plain.encode()) > MOST_PLAIN:
        yield f"cell {name}: {len(plain.encode())} bytes of text/plain, at most {MOST_PLAIN}"
    if re.search(r"\bat 0x[0-9a-f]{6,}", plain):
        yield f"cell {name}: a memory address in its text/plain"


# -- numbers ------------------------------------------------------------------------------------


def numbers_in(text: str) -> set[str]:
    """The numbers of a text, as they compare: without thousands' commas and trailing zeros.

    Also those in words, from four on; smaller ones mostly count the parts of a thought.
    """
    bare = NAMES.sub(" ", text)
    words = {WORDS[word] for word in re.findall(r"[a-z]+", bare.lower()) if word in WORDS}
    return {_plain(match) for match in NUMBER.findall(bare)} | words


def printed_numbers(cells: Iterable[NotebookNode]) -> set[str]:
    """All numbers that cells printed, but for what was rendered from prose (tag ``cards``)."""
    texts: list[str] = []
    for cell in cells:
        if cell.cell_type != "code" or "cards" in cell.metadata.get("tags", []):
            continue
        for output in cell.outputs:
            texts += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return {_plain(n) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", "\n".join(texts))}


def numbers(notebook: NotebookNode) -> Iterator[str]:
    """Every number in prose was printed by a cell: of the same section or of one beside it, but
    for sections that speak of the whole lesson.
    """
    parts = _sections(notebook)
    everywhere = printed_numbers(notebook.cells)
    for index, (heading, cells) in enumerate(parts):
        beside = [cell for _, part in parts[max(0, index - 1) : index + 2] for cell in part]
        near = everywhere if heading in WHOLE_LESSON else printed_numbers(beside)
        for cell in cells:
            if cell.cell_type != "markdown":
                continue
            for number in sorted(numbers_in(cell.source) - near):
                where = "no cell near it" if number in everywhere else "no cell"
                yield f"cell {cell.id}: {number} is printed by {where}"


def _sections(notebook: NotebookNode) -> list[tuple[str, list[NotebookNode]]]:
    parts: list[tuple[str, list[NotebookNode]]] = [("", [])]
    for cell in notebook.cells:
        match = re.match(r"## (.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and match:
            parts.append((match.group(1).strip(), []))
        parts[-1][1].append(cell)
    return parts


def _plain(number: str) -> str:
    number = number.replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


# -- interview questions --------------------------------------------------------------------------


def interview_problems(path: Path) -> list[str]:
    """Everything that is wrong with a file of questions."""
    found: list[str] = []
    for entry in json.loads(path.read_text(encoding="utf-8"))["questions"]:
        found += [f"{path.name}, {entry['id']}: {p}" for p in _entry_problems(entry)]
    return found


def _entry_problems(entry: dict[str, Any]) -> Iterator[str]:
    for part in cards.PARTS:
        texts = entry.get(part, {})
        for lang in cards.LANGUAGES:
            text = texts.get(lang, "")
            if not text.strip():
                yield f"{part} has no {lang}"
            bare = re.sub(r"\{\w+\}", "", text)
            for number in sorted(numbers_in(bare)):
                yield f"{part} ({lang}): {number} is not a named value"
        if cards.names_in(texts.get("en", "")) != cards.names_in(texts.get("zh", "")):
            yield f"{part}: English and Chinese name different values"
    if len(entry["answer"]["en"].split()) > MOST_ANSWER_WORDS:
        yield "answer (en): longer than a minute"
    if len(re.sub(r"\{\w+\}", "00", entry["answer"]["zh"])) > MOST_ANSWER_CHARACTERS:
        yield "answer (zh): longer than a minute"
