"""The front end of the learning aids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import ipywidgets
import traitlets

from widgets import registry
from widgets.assets import learn_css, learn_esm


class LearnWidget(anywidget.AnyWidget):
    """Shows what ``state`` says; hands what the reader does to ``take``."""

    _esm = learn_esm()
    _css = learn_css()
    kind = traitlets.Unicode().tag(sync=True)
    state = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, kind: str, state: str, take: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(kind=kind, state=state)
        self._take = take
        registry.register(self)

    def close(self) -> None:
        registry.forget(self)
        if self.comm is None:
            return
        layout = self.layout
        super().close()
        if isinstance(layout, ipywidgets.Layout):
            layout.close()

    def _handle_custom_msg(self, content: dict[str, Any], buffers: list[Any]) -> None:
        self._take(content)
