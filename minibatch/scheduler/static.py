"""``static``: a batch is filled, and nobody enters or leaves until its longest member ends.

The way of ordinary model servers, and the baseline of every lesson. Its two wastes are really
computed, so that they can be measured: prompts are padded to the longest one in the batch, and
a finished row goes through the model again and again until the batch is done. KV is reserved
for ``max_model_len`` tokens a row, in one piece (Orca's "Max").
"""

from __future__ import annotations

from collections.abc import Iterable

from minibatch.config import SchedulerConfig
from minibatch.request import FinishReason, Request, RequestStatus
from minibatch.scheduler.base import Scheduler
from minibatch.scheduler.output import SchedulerOutput


class StaticScheduler(Scheduler):
    """One batch at a time.

    Reads: ``max_num_seqs`` (rows), ``max_num_batched_tokens`` (rows x longest prompt),
    ``max_model_len`` (the reservation), ``max_wait`` (with it, the request-level "dynamic
    batching" of model servers: a batch starts when it is full or its oldest request has waited
    that long).
    """

    can_preempt = False
    can_share = False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.batch: list[Request] = []  # its finished members included

    @property
    def max_prompt_tokens(self) -> int:
        return self.config.max_num_batched_tokens

    def max_blocks(self, request: Request) -> int:
        return self.block_manager.blocks_for(self.config.max_model_len)

    def wake_time(self, now: float) -> float:
        full = len(self.waiting) >= self.config.max_num_seqs
        if self.batch or not self.waiting or full:
            return now
        return max(now, self.waiting[0].arrival_s + self.config.max_wait)

    def _decide(self, output: SchedulerOutput, now: float) -> None:
        if self.batch:
            self._decode_batch(output)
        elif self.wake_time(now) > now:
            seqs = self.config.max_num_seqs
            self._hold_back(output, self.waiting[0], "batch_filling", seqs, len(self.waiting))
        else:
            self._fill_batch(output)

    def _fill_batch(self, output: SchedulerOutput) -> None:
        """[admit] Everybody computes as many tokens as the longest prompt has."""
        config = self.config
        longest = 0
        while self.waiting:
            request = self.waiting[0]
            width = max(longest, request.num_tokens)
            tokens = width * (len(self.batch) + 1)
            if len(self.batch) >= config.max_num_seqs:
                self._hold_back(output, request, "no_slot", 1, 0)
                break
            if tokens > config.max_num_batched_tokens:
                budget = config.max_num_batched_tokens
                self._hold_back(output, request, "no_token_budget", tokens, budget)
                break
            needed = self.max_blocks(request)
            if not self.block_manager.allocate_contiguous(request, needed):
                free = self.block_manager.num_free_blocks
                self._hold_back(output, request, "no_blocks", needed, free)
                break
            self._admit(self.waiting.popleft(), output)
            self.running.append(request)
            self.batch.append(request)
            longest = width
        for request in self.batch:
            padding = longest - request.num_tokens
            output.schedule(request, request.num_tokens, "prefill", padding)

    def _decode_batch(self, output: SchedulerOutput) -> None:
        """[decode] A row each, also for those who are done."""
        if self.waiting:
            left = len(self.running)
            self._hold_back(output, self.waiting[0], "batch_not_drained", left, 0)
        for request in self.batch:
            if request.status is RequestStatus.RUNNING:
                output.schedule(request, 1, "decode")
            else:
                output.schedule(request, 0, "padding", num_padding_tokens=1)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """[finish] The answer is ready, but row and reservation stay until the batch is done."""
        if request not in self.batch:
            super()._finish(request, reason)
            return
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        # Its row is fed its last token again. (After an error that token has its KV already.)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self.running.remove(request)
        del self.requests[request.request_id]
        if not self.running:
            for member in self.batch:
                self._leave_lane(member)
                self.block_manager.free(member)
            self.batch.clear()

    def _block_holders(self) -> Iterable[Request]:
        return {*self.requests.values(), *self.batch}
