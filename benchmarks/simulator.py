"""How fast the simulator is, and how true: run me with ``rate``, ``record`` or ``check``.

    python benchmarks/simulator.py rate                   requests simulated a second
    python benchmarks/simulator.py record OUT.jsonl.gz    record SmolLM2 on this CPU (minutes)
    python benchmarks/simulator.py check OUT.jsonl.gz     fit on one half, judge on the other

``record`` times steps by the process's own CPU clock, with one thread, so that whatever else runs
on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

from minibatch.calibration import fit, report
from minibatch.config import POLICY_NAMES
from minibatch.cost_model import CostModel
from minibatch.hardware import hardware, measure_this_machine
from minibatch.model.presets import preset
from minibatch.request import Request
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import make_scheduler
from minibatch.simulation import scheduler_config, simulate
from minibatch.tables import table
from minibatch.trace import Trace
from minibatch.workload import Workload, generate, lognormal, poisson

MODEL = "smollm2-135m"


def rate(num_requests: int) -> None:
    """The whole simulator against its scheduler alone (no engine, no records, no cost model), in
    seconds of CPU time.
    """
    workload = generate(num_requests, 512, lognormal(100, 0.7, high=512))
    print(workload.describe())
    rows = []
    for policy in POLICY_NAMES:
        start = time.process_time()
        trace = simulate(workload, policy=policy, keep_records=1)
        whole_s = time.process_time() - start
        steps = trace.steps[-1].step + 1
        alone_s = scheduler_alone(workload, policy)
        virtual_s = trace.steps[-1].end_s
        rows.append(
            (
                policy,
                steps,
                f"{whole_s:.1f}",
                f"{num_requests / whole_s:.0f}",
                f"{steps / whole_s:.0f}",
                f"{alone_s:.1f}",
                f"{whole_s / alone_s:.1f}x",
                f"{virtual_s / whole_s:.0f}x",
            )
        )
    header = (
        "policy",
        "steps",
        "CPU s",
        "requests/s",
        "steps/s",
        "scheduler",
        "ratio",
        "real time",
    )
    print(table(header, rows))


def scheduler_alone(workload: Workload, policy: str) -> float:
    """Seconds for all the decisions of the run and nothing else."""
    cost_model = CostModel(preset("llama-2-7b"), hardware("a100-80gb"))
    config = scheduler_config(policy, cost_model)
    scheduler = make_scheduler(config)
    start = time.process_time()
    for spec in workload:
        params = SamplingParams(max_tokens=spec.output_len, ignore_eos=True)
        scheduler.add(Request(spec.request_id, [3] * spec.prompt_len, params))
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        sampled = {row.request.request_id: 3 for row in output.scheduled if row.samples}
        scheduler.update(
            output, sampled, lambda request: request.token_stop_reason(config.max_model_len)
        )
        scheduler.block_manager.take_changes()
    return time.process_time() - start


class CpuClock:
    """Seconds that this process has computed for, plus those that it would have slept."""

    def __init__(self) -> None:
        self._start = time.process_time()
        self.slept = 0.0

    def __call__(self) -> float:
        return time.process_time() - self._start + self.slept


def record(path: str, policy: str, num_requests: int) -> None:
    """A steady stream of requests through the real model."""
    import torch

    from minibatch.llm import LLM

    torch.set_num_threads(1)
    workload = generate(
        num_requests,
        lognormal(48, 0.9, high=300),
        lognormal(14, 0.7, high=48),
        poisson(1.3),
        seed=3,
    )
    print(workload.describe())
    budget = {"max_num_batched_tokens": 256} if policy == "unified" else {}
    with LLM(
        MODEL, policy=policy, max_model_len=512, num_gpu_blocks=256, max_num_seqs=16, **budget
    ) as llm:
        engine = llm.engine
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.generate([list(range(5, 30))], params, use_tqdm=False)  # warm-up
        engine.trace.steps.clear()
        engine.scheduler.step = 0
        engine.clock = clock = CpuClock()
        engine.trace.meta.software["clock"] = "CPU time of the process"
        pending = deque(workload)
        while pending or engine.has_unfinished:
            while pending and pending[0].arrival_s <= clock():
                spec = pending.popleft()
                engine.add_request(
                    spec.request_id,
                    prompt_token_ids=spec.prompt_token_ids(preset(MODEL).vocab_size),
                    sampling_params=SamplingParams(
                        max_tokens=spec.output_len, ignore_eos=True, temperature=0.0
                    ),
                    arrival_s=spec.arrival_s,
                )
            if engine.has_unfinished:
                engine.step()
            elif pending:
                clock.slept += max(0.0, pending[0].arrival_s - clock())
        print(f"{engine.trace.save(path)}: {engine.trace}")


def check(path: str) -> None:
    """Fit on the first half of a recorded run, and predict the second."""
    trace = Trace.load(path)
    base = CostModel(preset(MODEL), measure_this_machine("cpu"), "float32")
    middle = len(trace) // 2
    fitted = fit(trace.steps[:middle], base)
    rates = fitted.rates
    print(
        f"fitted: {rates.bandwidth / 1e9:.1f} GB/s, {rates.flops / 1e9:.1f} GFLOP/s, "
        f"{1e3 * fitted.row_overhead_s:.2f} ms a row, {1e3 * fitted.step_overhead_s:.2f} ms a step"
    )
    print("first half:  " + report(trace.steps[:middle], fitted).describe())
    print("second half: " + report(trace.steps[middle:], fitted).describe())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    rate_parser = actions.add_parser("rate")
    rate_parser.add_argument("--num-requests", type=int, default=10_000)
    record_parser = actions.add_parser("record")
    record_parser.add_argument("path")
    record_parser.add_argument("--policy", choices=POLICY_NAMES, default="unified")
    record_parser.add_argument("--num-requests", type=int, default=64)
    actions.add_parser("check").add_argument("path")
    args = parser.parse_args()
    if args.action == "rate":
        rate(args.num_requests)
    elif args.action == "record":
        record(args.path, args.policy, args.num_requests)
    else:
        check(args.path)


if __name__ == "__main__":
    main()
