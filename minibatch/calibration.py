"""Make the cost model predict *this* machine: fit its constants to a recorded run.

Looked for are seconds a byte and a FLOP, how much of the smaller of memory and compute is hidden
behind the larger, and seconds a row and a step. The first two are tried on a grid, which is then
drawn finer, for some values of the third; the others follow by non-negative least squares.

*Relative* errors count: a decode step of 40 ms matters as much as a prefill of a second. Steps that
the rest of the machine disturbed would still pull the fit, so those that miss most weigh less.

One thing no fit can tell from another: weights are read once a step, so on one model "slow memory"
and "something else that happens once a step" look alike, unless KV makes the bytes vary. Seconds a
step are therefore kept only if they explain a good deal more than memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from minibatch.cost_model import CostModel
from minibatch.errors import ConfigError
from minibatch.metrics import percentile
from minibatch.record import StepRecord
from minibatch.trace import Trace

LEAST_STEPS = 8
EARNS_ITS_PLACE = 0.75  # an overhead a step must lower the mean error to this share of it
OVERLAPS = (1.0, 0.5, 0.0)
GRID = 8  # values tried for each of the two rates...
REFINEMENTS = 3  # ...so many times, each time closer to the best
REWEIGHTINGS = 4


@dataclass(frozen=True)
class StepError:
    """One step, predicted and measured; ``relative`` is above 0 if the prediction is too long."""

    step: int
    kind: str  # "prefill" | "decode" | "mixed"
    num_tokens: int
    measured_s: float
    predicted_s: float
    bound: str

    @property
    def relative(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class ErrorReport:
    """How well a cost model predicts some recorded steps."""

    errors: tuple[StepError, ...]

    @property
    def median(self) -> float:
        """Half of the steps are predicted better than this (0.1: within 10 %)."""
        return self.percentile(50)

    def percentile(self, percent: float, kind: str | None = None) -> float:
        """Of the sizes of relative errors; of one kind of step, if given."""
        chosen = [e for e in self.errors if kind is None or e.kind == kind]
        return percentile([abs(error.relative) for error in chosen], percent)

    def worst(self, count: int = 5) -> list[StepError]:
        """The steps that are missed most, worst first."""
        return sorted(self.errors, key=lambda error: -abs(error.relative))[:count]

    @property
    def total(self) -> float:
        """Relative error of all the time together."""
        measured = sum(error.measured_s for error in self.errors)
        return sum(error.predicted_s for error in self.errors) / measured - 1.0

    def describe(self) -> str:
        """Median and tail by kind of step, and where it misses most."""
        lines = [
            f"{len(self.errors)} steps: median error {100 * self.median:.1f} %, p90 "
            f"{100 * self.percentile(90):.1f} %, total time {100 * self.total:+.1f} %"
        ]
        for kind in sorted({error.kind for error in self.errors}):
            signed = [error.relative for error in self.errors if error.kind == kind]
            lines.append(
                f"  {kind:8} {len(signed):5} steps, median error "
                f"{100 * self.percentile(50, kind):.1f} %, "
                f"bias {100 * percentile(signed, 50):+.1f} %"
            )
        lines += [
            f"  missed most: step {error.step} ({error.kind}, {error.num_tokens} tokens, bound by "
            f"{error.bound}): {1e3 * error.measured_s:.1f} ms measured, "
            f"{1e3 * error.predicted_s:.1f} ms predicted"
            for error in self.worst(3)
        ]
        return "\n".join(lines)


def fit(steps: Trace | Iterable[StepRecord], base: CostModel, block_size: int = 16) -> CostModel:
    """``base`` with the constants that predict ``steps`` best.

    Args:
        steps: recorded ones (a whole trace, or some of its steps).
        base: says model, chip and dtype; the efficiencies come out relative to that chip.
        block_size: tokens a block, for swaps.

    Raises:
        ConfigError: too few steps in which something ran.
    """
    chosen = [step for step in steps if step.scheduled and step.duration_s > 0.0]
    if len(chosen) < LEAST_STEPS:
        raise ConfigError(f"{len(chosen)} steps to calibrate from; {LEAST_STEPS} are needed.")
    works = [base.record_work(step, block_size) for step in chosen]
    run = _Run(
        measured=np.array([step.duration_s for step in chosen]),
        memory=np.array([float(work.weight_bytes + work.kv_bytes) for work in works]),
        flops=np.array([float(work.flops) for work in works]),
        rows=np.array([float(work.num_rows) for work in works]),
    )
    best = min(_search(run, overlap, with_step=False) for overlap in OVERLAPS)
    with_step = _search(run, best.overlap, with_step=True)
    if with_step.error < EARNS_ITS_PLACE * best.error:
        best = with_step
    chip = base.hardware
    return replace(
        base,
        memory_efficiency=1.0 / best.per_byte / chip.memory_bandwidth,
        compute_efficiency=1.0 / best.per_flop / chip.peak_flops(base.dtype),
        step_overhead_s=best.per_step,
        row_overhead_s=best.per_row,
        overlap=best.overlap,
    )


def report(
    steps: Trace | Iterable[StepRecord], cost_model: CostModel, block_size: int = 16
) -> ErrorReport:
    """Predict recorded steps, and compare."""
    errors: list[StepError] = []
    for step in steps:
        if not step.scheduled or step.duration_s <= 0.0:
            continue
        work = cost_model.record_work(step, block_size)
        cost = cost_model.cost(work)
        errors.append(
            StepError(
                step.step,
                _kind(step),
                work.num_tokens,
                step.duration_s,
                cost.total_s,
                cost.bound,
            )
        )
    return ErrorReport(tuple(errors))


def halves(steps: Sequence[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Every second step, and the others: to fit on one half and judge on the other."""
    return list(steps[0::2]), list(steps[1::2])


