"""Pictures of runs, drawn from their records and nothing else.

    import widgets
    widgets.play(trace)                       # step through a run, forward and back
    widgets.compare({"static": a, "continuous": b})
    run = widgets.live(engine)                # watch a run; buttons to step, pause, evict, add
    widgets.timeline_svg(trace)               # a picture without a kernel

Reading order: ``names``, ``blocks``, ``replay`` (records to states), ``view`` and ``sentences``
(what a step is), ``columns`` and ``codec`` (what the browser gets), ``static/*.js`` (what it
draws).
Names are loaded when they are first used: views and static pictures need neither torch nor
Jupyter.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from widgets.view import View, view

_HOMES = {
    "play": "widgets.player",
    "Player": "widgets.player_widget",
    "compare": "widgets.player",
    "live": "widgets.live_widget",
    "Live": "widgets.live_widget",
    "predict": "widgets.learn",
    "quiz": "widgets.learn",
    "flashcards": "widgets.learn",
    "Question": "widgets.learn",
    "Card": "widgets.learn",
    "Chart": "widgets.charts",
    "tokens_over_time": "widgets.charts",
    "latency_cdf": "widgets.charts",
    "timeline_svg": "widgets.static",
    "film_strip_svg": "widgets.static",
    "png": "widgets.static",
    "alt_text": "widgets.static",
    "data_table": "widgets.static",
}

__all__ = [
    "Card",
    "Chart",
    "Live",
    "Player",
    "Question",
    "View",
    "alt_text",
    "compare",
    "data_table",
    "film_strip_svg",
    "flashcards",
    "latency_cdf",
    "live",
    "play",
    "png",
    "predict",
    "quiz",
    "timeline_svg",
    "tokens_over_time",
    "view",
]

if TYPE_CHECKING:
    from widgets.charts import Chart, latency_cdf, tokens_over_time
    from widgets.learn import Card, Question, flashcards, predict, quiz
    from widgets.live_widget import Live, live
    from widgets.player import compare, play
    from widgets.player_widget import Player
    from widgets.static import alt_text, data_table, film_strip_svg, png, timeline_svg


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'widgets' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
