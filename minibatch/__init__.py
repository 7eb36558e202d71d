"""minibatch: a continuous-batching LLM engine to read, run and watch.

    from minibatch import LLM, SamplingParams

Names are loaded when they are first used, so that what needs no torch starts in a blink.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "minibatch.llm",
    "SamplingParams": "minibatch.sampling_params",
    "Engine": "minibatch.engine",
    "EngineConfig": "minibatch.config",
    "SchedulerConfig": "minibatch.config",
    "PreemptionMode": "minibatch.config",
    "RequestOutput": "minibatch.outputs",
    "CompletionOutput": "minibatch.outputs",
    "StepRecord": "minibatch.record",
    "Trace": "minibatch.trace",
    "simulate": "minibatch.simulation",
    "ForcedPreemption": "minibatch.scheduler",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from minibatch.config import EngineConfig, PreemptionMode, SchedulerConfig
    from minibatch.engine import Engine
    from minibatch.llm import LLM
    from minibatch.outputs import CompletionOutput, RequestOutput
    from minibatch.record import StepRecord
    from minibatch.sampling_params import SamplingParams
    from minibatch.scheduler import ForcedPreemption
    from minibatch.simulation import simulate
    from minibatch.trace import Trace


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minibatch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
