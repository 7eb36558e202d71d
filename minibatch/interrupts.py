"""Ctrl-C, held back for the moment in which the books are being written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Deliver a SIGINT that comes inside the block at its end.

    Deciding a step and taking its results are short, and half done they would leave a request in
    two queues. Running the model is long, and may be interrupted, since it can be run again.
    Python delivers signals to the main thread only, so elsewhere there is nothing to hold back.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
