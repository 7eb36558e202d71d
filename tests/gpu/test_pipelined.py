"""One step ahead, and nobody notices: decisions, records and answers are those of ``Engine``."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from pipeline_helpers import (
    Arrival,
    FakeLauncher,
    answers,
    decisions,
    drive,
    random_arrivals,
    small_config,
)
from toy_tokenizers import llama_style

from minibatch.engine import Engine
from minibatch.executor.launch import PENDING
from minibatch.pipelined import PipelinedEngine
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import ForcedPreemption

POLICIES: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "dynamic": {"policy": "dynamic"},
    "continuous": {"policy": "continuous"},
    "continuous, swapping": {"policy": "continuous", "preemption_mode": "swap"},
    "continuous, chunked": {"policy": "continuous", "enable_chunked_prefill": True},
    "unified": {"policy": "unified"},
    "unified, short of memory": {"policy": "unified", "num_gpu_blocks": 13},
    "continuous, short of memory": {
        "policy": "continuous",
        "num_gpu_blocks": 13,
        "preemption_mode": "swap",
    },
}


@pytest.fixture(params=list(POLICIES))
def knobs(request: pytest.FixtureRequest) -> dict[str, Any]:
    return POLICIES[request.param]


def both(knobs: dict[str, Any]) -> tuple[Engine, PipelinedEngine]:
    config = small_config(**knobs)
    settings: dict[str, Any] = {"check": True, "eos_token_ids": (0,)}
    return (
        Engine(config, FakeLauncher(), **settings),
        PipelinedEngine(config, FakeLauncher(), **settings),
    )


@pytest.mark.parametrize("seed", range(4))
def test_records_are_those_of_the_plain_engine(knobs: dict[str, Any], seed: int) -> None:
    """Where only ``max_tokens`` ends requests, every field of every step but the times."""
    plain, ahead = both(knobs)
    arrivals = random_arrivals(seed)
    expected = [decisions(record) for record in drive(plain, arrivals)]
    found = [decisions(record) for record in drive(ahead, arrivals)]
    assert found == expected
    assert answers(ahead, arrivals) == answers(plain, arrivals)


@pytest.mark.parametrize("seed", range(4))
def test_who_stops_early_never_shows_the_extra_token(knobs: dict[str, Any], seed: int) -> None:
    plain, ahead = both(knobs)
    stop_ids = list(range(0, 50, 7))  # one token in seven ends a text
    arrivals = random_arrivals(seed, stop_token_ids=stop_ids, max_tokens=14, ignore_eos=False)
    drive(plain, arrivals)
    records = drive(ahead, arrivals)
    assert answers(ahead, arrivals) == answers(plain, arrivals)
    # The records add up too: what was sampled is what was said, and all are told to have ended.
    for arrival in arrivals:
        said = [token for r in records for token in r.sampled.get(arrival.request_id, [])]
        assert said == ahead.output(arrival.request_id).outputs[0].token_ids
    ended = [finish.request_id for record in records for finish in record.finished]
    assert sorted(ended) == sorted(arrival.request_id for arrival in arrivals)
    blocks = ahead.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_usable_blocks


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_and_text(seed: int) -> None:
    """Text comes a step late too, and ends where it should: before the stop string."""
    tokenizer = llama_style()
    arrivals = random_arrivals(seed, count=8, stop=["th", "e", "!"], max_tokens=14)
    said = []
    for kind in (Engine, PipelinedEngine):
        launcher = FakeLauncher(vocab_size=tokenizer.vocab_size)
        engine = kind(small_config("continuous"), launcher, tokenizer=tokenizer, check=True)
        drive(engine, arrivals)
        said.append(answers(engine, arrivals))
    assert said[0] == said[1]
    reasons = [one[2] for sequences in said[0].values() for one in sequences]
    assert "stop" in reasons


def test_a_late_stop_costs_one_row_of_one_step() -> None:
    _, ahead = both({"policy": "continuous"})
    arrivals = random_arrivals(1, count=1, stop_token_ids=list(range(50)), max_tokens=9)
    records = drive(ahead, arrivals)[-2:]
    assert [len(record.scheduled) for record in records] == [1, 1]
    assert [len(record.sampled) for record in records] == [1, 0]
    assert [[f.reason for f in record.finished] for record in records] == [[], ["stop"]]
    assert not ahead.has_unfinished  # though step() was called but once


def test_steps_that_are_waited_for_are_not_guessed() -> None:
    """Penalties in some requests: their steps are taken as in ``Engine``, the others ahead."""
    plain, ahead = both({"policy": "continuous"})
    arrivals = random_arrivals(5, count=8)
    arrivals += [
        type(arrivals[0])(20, "P", [3, 4], arrivals[0].params.__class__(
            max_tokens=6, ignore_eos=True, temperature=0.0, repetition_penalty=1.3))
    ]  # fmt: skip
    expected = [decisions(record) for record in drive(plain, arrivals)]
    assert [decisions(record) for record in drive(ahead, arrivals)] == expected


def conversations(seed: int, **params: Any) -> list[Arrival]:
    """Requests that begin as others did, and some that go on where another's *answer* ends, while
    it is still being written: their blocks are entered and looked up in neighbouring steps.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    for number in range(16):
        earlier = rng.choice(arrivals) if arrivals and rng.random() < 0.7 else None
        prompt, seed_of_answer = [], 100 * seed + number
        if earlier is not None:
            seed_of_answer = earlier.params.seed or 0  # the same prompt then gets the same answer
            said = [random.Random(f"{seed_of_answer} {n}").randrange(50) for n in range(12)]
            prompt = (earlier.prompt + said[: rng.randint(0, 12)])[:18]
        else:
            prompt = [rng.randrange(2, 50) for _ in range(rng.randint(1, 12))]
        chosen = SamplingParams(
            max_tokens=rng.randint(1, 12), ignore_eos=True, temperature=0.0, seed=seed_of_answer
        )
        arrivals.append(Arrival(rng.randint(0, 30), chr(65 + number), prompt, chosen))
    return sorted(arrivals, key=lambda arrival: arrival.step)


