"""``minibatch simulate``: a workload on a chip that you need not have, under several policies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from minibatch.calibration import fit, report
from minibatch.commands.knobs import add_knobs, given
from minibatch.config import POLICY_NAMES, EngineConfig, SchedulerConfig
from minibatch.cost_model import CostModel
from minibatch.errors import ConfigError
from minibatch.hardware import DTYPE_BYTES, Hardware, all_hardware, hardware, measure_this_machine
from minibatch.metrics import SLO, MetricsCollector, RunMetrics
from minibatch.model.presets import PRESETS, preset
from minibatch.record import StepRecord
from minibatch.simulation import Recipe, Simulation, collector_paused, scheduler_config
from minibatch.tables import comparison, request_rows
from minibatch.trace import Trace
from minibatch.workload import (
    Arrivals,
    Lengths,
    Workload,
    all_at_once,
    as_workload,
    fixed,
    gamma,
    generate,
    listed,
    lognormal,
    uniform,
)
from minibatch.workload_files import read_workload

KNOBS = {knob.name for knob in fields(SchedulerConfig)} - {"policy"}
KNOBS |= {"gpu_memory_utilization", "swap_space"}  # which size the pools

EXAMPLES = """\
examples:
  minibatch simulate --policy static dynamic continuous unified
  minibatch simulate --hardware h100 --model llama-3-8b --policy unified \\
      --num-requests 1000 --prompt-len lognormal:300:1 --output-len uniform:32:512 --rate 8
  minibatch simulate --workload AzureLLMInferenceTrace_code.csv --model llama-3-8b \\
      --hardware h100 --policy continuous unified --slo-ttft 1 --slo-tpot 0.05
  minibatch simulate --policy unified --enable-prefix-caching --shared-prefix-len 400 --rate 20
  minibatch simulate --policy continuous --trace run.jsonl.gz      (then: minibatch trace show)
  minibatch simulate --hardware this-machine --model smollm2-135m --dtype float32 \\
      --num-gpu-blocks 2000 --calibrate recorded.jsonl.gz

lengths: 512 | uniform:LOW:HIGH | lognormal:MEDIAN:SIGMA | list:10,500,10
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="run a workload on a cost model of a chip",
        description="Serve a workload with the real schedulers on a virtual clock. Times come from "
        "a roofline cost model: they are predictions.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chip = parser.add_argument_group("chip and model")
    names = [*all_hardware(), "this-machine"]
    chip.add_argument(
        "--hardware",
        default="a100-80gb",
        choices=names,
        metavar="NAME",
        help=f"{', '.join(names)} (measured now); default a100-80gb",
    )
    chip.add_argument(
        "--model",
        default="llama-2-7b",
        choices=PRESETS,
        metavar="NAME",
        help=f"{', '.join(PRESETS)}; default llama-2-7b",
    )
    chip.add_argument("--dtype", default="float16", choices=DTYPE_BYTES)
    chip.add_argument("--weight-dtype", choices=DTYPE_BYTES, help="weight-only quantisation")
    chip.add_argument("--kv-dtype", choices=DTYPE_BYTES, help="quantised KV cache")
    chip.add_argument("--ideal", action="store_true", help="all of every ceiling, no overhead")
    chip.add_argument(
        "--calibrate",
        type=Path,
        metavar="TRACE",
        help="fit the constants to a recorded run of this model",
    )
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="Azure or BurstGPT CSV, Mooncake JSONL, or our own",
    )
    load.add_argument("--num-requests", type=int, help="default 128; of a file, all")
    load.add_argument("--prompt-len", default="512", metavar="LENGTHS", help="default 512")
    load.add_argument("--output-len", default="128", metavar="LENGTHS", help="default 128")
    load.add_argument("--rate", type=float, help="requests a second; default: all at once")
    load.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson; default 1")
    load.add_argument("--shared-prefix-len", type=int, default=0, help="tokens; default 0")
    load.add_argument("--num-prefixes", type=int, default=1, help="different ones; default 1")
    load.add_argument("--scale-tokens", type=float, default=1.0, help="times all lengths")
    load.add_argument("--scale-time", type=float, default=1.0, help="times all arrival times")
    load.add_argument("--seed", type=int, default=0)
    out = parser.add_argument_group("output")
    out.add_argument("--policy", nargs="+", default=["continuous"], choices=POLICY_NAMES)
    out.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record to .jsonl or .jsonl.gz; of several policies, one each",
    )
    out.add_argument("--requests", type=Path, metavar="FILE", help="a CSV line a request")
    out.add_argument("--style", choices=("plain", "markdown", "csv"), default="plain")
    out.add_argument("--slo-ttft", type=float, metavar="S", help="seconds; adds goodput")
    out.add_argument("--slo-tpot", type=float, metavar="S", help="seconds; adds goodput")
    out.add_argument("--slo-e2e", type=float, metavar="S", help="seconds; adds goodput")
    out.add_argument("--no-progress", action="store_true")
    others = {knob.name for knob in fields(EngineConfig)} - KNOBS
    add_knobs(parser, "scheduler and memory", EngineConfig, skip=others)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cost_model = make_cost_model(args)
    workload = make_workload(args)
    print(workload.describe(), file=sys.stderr)
    runs: dict[str, RunMetrics] = {}
    for policy in args.policy:
        runs[policy] = run_policy(policy, workload, cost_model, args)
    print(f"simulated: {cost_model.hardware.title}, {args.model} in {cost_model.dtype}")
    print(comparison(runs, args.style))
    slo = SLO(args.slo_ttft, args.slo_tpot, args.slo_e2e)
    if slo != SLO():
        for policy, metrics in runs.items():
            good = metrics.goodput(slo)
            print(f"goodput {policy}: {good:.3f} of {metrics.requests_per_s:.3f} requests/s")
    if args.requests:
        for policy, metrics in runs.items():
            path = path_for(args.requests, policy, args.policy)
            path.write_text(request_rows(metrics) + "\n", encoding="utf-8")
    return 0


