"""Four policies, one base. Read ``base.py`` first, then ``unified.py`` (the shortest real one)."""

from __future__ import annotations

from minibatch.config import SchedulerConfig
from minibatch.scheduler.base import Scheduler
from minibatch.scheduler.continuous import ChunkedContinuousScheduler, ContinuousScheduler
from minibatch.scheduler.dynamic import DynamicScheduler
from minibatch.scheduler.output import ScheduledRequest, SchedulerOutput
from minibatch.scheduler.preemption import ForcedPreemption
from minibatch.scheduler.static import StaticScheduler
from minibatch.scheduler.unified import UnifiedScheduler

SCHEDULERS: dict[str, type[Scheduler]] = {
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
    "continuous": ContinuousScheduler,
    "unified": UnifiedScheduler,
}


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler that ``config`` asks for."""
    scheduler = SCHEDULERS[config.policy]
    if scheduler is ContinuousScheduler and config.enable_chunked_prefill:
        scheduler = ChunkedContinuousScheduler
    return scheduler(config)


__all__ = [
    "SCHEDULERS",
    "ChunkedContinuousScheduler",
    "ContinuousScheduler",
    "DynamicScheduler",
    "ForcedPreemption",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerOutput",
    "StaticScheduler",
    "UnifiedScheduler",
    "make_scheduler",
]