def steps_ahead(engine: PipelinedEngine) -> int:
    """Launches that came before the tokens of the launch before them."""
    assert isinstance(engine.executor, FakeLauncher)
    return engine.executor.ahead


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "knobs",
    [
        {"policy": "unified"},
        {"policy": "unified", "num_gpu_blocks": 11, "max_num_batched_tokens": 8},
        {"policy": "continuous"},
        {"policy": "continuous", "num_gpu_blocks": 13, "preemption_mode": "swap"},
        {"policy": "continuous", "enable_chunked_prefill": True, "max_num_batched_tokens": 8},
    ],
    ids=["unified", "unified, short", "continuous", "swapping", "chunked"],
)
def test_prefix_caching_runs_ahead_and_finds_the_same_blocks(
    knobs: dict[str, Any], seed: int
) -> None:
    """Down to the ids of the blocks that are found, freed and kept."""
    plain, ahead = both({**knobs, "enable_prefix_caching": True, "max_num_seqs": 4})
    arrivals = conversations(seed)
    expected = drive(plain, arrivals)
    found = [decisions(record) for record in drive(ahead, arrivals)]
    assert found == [decisions(record) for record in expected]
    assert answers(ahead, arrivals) == answers(plain, arrivals)
    hits = sum(a.prefix_hit_tokens for record in expected for a in record.admitted)
    assert hits > 0
    assert steps_ahead(ahead) > len(found) // 4


def test_without_anybody_waiting_a_prefix_cache_costs_no_step() -> None:
    """Not even where a token completes a block; the block is found by whoever comes later."""
    plain, ahead = both({"policy": "unified", "enable_prefix_caching": True})
    first = random_arrivals(0, count=1, max_tokens=12)[0]
    said = [random.Random(f"{first.params.seed} {n}").randrange(50) for n in range(12)]
    later = Arrival(first.step + 11, "B", [*first.prompt, *said[:11]], first.params)
    arrivals = [first, later]
    expected = drive(plain, arrivals)
    found = drive(ahead, arrivals)
    assert [decisions(r) for r in found] == [decisions(r) for r in expected]
    hits = {a.request_id: a.prefix_hit_tokens for r in found for a in r.admitted}
    assert hits["B"] > len(first.prompt) // 4 * 4  # blocks that hold what was said
    assert steps_ahead(ahead) >= 11


