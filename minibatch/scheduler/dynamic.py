"""``dynamic``: finished rows leave at once, and their slots are filled again, one step late.

A half-way house between static and continuous batching, and the second strategy of the article
that the lessons audit. Who is in the batch changes, but memory is still reserved up front and in
one piece, for prompt + ``max_tokens`` rounded up to a power of two (Orca's "Pow2").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minibatch.config import SchedulerConfig
from minibatch.request import FinishReason, Request
from minibatch.scheduler.base import Scheduler
from minibatch.scheduler.output import SchedulerOutput


class DynamicScheduler(Scheduler):
    """Prefill steps for newcomers, decode steps for everybody, no paging, no preemption.

    Reads: ``max_num_seqs``, ``max_num_batched_tokens`` (of a prefill step), ``max_model_len``.
    """

    can_preempt = False
    can_share = False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._released = 0  # slots that the last step's finished requests left

    @property
    def max_prompt_tokens(self) -> int:
        return self.config.max_num_batched_tokens

    def max_blocks(self, request: Request) -> int:
        """The reservation; no sequence outgrows ``max_model_len``, so neither need it."""
        power = 1 << (request.max_num_tokens - 1).bit_length()
        return self.block_manager.blocks_for(min(power, self.config.max_model_len))

    def _decide(self, output: SchedulerOutput, now: float) -> None:
        self._admit_waiting(output)
        if output.scheduled:
            return
        for request in self.running:
            output.schedule(request, 1, "decode")

    def _admit_waiting(self, output: SchedulerOutput) -> None:
        """[admit] Newcomers are prefilled in a step of their own."""
        config, blocks = self.config, self.block_manager
        # With nobody left running there is no iteration to be late by.
        late = self._released if self.running else 0
        while self.waiting:
            request = self.waiting[0]
            slots = config.max_num_seqs - len(self.running)
            budget = config.max_num_batched_tokens - output.num_batched_tokens
            if slots - late <= 0:
                reason = "slot_released_late" if slots > 0 else "no_slot"
                self._hold_back(output, request, reason, 1, 0)
                break
            if request.num_tokens > budget:
                self._hold_back(output, request, "no_token_budget", request.num_tokens, budget)
                break
            needed = self.max_blocks(request)
            if not blocks.allocate_contiguous(request, needed):
                self._hold_back(output, request, "no_blocks", needed, blocks.num_free_blocks)
                break
            self._admit(self.waiting.popleft(), output)
            self.running.append(request)
            output.schedule(request, request.num_tokens, "prefill")

    def update(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, int],
        stop: Callable[[Request], FinishReason | None],
    ) -> list[Request]:
        finished = super().update(output, sampled, stop)
        self._released = len(finished)
        return finished
