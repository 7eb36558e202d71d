"""Our schedulers against recordings of the real ones: vLLM 0.6.0 and vLLM 0.26.0.

Each line of a golden file is a random workload and what the real scheduler decided for it, step
by step. Every field of every step must agree.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minibatch.config import SchedulerConfig
from minibatch.request import FinishReason, Request
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import Scheduler, SchedulerOutput, make_scheduler

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("MINIBATCH_GOLDEN", ROOT.parent / "shared" / "golden"))

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no recordings of the real schedulers at {GOLDEN}"
)

Step = dict[str, Any]


def workloads(pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(GOLDEN.glob(pattern)):
        with gzip.open(path, "rt") as file:
            yield from map(json.loads, file)


def make_request(spec: dict[str, Any]) -> Request:
    request_id = str(spec["id"])
    # Ids that no other request has, where the recording says nothing of the prompt.
    unknown = [-1_000_000 * (spec["id"] + 1) - i for i in range(spec["prompt_len"])]
    return Request(
        request_id,
        spec.get("prompt_token_ids", unknown),
        SamplingParams(max_tokens=spec["output_len"], ignore_eos=True),
    )


def sampled_token(request: Request) -> int:
    """The recordings do not say which tokens were sampled: different ones for each request."""
    return -1_000_000 * (int(request.request_id) + 1) - 500_000 - request.num_output_tokens


def replay(
    workload: dict[str, Any],
    config: SchedulerConfig,
    describe: Callable[[SchedulerOutput, Scheduler], Step],
    order: Callable[[list[int]], list[int]],
) -> str | None:
    """Run ``workload``; None if every step is as recorded, else what differs first."""
    scheduler = make_scheduler(config)
    requests = {spec["id"]: make_request(spec) for spec in workload["requests"]}

    def stop(request: Request) -> FinishReason | None:
        return request.token_stop_reason(config.max_model_len)

    for expected in workload["steps"]:
        for request_id in expected["arrived"]:
            scheduler.add(requests[request_id])
        output = scheduler.schedule()
        ours = describe(output, scheduler)
        sampled = {
            row.request.request_id: sampled_token(row.request)
            for row in output.scheduled
            if row.samples
        }
        finished = scheduler.update(output, sampled, stop)
        ours["finished"] = order(ids(request.request_id for request in finished))
        scheduler.check_invariants()
        for field, value in ours.items():
            if value != expected[field]:
                return f"step {expected['step']}: {field} is {value}, vLLM had {expected[field]}"
    if scheduler.has_unfinished:
        return f"{sorted(scheduler.requests)} are left over"
    if scheduler.block_manager.num_free_blocks != scheduler.block_manager.num_usable_blocks:
        return "blocks are left over"
    return None


def ids(request_ids: Any) -> list[int]:
    return [int(request_id) for request_id in request_ids]


def describe_v060(output: SchedulerOutput, scheduler: Scheduler) -> Step:
    how = {admission.request_id: admission.how for admission in output.admitted}

    def group(row: Any) -> int:  # new, continued, swapped in
        entry = how.get(row.request.request_id)
        return 1 if entry is None else 2 if entry == "swapped_in" else 0

    def rows(phase: str) -> list[list[int]]:
        chosen = [row for row in output.scheduled if row.phase == phase]
        ordered = sorted(chosen, key=group) if phase == "prefill" else chosen
        return [[int(row.request.request_id), row.num_tokens] for row in ordered]

    evicted = [(int(p.request_id), p.mode) for p in output.preempted]
    # The recording sorted the evicted and the returned; queues and batches are in vLLM's order.
    return {
        "prefill": rows("prefill"),
        "decode": rows("decode"),
        "preempted_recompute": sorted(i for i, mode in evicted if mode == "recompute"),
        "swapped_out": sorted(i for i, mode in evicted if mode == "swap"),
        "swapped_in": sorted(ids(output.swapped_in)),
        "num_batched_tokens": output.num_batched_tokens,
        "blocks_swapped_in": len(output.swap_in),
        "blocks_swapped_out": len(output.swap_out),
        "waiting": ids(output.waiting),
        "running": ids(output.running),
        "swapped": ids(output.swapped),
        "free_gpu_blocks": output.free_blocks,
        "free_cpu_blocks": output.free_cpu_blocks,
        "ignored": [],
    }


def describe_v026(output: SchedulerOutput, scheduler: Scheduler) -> Step:
    return {
        "scheduled": [[int(r.request.request_id), r.num_tokens] for r in output.scheduled],
        "prefix_hit_tokens": {
            a.request_id: a.prefix_hit_tokens
            for a in output.admitted
            if a.how == "new" and a.prefix_hit_tokens
        },
        # vLLM reports a set here, the recording sorted it.
        "preempted": sorted(ids(p.request_id for p in output.preempted)),
        "waiting": ids(output.waiting),
        "running": ids(output.running),
        "num_batched_tokens": output.num_batched_tokens,
        "free_gpu_blocks": output.free_blocks,
    }


@pytest.mark.parametrize(
    ("policy", "pattern", "describe", "order"),
    [
        ("continuous", "g060*.jsonl.gz", describe_v060, list),
        ("unified", "g026*.jsonl.gz", describe_v026, sorted),  # a set in vLLM's V1
    ],
)
def test_every_field_of_every_step(
    policy: str,
    pattern: str,
    describe: Callable[[SchedulerOutput, Scheduler], Step],
    order: Callable[[list[int]], list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    total = steps = 0
    failures: list[str] = []
    for number, workload in enumerate(workloads(pattern)):
        total += 1
        steps += len(workload["steps"])
        config = SchedulerConfig(policy=policy, **workload["knobs"])
        difference = replay(workload, config, describe, order)
        if difference is not None:
            failures.append(f"workload {number} {workload['knobs']}: {difference}")
    with capsys.disabled():
        print(f"\n{policy}: {total - len(failures)} of {total} workloads matched, {steps} steps")
    assert total > 0, f"no workloads in {GOLDEN / pattern}"
    assert not failures, "\n".join(failures[:5])
