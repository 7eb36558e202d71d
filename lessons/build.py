"""Execute lessons and write them back as they are committed.

What is committed is *baked*: outputs that a reader without a kernel can see, and nothing that
changes from run to run (widget state, time stamps, the kernel's name and version).
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from lessons.text import METADATA
from widgets.bake import clean

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
TIMEOUT_S = 240


def lesson_paths() -> list[Path]:
    """Lessons and solutions, in order."""
    return sorted(FOLDER.glob("[0-9]*.ipynb")) + sorted(FOLDER.glob("solutions/[0-9]*.ipynb"))


def execute(path: Path) -> NotebookNode:
    """Run a notebook from the top, in its folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    return bake(run(nbformat.read(path, as_version=4), path.parent))


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells in ``folder``; outputs as they come."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)
    return notebook


def bake(notebook: NotebookNode) -> NotebookNode:
    """Drop what must not be committed."""
    notebook = clean(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "data:image/png" in data.get("text/html", ""):  # it stands in there already
                data.pop("image/png", None)
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream put together: where it was cut is chance."""
    whole: list[NotebookNode] = []
    for output in outputs:
        last = whole[-1] if whole else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            whole.append(output)
    return whole


def write(notebook: NotebookNode, path: Path) -> None:
    nbformat.write(notebook, path)


def build(path: Path) -> None:
    """Execute and write back."""
    write(execute(path), path)
