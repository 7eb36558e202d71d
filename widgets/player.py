"""``play(trace)``: step through a run, forward and back; ``compare(...)``: through several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minibatch.trace import Trace
from widgets.base import TraceWidget
from widgets.picture import PANELS, Picture


class Player(TraceWidget):
    """Runs to step through: one, or two to four side by side on one slider.

    Made by ``play`` and ``compare``. Saved in a notebook it is a picture; where scripts run it
    can be stepped through without a kernel.
    """

    def __init__(self, picture: Picture, key: str | None = None) -> None:
        self.picture = picture
        super().__init__(picture.state(), key)

    def still_forms(self) -> dict[str, str]:
        return self.picture.bundle()

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of its own: works from a disk, without a network or a kernel."""
        return self.picture.to_html(path)

    def svg(self, theme: str = "light") -> str:
        """Key steps and the whole timeline."""
        return self.picture.svg(theme)

    def png(self) -> bytes:
        return self.picture.png()

    def __repr__(self) -> str:
        return self.picture.text()


def play(
    trace: Trace,
    *,
    step: int = 0,
    axis: str = "iterations",
    panels: tuple[str, ...] = PANELS,
    lang: str = "en",
    title: str | None = None,
    key: str | None = None,
) -> Player:
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
    return Player(picture, key)


def compare(
    traces: Mapping[str, Trace] | list[Trace],
    *more: Trace,
    axis: str = "iterations",
    panels: tuple[str, ...] = ("timeline", "blocks"),
    lang: str = "en",
    key: str | None = None,
) -> Player:
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
    return Player(picture, key)


def as_engine(thing: Any) -> Any:
    """An engine, or the engine of an ``LLM`` or a simulation."""
    return getattr(thing, "engine", thing)
