"""One live picture a cell: running a cell again closes what it made before.

``ipywidgets`` keeps every widget in a table until it is closed, so a notebook that is worked with
would grow without end.
"""

from __future__ import annotations

from typing import Any, Protocol


class Closable(Protocol):
    def close(self) -> None: ...


_made: dict[str, tuple[str, list[Closable]]] = {}  # cell -> (execution, what it made)


def register(widget: Closable, key: str | None = None) -> None:
    """Note what was made; close what the same cell (or ``key``) made in an earlier run.

    Outside a notebook, and without a key, nothing is closed.
    """
    if key is not None:
        cell, execution = f"key:{key}", ""
    else:
        cell, execution = _where()
        if not cell:
            return
    before = _made.get(cell)
    if before is not None and (key is not None or before[0] != execution):
        for old in before[1]:
            old.close()
        before = None
    _made[cell] = (execution, [*(before[1] if before else []), widget])


def forget(widget: Closable) -> None:
    """It is closed."""
    for cell, (_, made) in list(_made.items()):
        if widget in made:
            made.remove(widget)
            if not made:
                del _made[cell]


def _where() -> tuple[str, str]:
    """(cell id, execution id) of the cell that runs now, or empty."""
    try:
        from IPython import get_ipython

        shell: Any = get_ipython()
        parent = shell.get_parent() if shell is not None else {}
        header, metadata = parent.get("header", {}), parent.get("metadata", {})
        return str(metadata.get("cellId") or ""), str(header.get("msg_id", ""))
    except (ImportError, AttributeError):
        return "", ""
