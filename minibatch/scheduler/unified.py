"""``unified``: the scheduler of vLLM 0.26 (V1). No phases, one token budget.

Each request's ``num_computed_tokens`` catches up with its ``num_tokens``. A decode is one token
behind, a prompt hundreds; both draw on ``max_num_batched_tokens``, so a long prompt is cut into
chunks by itself and decodes never stand still behind it. Preemption is recompute only: with
prefix caching the victim finds most of its blocks again.
"""

from __future__ import annotations

from minibatch.config import PreemptionMode
from minibatch.request import Request
from minibatch.scheduler.base import Scheduler
from minibatch.scheduler.output import SchedulerOutput


class UnifiedScheduler(Scheduler):
    """Running requests first, then waiting ones, all from one token budget.

    Reads: ``max_num_batched_tokens``, ``max_num_seqs``, ``max_model_len``, block knobs,
    ``enable_prefix_caching``. As in vLLM, block 0 is reserved (the null block).
    """

    reserve_null_block = True

    def _can_swap(self, victim: Request) -> bool:
        return False  # V1 has no swapping: a victim is always recomputed

    def _decide(self, output: SchedulerOutput, now: float) -> None:
        budget = self._run_running(output, self.config.max_num_batched_tokens)
        if not self.waiting:
            return
        if output.preempted:  # whoever lost its memory in this step must not get it back in it
            self._hold_back(output, self.waiting[0], "preempted_this_step", 0, 0)
        else:
            self._run_waiting(output, budget)

    def _run_running(self, output: SchedulerOutput, budget: int) -> int:
        """[running] In order, each as many of its missing tokens as the budget allows."""
        blocks, limit = self.block_manager, self.config.max_model_len - 1
        size = self.config.block_size
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            computed = request.num_computed_tokens
            num_tokens = min(request.num_tokens - computed, budget, limit - computed)
            if num_tokens > 0:
                # Most decodes stay within their last block: nothing to allocate.
                if computed + num_tokens > len(request.block_table) * size:
                    if not self._make_room(request, computed + num_tokens, output):
                        break
                    blocks.allocate(request, computed + num_tokens)
                phase = "prefill" if computed < request.prefill_end else "decode"
                output.schedule(request, num_tokens, phase)
                blocks.publish(request, computed + num_tokens)
                budget -= num_tokens
            index += 1
        return budget

    def _make_room(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """[preempt] Evict from the tail, last come first, until ``request`` can grow. False: it
        was itself the last one, and is evicted.
        """
        blocks = self.block_manager
        needed = blocks.blocks_for(num_tokens) - len(request.block_table)
        while blocks.num_free_blocks < needed:
            victim = self.running.pop()
            self._preempt(victim, PreemptionMode.RECOMPUTE, output, request, needed)
            if victim is request:
                return False
        return True

    def _run_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """[admit] From the head of the queue, while budget, slots and blocks last."""
        blocks, config = self.block_manager, self.config
        while self.waiting:
            request = self.waiting[0]
            if budget == 0:
                self._hold_back(output, request, "no_token_budget", 1, 0)
                break
            if len(self.running) >= config.max_num_seqs:
                self._hold_back(output, request, "no_slot", 1, 0)
                break
            reusable = self._reusable_kv(request)
            hit_blocks, hit_tokens = reusable
            num_tokens = min(request.num_tokens - hit_tokens, budget)
            # Room for the *whole* sequence, though only a part of it may be computed now: else
            # requests let in one by one would evict each other for ever.
            writable = hit_tokens // config.block_size  # a shared last block will be copied
            needed = blocks.blocks_for(request.num_tokens) - writable
            needed += blocks.num_in_free_queue(hit_blocks)
            if needed > blocks.num_free_blocks:
                self._hold_back(output, request, "no_blocks", needed, blocks.num_free_blocks)
                break
            self.waiting.popleft()
            self._admit(request, output, reusable)
            blocks.allocate(request, hit_tokens + num_tokens)
            self.running.append(request)
            output.schedule(request, num_tokens, "prefill")
            blocks.publish(request, hit_tokens + num_tokens)
            budget -= num_tokens
