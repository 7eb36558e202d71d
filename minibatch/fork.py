"""Another scheduler takes over in the middle of a run.

Running requests keep their KV, in new blocks, as far as the new scheduler has room for it. Whoever
finds none, whose KV lies on the CPU, or who is half-way through a prompt that the new policy does
not split, goes to the head of the queue and is computed again. Cached prefixes that nobody holds
are lost.
"""

from __future__ import annotations

import heapq

from minibatch.errors import ConfigError
from minibatch.request import Request, RequestStatus
from minibatch.scheduler import (
    ChunkedContinuousScheduler,
    DynamicScheduler,
    Scheduler,
    StaticScheduler,
    UnifiedScheduler,
)


def take_over(new: Scheduler, old: Scheduler) -> None:
    """Move every live request of ``old`` into ``new``, which is empty.

    Raises:
        RequestTooLargeError, ConfigError: one of them could never run under the new knobs.
    """
    for request in (*old.running, *old.swapped, *old.waiting):
        new.check_fits(request)
    new.step = old.step
    new.requests.update(old.requests)
    new.samples.update(old.samples)
    _clear_tables(new, old)
    again: list[Request] = []
    for request in old.running:
        if _has_room(request, new):
            new.running.append(request)
            if isinstance(new, StaticScheduler):
                new.batch.append(request)
        else:
            again.append(request)
    again += old.swapped
    for request in again:
        _start_again(request, new)
    new.waiting.extend((*again, *old.waiting))
    lanes = {request.slot for request in new.running}  # everybody keeps its own
    new._num_lanes = max(lanes, default=-1) + 1
    new._free_lanes = sorted(set(range(new._num_lanes)) - lanes)
    heapq.heapify(new._free_lanes)


def _clear_tables(new: Scheduler, old: Scheduler) -> None:
    """All old blocks are let go, and the next record says so."""
    changes = new.block_manager.changes
    for request in old._block_holders():
        if request.block_table:
            changes.freed[request.request_id] = request.block_table
        if request.cpu_block_table:
            changes.cpu_freed[request.request_id] = request.cpu_block_table
        request.block_table, request.cpu_block_table = [], []


def _has_room(request: Request, new: Scheduler) -> bool:
    """Give ``request`` blocks for the KV that it has."""
    blocks, num_tokens = new.block_manager, request.num_computed_tokens
    splits_prompts = isinstance(new, (ChunkedContinuousScheduler, UnifiedScheduler))
    if len(new.running) >= new.config.max_num_seqs or (request.is_prefill and not splits_prompts):
        return False
    if isinstance(new, (StaticScheduler, DynamicScheduler)):
        return blocks.allocate_contiguous(request, new.max_blocks(request))
    if blocks.blocks_for(num_tokens) > blocks.num_free_blocks:
        return False
    blocks.allocate(request, num_tokens)
    blocks.publish(request, num_tokens)
    return True


def _start_again(request: Request, new: Scheduler) -> None:
    budget = new.max_prompt_tokens
    if budget is not None and request.num_tokens > budget:
        raise ConfigError(
            f"request {request.request_id!r} has {request.num_tokens} tokens to compute again in "
            f"one step, but max_num_batched_tokens={budget}; raise it."
        )
    request.num_computed_tokens = 0
    request.prefill_end = 0
    request.num_preemptions += 1
    request.slot = -1
    request.status = RequestStatus.WAITING
