"""Exercises of lesson 03: follow a block table, size a card, find the reservation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lessons.exercise import Exercise, Verdict, call, failed, passed
from minibatch.workload import RequestSpec

SOLUTION = "notebooks/solutions/03_paged_kv.ipynb"
QUIZ = (
    (
        "Where is memory wasted once KV is paged?",
        ("between sequences", "in each last block", "nowhere", "in the block table"),
        1,
        "Equal blocks are interchangeable; only a sequence's last block can be partly empty.",
    ),
)
PROMPTS = {"A": 5, "B": 3, "C": 6, "D": 2, "E": 5, "F": 4, "G": 3, "H": 6}
OUTPUTS = {"A": 6, "B": 4, "C": 3, "D": 7, "E": 5, "F": 3, "G": 6, "H": 4}
KNOBS = {"max_num_seqs": 8, "num_gpu_blocks": 12, "block_size": 4, "max_model_len": 24}


def requests() -> list[RequestSpec]:
    """The eight requests of the lesson, all there from the start."""
    return [RequestSpec(name, 0.0, PROMPTS[name], OUTPUTS[name]) for name in PROMPTS]


# -- where does a token live? ---------------------------------------------------------------------

TABLES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((5, 9), 0, 4),
    ((5, 9), 3, 4),
    ((5, 9), 4, 4),
    ((5, 9), 7, 4),
    ((2, 0, 7), 9, 4),
    ((3, 1), 17, 16),
)


def place(table: Sequence[int], position: int, block_size: int) -> int:
    """The slot of the pool in which the KV of a token stands."""
    return table[position // block_size] * block_size + position % block_size


def _from_one(table: Sequence[int], position: int, block_size: int) -> int:
    return place(table, max(position - 1, 0), block_size)


def _in_one_piece(table: Sequence[int], position: int, block_size: int) -> int:
    return table[0] * block_size + position


def _no_scale(table: Sequence[int], position: int, block_size: int) -> int:
    return table[position // block_size] + position % block_size


def _swapped_parts(table: Sequence[int], position: int, block_size: int) -> int:
    return table[min(position % block_size, len(table) - 1)] * block_size + position // block_size


PLACE_TURNS: tuple[tuple[Callable[..., int], str], ...] = (
    (
        _in_one_piece,
        "that holds only if the blocks are neighbours. Look up the block of this very position in "
        "the table.",
    ),
    (_from_one, "positions count from 0: the first token of the second block is block_size."),
    (
        _no_scale,
        "the table holds block numbers; a block starts at its number times block_size.",
    ),
    (
        _swapped_parts,
        "the quotient says which entry of the table, the remainder where in that block. You have "
        "them the other way round.",
    ),
)


def _judge_place(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: where.check(where_is).")
    results = [call(answer, list(table), p, size) for table, p, size in TABLES]
    if all(result is None for result in results):
        return Verdict(None, "where_is returns None so far.")
    for wrong, hint in PLACE_TURNS:
        if results == [wrong(*case) for case in TABLES]:
            return failed(hint)
    for (table, position, size), result in zip(TABLES, results, strict=True):
        right = place(table, position, size)
        if result != right:
            return failed(
                f"position {position} of table {list(table)} with blocks of {size}: you say "
                f"{result}, the pool has it in slot {right}."
            )
    return passed(f"all {len(TABLES)} tokens found. This line is all that paging asks of a kernel.")


where = Exercise(
    title="Follow the block table",
    task=(
        "Write where_is(table, position, block_size): the slot of the pool in which the KV of the "
        "token at that position stands. Positions count from 0."
    ),
    target="6 tokens found.",
    minutes=5,
    level="easy",
    judge=_judge_place,
    hints=("Which entry of the table? Then: how far into that block?",),
    solution=SOLUTION,
)


# -- how many fit? --------------------------------------------------------------------------------


class Case(NamedTuple):
    """A card less its weights, a model's shape, and what each sequence will hold."""

    name: str
    kv_gib: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int


CASES = (
    Case("Llama-2-7B, 512 + 128", 59.45, 32, 32, 128, 640),
    Case("Llama-3-8B, 512 + 128", 57.0, 32, 8, 128, 640),
    Case("Llama-3-8B, 8 k", 57.0, 32, 8, 128, 8192),
    Case("Llama-2-7B, 33 tokens", 59.45, 32, 32, 128, 33),
)
BLOCK_SIZE = 16
GIB = 2**30


