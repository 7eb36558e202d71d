"""``continuous``: the scheduler of vLLM 0.6.0. Three queues, and eviction when memory is short.

A step is either prefill or decode. New requests go first, whole prompts at a time, as long as
nobody waits in ``swapped``; else everybody who runs decodes one token, and whoever does not fit
any more is evicted, last come first. ``enable_chunked_prefill`` turns the order round: decodes
first, then pieces of prompts with what is left of the token budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from minibatch.config import SchedulerConfig
from minibatch.record import Admission
from minibatch.request import Request
from minibatch.scheduler.base import Scheduler
from minibatch.scheduler.output import SchedulerOutput

WATERMARK = 0.01  # share of the pool that an admission must leave free


@dataclass
class Budget:
    """What is left of a step."""

    tokens: int
    seqs: int

    def spend(self, tokens: int) -> None:
        self.tokens -= tokens
        self.seqs -= 1


class ContinuousScheduler(Scheduler):
    """Whole prefills first; decode steps otherwise.

    Reads: every knob but ``max_wait``. Where vLLM 0.6.0 dies (the CPU pool is full) or never
    ends (a swapped request that could not come back), a victim is recomputed instead.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.watermark = int(WATERMARK * self.config.num_gpu_blocks)

    @property
    def available_blocks(self) -> int:
        return self.block_manager.num_usable_blocks - self.watermark

    def _decide(self, output: SchedulerOutput, now: float) -> None:
        tokens, seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        swapped_before = bool(self.swapped)
        if not swapped_before:
            self._admit_waiting(output, Budget(tokens, seqs - len(self.running)))
        if output.scheduled:  # [prefill step] those who run already sit it out
            return
        budget = Budget(tokens, seqs)
        self._run_running(output, budget)
        if not output.preempted:
            self._swap_in(output, budget)
        elif self.swapped:
            self._hold_back(output, self.swapped[0], "preempted_this_step", 0, 0)
        if swapped_before and self.waiting:
            self._hold_back(output, self.waiting[0], "swapped_first", len(self.swapped), 0)

    def _num_new_tokens(self, missing: int, budget: Budget) -> int:
        """How many of its missing tokens a request computes in this step."""
        return missing

    # -- [admit] waiting -> running -----------------------------------------------------------

    def _admit_waiting(self, output: SchedulerOutput, budget: Budget) -> list[Request]:
        """From the head of the queue, while blocks (of the whole prompt), tokens and slots last.

        First come, first served: whoever does not fit holds up all behind it.
        """
        blocks = self.block_manager
        admitted: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            reusable = self._reusable_kv(request)
            hit_blocks, hit_tokens = reusable
            num_tokens = self._num_new_tokens(request.num_tokens - hit_tokens, budget)
            writable = hit_tokens // self.config.block_size  # a shared last block will be copied
            needed = blocks.blocks_for(request.num_tokens) - writable
            needed += blocks.num_in_free_queue(hit_blocks)
            if self._lacks_blocks(output, request, needed):
                break
            if self._lacks_budget(output, request, num_tokens, budget):
                break
            self.waiting.popleft()
            self._admit(request, output, reusable)
            blocks.allocate(request, request.num_tokens)
            self.running.append(request)
            admitted.append(request)
            self._run(output, request, num_tokens, budget)
        return admitted

    def _lacks_blocks(self, output: SchedulerOutput, request: Request, needed: int) -> bool:
        free = self.block_manager.num_free_blocks
        if free - needed >= self.watermark:
            return False
        if needed > free:
            self._hold_back(output, request, "no_blocks", needed, free)
        else:
            self._hold_back(output, request, "watermark", needed + self.watermark, free)
        return True

    def _lacks_budget(
        self, output: SchedulerOutput, request: Request, num_tokens: int, budget: Budget
    ) -> bool:
        if num_tokens == 0 or num_tokens > budget.tokens:
            self._hold_back(output, request, "no_token_budget", max(num_tokens, 1), budget.tokens)
            return True
        if budget.seqs <= 0:
            self._hold_back(output, request, "no_slot", 1, 0)
            return True
        return False

    # -- [run] those who run already ----------------------------------------------------------

    def _run_running(self, output: SchedulerOutput, budget: Budget) -> None:
        """In order; a victim is taken from the tail, so the oldest is the last to lose."""
        queue, self.running = self.running, deque()
        size = self.config.block_size
        while queue:
            request = queue[0]
            missing = request.num_tokens - request.num_computed_tokens
            num_tokens = self._num_new_tokens(missing, budget)
            if num_tokens == 0:
                break
            queue.popleft()
            if not self.block_manager.free_queue and not self._make_room(request, queue, output):
                break
            if request.num_computed_tokens + num_tokens > len(request.block_table) * size:
                self.block_manager.allocate(request, request.num_computed_tokens + num_tokens)
            self.running.append(request)
            self._run(output, request, num_tokens, budget)
        self.running.extendleft(reversed(queue))  # the budget did not reach them

    def _make_room(self, request: Request, queue: deque[Request], output: SchedulerOutput) -> bool:
        """[preempt] Evict until one block is free, even if ``request``'s last block has room (a
        simplification of vLLM 0.6.0). False: nobody was left to evict but ``request`` itself.
        """
        mode = self.config.preemption_mode
        while not self.block_manager.free_queue:
            if not queue:
                self._preempt(request, mode, output, request, needed=1)
                return False
            self._preempt(queue.pop(), mode, output, request, needed=1)
        return True

    def _run(
        self, output: SchedulerOutput, request: Request, num_tokens: int, budget: Budget
    ) -> None:
        output.schedule(request, num_tokens, "prefill" if request.is_prefill else "decode")
        self.block_manager.publish(request, request.num_computed_tokens + num_tokens)
        budget.spend(num_tokens)

    # -- [swap in] swapped -> running ---------------------------------------------------------

    def _can_swap(self, victim: Request) -> bool:
        """Only if it can come back: it will need its blocks and one more, above the watermark."""
        returns = len(victim.block_table) + 1 <= self.available_blocks
        return returns and super()._can_swap(victim)

    def _swap_in(self, output: SchedulerOutput, budget: Budget) -> list[Request]:
        """From the head of ``swapped``; who returns runs in this same step."""
        blocks = self.block_manager
        returned: list[Request] = []
        while self.swapped:
            request = self.swapped[0]
            held = len(request.cpu_block_table)
            missing = request.num_tokens - request.num_computed_tokens
            num_tokens = self._num_new_tokens(missing, budget)
            if self._lacks_blocks(output, request, held + 1):
                break
            if self._lacks_budget(output, request, num_tokens, budget):
                break
            self.swapped.popleft()
            blocks.swap_request_in(request)
            blocks.allocate(request, request.num_computed_tokens + num_tokens)
            output.swapped_in[request.request_id] = held
            output.admitted.append(Admission(request.request_id, "swapped_in"))
            self._enter_lane(request)
            self.running.append(request)
            returned.append(request)
            self._run(output, request, num_tokens, budget)
        return returned


class ChunkedContinuousScheduler(ContinuousScheduler):
    """vLLM 0.6.0 with ``enable_chunked_prefill``: decodes and pieces of prompts share a step."""

    @property
    def available_blocks(self) -> int:
        # A prompt in pieces needs the free block of ``_make_room`` to go on with.
        return self.block_manager.num_usable_blocks - max(self.watermark, 1)

    def _num_new_tokens(self, missing: int, budget: Budget) -> int:
        return min(missing, budget.tokens)

    def _decide(self, output: SchedulerOutput, now: float) -> None:
        budget = Budget(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self._run_running(output, budget)
        ran = [row.request for row in output.scheduled]
        not_reached = list(self.running)[: len(self.running) - len(ran)]
        returned = [] if output.preempted else self._swap_in(output, budget)
        new = self._admit_waiting(output, budget)
        output.scheduled.sort(key=lambda row: row.phase == "decode")  # prefills come first
        # vLLM's order of running afterwards, which is the order of the next step.
        self.running = deque(not_reached)
        for group in (returned, ran):
            for prefill in (False, True):
                self.running.extend(r for r in group if r.is_prefill is prefill)
        self.running.extend(new)
