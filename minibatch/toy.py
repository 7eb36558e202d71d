"""Static and continuous batching, in fifteen lines without an engine.

Requests are only numbers here: how many iterations each one takes. Everything else (prompts,
memory, time) is left out, and the difference between the two ways of batching is still there.
The real schedulers must agree with these functions step for step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def static(requests: Sequence[int], slots: int) -> tuple[int, int]:
    """Fill the slots, run until the longest is done, start again.

    Returns:
        (iterations, slot-iterations in which a slot did useful work).
    """
    batches = [requests[i : i + slots] for i in range(0, len(requests), slots)]
    return sum(max(batch) for batch in batches), sum(requests)


def continuous(requests: Sequence[int], slots: int) -> tuple[int, int]:
    """Refill a slot in the iteration after it came free.

    Returns:
        (iterations, slot-iterations in which a slot did useful work).
    """
    waiting, running, steps, busy = deque(requests), [], 0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.popleft())
        steps, busy = steps + 1, busy + len(running)
        running = [left - 1 for left in running if left > 1]
    return steps, busy


def utilization(result: tuple[int, int], slots: int) -> float:
    """The share of slot-iterations that did useful work."""
    steps, busy = result
    return busy / (steps * slots)