def capacity(
    case: Case, *, both: int = 2, bytes_a_number: int = 2, unit: float = GIB, rounded: bool = True
) -> int:
    """Sequences that fit, all at full length, in blocks of 16 and fp16."""
    token = both * case.num_layers * case.num_kv_heads * case.head_dim * bytes_a_number
    if not rounded:
        return int(case.kv_gib * unit / (token * case.num_tokens))
    blocks = int(case.kv_gib * unit) // (token * BLOCK_SIZE)
    return blocks // -(-case.num_tokens // BLOCK_SIZE)


FIT_TURNS: tuple[tuple[Callable[[Case], int], str], ...] = (
    (
        lambda case: capacity(case, both=1),
        "twice too many: each token stores a key *and* a value, of two bytes a number in fp16.",
    ),
    (
        lambda case: capacity(case, bytes_a_number=4),
        "half of it: fp16 takes two bytes a number, not four.",
    ),
    (
        lambda case: capacity(case._replace(num_kv_heads=32)),
        "Llama-3-8B has 32 query heads but 8 KV heads, and only KV heads are stored.",
    ),
    (
        lambda case: capacity(case, unit=1e9),
        "a GiB is 2**30 bytes; you took 10**9.",
    ),
    (
        lambda case: capacity(case, rounded=False),
        "memory is handed out in whole blocks of 16: round each sequence up before you divide.",
    ),
)


def _judge_fit(answer: Any) -> Verdict:
    if not callable(answer):
        return failed("pass the function itself: fit.check(how_many).")
    results = [
        call(answer, c.kv_gib, c.num_layers, c.num_kv_heads, c.head_dim, c.num_tokens)
        for c in CASES
    ]
    if all(result is None for result in results):
        return Verdict(None, "how_many returns None so far.")
    right = [capacity(case) for case in CASES]
    for wrong, hint in FIT_TURNS:
        if results == [wrong(case) for case in CASES] != right:
            return failed(hint)
    for case, result, number in zip(CASES, results, right, strict=True):
        if result != number:
            return failed(f"{case.name}: you say {result}, {number} fit.")
    return passed(f"{', '.join(f'{c.name}: {n}' for c, n in zip(CASES, right, strict=True))}.")


fit = Exercise(
    title="How many fit?",
    task=(
        "Write how_many(kv_gib, num_layers, num_kv_heads, head_dim, num_tokens): how many "
        "sequences of num_tokens fit, all at full length, in fp16 and blocks of 16 tokens."
    ),
    target="4 cases, among them 190 for Llama-2-7B at 512 + 128 tokens.",
    minutes=10,
    level="medium",
    judge=_judge_fit,
    hints=(
        "Bytes a token: key and value, every layer, every KV head, head_dim numbers, 2 bytes each.",
        "Blocks in the pool, whole ones; blocks a sequence, rounded up; divide.",
    ),
    solution=SOLUTION,
)


# -- break it -------------------------------------------------------------------------------------

SIGNS = {
    "evictions": "Nobody is evicted.",
    "boundary": "No block is taken after the first step of a request, at no block boundary.",
    "free": "Free blocks never reach zero.",
    "order": "Requests finish in order of arrival.",
}
_NO_SIGN = {
    "evictions": "that is what its author wanted, and an engine with enough memory shows it too.",
    "free": "they do: all 16 blocks are taken in the first step.",
    "order": "it does not hold: count who finishes when.",
}


def _judge_sign(answer: Any) -> Verdict:
    if answer not in SIGNS:
        return failed(f"one of {', '.join(SIGNS)}.")
    if answer != "boundary":
        return failed(f"not that one: {_NO_SIGN[answer]}")
    return passed(
        "all blocks are taken on admission, so they were reserved for tokens that may never come. "
        "It is paged in its table and Orca in its heart."
    )


sign = Exercise(
    title="Which sign gives it away?",
    task="; ".join(f"{name}: {text}" for name, text in SIGNS.items()),
    target="the one word.",
    minutes=5,
    level="easy",
    judge=_judge_sign,
    hints=("Paged memory grows with the tokens. Where would you see it grow?",),
    solution=SOLUTION,
)
