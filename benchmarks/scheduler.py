"""The scheduler alone: milliseconds a step at 64 and 256 running requests, records included.

    python benchmarks/scheduler.py

An executor that computes nothing answers at once, and its time is taken off. What is left is
deciding (``schedule``), taking results (``update``) and making the record. CPU time of this
thread, so other processes do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import machine

from minibatch.config import POLICY_NAMES, SchedulerConfig
from minibatch.engine import Engine
from minibatch.executor.base import SampledToken
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler.output import SchedulerOutput
from minibatch.tables import table

HEADER = ("policy", "running", "schedule ms", "with records ms", "95 % below ms")
PROMPT_LEN, OUTPUT_LEN = 128, 1024


class InstantExecutor:
    """Gives every row the same token, and notes how long that took."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._token = SampledToken(7)

    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        start = time.thread_time()
        output.moves_made = len(output.MOVES)
        tokens = {row.request.request_id: self._token for row in output.scheduled if row.samples}
        self.spent_s = time.thread_time() - start
        return tokens

    def close(self) -> None:
        """There is nothing to give back."""


def step_times(policy: str, running: int, steps: int, schedule_only: bool) -> list[float]:
    """Seconds of each of ``steps`` decode steps with ``running`` requests."""
    executor = InstantExecutor()
    clock = time.thread_time if schedule_only else None
    config = SchedulerConfig(
        policy=policy,
        num_gpu_blocks=running * 80 + 1,
        max_num_seqs=running,
        max_model_len=PROMPT_LEN + OUTPUT_LEN,
        max_num_batched_tokens=running * PROMPT_LEN + PROMPT_LEN + OUTPUT_LEN,
    )
    engine = Engine(config, executor, clock=clock)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    for number in range(running):
        engine.add_request(str(number), [1] * PROMPT_LEN, params)
    engine.step()
    times = []
    for _ in range(steps):
        start = time.thread_time()
        record = engine.step()
        whole = time.thread_time() - start - executor.spent_s
        times.append(record.schedule_s if schedule_only else whole)
        assert len(record.scheduled) == running
    return times


def measure(running: list[int], steps: int) -> list[tuple[str, int, float, float, float]]:
    """(policy, running, median ms of schedule(), median and 95th percentile ms of all of it)."""
    rows = []
    for policy in POLICY_NAMES:
        for count in running:
            decide = statistics.median(step_times(policy, count, steps, True))
            whole = sorted(step_times(policy, count, steps, False))
            late = whole[int(0.95 * len(whole))]
            rows.append((policy, count, 1e3 * decide, 1e3 * statistics.median(whole), 1e3 * late))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md too")
    args = parser.parse_args()
    rows = [
        (policy, count, *(f"{value:.3f}" for value in values))
        for policy, count, *values in measure(args.running, args.steps)
    ]
    print(table(HEADER, rows))
    if args.out:
        machine.save(args.out, HEADER, rows, steps=args.steps)


if __name__ == "__main__":
    main()
