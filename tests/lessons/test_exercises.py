"""Exercises: the stub fails, the solution passes, a plausible wrong answer gets a useful hint."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from lessons import exercise00, exercise01, exercise02, exercise03, exercise04
from lessons.build import FOLDER, lesson_paths, run
from lessons.engines import run_with, submit
from lessons.exercise import Exercise, Mistake, Verdict, call
from minibatch import toy
from minibatch.hardware import hardware
from minibatch.model.presets import preset
from minibatch.reservation import kv_memory, reservation
from minibatch.scheduler import ContinuousScheduler
from minibatch.simulation import simulate
from minibatch.workload import generate, uniform

LESSONS = [path for path in lesson_paths() if path.parent == FOLDER]


def exercises(path: Path) -> dict[str, Exercise]:
    module = importlib.import_module(f"lessons.exercise{path.stem[:2]}")
    return {name: value for name, value in vars(module).items() if isinstance(value, Exercise)}


def cells(path: Path, start: str) -> dict[str, NotebookNode]:
    """Code cells whose id begins so, by the rest of the id."""
    notebook = nbformat.read(path, as_version=4)
    return {c.id[len(start) :]: c for c in notebook.cells if c.id.startswith(start)}


def plain(cell: NotebookNode) -> str:
    return cell.outputs[-1].data["text/plain"]


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_every_exercise_has_an_open_stub_and_a_passing_solution(path: Path) -> None:
    """Read from the committed outputs, which ``--nbval`` compares with new ones."""
    stubs = cells(path, "stub-")
    solutions = cells(path.parent / "solutions" / path.name, "solution-")
    assert stubs.keys() == solutions.keys() == exercises(path).keys()
    for name, cell in stubs.items():
        assert "stub" in cell.metadata.tags
        assert plain(cell).startswith(("Open:", "Not yet:")), name
    for name, cell in solutions.items():
        assert plain(cell).startswith("Passed:"), name
    shown = cells(path, "exercise-")
    assert shown.keys() == stubs.keys()


@pytest.mark.parametrize("path", LESSONS[1:], ids=[path.stem for path in LESSONS[1:]])
def test_solutions_pass_where_a_learner_would_type_them(path: Path) -> None:
    """The whole lesson, with every stub filled in. (00 runs a real model and is left out.)"""
    solutions = cells(path.parent / "solutions" / path.name, "solution-")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.id.startswith("stub-"):
            cell.source = solutions[cell.id.removeprefix("stub-")].source
    run(notebook, path.parent)
    for cell in notebook.cells:
        if cell.id.startswith("stub-"):
            assert plain(cell).startswith("Passed:"), cell.id


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_every_exercise_has_a_target_hints_and_a_solution(path: Path) -> None:
    for exercise in exercises(path).values():
        assert exercise.target and exercise.hints and exercise.minutes > 0
        assert exercise.level in ("easy", "medium", "hard")
        assert (FOLDER.parent / exercise.solution).is_file()
        bundle = exercise.show()._repr_mimebundle_()
        assert exercise.target in bundle["text/plain"]
        assert bundle["text/html"].count("<details>") == len(exercise.hints) + 1


# -- wrong answers --------------------------------------------------------------------------------


def one_by_one(engine: Any, lengths: dict[str, int]) -> None:
    for name, length in lengths.items():
        submit(engine, name, length)
        for _ in engine.run():
            pass


def first_half_then_rest(engine: Any, lengths: dict[str, int]) -> None:
    items = list(lengths.items())
    for name, length in items[:5]:
        submit(engine, name, length)
    for _ in range(11):
        engine.step()
    for name, length in items[5:]:
        submit(engine, name, length)
    for _ in engine.run():
        pass


def forgets_to_step(engine: Any, lengths: dict[str, int]) -> None:
    for name, length in lengths.items():
        submit(engine, name, length)


def eats_its_input(requests: list[int], slots: int) -> tuple[int, int]:
    result = toy.continuous(requests, slots)
    requests.clear()
    return result


def never_ends(requests: list[int], slots: int) -> tuple[int, int]:
    steps = 0
    while requests:
        steps += 1
    return steps, 0


def raises(requests: list[int], slots: int) -> tuple[int, int]:
    return requests[99], slots


def keys_only(kv_gib: float, layers: int, heads: int, dim: int, tokens: int) -> int:
    blocks = int(kv_gib * 2**30) // (16 * layers * heads * dim * 2)
    return blocks // -(-tokens // 16)


def query_heads(kv_gib: float, layers: int, heads: int, dim: int, tokens: int) -> int:
    return keys_only(kv_gib / 2, layers, 32, dim, tokens)


def one_way(tokens: int, kv: int, parameters: int, link: float, flops: float) -> Any:
    return tokens * kv / link, 2 * parameters * tokens / flops


WRONG: list[tuple[Exercise, Any, str]] = [
    *((exercise01.refill, wrong, hint) for wrong, hint in exercise01.WRONG_TURNS),
    (exercise01.refill, eats_its_input, "work on a copy"),
    (exercise01.refill, never_ends, "does not end"),
    (exercise01.refill, raises, "IndexError"),
    (exercise01.refill, (12, 36), "the function itself"),
    (exercise01.refill, lambda requests, slots: 12, "two numbers"),
    (exercise01.refill, lambda requests, slots: (12, 36), "by hand, iteration by iteration"),
    (exercise01.order, "ABCDEFGH", "21 iterations: the first batch waits for A"),
    (exercise01.order, "ABC", "each of A to H"),
    (exercise01.barrier, one_by_one, "queue was always empty"),
    (exercise01.barrier, first_half_then_rest, "hand over all of them"),
    (exercise01.barrier, forgets_to_step, "never finished"),
    *((exercise02.door, wrong, hint) for wrong, hint in exercise02.WRONG_TURNS),
    (exercise02.door, lambda door: "no_slot", "the scheduler says"),
    (exercise02.room, {"max_num_seqs": 3}, "costs iterations"),
    (exercise02.room, {"num_gpu_blocks": 10}, "step 3: D loses its memory to A"),
    (exercise02.room, {"num_gpu_blocks": 64}, "Less than that is enough"),
    (exercise02.room, {"num_gpu_blocks": 1}, "num_gpu_blocks"),
    (exercise02.room, {"block_size": 1}, "the two knobs"),
    (exercise02.rule, "preempt", "lives of s0"),
    (exercise02.rule, "release", "free blocks"),
    (exercise02.rule, "swapped", "intact"),
    (exercise02.rule, "queue", "one of"),
    *((exercise00.per_pass, wrong, hint) for wrong, hint in exercise00.WRONG_TURNS),
    (exercise00.per_pass, lambda trace: 1.0, "for four slots"),
    (exercise00.report, "ann", "what users wait for"),
    (exercise00.report, "eve", "one of"),
    *((exercise03.where, wrong, hint) for wrong, hint in exercise03.PLACE_TURNS),
    (exercise03.where, lambda table, position, size: 0, "the pool has it in slot 20"),
    (exercise03.fit, keys_only, "a key *and* a value"),
    (exercise03.fit, query_heads, "only KV heads are stored"),
    (exercise03.fit, lambda *shape: 190, "729 fit"),
    (exercise03.sign, "evictions", "what its author wanted"),
    (exercise03.sign, "free", "all 16 blocks are taken"),
    (exercise03.sign, "order", "count who finishes when"),
    (exercise03.sign, "none", "one of"),
    (exercise04.price, one_way, "half of the way"),
    (exercise04.price, lambda *victim: 1.0, "two numbers"),
    (exercise04.price, lambda *victim: (1.0, 1.0), "it is 21.5 and 43.3 ms"),
    (exercise04.watermark, 0, "too bold"),
    (exercise04.watermark, 4, "too careful"),
    (exercise04.watermark, 0.01, "whole number"),
    (exercise04.bug, "requeue", "before anybody else"),
    (exercise04.bug, "admit", "nobody new is left"),
    (exercise04.bug, "release", "all requests finish"),
    (exercise04.bug, "none", "one of"),
]


@pytest.mark.parametrize(("exercise", "answer", "hint"), WRONG)
def test_a_wrong_answer_fails_with_a_hint(exercise: Exercise, answer: Any, hint: str) -> None:
    verdict = exercise.check(answer)
    assert verdict.passed is False
    assert hint in verdict.message
    assert verdict.message.startswith(hint) or len(verdict.message) > 20


def test_wrong_turns_differ_from_the_truth_and_from_each_other() -> None:
    truth = [toy.continuous(*case) for case in exercise01.CASES]
    results = [[wrong(*case) for case in exercise01.CASES] for wrong, _ in exercise01.WRONG_TURNS]
    results.append(truth)
    assert len(set(map(tuple, results))) == len(results)
    doors = [tuple(map(wrong, exercise02.DOORS)) for wrong, _ in exercise02.WRONG_TURNS]
    doors.append(tuple(map(exercise02.truth, exercise02.DOORS)))
    assert len(set(doors)) == len(doors)
    fits = [tuple(map(wrong, exercise03.CASES)) for wrong, _ in exercise03.FIT_TURNS]
    fits.append(tuple(map(exercise03.capacity, exercise03.CASES)))
    assert len(set(fits)) == len(fits)
    prices = [tuple(map(wrong, exercise04.VICTIMS)) for wrong, _ in exercise04.WRONG_TURNS]
    prices.append(tuple(map(exercise04.costs, exercise04.VICTIMS)))
    assert len(set(prices)) == len(prices)


def test_capacity_agrees_with_the_schedulers_own() -> None:
    memory = kv_memory(hardware("a100-80gb"), preset("llama-2-7b"))
    case = exercise03.CASES[0]._replace(kv_gib=memory.num_bytes / 2**30)
    for tokens in (33, 640, 4096):
        fits = reservation("continuous", memory.num_blocks, tokens - 1, 1, max_model_len=4096)
        # The last token never needs KV, which matters where it would begin a block.
        expected = exercise03.capacity(case._replace(num_tokens=tokens - (tokens % 16 == 1)))
        assert fits.num_sequences == expected


class Watched(ContinuousScheduler):
    """Notes every look at the head of ``waiting``, as a door."""

    seen: list[tuple[exercise02.Door, str | None]]

    def _decide(self, output: Any, now: float) -> None:
        config, head = self.config, self.waiting[0] if self.waiting else None
        swapped, free = len(self.swapped), self.block_manager.num_free_blocks
        slots = config.max_num_seqs - len(self.running)
        super()._decide(output, now)
        if head is None or (output.admitted and not swapped):
            return
        held = output.held_back
        if held is not None and held.request_id == head.request_id:
            door = exercise02.Door(
                self.block_manager.blocks_for(head.num_tokens), free, self.watermark,
                head.num_tokens, config.max_num_batched_tokens, slots, swapped,
            )  # fmt: skip
            type(self).seen.append((door, held.reason))


def test_the_bouncer_says_what_real_runs_record() -> None:
    Watched.seen = []
    for seed in range(12):
        workload = generate(24, uniform(1, 40), uniform(1, 30), seed=seed)
        for blocks in (20, 130):
            knobs = {
                "max_num_seqs": 6, "num_gpu_blocks": blocks, "num_cpu_blocks": 40,
                "block_size": 4, "max_model_len": 72, "preemption_mode": "swap",
                "max_num_batched_tokens": 72,
            }  # fmt: skip
            run_with(Watched, workload, knobs)
    assert len(Watched.seen) > 100
    for door, reason in Watched.seen:
        assert exercise02.truth(door) == reason, door
    assert {"no_blocks", "no_slot", "swapped_first"} <= {reason for _, reason in Watched.seen}


def test_run_with_is_simulate_with_another_scheduler() -> None:
    requests, knobs = exercise02.requests(), exercise02.KNOBS
    ours = run_with(ContinuousScheduler, requests, knobs)
    theirs = simulate(requests, model="tiny", policy="continuous", knobs=knobs)
    assert ours.steps == theirs.steps


@pytest.mark.parametrize("path", LESSONS[1:], ids=[path.stem for path in LESSONS[1:]])
def test_quizzes_do_not_give_their_answers_away(path: Path) -> None:
    module = importlib.import_module(f"lessons.exercise{path.stem[:2]}")
    source = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells)
    assert f"widgets.quiz(exercise{path.stem[:2]}.QUIZ)" in source
    for _, choices, answer, why in module.QUIZ:
        assert 0 <= answer < len(choices)
        assert why not in source


# -- the helper itself ----------------------------------------------------------------------------


def exercise(judge: Callable[[Any], Verdict]) -> Exercise:
    return Exercise("t", "task", "target", 1, "easy", judge)


@pytest.mark.parametrize("nothing", [None, ...])
def test_nothing_to_check_yet(nothing: object) -> None:
    verdict = exercise(lambda answer: Verdict(True, "no")).check(nothing)
    assert verdict.passed is None
    assert repr(verdict).startswith("Open:")


def test_a_mistake_is_told_not_raised() -> None:
    def judge(answer: Any) -> Verdict:
        raise Mistake("you divided by <zero>")

    verdict = exercise(judge).check(1)
    assert verdict.passed is False
    assert "&lt;zero&gt;" in verdict._repr_mimebundle_()["text/html"]


def test_call_names_the_line_that_raised() -> None:
    def broken(x: int) -> int:
        return x // 0

    with pytest.raises(Mistake, match=r"broken\(7\) raised ZeroDivisionError.*x // 0"):
        call(broken, 7)
