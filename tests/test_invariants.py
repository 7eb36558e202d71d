"""Hundreds of random workloads, each audited at every step, under every policy.

``MINIBATCH_EXAMPLES=5000 pytest tests/test_invariants.py`` searches longer, and elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
from engine_helpers import (
    DEFAULT_KNOBS,
    Auditor,
    assert_all_free,
    foretell,
    greedy,
    make_engine,
    paper,
)
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from minibatch.errors import RequestTooLargeError
from minibatch.scheduler import ForcedPreemption

EXAMPLES = int(os.environ.get("MINIBATCH_EXAMPLES", "0"))
EOS = 7
MAX_LEN = 20
EVICTIONS = 30  # by hand, at most

POLICIES: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "dynamic": {"policy": "dynamic"},
    "recompute": {"policy": "continuous", "preemption_mode": "recompute"},
    "swap": {"policy": "continuous", "preemption_mode": "swap"},
    "chunked recompute": {"policy": "continuous", "enable_chunked_prefill": True},
    "chunked swap": {
        "policy": "continuous",
        "enable_chunked_prefill": True,
        "preemption_mode": "swap",
    },
    "unified": {"policy": "unified"},
}
PREEMPTS = [name for name in POLICIES if name not in ("static", "dynamic")]


@dataclass(frozen=True)
class Job:
    """One request of a workload: when it comes, what it wants, when its caller gives up."""

    arrives: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    aborted: int | None


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    arrives = draw(st.integers(0, 12))
    # Few letters and a favourite beginning, so that prefixes are often shared.
    prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
    if draw(st.booleans()):
        prompt = [0, 1, 1, 0, 1, 0, 0, 1][: draw(st.integers(1, 8))] + prompt[:2]
    return Job(
        arrives,
        tuple(prompt),
        max_tokens=draw(st.integers(1, 12)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        aborted=draw(st.none() | st.none() | st.integers(arrives, arrives + 12)),
    )


@st.composite
def knobs(draw: st.DrawFn) -> dict[str, Any]:
    max_num_seqs = draw(st.integers(1, 5))
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    return {
        "block_size": block_size,
        # From too small for the longest to enough for two of them: memory is always short.
        "num_gpu_blocks": -(-MAX_LEN // block_size) + draw(st.integers(-2, 2 + 16 // block_size)),
        "num_cpu_blocks": draw(st.sampled_from([0, 1, 3, 20])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 24)),
        "max_model_len": MAX_LEN,
        "enable_prefix_caching": draw(st.booleans()),
    }


@pytest.mark.parametrize("policy", POLICIES)
@settings(
    max_examples=EXAMPLES or 300,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    workload=st.lists(jobs(), min_size=1, max_size=8),
    shape=knobs(),
    chance=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    seed=st.integers(0, 99),
)
@example(  # a sample copied a block of its leader that was a hit on the very same step
    workload=[
        Job(4, (1, 0, 1, 1, 0, 1, 0, 1), max_tokens=3, n=2, aborted=None),
        Job(4, (0, 1, 1, 0), max_tokens=2, n=2, aborted=None),
        Job(4, (0, 0, 0, 0, 0, 0, 0), max_tokens=1, n=1, aborted=None),
        Job(4, (0,), max_tokens=2, n=3, aborted=None),
        Job(1, (0, 0, 0), max_tokens=1, n=1, aborted=None),
        Job(1, (1, 0, 1, 1, 0, 1, 0, 1), max_tokens=4, n=1, aborted=None),
    ],
    shape={
        "block_size": 2,
        "num_gpu_blocks": 13,
        "num_cpu_blocks": 3,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 10,
        "max_model_len": MAX_LEN,
        "enable_prefix_caching": True,
    },
    chance=0.4,
    seed=42,
)
def test_any_workload(
    policy: str, workload: list[Job], shape: dict[str, Any], chance: float, seed: int
) -> None:
    shape = DEFAULT_KNOBS | shape | POLICIES[policy]
    if shape["policy"] == "continuous" and not shape.get("enable_chunked_prefill"):
        shape["max_num_batched_tokens"] = max(MAX_LEN, shape["max_num_batched_tokens"])
    engine = make_engine(**shape, eos_token_ids=[EOS])
    if policy in PREEMPTS and chance:
        engine.force_preemption(ForcedPreemption(probability=chance, seed=seed, limit=EVICTIONS))
    auditor = Auditor(engine)
    refused: set[str] = set()
    aborted: set[str] = set()

    # An eviction by hand may cost a whole sequence's steps, token by token.
    bound = 60 + 2 * sum(job.n * (len(job.prompt) + job.max_tokens) for job in workload)
    bound += EVICTIONS * MAX_LEN if chance else 0
    step = 0
    while engine.has_unfinished or any(job.arrives >= step for job in workload):
        for number, job in enumerate(workload):
            if job.arrives == step:
                try:
                    engine.add_request(str(number), job.prompt, greedy(job.max_tokens, n=job.n))
                except RequestTooLargeError as error:
                    assert error.needed > error.available
                    refused.add(str(number))
            if job.aborted == step and engine.abort(str(number)):
                aborted.add(str(number))
        auditor.step()
        step += 1
        assert step < bound, "somebody never finishes"

    auditor.step()  # ends that came between steps are told by the next record
    assert_all_free(engine)
    assert not auditor.replay.tables and not auditor.replay.host_tables
    assert not auditor.replay.lanes and not auditor.replay.waiting | auditor.replay.running
    assert {r.request_id for record in auditor.records for r in record.refused} == refused
    for number, job in enumerate(workload):
        if str(number) in refused:
            continue
        output = engine.output(str(number))
        assert output.finished and len(output.outputs) == job.n
        for index, part in enumerate(output.outputs):
            expected = foretell(
                job.prompt, job.max_tokens, sample_index=index, stop=[EOS], max_model_len=MAX_LEN
            )
            if part.finish_reason == "abort":
                assert str(number) in aborted
                assert part.token_ids == expected[: len(part.token_ids)]
            else:
                assert part.token_ids == expected
                assert part.finish_reason == ("stop" if expected[-1] == EOS else "length")
    describe(auditor)


def describe(auditor: Auditor) -> None:
    """What happened, for ``pytest --hypothesis-show-statistics``."""
    records = auditor.records
    for mode in ("swap", "recompute"):
        for by in ("hand", "need"):
            if any(
                p.mode == mode and (p.victim_of is None) == (by == "hand")
                for record in records
                for p in record.preempted
            ):
                event(f"{mode} by {by}")
    for record in records:
        for admission in record.admitted:
            hit = "hit" if admission.prefix_hit_tokens else "no hit"
            event(f"admitted {admission.how}, {hit}")
        if record.held_back is not None:
            event(f"held back: {record.held_back.reason}")
        if record.blocks_copied:
            event("copy-on-write")


def test_the_search_reaches_what_it_should() -> None:
    """A workload that is known to do everything at once; else the test above proves little."""
    engine = make_engine(
        policy="continuous",
        preemption_mode="swap",
        num_gpu_blocks=9,
        num_cpu_blocks=4,
        enable_prefix_caching=True,
    )
    auditor = Auditor(engine)
    for name, prompt, n in (("A", [0, 1, 1, 0, 1], 3), ("B", [0, 1, 1, 0, 1, 1], 2), ("C", [1], 1)):
        engine.add_request(name, prompt, greedy(9, n=n))
    while engine.has_unfinished:
        auditor.step()
    records = auditor.records
    modes = {p.mode for record in records for p in record.preempted}
    how = {admission.how for record in records for admission in record.admitted}
    assert modes == {"swap", "recompute"}
    assert how == {"new", "forked", "recomputed", "swapped_in"}
    assert any(record.blocks_copied for record in records)
    assert any(a.prefix_hit_tokens for record in records for a in record.admitted)
    assert_all_free(engine)
    assert paper(engine).device  # real slots were read all along
