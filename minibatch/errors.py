"""Every error that minibatch raises on purpose: one family, so that callers can catch it whole.

Bad input also *is* a ``ValueError``, which is what a caller of a Python library expects.
Each message carries the numbers that collided and the knob that would change the answer.
"""

from __future__ import annotations


class MinibatchError(Exception):
    """Root of the family."""


class ConfigError(MinibatchError, ValueError):
    """A knob of the engine is impossible, alone or together with another knob."""


class CheckpointError(MinibatchError, ValueError):
    """A checkpoint is missing, cut short, or does not match its own config."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound but of an architecture that this engine does not run."""


class InvalidRequestError(MinibatchError, ValueError):
    """A request that is malformed: the engine refuses it at the door, before it queues."""


class InvalidSamplingParamsError(InvalidRequestError):
    """A sampling parameter outside its range."""


class DuplicateRequestError(InvalidRequestError):
    """A request id that a live request already carries."""


class RequestTooLargeError(InvalidRequestError):
    """A request that could never run, however empty the engine: it would block the queue for ever.

    ``needed`` and ``available`` are in the unit that ``knob`` counts (tokens or blocks).
    """

    def __init__(self, message: str, *, needed: int, available: int, knob: str) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.knob = knob


class PreemptionUnsupportedError(MinibatchError, ValueError):
    """Somebody asked a policy that never preempts to preempt."""


class SamplingError(MinibatchError):
    """Logits that no token can be drawn from (NaN, or nothing left that is allowed)."""


class NoProgressError(MinibatchError):
    """The scheduler ran many steps without any request getting nearer to its end (a livelock)."""


class InvariantError(MinibatchError, AssertionError):
    """The engine's own books do not balance. Always a bug of minibatch, never of its user."""


class DeviceMemoryError(MinibatchError):
    """The GPU's memory does not hold what was asked for; the message names the knob to turn."""


class HostMemoryError(MinibatchError):
    """The host's memory does not hold, or does not pin, the pool of swapped KV; the message has the
    numbers and names ``swap_space``.
    """


class EngineClosedError(MinibatchError):
    """The engine was closed; its memory has been given back."""


class TraceFormatError(MinibatchError, ValueError):
    """A file that is not a minibatch trace, or of a newer format version."""
