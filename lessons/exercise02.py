"""Exercises of lesson 02: the bouncer at the door, room for everybody, and the impatient queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lessons.engines import run_with
from lessons.exercise import Exercise, Verdict, call, failed, passed
from minibatch.errors import MinibatchError
from minibatch.record import StepRecord
from minibatch.scheduler import ContinuousScheduler
from minibatch.workload import RequestSpec

SOLUTION = "notebooks/solutions/02_three_queues.ipynb"
_REASONS = ("no_slot", "no_blocks", "swapped_first", "preempted_this_step")
QUIZ = (
    (
        "5 blocks and a slot are free, somebody is swapped. The head of waiting meets:",
        _REASONS,
        2,
        "Who was evicted comes first, however much is free.",
    ),
    (
        "Nobody is swapped, 1 block is free, the head needs 2, no slot is free:",
        _REASONS,
        1,
        "Memory is asked before slots, and the first no is the one on record.",
    ),
)
PROMPTS = {"A": 7, "B": 4, "C": 8, "D": 3, "E": 6, "F": 3, "G": 6, "H": 6}
OUTPUTS = {"A": 4, "B": 8, "C": 4, "D": 5, "E": 2, "F": 2, "G": 2, "H": 3}
KNOBS = {
    "max_num_seqs": 4,
    "num_gpu_blocks": 9,
    "num_cpu_blocks": 8,
    "block_size": 4,
    "max_model_len": 24,
    "preemption_mode": "swap",
}


def requests() -> list[RequestSpec]:
    """The eight requests of the lesson, all there from the start."""
    return [RequestSpec(name, 0.0, PROMPTS[name], OUTPUTS[name]) for name in PROMPTS]


# -- the door -------------------------------------------------------------------------------------


class Door(NamedTuple):
    """What the scheduler knows when it looks at the head of ``waiting``."""

    needed_blocks: int
    free_blocks: int
    watermark: int  # blocks that an admission must leave free
    tokens: int  # of its prompt
    token_budget: int  # left in this step
    free_slots: int
    swapped: int  # requests that were evicted and wait to return


def truth(door: Door) -> str | None:
    """The checks of ``ContinuousScheduler``, in its order."""
    if door.swapped:
        return "swapped_first"
    if door.needed_blocks > door.free_blocks:
        return "no_blocks"
    if door.free_blocks - door.needed_blocks < door.watermark:
        return "watermark"
    if door.tokens > door.token_budget:
        return "no_token_budget"
    return None if door.free_slots > 0 else "no_slot"


DOORS = (
    Door(2, 5, 0, 6, 64, 1, 0),
    Door(2, 1, 0, 6, 64, 1, 0),
    Door(2, 2, 0, 6, 64, 1, 0),
    Door(2, 2, 1, 6, 64, 1, 0),
    Door(4, 5, 1, 16, 64, 1, 0),
    Door(2, 9, 0, 6, 5, 1, 0),
    Door(2, 9, 0, 6, 64, 0, 0),
    Door(2, 1, 0, 6, 64, 0, 0),
    Door(2, 9, 0, 6, 5, 0, 0),
    Door(2, 9, 0, 6, 64, 2, 1),
    Door(2, 1, 0, 6, 64, 0, 2),
    Door(2, 3, 2, 6, 5, 1, 0),
)


def _slots_first(door: Door) -> str | None:
    if door.swapped:
        return "swapped_first"
    return "no_slot" if door.free_slots <= 0 else truth(door)


def _no_watermark(door: Door) -> str | None:
    return truth(door._replace(watermark=0))


def _strict_watermark(door: Door) -> str | None:
    """Takes ``<=`` where the scheduler has ``<``."""
    reason = truth(door)
    at_it = door.free_blocks - door.needed_blocks == door.watermark
    return "watermark" if at_it and not door.swapped else reason


def _one_word(door: Door) -> str | None:
    reason = truth(door)
    return "no_blocks" if reason == "watermark" else reason


def _no_swapped(door: Door) -> str | None:
    return truth(door._replace(swapped=0))


def _tokens_first(door: Door) -> str | None:
    if not door.swapped and door.tokens > door.token_budget:
        return "no_token_budget"
    return truth(door)


WRONG_TURNS: tuple[tuple[Callable[[Door], str | None], str], ...] = (
    (
        _slots_first,
        "you ask for a slot first. Look at _admit_waiting again: memory is asked before the "
        "budget, and slots belong to the budget.",
    ),
    (
        _tokens_first,
        "you ask for tokens before memory. In _admit_waiting, _lacks_blocks comes before "
        "_lacks_budget.",
    ),
    (
        _no_watermark,
        "you admit down to the last block. An admission must leave `watermark` blocks free.",
    ),
    (
        _strict_watermark,
        "off by one: exactly `watermark` blocks left is enough. (With a watermark of 0 you would "
        "never fill the pool.)",
    ),
    (
        _one_word,
        "two reasons, two cures: no_blocks when they are not free, watermark when they are free "
        "but too few would be left.",
    ),
    (
        _no_swapped,
        "who was evicted comes first: while anybody is in swapped, nobody new is even looked at.",
    ),
)


def _judge_door(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: door.check(why_not).")
    results = [call(answer, door) for door in DOORS]
    if all(result is None for result in results):
        return Verdict(None, "why_not lets everybody in so far.")
    right = [truth(door) for door in DOORS]
    for wrong, hint in WRONG_TURNS:
        if results == [wrong(door) for door in DOORS]:
            return failed(hint)
    for door, result, reason in zip(DOORS, results, right, strict=True):
        if result != reason:
            return failed(f"{door}: you say {result!r}, the scheduler says {reason!r}.")
    return passed(f"all {len(DOORS)} doors, and in the scheduler's order.")


door = Exercise(
    title="The bouncer",
    task=(
        "Write why_not(door): the reason why vLLM 0.6.0 leaves the head of waiting outside, or "
        "None. The reasons are swapped_first, no_blocks, watermark, no_token_budget and no_slot; "
        "the fields of a door stand in exercise02.Door."
    ),
    target="12 doors, each with the reason that the scheduler would record.",
    minutes=15,
    level="medium",
    judge=_judge_door,
    hints=(
        "The first check that fails is the reason. Their order is the order of the source above.",
        "free - needed < watermark is a different reason from needed > free.",
    ),
    solution=SOLUTION,
)


# -- room for everybody ---------------------------------------------------------------------------


def _judge_room(answer: Any) -> Verdict:
    if not isinstance(answer, dict) or not answer.keys() <= {"max_num_seqs", "num_gpu_blocks"}:
        return failed('give a dict of the two knobs: {"max_num_seqs": ..., "num_gpu_blocks": ...}.')
    try:
        trace = run_with(ContinuousScheduler, requests(), {**KNOBS, **answer})
    except MinibatchError as error:
        return failed(str(error))
    refused = [refusal for step in trace for refusal in step.refused]
    if refused:
        return failed(refused[0].reason)
    evictions, steps = trace.summary["num_preemptions"], len(trace)
    blocks = trace.meta.knobs["num_gpu_blocks"]
    seen = f"{steps} iterations, {evictions} evictions, {blocks} blocks"
    if blocks > 11:
        return failed(f"{seen}: more memory always helps. Less than that is enough.")
    if evictions:
        return failed(
            f"{seen}: more requests are let in than can grow to their end. {_worst(trace)}"
        )
    if steps > 10:
        return failed(
            f"{seen}: nobody is evicted, because a slot fewer is in use. That costs iterations; "
            "try memory instead."
        )
    return passed(f"{seen}. Eviction is a sign of too little memory, not of too many slots.")


def _worst(trace: Any) -> str:
    step = next(step for step in trace if step.preempted)
    victim = step.preempted[0]
    return f"See step {step.step}: {victim.request_id} loses its memory to {victim.victim_of}."


room = Exercise(
    title="Room for everybody",
    task="Choose max_num_seqs and num_gpu_blocks for the eight requests. All other knobs stay.",
    target="no eviction, at most 10 iterations, at most 11 blocks.",
    minutes=5,
    level="easy",
    judge=_judge_room,
    hints=(
        "What does a slot fewer cost, and what does a block more?",
        "Try one knob at a time; a run takes no time.",
    ),
    solution=SOLUTION,
)


# -- break it -------------------------------------------------------------------------------------


CROWD_KNOBS = {**KNOBS, "num_gpu_blocks": 8, "max_model_len": 32}


def crowd(small: int = 12) -> list[RequestSpec]:
    """``small`` requests of one block each, and a large one, X, that comes fourth."""
    sizes = [RequestSpec(f"s{i}", 0.0, 1, (3, 4)[i % 2]) for i in range(small)]
    return [*sizes[:3], RequestSpec("X", 0.0, 28, 3), *sizes[3:]]


def first_token(steps: Iterable[StepRecord], name: str) -> int:
    """The step in which a request got its first token."""
    return next(step.step for step in steps if name in step.sampled)


RULES = {
    "release": "Finished requests keep their blocks.",
    "preempt": "The oldest request is evicted, not the newest.",
    "head": "The head of the queue is no longer first: whoever fits may pass it, without a limit.",
    "swapped": "Newcomers are let in although somebody is swapped out.",
}
_WHY_NOT = {
    "release": "count the free blocks after a finish: they come back at once.",
    "preempt": "look at the lives of s0, s1 and s2, the oldest: they run to their end.",
    "swapped": "in this run nobody is admitted while somebody is swapped out; that rule is intact.",
}


def _judge_rule(answer: Any) -> Verdict:
    if answer not in RULES:
        return failed(f"one of {', '.join(RULES)}.")
    if answer != "head":
        return failed(f"not that one: {_WHY_NOT[answer]}")
    return passed(
        "small requests pass the large one for as long as they come: it starves. A bypass needs a "
        "bound, for example: at most so many may pass, then blocks are saved up for the head."
    )


rule = Exercise(
    title="Which rule is broken?",
    task="; ".join(f"{name}: {text}" for name, text in RULES.items()),
    target="the one word.",
    minutes=5,
    level="easy",
    judge=_judge_rule,
    hints=("Compare the lives of X under both schedulers. Who got in before it, and came later?",),
    solution=SOLUTION,
)
