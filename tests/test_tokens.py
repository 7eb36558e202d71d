"""Whatever the engine does to a request, it says what transformers says of its prompt alone.

Greedy, float32, tiny random Llamas. Each test also reads from the records that what it is about
(a split prompt, an eviction, a hit...) really happened.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens_helpers import (
    INTERRUPTION_POINTS,
    LONGEST_OUTPUT,
    MAX_LEN,
    POOL_TOKENS,
    Job,
    TinyModel,
    admissions,
    amplify,
    assert_each_as_alone,
    drive,
    hit_tokens,
    interrupt,
    is_mid_prompt,
    make_engine,
    mixed_steps,
    nonempty_subsets,
    preemptions,
    running_before,
    split_prompts,
    state_of,
)

from minibatch.builder import pack_for_cpu
from minibatch.config import CpuKernelsName, EngineConfig, PreemptionMode
from minibatch.engine import Engine
from minibatch.model.loader import load_model
from minibatch.record import StepRecord
from minibatch.scheduler import ForcedPreemption
from tests.model.model_helpers import hf_config, hf_model, random_tokens, save

Knobs = dict[str, Any]

EXAMPLES = int(os.environ.get("MINIBATCH_EXAMPLES", "0"))  # of the last test: to search longer

ORIGINAL = 16  # positions of the scaled ropes before scaling: sequences here run past it


def scaled_rope(kind: str, **settings: float) -> dict[str, Any]:
    longest = MAX_LEN if kind == "llama3" else ORIGINAL
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **settings}
    return {"rope_parameters": rope, "max_position_embeddings": longest}


SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": scaled_rope("linear"),
    "dynamic": scaled_rope("dynamic"),
    "llama3": scaled_rope(
        "llama3",
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
}

POLICIES: dict[str, Knobs] = {
    "static": {"policy": "static"},
    "dynamic": {"policy": "dynamic"},
    "continuous": {"policy": "continuous"},
    "chunked": {
        "policy": "continuous",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 6,
    },
    "unified": {"policy": "unified", "max_num_batched_tokens": 6},
}
PAGED = [name for name in POLICIES if name not in ("static", "dynamic")]

PREEMPTING: dict[str, Knobs] = {
    f"{name}-{mode}": POLICIES[name] | {"preemption_mode": mode}
    for name in ("continuous", "chunked")
    for mode in ("swap", "recompute")
} | {"unified-recompute": POLICIES["unified"]}

BLOCK_SIZES = [1, 4, 16]

# Lengths of one token, of whole blocks, and in between; five requests on four slots.
JOBS = [
    Job("a", random_tokens(1), 9),
    Job("b", random_tokens(13), 6),
    Job("c", random_tokens(21), 12),
    Job("d", random_tokens(8), 10),
    Job("e", random_tokens(5), 7, arrives=3),
]
FEW_JOBS = [
    Job("a", random_tokens(5), 6),
    Job("b", random_tokens(13), 4),
    Job("c", random_tokens(8), 7, arrives=1),
]
FEW_IDS = [job.request_id for job in FEW_JOBS]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """The model of a shape in ``SHAPES``, its matrices as an engine of these ``cpu_kernels`` has
    them, with what it has said so far.
    """

    @functools.cache
    def make(shape: str, kernels: CpuKernelsName = "auto") -> TinyModel:
        theirs = amplify(hf_model(hf_config(**SHAPES[shape])), 2.0)
        folder = save(theirs, tmp_path_factory.mktemp(shape))
        ours = load_model(folder, max_model_len=MAX_LEN)
        pack_for_cpu(ours, EngineConfig("tiny", cpu_kernels=kernels))
        return TinyModel(theirs, ours)

    return make


@pytest.fixture(scope="session")
def gqa(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("gqa")


def mode_of(variant: str) -> str:
    return variant.split("-")[1]


# -- the oracle -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_oracle_tells_requests_apart(tiny: Callable[[str], TinyModel], shape: str) -> None:
    """A text of one repeated token, or the same for all, would forgive every mistake."""
    said = [tuple(tiny(shape).greedy(job.prompt, LONGEST_OUTPUT)) for job in JOBS]
    assert len(set(said)) == len(JOBS)
    assert all(len(set(tokens)) >= 8 for tokens in said)


@pytest.mark.parametrize("position", [0, 7, 11])
def test_the_oracle_depends_on_every_token(gqa: TinyModel, position: int) -> None:
    """Another token anywhere in the prompt, another text: wrong KV would be noticed."""
    prompt = random_tokens(13)
    other = [*prompt]
    other[position] = (other[position] + 1) % 97
    assert gqa.greedy(prompt, 12) != gqa.greedy(other, 12)


# -- policies, shapes, block sizes, budgets ---------------------------------------------------


def assert_policy_did_its_thing(policy: str, records: list[StepRecord]) -> None:
    reasons = {record.held_back.reason for record in records if record.held_back}
    if policy == "static":
        assert any(record.rows("padding") for record in records)
        assert "batch_not_drained" in reasons
    else:
        assert not any(record.rows("padding") for record in records)
    if policy == "dynamic":
        assert "slot_released_late" in reasons
    splits = policy in ("chunked", "unified")
    assert split_prompts(records) >= {"b", "c", "d"} if splits else not split_prompts(records)
    assert bool(mixed_steps(records)) == splits


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_every_shape_under_every_policy(
    tiny: Callable[..., TinyModel], kernels: str, shape: str, policy: str, block_size: int
) -> None:
    """With the compiled kernels, where there is a compiler, and with torch's own operations."""
    model = tiny(shape, kernels)
    knobs = POLICIES[policy] | {"block_size": block_size, "cpu_kernels": kernels}
    engine = make_engine(model, **knobs)
    compiled = kernels == "auto" and shutil.which("cc") is not None
    assert engine.trace.meta.software["cpu_kernels"] == ("compiled" if compiled else "torch")
    records = drive(engine, JOBS)
    assert_each_as_alone(engine, model, JOBS)
    assert_policy_did_its_thing(policy, records)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", [4, 5, 9, 17, 128])
