"""Whoever turns decisions into tokens: a torch model, or a cost model on a virtual clock."""

from __future__ import annotations

from minibatch.executor.base import Executor, SampledToken

__all__ = ["Executor", "SampledToken"]
