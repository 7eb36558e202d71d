"""What a scheduler hands to the executor: who runs, how many tokens each, which blocks move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from minibatch.record import Admission, HeldBack, Preemption
from minibatch.request import Request


class ScheduledRequest(NamedTuple):
    """Compute tokens ``[start, start + num_tokens)`` of ``request``.

    A ``padding`` row (static batching) is fed its last token again and the result is thrown
    away; ``num_padding_tokens`` further tokens serve nobody either, but cost as much.
    """

    request: Request
    start: int
    num_tokens: int
    phase: str  # "prefill" | "decode" | "padding"
    num_padding_tokens: int = 0
    slot: int = -1  # its lane, as the step was scheduled

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Its last known token is computed, so the model's output is its next token."""
        return self.phase != "padding" and self.end == self.request.num_tokens


@dataclass
class SchedulerOutput:
    """One step's decisions.

    Block moves are made once each, in the order of ``MOVES``, before the model runs: a block
    freed by a swap may be the target of a copy, and any of them may be written by this step.
    ``moves_made`` lets an interrupted step be executed again.
    """

    MOVES: ClassVar = ("swap_out", "swap_in", "copies")

    step: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device, CPU)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (CPU, device)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (device, device)
    moves_made: int = 0
    admitted: list[Admission] = field(default_factory=list)
    held_back: HeldBack | None = None
    preempted: list[Preemption] = field(default_factory=list)
    swapped_in: dict[str, int] = field(default_factory=dict)
    swapped_out: dict[str, int] = field(default_factory=dict)
    num_batched_tokens: int = 0
    num_padding_tokens: int = 0
    # As they stood once everything was decided:
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    free_blocks: int = 0
    free_cpu_blocks: int = 0
    cached_blocks: int = 0

    def schedule(
        self,
        request: Request,
        num_tokens: int,
        phase: str,
        num_padding_tokens: int = 0,
    ) -> None:
        """Add a row; the request's computed tokens are where it starts."""
        start = request.num_computed_tokens
        self.scheduled.append(
            ScheduledRequest(request, start, num_tokens, phase, num_padding_tokens, request.slot)
        )
        self.num_batched_tokens += num_tokens
        self.num_padding_tokens += num_padding_tokens

    @property
    def is_empty(self) -> bool:
        return not self.scheduled and not self.swap_out and not self.swap_in
