"""A progress bar with live throughput, in a terminal or a notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Counts finished requests and generated tokens."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._start = time.perf_counter()
        self._tokens = 0

    def update(self, requests: int, tokens: int) -> None:
        self._tokens += tokens
        if self._bar is None:
            return
        elapsed = time.perf_counter() - self._start
        rate = self._tokens / elapsed if elapsed > 0 else 0.0
        self._bar.set_postfix_str(f"{rate:.0f} generated tok/s", refresh=False)
        self._bar.update(requests)


@contextmanager
def progress_bar(total: int, enabled: bool) -> Iterator[Progress]:
    """``total`` requests; does nothing unless ``enabled``."""
    if not enabled:
        yield Progress(None)
        return
    from tqdm.auto import tqdm  # slow to import, and often not wanted

    with tqdm(total=total, desc="Prompts", unit="req", dynamic_ncols=True) as bar:
        yield Progress(bar)
