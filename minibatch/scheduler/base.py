"""What all four policies share: three queues, and the step around the decision.

    add -> waiting -> running -> finished
              ^          |
              |          v
              +------ swapped        (recompute: straight back to waiting)

A step is ``schedule()``, then the executor runs what was decided, then ``update()`` takes the
sampled tokens. A policy says only how one step is decided (``_decide``) and what a request must
fit (``max_blocks``). It reads no clock, but for the time that it is handed.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from minibatch.block_manager import BlockManager
from minibatch.config import PreemptionMode, SchedulerConfig, as_preemption_mode
from minibatch.errors import (
    DuplicateRequestError,
    InvariantError,
    NoProgressError,
    PreemptionUnsupportedError,
    RequestTooLargeError,
)
from minibatch.record import Admission, HeldBack, Preemption
from minibatch.request import FinishReason, Request, RequestStatus
from minibatch.scheduler.output import SchedulerOutput
from minibatch.scheduler.preemption import ForcedPreemption


class Scheduler(ABC):
    """Queues, lanes, block accounts; subclasses decide.

    Args:
        config: see ``SchedulerConfig``.

    Attributes:
        can_preempt: this policy may take a running request's memory away.
        can_share: its requests may hold the same block (prefix hits, ``n > 1``).
    """

    can_preempt = True
    can_share = True
    reserve_null_block = False

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_manager = BlockManager(
            config.num_gpu_blocks,
            config.num_cpu_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching and self.can_share,
            reserve_null_block=self.reserve_null_block,
        )
        self.waiting: deque[Request] = deque()
        self.running: deque[Request] = deque()
        self.swapped: deque[Request] = deque()
        self.requests: dict[str, Request] = {}  # all that live
        self.samples: dict[str, list[Request]] = {}  # by leader: they wait for its prompt's KV
        self._forced_preemption: ForcedPreemption | None = None
        self.step = 0
        self._preempt_next: dict[str, PreemptionMode] = {}
        self._recompute_victims: list[Request] = []
        self._free_lanes: list[int] = []
        self._num_lanes = 0
        self._steps_without_a_token = 0

    # -- requests come and go -----------------------------------------------------------------

    def add(self, request: Request, samples: Iterable[Request] = ()) -> None:
        """Queue ``request``; ``samples`` are the further ones of ``n > 1``, which join once the
        prompt's KV can be shared (or at once, where a policy cannot share).

        Raises:
            DuplicateRequestError: a live request has its id.
            RequestTooLargeError: it could never run, not even alone.
        """
        family = [request, *samples]
        for member in family:
            if member.request_id in self.requests:
                raise DuplicateRequestError(
                    f"request id {member.request_id!r} is in use by a live request; choose "
                    "another, or wait until that one finishes."
                )
        self.check_fits(request)
        self.requests.update((member.request_id, member) for member in family)
        self.waiting.append(request)
        if self.can_share and len(family) > 1:
            self.samples[request.request_id] = family[1:]
        else:
            self.waiting.extend(family[1:])

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """Drop a request in any state; its blocks are free at once. None: no such request."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def preempt(self, request_id: str, mode: PreemptionMode | str | None = None) -> None:
        """Evict this request at the next step, if it runs then.

        Raises:
            ConfigError: there is no such mode.
            PreemptionUnsupportedError: the policy never preempts.
        """
        self._check_can_preempt()
        mode = self.config.preemption_mode if mode is None else as_preemption_mode(mode)
        self._preempt_next[request_id] = mode

    def force_preemption(self, plan: ForcedPreemption | None) -> None:
        """Evict by plan, from the next step on; None: no more. Raises as ``preempt`` does."""
        if plan is not None:
            self._check_can_preempt()
        self._forced_preemption = plan

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def wake_time(self, now: float) -> float:
        """When the next step will find something to do (``now``, unless a policy waits)."""
        return now

    # -- what a request must fit --------------------------------------------------------------

    def max_blocks(self, request: Request) -> int:
        """Blocks that ``request`` holds at its longest, alone in an empty engine."""
        most = min(request.max_num_tokens, self.config.max_model_len)
        return self.block_manager.blocks_for(most - 1)  # the last token never needs KV

    @property
    def available_blocks(self) -> int:
        """Blocks that one request may hold when it is alone."""
        return self.block_manager.num_usable_blocks

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that one step can take, where prompts are not split."""
        return None

    def check_fits(self, request: Request) -> None:
        """Refuse at the door what would block the queue for ever.

        Raises:
            RequestTooLargeError: with the numbers and the knob.
        """
        prompt, limit = request.num_prompt_tokens, self.config.max_model_len
        if prompt >= limit:
            raise RequestTooLargeError(
                f"request {request.request_id!r}: {prompt} prompt tokens leave no room for an "
                f"output token in max_model_len={limit}; raise max_model_len (and num_gpu_blocks, "
                "where the KV pool is what limits it) or shorten the prompt.",
                needed=prompt + 1,
                available=limit,
                knob="max_model_len",
            )
        budget = self.max_prompt_tokens
        if budget is not None and prompt > budget:
            raise RequestTooLargeError(
                f"request {request.request_id!r}: {prompt} prompt tokens are computed in one "
                f"step, but max_num_batched_tokens={budget}; raise it or shorten the prompt.",
                needed=prompt,
                available=budget,
                knob="max_num_batched_tokens",
            )
        needed, available = self.max_blocks(request), self.available_blocks
        if needed > available:
            raise RequestTooLargeError(
                f"request {request.request_id!r}: {prompt} prompt tokens and up to "
                f"{request.max_tokens} new ones need {needed} KV blocks of "
                f"{self.config.block_size}, and at most {available} can ever be its own; raise "
                "num_gpu_blocks (more KV memory) or lower max_tokens.",
                needed=needed,
                available=available,
                knob="num_gpu_blocks",
            )

    # -- the step -----------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Decide one iteration: who runs, whose memory is taken, who comes in.

        Args:
            now: seconds on the engine's clock, for a policy that waits (``max_wait``).

        Raises:
            NoProgressError: the last many steps brought no request nearer to its end.
        """
        self._check_progress()
        output = SchedulerOutput(self.step)
        self.step += 1
        if self._forced_preemption is not None or self._preempt_next:
            self._preempt_by_hand(output)
        self._decide(output, now)
        for victim in self._recompute_victims:  # the last one evicted ends up first
            self.waiting.appendleft(victim)
        self._recompute_victims.clear()
        blocks = self.block_manager
        output.swap_out, output.swap_in, output.copies = blocks.take_moves()
        output.waiting = tuple([request.request_id for request in self.waiting])
        output.running = tuple([request.request_id for request in self.running])
        output.swapped = tuple([request.request_id for request in self.swapped])
        output.free_blocks = blocks.num_free_blocks
        output.free_cpu_blocks = blocks.num_free_cpu_blocks
        output.cached_blocks = blocks.num_cached_blocks
        return output

    @abstractmethod
    def _decide(self, output: SchedulerOutput, now: float) -> None:
        """Fill ``output`` and move requests between the queues."""

    def update(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, int],
        stop: Callable[[Request], FinishReason | None],
    ) -> list[Request]:
        """Take the model's results: computed counts advance, tokens are appended, and whoever is
        done leaves with its blocks.

        Args:
            sampled: the next token of every row that samples (an aborted one's is passed over).
            stop: called once for each new token; a reason ends the request.

        Returns:
            The requests that finished, in batch order.
        """
        finished: list[Request] = []
        for request, start, num_tokens, phase, _, _ in output.scheduled:
            if phase == "padding" or request.finish_reason is not None:
                continue
            request.num_computed_tokens = start + num_tokens
            token = sampled.get(request.request_id)
            if token is None:
                continue
            request.token_ids.append(token)
            reason = stop(request)
            if self.samples and request.request_id in self.samples:
                self.waiting.extendleft(reversed(self.samples.pop(request.request_id)))
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        filling = output.held_back is not None and output.held_back.reason == "batch_filling"
        progressed = bool(sampled) or filling or not self.requests
        self._steps_without_a_token = 0 if progressed else self._steps_without_a_token + 1
        return finished

    def drop_rows(self, output: SchedulerOutput) -> None:
        """Take back a step that will not be run after all; its block moves stay to be made.

        Nobody outside the step can have seen its KV, so forgetting it is enough.
        """
        for row in output.scheduled:
            self.block_manager.unpublish(row.request)
        output.scheduled.clear()
        output.num_batched_tokens = output.num_padding_tokens = 0

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._leave_lane(request)
        elif request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:  # a further sample whose leader has not computed the prompt yet
            for family in self.samples.values():
                if request in family:
                    family.remove(request)
        # The other samples need not wait for a leader that will never compute their prompt.
        self.waiting.extendleft(reversed(self.samples.pop(request.request_id, [])))
        request.status = RequestStatus.FINISHED
        self.block_manager.free(request)
        del self.requests[request.request_id]

    # -- moves that policies are made of ------------------------------------------------------

    def _admit(
        self, request: Request, output: SchedulerOutput, reusable: tuple[list[int], int] = ([], 0)
    ) -> None:
        """waiting -> running. ``reusable`` is what ``_reusable_kv`` found; other blocks are the
        policy's to allocate.
        """
        blocks, num_tokens = reusable
        self.block_manager.share(request, blocks)
        request.num_computed_tokens = num_tokens
        request.prefill_end = request.num_tokens
        forked = num_tokens > 0 and request.leader is not None
        how = "recomputed" if request.num_preemptions else "forked" if forked else "new"
        output.admitted.append(Admission(request.request_id, how, num_tokens))
        self._enter_lane(request)

    def _reusable_kv(self, request: Request) -> tuple[list[int], int]:
        """KV of the beginning of ``request`` that stands in the pool already: (blocks, tokens).

        From the prefix cache whole blocks; from the leader of its ``n`` samples the whole prompt
        but the last token, whose logits are wanted. Not from one that is still being prefilled
        (again): its blocks may be hits on this very step, and a copy would be made before it.
        """
        leader = request.leader
        if leader is not None and leader.status is RequestStatus.RUNNING and not leader.is_prefill:
            num_tokens = request.num_prompt_tokens - 1
            if leader.num_computed_tokens > num_tokens:
                shared = self.block_manager.blocks_for(num_tokens)
                return leader.block_table[:shared], num_tokens
        hits = self.block_manager.match_prefix(request)
        return hits, len(hits) * self.block_manager.block_size

    def _preempt(
        self,
        victim: Request,
        mode: PreemptionMode,
        output: SchedulerOutput,
        victim_of: Request | None,
        needed: int = 0,
    ) -> None:
        """Take a running request's memory away. The caller has taken it out of ``running``.

        A recomputed victim goes to the head of ``waiting`` at the end of the step, so that the
        step which evicted it does not admit it again.
        """
        blocks = self.block_manager
        free = blocks.num_free_blocks
        victim.num_preemptions += 1
        self._leave_lane(victim)
        if mode is PreemptionMode.SWAP and self._can_swap(victim):
            output.swapped_out[victim.request_id] = len(victim.block_table)
            blocks.swap_request_out(victim)
            victim.status = RequestStatus.SWAPPED
            self.swapped.append(victim)
        else:
            mode = PreemptionMode.RECOMPUTE
            blocks.free(victim)
            victim.num_computed_tokens = 0
            victim.prefill_end = 0
            victim.status = RequestStatus.WAITING
            self._recompute_victims.append(victim)
        culprit = victim_of.request_id if victim_of is not None else None
        output.preempted.append(Preemption(victim.request_id, mode.value, culprit, needed, free))

    def _can_swap(self, victim: Request) -> bool:
        """Is there room in the CPU pool? (vLLM 0.6.0 dies when there is none.)"""
        return self.block_manager.can_swap_out(victim)

    def _check_can_preempt(self) -> None:
        if not self.can_preempt:
            raise PreemptionUnsupportedError(
                f"policy {self.config.policy!r} never preempts; use 'continuous' or 'unified'."
            )

    def _preempt_by_hand(self, output: SchedulerOutput) -> None:
        chosen = dict(self._preempt_next)
        self._preempt_next.clear()
        if self._forced_preemption is not None:
            ids = [request.request_id for request in self.running]
            for request_id in self._forced_preemption.victims(output.step, ids):
                chosen.setdefault(request_id, self.config.preemption_mode)
        for victim in reversed([r for r in self.running if r.request_id in chosen]):
            self.running.remove(victim)
            self._preempt(victim, chosen[victim.request_id], output, victim_of=None)

    def _enter_lane(self, request: Request) -> None:
        """Into ``running``'s company: the lowest free lane of the timeline is its slot."""
        request.status = RequestStatus.RUNNING
        if self._free_lanes:
            request.slot = heapq.heappop(self._free_lanes)
        else:
            request.slot = self._num_lanes
            self._num_lanes += 1

    def _leave_lane(self, request: Request) -> None:
        heapq.heappush(self._free_lanes, request.slot)
        request.slot = -1

    @staticmethod
    def _hold_back(
        output: SchedulerOutput, request: Request, reason: str, needed: int, available: int
    ) -> None:
        if output.held_back is None:  # the first reason is the one that shut the door
            output.held_back = HeldBack(request.request_id, reason, needed, available)

    # -- watching itself ----------------------------------------------------------------------

    def _check_progress(self) -> None:
        """vLLM can evict and re-admit for ever; an honest engine says so instead.

        Between two sampled tokens lie at most the chunks of every prompt there is, so many more
        steps than that without one is a livelock.
        """
        steps = self._steps_without_a_token
        if steps < 1000:
            return
        budget = self.config.max_num_batched_tokens
        tokens = sum(request.num_tokens for request in self.requests.values())
        if steps > 1000 + 4 * (tokens // budget + len(self.requests)):
            self._steps_without_a_token = 0  # whoever aborts some requests may go on
            raise NoProgressError(
                f"{steps} steps without a sampled token: "
                f"{len(self.running)} running, {len(self.waiting)} waiting, "
                f"{len(self.swapped)} swapped, {self.block_manager.num_free_blocks} blocks "
                "free. Raise num_gpu_blocks, or lower max_num_seqs."
            )

    def check_invariants(self) -> None:
        """The books of queues and blocks, for tests and lessons.

        Raises:
            InvariantError: naming what disagrees.
        """
        queues = (
            (RequestStatus.WAITING, self.waiting),
            (RequestStatus.RUNNING, self.running),
            (RequestStatus.SWAPPED, self.swapped),
        )
        seen: dict[str, RequestStatus] = {}
        for status, queue in queues:
            for request in queue:
                if request.request_id in seen:
                    raise InvariantError(f"{request} is queued twice.")
                if request.status is not status:
                    raise InvariantError(f"{request} stands in {status.value}.")
                if status is RequestStatus.WAITING and request.block_table:
                    raise InvariantError(f"{request} waits but holds blocks.")
                seen[request.request_id] = status
        unborn = {sample.request_id for family in self.samples.values() for sample in family}
        if seen.keys() & unborn or seen.keys() | unborn != self.requests.keys():
            raise InvariantError("a live request is in no queue, or a dead one is in some.")
        if len(self.running) > self.config.max_num_seqs:
            raise InvariantError(f"{len(self.running)} running > {self.config.max_num_seqs}.")
        self.block_manager.check_invariants(self._block_holders())

    def _block_holders(self) -> Iterable[Request]:
        return self.requests.values()
