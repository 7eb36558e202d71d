"""Exercises of lesson 04: what a victim costs, how much to keep free, and whom to evict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lessons.engines import run_with
from lessons.exercise import Exercise, Verdict, call, failed, passed
from lessons.exercise03 import KNOBS, requests
from minibatch.config import SchedulerConfig
from minibatch.scheduler import ContinuousScheduler
from minibatch.trace import Trace

SOLUTION = "notebooks/solutions/04_preemption.ipynb"
_COSTS = ("bytes over the link", "FLOPs", "both", "neither")
QUIZ = (
    ("Swapping a victim costs", _COSTS, 0, "Its KV crosses the link twice; nothing is computed."),
    ("Recomputing it costs", _COSTS, 1, "A prefill of all its tokens; nothing is moved."),
)


class Victim(NamedTuple):
    """A request of ``num_tokens`` with KV, a model, a host link and what the cores reach."""

    num_tokens: int
    kv_bytes_per_token: int
    num_parameters: int
    link_bytes_per_s: float
    flops_per_s: float


VICTIMS = (
    Victim(512, 524_288, 6_600_000_000, 25e9, 156e12),  # Llama-2-7B, A100, PCIe 4, half the peak
    Victim(512, 131_072, 7_500_000_000, 50e9, 495e12),  # Llama-3-8B, H100, PCIe 5
    Victim(512, 524_288, 6_600_000_000, 25e9, 495e12),  # Llama-2-7B, a fast chip on a slow link
    Victim(2048, 524_288, 6_600_000_000, 25e9, 495e12),
)


def costs(victim: Victim, *, ways: int = 2, flops: int = 2) -> tuple[float, float]:
    """(seconds to swap out and in, seconds to compute again); attention's dot products left out."""
    moved = ways * victim.num_tokens * victim.kv_bytes_per_token
    computed = flops * victim.num_parameters * victim.num_tokens
    return moved / victim.link_bytes_per_s, computed / victim.flops_per_s


WRONG_TURNS: tuple[tuple[Callable[[Victim], tuple[float, float]], str], ...] = (
    (
        lambda v: costs(v, ways=1),
        "half of the way: what is swapped out must come back in. Both cross the link.",
    ),
    (
        lambda v: costs(v, flops=1),
        "a weight costs two FLOPs for each token: a multiplication and an addition.",
    ),
    (
        lambda v: costs(v._replace(num_tokens=1)),
        "that is one token's share; all of the victim's tokens are moved or computed again.",
    ),
    (
        lambda v: costs(v)[::-1],
        "the right numbers the wrong way round: swap first, then recompute.",
    ),
)


def _close(a: Any, b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= 0.01 * y for x, y in zip(a, b, strict=True))


def _judge_costs(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: price.check(victim_costs).")
    results = [call(answer, *victim) for victim in VICTIMS]
    if all(result is None for result in results):
        return Verdict(None, "victim_costs returns None so far.")
    if not all(isinstance(r, tuple) and len(r) == 2 for r in results):
        return failed("return two numbers: (seconds to swap, seconds to recompute).")
    right = [costs(victim) for victim in VICTIMS]
    if all(map(_close, results, right)):
        cheaper = ["swap" if swap < again else "recompute" for swap, again in right]
        return passed(f"cheaper for the four victims: {', '.join(cheaper)}.")
    for wrong, hint in WRONG_TURNS:
        if all(map(_close, results, map(wrong, VICTIMS))):
            return failed(hint)
    (swap, again), (yours, too) = right[0], results[0]
    return failed(
        f"first victim: you say {yours * 1e3:.1f} and {too * 1e3:.1f} ms; it is {swap * 1e3:.1f} "
        f"and {again * 1e3:.1f} ms."
    )


price = Exercise(
    title="The price of a victim",
    task=(
        "Write victim_costs(num_tokens, kv_bytes_per_token, num_parameters, link_bytes_per_s, "
        "flops_per_s): seconds that swapping costs in all, and seconds that recomputing costs. "
        "Leave attention's dot products out."
    ),
    target="4 victims, within 1 %.",
    minutes=10,
    level="medium",
    judge=_judge_costs,
    hints=(
        "Swapping moves bytes over the link; recomputing runs every token through every weight.",
        "How often do the bytes cross the link? How many FLOPs does a weight cost a token?",
    ),
    solution=SOLUTION,
)


# -- the watermark --------------------------------------------------------------------------------


def with_watermark(blocks: int) -> Trace:
    """The lesson's load, with so many blocks that an admission must leave free."""

    class Watermarked(ContinuousScheduler):
        def __init__(self, config: SchedulerConfig) -> None:
            super().__init__(config)
            self.watermark = blocks

    return run_with(Watermarked, requests(), KNOBS)


def _judge_watermark(answer: Any) -> Verdict:
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer <= 6:
        return failed("a whole number of blocks, 0 to 6.")
    trace = with_watermark(answer)
    tokens, evictions = trace.summary["num_batched_tokens"], trace.summary["num_preemptions"]
    seen = f"{len(trace)} iterations, {tokens} tokens computed, {evictions} evictions"
    if len(trace) > 10:
        return failed(f"{seen}: too careful. Blocks stand empty while requests wait.")
    if tokens > 75:
        return failed(f"{seen}: too bold. Whoever comes in with the last block is out again soon.")
    return passed(f"{seen}. Less work thrown away, and not an iteration more.")


watermark = Exercise(
    title="How much to keep free?",
    task="Choose the watermark, in blocks: so many must stay free after an admission.",
    target="at most 10 iterations, and at most 75 tokens computed.",
    minutes=5,
    level="easy",
    judge=_judge_watermark,
    hints=("0 thrashes, 6 is idle. exercise04.with_watermark(2) gives you a trace to look at.",),
    solution=SOLUTION,
)


# -- break it -------------------------------------------------------------------------------------

BUGS = {
    "victim": "It evicts the next one in line instead of the newest.",
    "requeue": "Victims go to the end of the queue instead of to its head.",
    "admit": "It admits newcomers in a step that evicted.",
    "release": "A victim's blocks are not given back.",
}
_NOT_THIS = {
    "requeue": "compare B and H after their evictions: victims return before anybody else.",
    "admit": "here nobody new is left to be admitted after the first step.",
    "release": "then the pool would stay full; all requests finish in it.",
}


def _judge_bug(answer: Any) -> Verdict:
    if answer not in BUGS:
        return failed(f"one of {', '.join(BUGS)}.")
    if answer != "victim":
        return failed(f"not that one: {_NOT_THIS[answer]}")
    return passed(
        "queue.popleft() for queue.pop(): B, second to arrive, loses its work again and again to "
        "requests that came later. Last in, first out protects whoever has waited longest."
    )


bug = Exercise(
    title="What did they change?",
    task="; ".join(f"{name}: {text}" for name, text in BUGS.items()),
    target="the one word.",
    minutes=5,
    level="easy",
    judge=_judge_bug,
    hints=("Who loses its memory in the honest run, and who in the other one?",),
    solution=SOLUTION,
)