@pytest.mark.parametrize("policy", ["chunked", "unified"])
def test_chunk_budgets(gqa: TinyModel, policy: str, budget: int, block_size: int) -> None:
    knobs = POLICIES[policy] | {"max_num_batched_tokens": budget, "block_size": block_size}
    engine = make_engine(gqa, **knobs)
    records = drive(engine, JOBS)
    assert_each_as_alone(engine, gqa, JOBS)
    assert max(record.num_batched_tokens for record in records) <= budget
    assert bool(split_prompts(records)) == (budget < 128)


@pytest.mark.parametrize("policy", POLICIES)
def test_stop_tokens_end_a_request_beside_others(gqa: TinyModel, policy: str) -> None:
    """Nobody knows beforehand when it ends, and its neighbours do not mind."""
    jobs = [replace(job, stop=(gqa.greedy(job.prompt, 4)[3],)) for job in JOBS[:3]] + JOBS[3:]
    engine = make_engine(gqa, **POLICIES[policy])
    drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    assert [engine.output(job.request_id).outputs[0].finish_reason for job in jobs] == (
        ["stop"] * 3 + ["length"] * 2
    )


# -- preemption -------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("variant", PREEMPTING)
def test_forced_preemption_at_every_step(
    gqa: TinyModel, variant: str, block_size: int, caching: bool
) -> None:
    """Each request that runs, and all together, evicted before every step there is."""
    knobs = PREEMPTING[variant] | {"block_size": block_size, "enable_prefix_caching": caching}
    undisturbed = drive(make_engine(gqa, **knobs), FEW_JOBS)
    mid_prompt = 0
    for step in range(1, len(undisturbed)):
        running = running_before(undisturbed, step)
        mid_prompt += any(
            is_mid_prompt(undisturbed, step, job.request_id, len(job.prompt))
            for job in FEW_JOBS
            if job.request_id in running
        )
        for victims in {(request_id,) for request_id in running} | {tuple(running)}:
            engine = make_engine(gqa, **knobs)
            engine.force_preemption(ForcedPreemption(at={step: victims}))
            records = drive(engine, FEW_JOBS)
            assert_each_as_alone(engine, gqa, FEW_JOBS)
            evicted = [(p.request_id, p.mode) for p in records[step].preempted]
            assert sorted(evicted) == sorted((victim, mode_of(variant)) for victim in victims)
            assert len(preemptions(records)) == len(victims)
    assert bool(mid_prompt) == (not variant.startswith("continuous"))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("variant", PREEMPTING)
