"""Whose time was it? Wall time, own CPU time, and CPU time that other processes took meanwhile.

Two threads that wait for each other collapse when another process takes one of the cores, so a
timing means something only beside this figure. Linux only; elsewhere ``foreign`` is None.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.05  # cores' time that others may take, as a share, before a run is called disturbed


@dataclass(frozen=True)
class Span:
    """Seconds. ``foreign`` is the share of all cores' time that went to other processes."""

    wall_s: float
    cpu_s: float
    foreign: float | None

    @property
    def quiet(self) -> bool:
        return self.foreign is not None and self.foreign < QUIET


class Stopwatch:
    """``with Stopwatch() as watch: ...`` and then ``watch.span``. Children that have ended count
    as own time.
    """

    span: Span

    def __enter__(self) -> Stopwatch:
        self._busy, self._own, self._wall = busy_seconds(), own_seconds(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        wall = time.perf_counter() - self._wall
        own = own_seconds() - self._own
        foreign = None
        busy = busy_seconds()
        if busy is not None and self._busy is not None:
            others = busy - self._busy - own
            share = others / (wall * (os.cpu_count() or 1))
            foreign = min(1.0, max(0.0, share))  # the system counts in ticks of 10 ms
        self.span = Span(wall, own, foreign)


def wait_for_quiet(limit_s: float) -> None:
    """Return once others leave the cores alone for a second, or after ``limit_s``."""
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        with Stopwatch() as watch:
            time.sleep(1.0)
        if watch.span.foreign is None or watch.span.foreign < QUIET:
            return


def own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def busy_seconds() -> float | None:
    """CPU seconds that all processes have used since boot, and those that the host took away."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