def test_who_stops_early_leaves_no_block_that_was_never_said() -> None:
    """Its row of the next step completes a block, which must not be found."""
    plain, ahead = both({"policy": "unified", "enable_prefix_caching": True})
    for seed in range(6):
        arrivals = [
            replace(a, request_id=f"{seed}{a.request_id}", step=a.step + 60 * seed,
                    params=replace(a.params, stop_token_ids=list(range(0, 50, 5))))
            for a in conversations(seed)
        ]  # fmt: skip
        for engine in (plain, ahead):
            drive(engine, arrivals)
        assert answers(ahead, arrivals) == answers(plain, arrivals)
    for engine in (plain, ahead):
        blocks = engine.scheduler.block_manager
        known = [node.tokens for node in blocks.node_of if node is not None]
        assert known and not any(PENDING in tokens for tokens in known)


def test_several_samples_of_one_prompt() -> None:
    plain, ahead = both({"policy": "unified"})
    arrivals = random_arrivals(2, count=5, n=3)
    expected = [decisions(record) for record in drive(plain, arrivals)]
    assert [decisions(record) for record in drive(ahead, arrivals)] == expected
    assert answers(ahead, arrivals) == answers(plain, arrivals)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_evictions_of_rows_whose_token_is_still_unknown(mode: str) -> None:
    plain, ahead = both({"policy": "continuous", "preemption_mode": mode})
    arrivals = random_arrivals(3, stop_token_ids=[1, 2, 3])
    for engine in (plain, ahead):
        engine.force_preemption(ForcedPreemption(probability=0.3, seed=1))
        drive(engine, arrivals)
    assert answers(ahead, arrivals) == answers(plain, arrivals)


def test_aborts_between_steps() -> None:
    _, ahead = both({"policy": "continuous"})
    arrivals = random_arrivals(4, max_tokens=12)
    gone: list[str] = []

    def abort_somebody(call: int) -> None:
        if call % 3 == 2 and ahead.scheduler.running:
            victim = ahead.scheduler.running[-1].request_id
            assert ahead.abort(victim)
            gone.append(victim)

    records = drive(ahead, arrivals, before_step=abort_somebody)
    assert gone
    for arrival in arrivals:
        completion = ahead.output(arrival.request_id).outputs[0]
        assert PENDING not in completion.token_ids
        assert (completion.finish_reason == "abort") == (arrival.request_id in gone)
        said = [token for r in records for token in r.sampled.get(arrival.request_id, [])]
        assert said == completion.token_ids


@pytest.mark.parametrize("failing_call", [0, 1, 3, 6])
def test_a_launch_that_fails_is_tried_again(knobs: dict[str, Any], failing_call: int) -> None:
    plain, ahead = both(knobs)
    launcher = ahead.executor
    assert isinstance(launcher, FakeLauncher)
    arrivals = [a for a in random_arrivals(6, stop_token_ids=[1, 2, 3, 4, 5])]
    arrivals = [type(a)(0, a.request_id, a.prompt, a.params) for a in arrivals]
    for engine in (plain, ahead):
        for a in arrivals:
            engine.add_request(a.request_id, a.prompt, a.params)
    calls = 0
    while ahead.has_unfinished:
        launcher.fails = 2 if calls == failing_call else 0
        while True:
            try:
                ahead.step()
                break
            except RuntimeError:
                for a in arrivals:
                    for one in ahead.output(a.request_id).outputs:
                        assert PENDING not in one.token_ids
        calls += 1
    list(plain.run())
    assert answers(ahead, arrivals) == answers(plain, arrivals)


def test_an_error_and_then_everything_is_aborted() -> None:
    _, ahead = both({"policy": "continuous"})
    launcher = ahead.executor
    assert isinstance(launcher, FakeLauncher)
    arrivals = random_arrivals(7, max_tokens=12)
    for a in arrivals:
        ahead.add_request(a.request_id, a.prompt, a.params)
    for _ in range(3):
        ahead.step()
    launcher.fails = 1
    with pytest.raises(RuntimeError):
        ahead.step()
    for a in arrivals:
        ahead.abort(a.request_id)
    while ahead.has_unfinished:
        ahead.step()
    for a in arrivals:
        completion = ahead.output(a.request_id).outputs[0]
        assert completion.finish_reason in ("abort", "length")
        assert PENDING not in completion.token_ids
    blocks = ahead.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_usable_blocks


def test_records_tile_the_time_line() -> None:
    """Steps overlap, but the device does one at a time: its time is told once."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    config = small_config("continuous")
    ahead = PipelinedEngine(config, FakeLauncher(), clock=clock)
    records = drive(ahead, random_arrivals(8))
    for before, after in pairwise(records):
        assert after.start_s >= before.end_s
