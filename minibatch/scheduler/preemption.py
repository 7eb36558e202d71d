"""Preemption by hand, for tests and lessons: evict these requests at this step, or at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence


class ForcedPreemption:
    """Which running requests to evict before a step is scheduled.

    Args:
        at: step -> ids (those that do not run then are passed over).
        probability: chance of each running request to be evicted, each step.
        seed: of those chances.
        limit: evictions in all, so that a run ends.
    """

    def __init__(
        self,
        at: Mapping[int, Sequence[str]] | None = None,
        *,
        probability: float = 0.0,
        seed: int = 0,
        limit: int = 1000,
    ) -> None:
        self.at = dict(at or {})
        self.probability = probability
        self.random = random.Random(seed)
        self.left = limit

    def victims(self, step: int, running: Sequence[str]) -> list[str]:
        """Ids to evict, the newest first."""
        named = set(self.at.get(step, ()))
        chosen = [
            request_id
            for request_id in reversed(running)
            if request_id in named or (self.probability and self.random.random() < self.probability)
        ][: self.left]
        self.left -= len(chosen)
        return chosen
