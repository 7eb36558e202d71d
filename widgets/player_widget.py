"""The player as a widget."""

from __future__ import annotations

from pathlib import Path

from widgets.base import TraceWidget
from widgets.picture import Picture


class Player(TraceWidget):
    """Runs to step through: one, or two to four side by side on one slider.

    Made by ``play`` and ``compare``. Saved in a notebook it is a picture; where scripts run it
    can be stepped through without a kernel.
    """

    def __init__(self, picture: Picture, key: str | None = None) -> None:
        self.picture = picture
        super().__init__(picture.state, key)

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
