"""Exercises of lesson 00: tokens a forward pass, and whose report to believe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

from lessons.engines import cost_model
from lessons.exercise import Exercise, Verdict, call, failed, passed
from minibatch.simulation import simulate
from minibatch.trace import Trace
from minibatch.workload import RequestSpec

SOLUTION = "notebooks/solutions/00_quickstart.ipynb"
SLOTS = 4
QUESTIONS = {
    "Why is the sky blue?": 32,
    "What is 2+2?": 6,
    "Name three rivers in Europe.": 8,
    "What do bees make?": 10,
    "What is a computer program?": 26,
    "List five fruits.": 8,
    "What is the capital of France?": 6,
    "Who wrote Hamlet?": 12,
}
PROMPT = 30  # tokens, about what the chat template makes of them


def rehearsal(slots: int = SLOTS, policy: str = "unified") -> Trace:
    """The lesson's load on a virtual clock: the same lengths, no model."""
    requests = [
        RequestSpec("ABCDEFGH"[i], 0.0, PROMPT, length)
        for i, length in enumerate(QUESTIONS.values())
    ]
    knobs = {"max_num_seqs": slots, "num_gpu_blocks": 128, "max_model_len": 128}
    return simulate(requests, policy=policy, knobs=knobs, cost_model=cost_model())


def _traces() -> Iterator[Trace]:
    yield from (rehearsal(), rehearsal(1), rehearsal(8), rehearsal(policy="static"))


def tokens_a_pass(trace: Trace) -> float:
    """Answer tokens that one forward pass gives, on average."""
    return sum(step.num_generated_tokens for step in trace) / len(trace)


WRONG_TURNS: tuple[tuple[Callable[[Trace], float], str], ...] = (
    (
        lambda trace: sum(step.num_batched_tokens for step in trace) / len(trace),
        "num_batched_tokens counts prompt tokens too. Nobody waits for his own prompt: count what "
        "was sampled.",
    ),
    (
        lambda trace: sum(step.num_generated_tokens for step in trace),
        "that is the number of tokens; divide it by the number of passes.",
    ),
    (
        lambda trace: len(trace) / sum(step.num_generated_tokens for step in trace),
        "upside down: that is passes a token.",
    ),
    (
        lambda trace: mean(len(step.scheduled) for step in trace),
        "that is how many rows go through the model. In static batching some of them are padding; "
        "count tokens.",
    ),
)


def _judge(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: per_pass.check(tokens_per_pass).")
    traces = list(_traces())
    results = [call(answer, trace) for trace in traces]
    if all(result is None for result in results):
        return Verdict(None, "tokens_per_pass returns None so far.")
    right = [tokens_a_pass(trace) for trace in traces]
    if all(abs(result - value) < 1e-9 for result, value in zip(results, right, strict=True)):
        return passed(f"{right[0]:.2f} with {SLOTS} slots, {right[1]:.2f} with one, of the best.")
    for wrong, hint in WRONG_TURNS:
        if all(abs(r - wrong(t)) < 1e-9 for r, t in zip(results, traces, strict=True)):
            return failed(hint)
    return failed(f"you get {results[0]:.2f} for four slots; it is {right[0]:.2f}.")


per_pass = Exercise(
    title="Tokens a pass",
    task=(
        "Write tokens_per_pass(trace): how many answer tokens a forward pass gives, on average. "
        "A trace is a list of records; len(trace) passes were made."
    ),
    target="right for four runs, among them one with a single slot.",
    minutes=5,
    level="easy",
    judge=_judge,
    hints=("Print one record's fields: which of them counts what was sampled?",),
    solution=SOLUTION,
)


# -- break it -------------------------------------------------------------------------------------

REPORTS = {"ann": "counts num_generated_tokens", "bob": "counts num_batched_tokens"}


def _judge_report(answer: Any) -> Verdict:
    if answer not in REPORTS:
        return failed(f"one of {', '.join(REPORTS)}.")
    if answer == "ann":
        return failed(
            "Ann counts sampled tokens, which is what users wait for. Look at step 0 of the run: "
            "how many tokens does Bob count there, and how many were said?"
        )
    return passed(
        "Bob counts prompts as output: most of his tokens were never said by the model. Always ask "
        "of a tokens/s figure: input, output, or both?"
    )


report = Exercise(
    title="Whose report is inflated?",
    task="; ".join(f"{name} {what}" for name, what in REPORTS.items()),
    target="the name.",
    minutes=3,
    level="easy",
    judge=_judge_report,
    hints=("One of them would get faster by sending longer prompts.",),
    solution=SOLUTION,
)