@pytest.mark.parametrize("shape", SHAPES)
def test_everybody_evicted_again_and_again(
    tiny: Callable[[str], TinyModel], shape: str, variant: str, block_size: int
) -> None:
    """Every fifth step takes everybody's memory; prefix hits make up for some of it."""
    model = tiny(shape)
    knobs = PREEMPTING[variant] | {"enable_prefix_caching": True, "block_size": block_size}
    engine = make_engine(model, **knobs)
    ids = [job.request_id for job in JOBS]
    engine.force_preemption(ForcedPreemption(at={step: ids for step in range(4, 200, 5)}))
    records = drive(engine, JOBS)
    assert_each_as_alone(engine, model, JOBS)
    assert {p.request_id for p in preemptions(records)} == set(ids)
    assert {p.mode for p in preemptions(records)} == {mode_of(variant)}


TIGHT_JOBS = [
    Job("a", random_tokens(5), 16),
    Job("b", random_tokens(13), 12),
    Job("c", random_tokens(8), 14),
    Job("d", random_tokens(3), 18, arrives=2),
]


def tight_pool(block_size: int) -> int:
    """Blocks for the longest of ``TIGHT_JOBS`` alone (24 tokens), and hardly more."""
    return -(-24 // block_size) + 2


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("variant", PREEMPTING)
def test_preemption_for_want_of_blocks(
    gqa: TinyModel, variant: str, block_size: int, caching: bool
) -> None:
    knobs = {"num_gpu_blocks": tight_pool(block_size), "enable_prefix_caching": caching}
    engine = make_engine(gqa, block_size=block_size, **PREEMPTING[variant], **knobs)
    records = drive(engine, TIGHT_JOBS)
    assert_each_as_alone(engine, gqa, TIGHT_JOBS)
    assert len(preemptions(records)) >= 2
    assert all(p.victim_of is not None for p in preemptions(records))
    assert {p.mode for p in preemptions(records)} == {mode_of(variant)}


@pytest.mark.parametrize("variant", ["continuous-swap", "chunked-swap"])
def test_a_full_cpu_pool_makes_victims_recompute(gqa: TinyModel, variant: str) -> None:
    knobs = {"num_gpu_blocks": tight_pool(4), "num_cpu_blocks": 3}
    engine = make_engine(gqa, **PREEMPTING[variant], **knobs)
    records = drive(engine, TIGHT_JOBS)
    assert_each_as_alone(engine, gqa, TIGHT_JOBS)
    assert {p.mode for p in preemptions(records)} == {"swap", "recompute"}


# -- prefix caching ---------------------------------------------------------------------------

PREFIX = random_tokens(32, seed=2)
LARGE_BUDGET = 128
CACHING: dict[str, Knobs] = {
    name: POLICIES[name] | {"enable_prefix_caching": True, "max_num_batched_tokens": LARGE_BUDGET}
    for name in PAGED
}
caching_policies = pytest.mark.parametrize("policy", PAGED)
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def prefixed(request_id: str, length: int, **settings: Any) -> Job:
    """A prompt of ``PREFIX`` and ``length`` tokens of its own."""
    return Job(request_id, PREFIX + random_tokens(length, seed=ord(request_id)), **settings)


@block_sizes
@caching_policies
@pytest.mark.parametrize("arrives", [0, 2, 30], ids=["same step", "while it runs", "after its end"])
def test_prompts_that_begin_alike(
    gqa: TinyModel, policy: str, block_size: int, arrives: int
) -> None:
    jobs = [prefixed("a", 3), prefixed("b", 5, arrives=arrives), prefixed("c", 1, arrives=arrives)]
    engine = make_engine(gqa, block_size=block_size, **CACHING[policy])
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    assert [hit_tokens(records, job.request_id) for job in jobs] == [0, 32, 32]


@block_sizes
@pytest.mark.parametrize("policy", ["chunked", "unified"])
def test_hits_on_a_prompt_that_is_still_in_pieces(
    gqa: TinyModel, policy: str, block_size: int
) -> None:
    """A piece that is computed in the very step of the hit."""
    jobs = [prefixed("a", 3), prefixed("b", 5), prefixed("c", 7)]
    knobs = CACHING[policy] | {"max_num_batched_tokens": 20}
    engine = make_engine(gqa, block_size=block_size, **knobs)
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    assert [hit_tokens(records, job.request_id) for job in jobs] == [0, 32, 32]
    row = next(row for row in records[1].scheduled if row.request_id == "a")
    assert row.context_len == 35  # the step that admits b is the one that ends a's prompt
    assert "b" in {admission.request_id for admission in records[1].admitted}


@block_sizes
@caching_policies
@pytest.mark.parametrize("arrives", [0, 2, 30])
def test_the_same_prompt_is_never_a_whole_hit(
    gqa: TinyModel, policy: str, block_size: int, arrives: int
) -> None:
    """Its last token's logits are wanted, so its last block is computed again."""
    jobs = [Job("a", PREFIX), Job("b", PREFIX, arrives=arrives)]
    engine = make_engine(gqa, block_size=block_size, **CACHING[policy])
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    assert hit_tokens(records, "b") == 32 - block_size


@block_sizes
@caching_policies
def test_hits_on_generated_tokens(gqa: TinyModel, policy: str, block_size: int) -> None:
    """The next turn of a chat begins with the last one's answer."""
    first = Job("a", random_tokens(21), 13)
    chat = [*first.prompt, *first.expected(gqa), *random_tokens(4, seed=1)]
    jobs = [first, Job("b", chat, arrives=40)]
    engine = make_engine(gqa, block_size=block_size, **CACHING[policy])
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    assert hit_tokens(records, "b") == 33 // block_size * block_size  # the 34th has no KV


@block_sizes
@pytest.mark.parametrize("policy", PAGED)
def test_a_victim_finds_its_own_blocks_again(gqa: TinyModel, policy: str, block_size: int) -> None:
    """Prompt and answer alike, and even when the neighbours hold them too."""
    jobs = [prefixed("a", 3, max_tokens=15), prefixed("b", 5, max_tokens=15)]
    engine = make_engine(gqa, block_size=block_size, **CACHING[policy])
    engine.force_preemption(ForcedPreemption(at={6: ["a"], 10: ["a", "b"]}))
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    again = [entry for entry in admissions(records) if entry.how == "recomputed"]
    assert sorted(entry.request_id for entry in again) == ["a", "a", "b"]
    assert all(entry.prefix_hit_tokens >= 32 for entry in again)
    assert max(entry.prefix_hit_tokens for entry in again) > 35 or block_size == 16


@block_sizes
@caching_policies
def test_a_cached_prefix_that_was_overwritten_is_not_hit(
    gqa: TinyModel, policy: str, block_size: int
) -> None:
    """Somebody else needed the memory: all of it, or the end of the prefix."""
    pool = -(-48 // block_size) + 1
    hits = []
    for length in (7, 36):
        jobs = [
            prefixed("a", 3, max_tokens=2),
            Job("x", random_tokens(length, seed=5), 9, arrives=10),
            prefixed("b", 5, arrives=30),
        ]
        engine = make_engine(gqa, block_size=block_size, num_gpu_blocks=pool, **CACHING[policy])
        records = drive(engine, jobs)
        assert_each_as_alone(engine, gqa, jobs)
        hits.append(hit_tokens(records, "b"))
    assert 32 >= hits[0] > hits[1]


@caching_policies
def test_dynamic_rope_shares_only_among_prompts_of_one_length(
    tiny: Callable[[str], TinyModel], policy: str
) -> None:
    """Beyond the original length its rotation depends on how long the prompt is."""
    model = tiny("dynamic")
    jobs = [prefixed("a", 3), prefixed("b", 5, arrives=2), prefixed("c", 3, arrives=3)]
    engine = make_engine(model, **CACHING[policy])
    records = drive(engine, jobs)
    assert_each_as_alone(engine, model, jobs)
    assert [hit_tokens(records, job.request_id) for job in jobs] == [0, 0, 32]


# -- n > 1 ------------------------------------------------------------------------------------


def family_jobs(length: int) -> list[Job]:
    return [
        Job("a", random_tokens(5), 9),
        Job("s", random_tokens(length), 8, n=3),
        Job("b", random_tokens(13), 6, arrives=2),
    ]


@pytest.mark.parametrize("length", [1, 8, 9, 13, 17])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_three_samples_say_the_same(
    gqa: TinyModel, policy: str, block_size: int, length: int
) -> None:
    jobs = family_jobs(length)
    engine = make_engine(gqa, block_size=block_size, **POLICIES[policy])
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    forked = [entry.request_id for entry in admissions(records) if entry.how == "forked"]
    shares = policy in PAGED and length > 1  # of a prompt of one token nothing can be shared
    assert sorted(forked) == (["s#1", "s#2"] if shares else [])
    copies = sum(len(record.blocks_copied) for record in records)
    assert copies == (2 if shares and (length - 1) % block_size else 0)


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("variant", PREEMPTING)
def test_samples_evicted_at_every_step(gqa: TinyModel, variant: str, caching: bool) -> None:
    """A neighbour alone (whose block may be the target of a copy), the leader alone, one of the
    others, and all together.
    """
    jobs = family_jobs(11)
    knobs = PREEMPTING[variant] | {"enable_prefix_caching": caching, "max_num_seqs": 5}
    undisturbed = drive(make_engine(gqa, **knobs), jobs)
    evicted: set[str] = set()
    copied_beside: set[str] = set()  # what else moved in a step with copies
    for step in range(1, len(undisturbed)):
        running = running_before(undisturbed, step)
        for victims in [("a",), ("s#0",), ("s#2",), tuple(running)]:
            if not set(victims) <= set(running):
                continue
            engine = make_engine(gqa, **knobs)
            engine.force_preemption(ForcedPreemption(at={step: victims}))
            records = drive(engine, jobs)
            assert_each_as_alone(engine, gqa, jobs)
            assert {p.request_id for p in records[step].preempted} == set(victims)
            evicted.update(victims)
            for record in records:
                if record.blocks_copied:
                    copied_beside |= {"out"} if record.swapped_out else set()
                    copied_beside |= {"in"} if record.swapped_in else set()
    assert evicted == {"a", "b", "s#0", "s#1", "s#2"}
    assert copied_beside == ({"out", "in"} if variant == "chunked-swap" else set())


def test_a_sample_does_not_copy_what_this_step_computes(gqa: TinyModel) -> None:
    """Copies are made before the forward pass, and a leader that returns by a hit on blocks of
    this very step has nothing yet to copy from.
    """
    leader = Job("s", random_tokens(4), 16, n=2)
    longer = [*leader.prompt, *leader.expected(gqa)[:3]]
    jobs = [Job("x", random_tokens(33), 12), Job("t", longer, 10), leader]
    knobs = {"block_size": 2, "num_gpu_blocks": 31, "num_cpu_blocks": 40}
    engine = make_engine(gqa, **CACHING["continuous"], **knobs)

    def evict(step: int) -> None:
        if step == 4:  # x returns first, from the CPU, and into what the others left
            engine.preempt("x", PreemptionMode.SWAP)
            for request_id in ("t", "s#0", "s#1"):
                engine.preempt(request_id, PreemptionMode.RECOMPUTE)

    records = drive(engine, jobs, before_step=evict)
    assert_each_as_alone(engine, gqa, jobs)
    assert [entry.request_id for entry in records[5].admitted] == ["x"]
    returned = {entry.request_id: entry.prefix_hit_tokens for entry in records[6].admitted}
    assert list(returned) == ["t", "s#0", "s#1"]
    assert returned["t"] == 0 and returned["s#0"] >= len(leader.prompt)


# -- aborts -----------------------------------------------------------------------------------

ABORTING: dict[str, Knobs] = POLICIES | {
    name: PREEMPTING[name] for name in ("continuous-swap", "chunked-swap")
}


@pytest.mark.parametrize("caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("variant", ABORTING)
def test_a_neighbour_aborted_at_every_step(gqa: TinyModel, variant: str, caching: bool) -> None:
    """Whatever it is doing: waiting, half prefilled, decoding, swapped out."""
    knobs = ABORTING[variant] | {"enable_prefix_caching": caching, "max_num_seqs": 3}
    jobs = [*FEW_JOBS, Job("d", random_tokens(9), 5)]
    plan = {3: ["b", "c"], 5: ["a", "d"]} if "swap" in variant else None

    def start() -> Engine:
        engine = make_engine(gqa, **knobs)
        engine.force_preemption(ForcedPreemption(at=plan) if plan else None)
        return engine

    states: set[str] = set()
    for step in range(len(drive(start(), jobs))):
        for job in jobs:
            if job.arrives > step:
                continue
            engine = start()

            def abort(now: int, engine: Engine = engine, victim: Job = job, at: int = step) -> None:
                if now == at:
                    states.add(state_of(engine, victim.request_id))
                    engine.abort(victim.request_id)

            drive(engine, jobs, before_step=abort)
            assert_each_as_alone(engine, gqa, jobs, aborted=[job.request_id])
    expected = {"waiting", "running", "finished"}
    expected |= {"swapped"} if plan else set()
    expected |= {"mid prompt"} if "max_num_batched_tokens" in knobs else set()
    assert states == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_family_aborted_at_every_step(gqa: TinyModel, policy: str) -> None:
    jobs = family_jobs(11)
    knobs = POLICIES[policy] | {"enable_prefix_caching": True}
    steps = len(drive(make_engine(gqa, **knobs), jobs))
    reasons: set[str] = set()
    for step in range(steps):
        engine = make_engine(gqa, **knobs)

        def abort(now: int, engine: Engine = engine, at: int = step) -> None:
            if now == at:
                engine.abort("s")

        drive(engine, jobs, before_step=abort)
        assert_each_as_alone(engine, gqa, jobs, aborted=["s"])
        reasons |= {str(one.finish_reason) for one in engine.output("s").outputs}
    assert reasons == {"abort", "length"}


# -- Ctrl-C -----------------------------------------------------------------------------------

INTERRUPTIBLE: dict[str, Knobs] = {
    name: knobs | {"num_gpu_blocks": tight_pool(4), "enable_prefix_caching": True}
    for name, knobs in PREEMPTING.items()
} | {name: POLICIES[name] for name in ("static", "dynamic")}


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("point", INTERRUPTION_POINTS)
@pytest.mark.parametrize("variant", INTERRUPTIBLE)
def test_every_step_interrupted(gqa: TinyModel, variant: str, point: str, times: int) -> None:
    """Every step is cut short and taken up again, with evictions, hits and copies in some."""
    jobs = [*TIGHT_JOBS, Job("s", random_tokens(6), 5, arrives=1, n=2)]
    undisturbed = drive(make_engine(gqa, **INTERRUPTIBLE[variant]), jobs)
    engine = make_engine(gqa, **INTERRUPTIBLE[variant])
    executor = interrupt(engine, point, times=times)
    records = drive(engine, jobs)
    assert_each_as_alone(engine, gqa, jobs)
    assert executor.struck == [step for step in range(len(records)) for _ in range(times)]
    assert [r.scheduled for r in records] == [r.scheduled for r in undisturbed]
    if variant in PREEMPTING:
        assert mode_of(variant) in {p.mode for p in preemptions(records)}
        assert any(record.blocks_copied for record in records)


@pytest.mark.parametrize("point", ["before anything", "between layers", "when all is done"])
@pytest.mark.parametrize("variant", INTERRUPTIBLE)
def test_aborts_while_a_step_is_interrupted(gqa: TinyModel, variant: str, point: str) -> None:
    """Any of the requests dropped in the middle of any step, one alone, some, or all; a newcomer
    that begins like them must not hit what then was never computed.
    """
    # Prompts that begin alike, so that one step hits what it computes itself.
    jobs = [Job(name, [*PREFIX[:9], index], 5) for index, name in enumerate("abc")]
    newcomer = Job("n", PREFIX[:13], 5)
    knobs = INTERRUPTIBLE[variant] | {"num_gpu_blocks": POOL_TOKENS // 4}
    plan = ForcedPreemption(at={3: ["a", "b"]}) if variant in PREEMPTING else None
    engine = make_engine(gqa, **knobs)
    engine.force_preemption(plan)
    undisturbed = drive(engine, jobs)
    if variant in PREEMPTING:
        assert hit_tokens(undisturbed, "b") == hit_tokens(undisturbed, "c") == 8
        assert len(preemptions(undisturbed)) >= 1
    dropped_whole_steps = 0
    for step in range(len(undisturbed)):
        for victims in nonempty_subsets([job.request_id for job in jobs]):
            engine = make_engine(gqa, **knobs)
            engine.force_preemption(plan)
            interrupt(engine, point, [step])

            def abort(
                now: int, engine: Engine = engine, victims: tuple[str, ...] = victims
            ) -> None:
                for victim in victims:
                    engine.abort(victim)
                engine.add_request(newcomer.request_id, newcomer.prompt, newcomer.params)

            records = drive(engine, jobs, when_interrupted=abort)
            assert_each_as_alone(engine, gqa, [*jobs, newcomer], aborted=victims)
            dropped_whole_steps += bool(undisturbed[step].scheduled and not records[step].scheduled)
    assert dropped_whole_steps > 0


# -- all of it together -----------------------------------------------------------------------


@st.composite
def stories(draw: st.DrawFn) -> dict[str, Any]:
    """Some requests, an engine that may be short of everything, and what befalls them."""
    variant = draw(st.sampled_from(sorted(INTERRUPTIBLE)))
    size = draw(st.sampled_from([1, 2, 4]))
    jobs = [
        Job(
            name,
            PREFIX[: draw(st.sampled_from([1, 4, 8, 9, 16, 17]))]
            + draw(st.sampled_from([[], [1], [2, 3, 4, 5, 6]])),
            max_tokens=draw(st.integers(1, 10)),
            arrives=draw(st.integers(0, 4)),
            n=draw(st.sampled_from([1, 1, 2])),
        )
        for name in "abcd"[: draw(st.integers(2, 4))]
    ]
    knobs: Knobs = {
        "block_size": size,
        "num_cpu_blocks": draw(st.sampled_from([6, POOL_TOKENS])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_seqs": draw(st.integers(2, 4)),
        "max_model_len": 32,
    }
    if variant in PREEMPTING:
        longest = max(len(job.prompt) + job.max_tokens for job in jobs)
        knobs["num_gpu_blocks"] = -(-longest // size) + 1 + draw(st.integers(0, 3))
    if not variant.startswith("continuous"):
        least = 22 if variant in ("static", "dynamic") else 4
        knobs["max_num_batched_tokens"] = draw(st.integers(least, 40))
    return {
        "jobs": jobs,
        "knobs": PREEMPTING.get(variant, {"policy": variant}) | knobs,
        "evictions": draw(st.sampled_from([0.0, 0.0, 0.2])) if variant in PREEMPTING else 0.0,
        "seed": draw(st.integers(0, 99)),
        "aborts": draw(st.dictionaries(st.integers(0, 15), st.sampled_from("abcd"), max_size=2)),
        "point": draw(st.sampled_from(sorted(INTERRUPTION_POINTS))),
        "interrupted": draw(st.sets(st.integers(0, 15), max_size=5)),
    }


def test_anything_at_once(gqa: TinyModel) -> None:
    """Evictions, hits, samples, aborts and interrupts, as chance has it."""
    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES or 200, deadline=None, derandomize=not EXAMPLES)
    @given(story=stories())
    def tell(story: dict[str, Any]) -> None:
        jobs, aborts = story["jobs"], story["aborts"]
        engine = make_engine(gqa, **story["knobs"])
        if story["evictions"]:
            engine.force_preemption(
                ForcedPreemption(probability=story["evictions"], seed=story["seed"], limit=40)
            )
        executor = interrupt(engine, story["point"], story["interrupted"])

        def abort(step: int) -> None:  # between steps, and within one that is interrupted
            if step in aborts:
                seen["abort"] += engine.abort(aborts[step])

        records = drive(engine, jobs, before_step=abort, when_interrupted=abort)
        assert_each_as_alone(engine, gqa, jobs, aborted=set(aborts.values()))
        seen["interrupt"] += len(executor.struck)
        seen.update(f"{entry.mode} {entry.victim_of is None}" for entry in preemptions(records))
        for entry in admissions(records):
            seen[entry.how] += 1
            seen["hit"] += bool(entry.prefix_hit_tokens) and entry.how != "forked"

    tell()
    evictions = [f"{mode} {by_hand}" for mode in ("swap", "recompute") for by_hand in (True, False)]
    for what in (*evictions, "abort", "interrupt", "forked", "recomputed", "swapped_in", "hit"):
        assert seen[what] >= 5, what
