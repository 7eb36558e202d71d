"""Time, as the engine sees it: real, or as a cost model says."""

from __future__ import annotations

import time


class SystemClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


class VirtualClock:
    """Stands still until somebody advances it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def advance_to(self, time_s: float) -> None:
        """To ``time_s``, but never back."""
        self.now = max(self.now, time_s)
