"""Exercises of lesson 01: write the refill, sort the batch, find the barrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lessons.engines import new_engine
from lessons.exercise import Exercise, Verdict, call, failed, passed
from minibatch import toy

SLOTS = 4
LENGTHS = {"A": 12, "B": 3, "C": 2, "D": 4, "E": 9, "F": 2, "G": 3, "H": 1}
SOLUTION = "notebooks/solutions/01_static_vs_continuous.ipynb"
QUIZ = (
    (
        "Which line made it static?",
        ("while group := ...", "submit(...)", "for _ in engine.run()", "SLOTS in islice"),
        2,
        "It waits for a whole group before the next one is handed over: a barrier.",
    ),
)
CASES: tuple[tuple[tuple[int, ...], int], ...] = (
    (tuple(LENGTHS.values()), SLOTS),
    ((4, 1, 1, 1, 1), 2),
    ((7,) * 12, 4),
    ((5,), 3),
    ((1, 1, 1), 1),
    ((), 2),
)


# -- wrong turns, each a function of its own, so that a wrong answer can be recognised ------------


def _same_step(requests: Sequence[int], slots: int) -> tuple[int, int]:
    """A freed slot serves a second request within the same iteration."""
    waiting, running, steps, busy = deque(requests), [], 0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.popleft())
        steps, busy = steps + 1, busy + len(running)
        left = [n - 1 for n in running]
        running = [n for n in left if n > 0]
        for _ in range(len(left) - len(running)):
            if waiting:
                busy += 1
                first = waiting.popleft() - 1
                if first:
                    running.append(first)
    return steps, busy


def _one_late(requests: Sequence[int], slots: int) -> tuple[int, int]:
    """A freed slot stays empty for an iteration."""
    waiting, running, steps, busy, late = deque(requests), [], 0, 0, 0
    while waiting or running:
        while waiting and len(running) < slots - late:
            running.append(waiting.popleft())
        steps, busy = steps + 1, busy + len(running)
        before = len(running)
        running = [n - 1 for n in running if n > 1]
        late = before - len(running) if running else 0
    return steps, busy


def _all_slots_busy(requests: Sequence[int], slots: int) -> tuple[int, int]:
    """Counts every slot of every iteration as busy."""
    steps, _ = toy.continuous(requests, slots)
    return steps, steps * slots


def _lower_bound(requests: Sequence[int], slots: int) -> tuple[int, int]:
    """Total work over slots: what a perfectly divisible load would take."""
    return -(-sum(requests) // slots), sum(requests)


def _shortest_first(requests: Sequence[int], slots: int) -> tuple[int, int]:
    return toy.continuous(sorted(requests), slots)


WRONG_TURNS: tuple[tuple[Callable[[Sequence[int], int], tuple[int, int]], str], ...] = (
    (
        toy.static,
        "that is static batching: nobody enters until everybody has left. Move the admission "
        "inside the loop over iterations, so that it runs every time.",
    ),
    (
        _one_late,
        "a freed slot stays empty for an iteration. Admit at the start of each iteration, before "
        "you count it.",
    ),
    (
        _same_step,
        "a freed slot serves two requests in one iteration. One forward pass gives one token a "
        "slot: the newcomer starts in the next one.",
    ),
    (
        _all_slots_busy,
        "the iterations are right, but an empty slot is not busy: add len(running), not slots.",
    ),
    (
        _lower_bound,
        "that is the least that any schedule could take. A single long request cannot be spread "
        "over slots: go through the iterations one by one.",
    ),
    (
        _shortest_first,
        "first come, first served: take them in the order they stand in. Nobody knows beforehand "
        "who is short.",
    ),
)


def _judge_refill(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: refill.check(my_continuous).")
    results = []
    for requests, slots in CASES:
        given = list(requests)
        results.append(call(answer, given, slots))
        if given != list(requests):
            return failed("your function changes the list that it is given; work on a copy.")
    if all(result is None for result in results):
        return Verdict(None, "my_continuous returns None so far.")
    if not all(isinstance(r, tuple) and len(r) == 2 for r in results):
        return failed("return two numbers: (iterations, slot-iterations that did useful work).")
    for wrong, hint in WRONG_TURNS:
        expected = [wrong(requests, slots) for requests, slots in CASES]
        truth = [toy.continuous(requests, slots) for requests, slots in CASES]
        if results == expected and expected != truth:
            return failed(hint)
    for (requests, slots), result in zip(CASES, results, strict=True):
        right = toy.continuous(requests, slots)
        if result != right:
            return failed(
                f"my_continuous({list(requests)}, {slots}) gives {result}, the engine does "
                f"{right}. Go through it by hand, iteration by iteration."
            )
    return passed(f"all {len(CASES)} cases agree with the engine, iteration by iteration.")


refill = Exercise(
    title="The coding question: refill the slots",
    task=(
        "Write my_continuous(requests, slots): requests are iteration counts in order of arrival. "
        "Return the number of iterations and how many slot-iterations did useful work. Do not look "
        "at the source above while you write."
    ),
    target="(12, 36) for this lesson's eight requests; five more cases are checked.",
    minutes=15,
    level="medium",
    judge=_judge_refill,
    hints=(
        "Four moves an iteration: admit while a slot is free, count, take one from everybody, drop "
        "whoever is done.",
        "Keep only what is left of each running request: a list of integers is enough.",
    ),
    solution=SOLUTION,
)


def _judge_order(answer: Any) -> Verdict:
    names = list(answer) if isinstance(answer, (str, list, tuple)) else None
    if names is None:
        return failed('give the order as a string of names, like "ABCDEFGH".')
    if sorted(names) != sorted(LENGTHS):
        return failed("each of A to H exactly once.")
    steps, _ = toy.static([LENGTHS[name] for name in names], SLOTS)
    best, _ = toy.static(sorted(LENGTHS.values(), reverse=True), SLOTS)
    if steps == best:
        return passed(
            f"{steps} iterations. The long ones share a batch, so only one batch is long. It needs "
            "lengths that nobody knows beforehand."
        )
    first, second = names[:SLOTS], names[SLOTS:]
    return failed(
        f"{steps} iterations: the first batch waits for {max(first, key=LENGTHS.__getitem__)}, the "
        f"second for {max(second, key=LENGTHS.__getitem__)}. Who would rather share a batch?"
    )


order = Exercise(
    title="Help the static batcher",
    task=(
        "You may choose the order of the eight requests, nothing else. Static batching takes the "
        "first four, then the other four."
    ),
    target="at most 15 iterations.",
    minutes=5,
    level="easy",
    judge=_judge_order,
    hints=("A batch costs what its longest member costs. How many batches must be long?",),
    solution=SOLUTION,
)


# -- break it -------------------------------------------------------------------------------------


def _judge_serve(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: barrier.check(serve_fixed).")
    engine = new_engine(max_num_seqs=SLOTS)
    answered = call(answer, engine, dict(LENGTHS), most_lines=2_000_000)
    trace = engine.trace
    done = {finish.request_id for step in trace for finish in step.finished}
    if answered is None and not trace.steps and not engine.has_unfinished:
        return Verdict(None, "serve_fixed does nothing so far.")
    missing = sorted(set(LENGTHS) - done)
    if missing:
        return failed(f"{', '.join(missing)} never finished: step until nothing is left.")
    best, _ = toy.continuous(list(LENGTHS.values()), SLOTS)
    most_waiting = max(len(step.waiting) for step in trace)
    if len(trace) <= best:
        return passed(f"{len(trace)} iterations; at most {most_waiting} waited, inside the engine.")
    if most_waiting == 0:
        return failed(
            f"{len(trace)} iterations, and the engine's own queue was always empty: it can only "
            "refill a slot from requests that it has been given. Who holds them back?"
        )
    return failed(
        f"{len(trace)} iterations, {best} are possible. In some step a slot was free while you "
        "still held a request back: hand over all of them before the first step."
    )


barrier = Exercise(
    title="Remove the barrier",
    task=(
        "Write serve_fixed(engine, lengths): submit and step as you like, on an engine of four "
        "slots, so that it batches continuously."
    ),
    target="12 iterations for the eight requests.",
    minutes=5,
    level="easy",
    judge=_judge_serve,
    hints=("The engine has a queue of its own. Use it.",),
    solution=SOLUTION,
)
