"""A notebook as plain text, for editing and reading in a terminal, and back.

    --- markdown claim
    ## Claim
    ...
    --- code run [nbval-ignore-output]
    print(1)

The notebook stays the source: this is a view of its cells without their outputs.
"""

from __future__ import annotations

import re

import nbformat
from nbformat import NotebookNode

MARK = re.compile(r"^--- (markdown|code) ([a-z0-9_-]+)(?: \[([^\]]*)\])?$", re.MULTILINE)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def to_text(notebook: NotebookNode) -> str:
    """All cells, each under a line that says its kind, id and tags."""
    parts = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        note = f" [{' '.join(tags)}]" if tags else ""
        parts.append(f"--- {cell.cell_type} {cell.id}{note}\n{cell.source.strip()}\n")
    return "\n".join(parts)


def from_text(text: str) -> NotebookNode:
    """Inverse of ``to_text``; nothing is executed.

    Raises:
        ValueError: no cells, or an id that comes twice.
    """
    marks = list(MARK.finditer(text))
    if not marks:
        raise ValueError("no line like '--- code run'.")
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        kind, name, tags = mark.groups()
        body = text[mark.end() : end].strip()
        make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        metadata = {"tags": tags.split()} if tags else {}
        cells.append(make(body, id=name, metadata=metadata))
    ids = [cell.id for cell in cells]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"cell ids that come twice: {', '.join(twice)}.")
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
