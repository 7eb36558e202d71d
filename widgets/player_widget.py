"""The player as a widget."""

from __future__ import annotations

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

    def still(self) -> Picture:
        return self.picture

    def __repr__(self) -> str:
        return self.picture.text()
