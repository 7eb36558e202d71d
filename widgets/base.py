"""The thin shell between a picture and Jupyter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from widgets import registry
from widgets.assets import player_css, player_esm
from widgets.picture import Picture


class TraceWidget(anywidget.AnyWidget):
    """Sends packed traces to the front end, which does all stepping itself.

    Only ``step`` comes back, and only when the reader has come to rest.
    """

    _esm = player_esm()
    _css = player_css()
    mode = traitlets.Unicode("play").tag(sync=True)
    lang = traitlets.Unicode("en").tag(sync=True)
    axis = traitlets.Unicode("iterations").tag(sync=True)
    panels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    series = traitlets.List(traitlets.Dict()).tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, state: dict[str, Any], key: str | None = None) -> None:
        super().__init__(**state)
        registry.register(self, key)

    def close(self) -> None:
        """Close this widget and all that it made (``ipywidgets`` leaves the layout behind)."""
        registry.forget(self)
        if self.comm is None:
            return
        layout = self.layout
        super().close()
        if isinstance(layout, ipywidgets.Layout):
            layout.close()

    def still(self) -> Picture:
        """What it shows now, without a kernel."""
        raise NotImplementedError

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of its own: works from a disk, without a network or a kernel."""
        return self.still().to_html(path)

    def svg(self, theme: str = "light") -> str:
        """Key steps and the whole timeline."""
        return self.still().svg(theme)

    def png(self) -> bytes:
        return self.still().png()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        forms: dict[str, Any] = dict(self.still().bundle())
        if self.comm is not None:
            forms["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        return forms, {}
