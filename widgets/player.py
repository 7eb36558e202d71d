"""``play(trace)``: step through a run, forward and back; ``compare(...)``: through several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minibatch.trace import Trace
from widgets.picture import PANELS, Picture

if TYPE_CHECKING:
    from widgets.player_widget import Player


class Still:
    """What is shown where anywidget is missing: the saved form of a player, and a word about it.

    Where scripts may run, it can be stepped through all the same.
    """

    def __init__(self, picture: Picture) -> None:
        self.picture = picture

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of its own: works from a disk, without a network or a kernel."""
        return self.picture.to_html(path)

    def svg(self, theme: str = "light") -> str:
        """Key steps and the whole timeline."""
        return self.picture.svg(theme)

    def png(self) -> bytes:
        return self.picture.png()

    def close(self) -> None:
        """There is nothing to close."""

    def __repr__(self) -> str:
        return f"{self.picture.text()}\n{self.picture.words('still.note')}"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        forms = self.picture.bundle()
        forms["text/plain"] = repr(self)
        forms["text/html"] += f"<p>{self.picture.words('still.note')}</p>"
        return forms, {}


def play(
    trace: Trace,
    *,
    step: int = 0,
    axis: str = "iterations",
    panels: tuple[str, ...] = PANELS,
    lang: str = "en",
    title: str | None = None,
    key: str | None = None,
) -> Player | Still:
    """A player of one run.

    Args:
        trace: what was recorded.
        step: where to begin; negative numbers count from the end.
        axis: ``"iterations"`` or ``"ms"``.
        panels: which of ``timeline``, ``queues``, ``blocks``, ``throughput``.
        lang: ``"en"`` or ``"zh"``.
        title: instead of the policy's name.
        key: making a player with the same key again closes the former one (in a notebook the
            cell is key enough).
    """
    if len(trace):
        step = range(len(trace))[step]
    titles = [title] if title else None
    picture = Picture([trace], titles, step=step, axis=axis, panels=panels, lang=lang)
    return _show(picture, key)


def compare(
    traces: Mapping[str, Trace] | list[Trace],
    *more: Trace,
    axis: str = "iterations",
    panels: tuple[str, ...] = ("timeline", "blocks"),
    lang: str = "en",
    key: str | None = None,
) -> Player | Still:
    """Two to four runs on one slider, with totals side by side.

    Args:
        traces: by title, or one after the other. The same requests should have run in each.
        axis: aligned on ``"iterations"`` or on time, ``"ms"``.
        panels: which of ``timeline`` and ``blocks``.
    """
    titles: list[str] | None = None
    if isinstance(traces, Mapping):
        titles, listed = list(traces), [*traces.values(), *more]
    else:
        listed = [*traces, *more] if isinstance(traces, (list, tuple)) else [traces, *more]
    picture = Picture(listed, titles, axis=axis, panels=panels, lang=lang)
    return _show(picture, key)


def _show(picture: Picture, key: str | None) -> Player | Still:
    try:
        from widgets.player_widget import Player
    except ImportError:
        return Still(picture)
    return Player(picture, key)