def _kind(step: StepRecord) -> str:
    prefills = sum(row.phase == "prefill" for row in step.scheduled)
    if prefills == 0:
        return "decode"
    return "prefill" if prefills == len(step.scheduled) else "mixed"


class _Run(NamedTuple):
    """One number a step."""

    measured: np.ndarray  # seconds
    memory: np.ndarray  # bytes
    flops: np.ndarray
    rows: np.ndarray


class _Fit(NamedTuple):
    error: float  # mean size of the relative errors
    per_byte: float
    per_flop: float
    per_row: float
    per_step: float
    overlap: float


def _search(run: _Run, overlap: float, with_step: bool) -> _Fit:
    """The best constants on a grid of rates, drawn finer around the best so far."""
    # No step was faster than its bytes or FLOPs alone: beyond these rates nothing need be tried.
    most = np.array([np.min(run.measured / run.memory), np.min(run.measured / run.flops)])
    best = _Fit(np.inf, 0.0, 0.0, 0.0, 0.0, overlap)
    low, high = np.full(2, 0.02), np.full(2, 1.2)
    for _ in range(REFINEMENTS):
        rates = np.linspace(low, high, GRID) * most  # [GRID, 2]
        for per_byte, per_flop in product(*rates.T.tolist()):
            roofline = _roofline(run, per_byte, per_flop, overlap)
            error, per_row, per_step = _fit_overheads(run, roofline, with_step)
            best = min(best, _Fit(error, per_byte, per_flop, per_row, per_step, overlap))
        spacing = (high - low) / (GRID - 1)
        center = np.array([best.per_byte, best.per_flop]) / most
        low, high = np.maximum(center - spacing, 0.01), center + spacing
    return best


def _roofline(run: _Run, per_byte: float, per_flop: float, overlap: float) -> np.ndarray:
    memory, compute = per_byte * run.memory, per_flop * run.flops
    return np.maximum(memory, compute) + (1.0 - overlap) * np.minimum(memory, compute)


def _fit_overheads(run: _Run, roofline: np.ndarray, with_step: bool) -> tuple[float, float, float]:
    """(mean relative error, seconds a row, seconds a step) beside a given roofline."""
    terms = np.column_stack([run.rows, np.ones_like(run.rows)] if with_step else [run.rows])
    trust = np.ones_like(run.measured)
    for _ in range(REWEIGHTINGS):
        overheads = _non_negative_least_squares(
            terms, run.measured - roofline, trust / run.measured
        )
        relative = np.abs((roofline + terms @ overheads) / run.measured - 1.0)
        trust = 1.0 / np.sqrt(np.maximum(relative, 0.01))  # towards least absolute errors
    per_row, per_step = (*map(float, overheads), 0.0)[:2]
    return float(np.mean(np.minimum(relative, 1.0))), per_row, per_step


def _non_negative_least_squares(
    terms: np.ndarray, target: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Exact, by trying which constants are zero: with two of them that is 3 small problems."""
    count = terms.shape[1]
    scaled, wanted = terms * weights[:, None], target * weights
    gram, moments = scaled.T @ scaled, scaled.T @ wanted
    best, least = np.zeros(count), 0.0  # the error, less that of all zeros
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            index = np.ix_(chosen, chosen)
            if np.linalg.matrix_rank(gram[index]) < size:
                continue
            solution = np.linalg.solve(gram[index], moments[list(chosen)])
            error = -float(solution @ moments[list(chosen)])
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = solution
    return best
