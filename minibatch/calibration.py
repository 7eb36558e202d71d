"""Make the cost model predict *this* machine: fit its constants to a recorded run.

Five numbers are looked for: seconds a byte, seconds a FLOP, and seconds a step, a row and a token.
Which of memory and compute bounds a step depends on the first two, so the fit goes in turns: given
who is bound by what, the times are a sum of terms, and non-negative least squares finds the
constants; with those, the bounds are decided again, until they stay.

Steps are weighted so that *relative* errors count: a decode step of 40 ms matters as much as a
prefill of a second. Steps that the rest of the machine disturbed would still pull the fit, so
those that miss most count less and less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from minibatch.cost_model import CostModel, StepWork
from minibatch.errors import ConfigError
from minibatch.metrics import percentile
from minibatch.record import StepRecord
from minibatch.trace import Trace

ROUNDS = 30
LEAST_STEPS = 8


@dataclass(frozen=True)
class StepError:
    """One step, predicted and measured. ``relative`` is above 0 where the prediction is too long."""

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
    measured = np.array([step.duration_s for step in chosen])
    memory = np.array([float(work.weight_bytes + work.kv_bytes) for work in works])
    flops = np.array([float(work.flops) for work in works])
    rest = np.array([[1.0, work.num_rows, work.num_tokens] for work in works])
    per_byte, per_flop = _first_guess(measured, memory, flops)
    trust = np.ones(len(chosen))
    best, best_error = np.zeros(5), np.inf
    for _ in range(ROUNDS):
        by_memory = per_byte * memory >= per_flop * flops
        terms = np.column_stack([memory * by_memory, flops * ~by_memory, rest])
        constants = _non_negative_least_squares(terms, measured, trust / measured)
        per_byte = constants[0] or per_byte  # nobody was bound by it: keep the guess
        per_flop = constants[1] or per_flop
        predicted = np.maximum(per_byte * memory, per_flop * flops) + rest @ constants[2:]
        relative = np.abs(predicted / measured - 1.0)
        if np.median(relative) < best_error:
            best_error = float(np.median(relative))
            best = np.array([per_byte, per_flop, *constants[2:]])
        trust = 1.0 / np.sqrt(np.maximum(relative, 0.01))  # towards least absolute errors
    per_byte, per_flop, per_step, per_row, per_token = (float(value) for value in best)
    chip = base.hardware
    return replace(
        base,
        memory_efficiency=1.0 / per_byte / chip.memory_bandwidth,
        compute_efficiency=1.0 / per_flop / chip.peak_flops(base.dtype),
        step_overhead_s=per_step,
        row_overhead_s=per_row,
        token_overhead_s=per_token,
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


def _first_guess(
    measured: np.ndarray, memory: np.ndarray, flops: np.ndarray
) -> tuple[float, float]:
    """Rates that no step beats: the fastest step by bytes, the fastest by FLOPs."""
    return float(np.min(measured / memory)), float(np.min(measured / flops))


def _non_negative_least_squares(
    terms: np.ndarray, target: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Exact, by trying which constants are zero: with five of them that is 31 small problems."""
    count = terms.shape[1]
    scaled, wanted = terms * weights[:, None], target * weights
    best, least = np.zeros(count), float(wanted @ wanted)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = scaled[:, chosen]
            if not columns.any(axis=0).all():
                continue
            solution = np.linalg.lstsq(columns, wanted, rcond=None)[0]
            residual = columns @ solution - wanted
            error = float(residual @ residual)
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = solution
    return best