def run_policy(
    policy: str, workload: Workload, cost_model: CostModel, args: argparse.Namespace
) -> RunMetrics:
    """One simulated run; its records go to the file, if any, and into the figures."""
    knobs = {name: value for name, value in given(args, EngineConfig).items() if name in KNOBS}
    config = scheduler_config(policy, cost_model, knobs)
    trace_path = path_for(args.trace, policy, args.policy) if args.trace else None
    simulation = Simulation(
        Recipe(workload, cost_model, ((0, config),)), trace_path=trace_path, keep_records=1
    )
    collector = MetricsCollector(config.max_num_seqs, config.num_gpu_blocks, config.block_size)
    with (
        simulation.engine,
        collector_paused(),
        progress(policy, len(workload), not args.no_progress) as advance,
    ):
        for record in simulation.run():
            collector.add(record)
            advance(record)
    return collector.result()


@contextmanager
def progress(policy: str, total: int, enabled: bool) -> Iterator[Any]:
    """A bar of ended requests, on standard error."""
    from tqdm import tqdm

    with tqdm(total=total, desc=policy, unit="req", disable=None if enabled else True) as bar:

        def advance(record: StepRecord) -> None:
            ended = len(record.finished) + len(record.refused)
            if ended:
                bar.update(ended)

        yield advance


def make_cost_model(args: argparse.Namespace) -> CostModel:
    """From the options, and from a recorded run if there is one."""
    chip: Hardware = (
        measure_this_machine(dtype=args.dtype)
        if args.hardware == "this-machine"
        else hardware(args.hardware)
    )
    if args.hardware == "this-machine":
        print(chip.describe(), file=sys.stderr)
    model = preset(args.model)
    if args.ideal:
        return CostModel.ideal(model, chip, args.dtype)
    cost_model = CostModel(model, chip, args.dtype, args.weight_dtype, args.kv_dtype)
    if args.calibrate is None:
        return cost_model
    trace = Trace.load(args.calibrate)
    block_size = trace.meta.knobs.get("block_size", SchedulerConfig.block_size)
    fitted = fit(trace, cost_model, block_size)
    print(f"calibrated on {args.calibrate}:", file=sys.stderr)
    print(report(trace, fitted, block_size).describe(), file=sys.stderr)
    return fitted


def make_workload(args: argparse.Namespace) -> Workload:
    """From the file, or drawn."""
    if args.workload is not None:
        workload = as_workload(read_workload(args.workload))
        if args.num_requests is not None:
            workload = workload.first(args.num_requests)
    else:
        arrivals: Arrivals = (
            all_at_once() if args.rate is None else gamma(args.rate, args.burstiness)
        )
        workload = generate(
            128 if args.num_requests is None else args.num_requests,
            parse_lengths(args.prompt_len),
            parse_lengths(args.output_len),
            arrivals,
            shared_prefix_len=args.shared_prefix_len,
            num_prefixes=args.num_prefixes,
            seed=args.seed,
        )
    if args.scale_tokens != 1.0 or args.scale_time != 1.0:
        workload = workload.scaled(args.scale_tokens, args.scale_time)
    return workload


def parse_lengths(text: str) -> Lengths:
    """``512``, ``uniform:32:512``, ``lognormal:200:0.8`` or ``list:10,500``.

    Raises:
        ConfigError: anything else.
    """
    kind, *parts = text.split(":")
    try:
        if kind.isdigit() and not parts:
            return fixed(int(kind))
        if kind == "uniform":
            low, high = map(int, parts)
            return uniform(low, high)
        if kind == "lognormal":
            median, sigma = map(float, parts)
            return lognormal(median, sigma)
        if kind == "list":
            (numbers,) = parts
            return listed([int(number) for number in numbers.split(",")])
    except ConfigError:
        raise
    except ValueError:
        pass
    raise ConfigError(
        f"lengths {text!r}: expected N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or list:N,N,..."
    )


def path_for(path: Path, policy: str, policies: list[str]) -> Path:
    """``run.jsonl.gz`` -> ``run.static.jsonl.gz``, if there are several policies."""
    if len(policies) == 1:
        return path
    stem, dot, suffix = path.name.partition(".")
    return path.with_name(f"{stem}.{policy}{dot}{suffix}")
