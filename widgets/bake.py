"""Run notebooks, and save them so that they show without a kernel.

    python -m widgets.bake notebooks/*.ipynb            run and save
    python -m widgets.bake --check notebooks/*.ipynb    only look; exit 1 if something is wrong

A baked notebook holds every output's text, HTML and PNG, but no widget state, no widget views, no
time stamps and nothing of the machine that ran it. Live pictures that a reader makes by running
cells are not affected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
LARGEST = 150_000
LONGEST_TEXT = 2_000
UNWANTED = re.compile(r"application/vnd\.plotly")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")


def clean(notebook: dict[str, Any]) -> dict[str, Any]:
    """Take out what must not be saved. In place; returns the notebook."""
    metadata = notebook.setdefault("metadata", {})
    metadata.pop("widgets", None)
    language = metadata.get("language_info", {})
    metadata["language_info"] = {"name": language.get("name", "python")}
    kernel = metadata.get("kernelspec", {})
    metadata["kernelspec"] = {
        "display_name": kernel.get("display_name", "Python 3"),
        "language": "python",
        "name": kernel.get("name", "python3"),
    }
    for cell in notebook["cells"]:
        cell.get("metadata", {}).pop("execution", None)
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(VIEW, None)
    return notebook


def problems(notebook: dict[str, Any], size: int) -> list[str]:
    """What is wrong with a notebook that is to be committed."""
    found: list[str] = []
    if size > LARGEST:
        found.append(f"{size:,} bytes, more than {LARGEST:,}")
    if "widgets" in notebook.get("metadata", {}):
        found.append("metadata.widgets is saved")
    for number, cell in enumerate(notebook.get("cells", ())):
        for output in cell.get("outputs", ()):
            found += [f"cell {number}: {text}" for text in _output_problems(output)]
        if cell.get("metadata", {}).get("execution"):
            found.append(f"cell {number}: time stamps are saved")
    return found


def _output_problems(output: dict[str, Any]) -> list[str]:
    data = output.get("data", {})
    found = [f"{kind} is saved" for kind in data if kind == VIEW or UNWANTED.match(kind)]
    text = _joined(data.get("text/plain", output.get("text", "")))
    if len(text) > LONGEST_TEXT:
        found.append(f"{len(text):,} characters of text")
    if ADDRESS.search(text):
        found.append("an address in memory is printed")
    if output.get("name") == "stderr":
        found.append("something was written to stderr")
    return found


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def run(path: Path, timeout: int = 120) -> dict[str, Any]:
    """Execute a notebook in its own folder; returns it, cleaned."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}}
    )
    here = str(Path(__file__).resolve().parents[1])  # also where the package is not installed
    search = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    client.execute(env={**os.environ, "PYTHONPATH": search})
    return clean(notebook)


def write(path: Path, notebook: dict[str, Any]) -> None:
    text = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m widgets.bake", description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="do not run, only look")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a cell (default: 120)")
    args = parser.parse_args(arguments)
    wrong = 0
    for path in args.notebooks:
        if not args.check:
            write(path, run(path, args.timeout))
        text = path.read_text(encoding="utf-8")
        found = problems(json.loads(text), len(text.encode()))
        wrong += len(found)
        print(f"{path}: {len(text) / 1024:.0f} KB" + "".join(f"\n    {one}" for one in found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
