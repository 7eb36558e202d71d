"""Llama-2-7B on one GPU, measured in pieces that take a few minutes each.

    python benchmarks/gpu.py limits          copy bandwidth, matrix rates: what the chip gives
    python benchmarks/gpu.py kernels         decodes over tilings and cache layouts: errors, GB/s
    python benchmarks/gpu.py prompts         prompts and chunks: our kernel beside torch's
    python benchmarks/gpu.py load            seconds to draw random weights, to read a checkpoint
    python benchmarks/gpu.py verify          our forward pass against transformers' on one storage
    python benchmarks/gpu.py steps           a decode step, eager and captured, part by part
    python benchmarks/gpu.py sweep           concurrency 1 to 256, 512 in / 128 out, four policies
    python benchmarks/gpu.py spread          the same work in outputs of ever more unequal length
    python benchmarks/gpu.py quantization    8-bit weights, activations and KV
    python benchmarks/gpu.py traces          one recorded run a policy, for data/traces/
    python benchmarks/gpu.py report          tables and plots of all that was written so far

Each writes ``OUT/<stage>.json`` (``--out``, by default ``benchmarks/results/gpu``) after every row,
and prints its table last. What fails leaves its error in a row, and the rest goes on; the exit
status then is 1. No stage needs another one (``limits`` is measured anew where it is missing).
Weights are random: speed does not depend on what they say. ``gpu_checklist.md`` has the order and
what to look for. ``--quick`` runs a stage in small, on any device, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))  # also where minibatch was not installed

import torch
from gpu_attention import kernels, prompts
from gpu_bench import Bench, Row, print_table
from gpu_model import load, verify
from gpu_report import write_report

from minibatch.bounds import UniformLoad, uniform_bounds
from minibatch.builder import engine_for
from minibatch.config import EngineConfig
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.hardware import DTYPE_BYTES
from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("static", "dynamic", "continuous", "unified")


# -- what the chip gives ------------------------------------------------------------------------


def limits(bench: Bench) -> None:
    """Copy bandwidth and peak rate, then every matrix of the model at all batch sizes."""
    chip, shape = bench.measure_chip(), bench.shape
    heads = shape.num_heads + 2 * shape.num_kv_heads
    matrices = {
        "qkv": (heads * shape.head_dim, shape.hidden_size),
        "o": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "lm_head": (shape.vocab_size, shape.hidden_size),
    }
    rows: list[Row] = []
    for name, (outputs, inner) in matrices.items():
        with bench.attempt("limits", rows, matrix=name):
            matrix_rows(bench, name, outputs, inner, rows)
    print_table(("matrix", "batch", "us", "GB/s", "TFLOP/s", "share of bound"), rows)
    print(chip.describe())


def matrix_rows(bench: Bench, name: str, outputs: int, inner: int, rows: list[Row]) -> None:
    """One matrix, multiplied with ever more tokens."""
    chip, dtype = bench.chip(), bench.torch_dtype
    # Several copies in turn, so that none stays in the cache between two uses.
    copies = max(2, min(16, 2**29 // (outputs * inner * 2)))
    weights = [torch.randn(outputs, inner, device=bench.device).to(dtype) for _ in range(copies)]
    for batch in (1, 4) if bench.quick else (1, 8, 32, 128, 256, 512, 8192):
        x = torch.randn(batch, inner, device=bench.device).to(dtype)
        runs = [lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in weights]
        seconds = bench.device_seconds(runs, repeats=50 if batch <= 512 else 10)
        moved = (outputs * inner + batch * (inner + outputs)) * dtype.itemsize
        flops = 2 * batch * outputs * inner
        least = max(moved / chip.memory_bandwidth, flops / chip.peak_flops(bench.dtype))
        rows.append(
            {
                "matrix": name,
                "batch": batch,
                "us": 1e6 * seconds,
                "GB/s": moved / seconds / 1e9,
                "TFLOP/s": flops / seconds / 1e12,
                "share of bound": least / seconds,
            }
        )


# -- engines ------------------------------------------------------------------------------------


def make_engine(bench: Bench, concurrency: int, **knobs: Any) -> Engine:
    settings: dict[str, Any] = {
        "model": bench.model_name,
        "load_format": "dummy",
        "device": str(bench.device),
        "max_model_len": bench.max_model_len,
        "max_num_seqs": concurrency,
        "policy": "continuous",
        "max_num_batched_tokens": max(8192, bench.max_model_len),
        "swap_space": 0.0,
    }
    if knobs.get("policy") == "static":  # prefills its whole batch in one step
        whole_batch = concurrency * bench.prompt_len
        settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], whole_batch)
    if bench.quick or bench.device.type == "cpu":  # a tiny model's pool would have millions
        settings["num_gpu_blocks"] = 1024
    return engine_for(bench.model(), EngineConfig(**(settings | knobs)))


@dataclass
class Run:
    """An engine's run over one load."""

    seconds: float
    records: list[StepRecord]
    parts: dict[str, float]  # seconds by part of a step

    @property
    def num_tokens(self) -> int:
        return sum(record.num_generated_tokens for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_load(
    bench: Bench,
    engine: Engine,
    prompt_len: int,
    outputs: Iterable[int],
    record_to: Path | None = None,
) -> Run:
    """Everything submitted at once, run to the end; the first small run is thrown away."""
    rng = random.Random(0)
    vocab = bench.shape.vocab_size

    def submit(name: str, length: int, output: int) -> None:
        prompt = [rng.randrange(vocab) for _ in range(length)]
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.add_request(name, prompt, params)

    for index in range(min(2, engine.config.max_num_seqs)):
        submit(f"warm-up {index}", prompt_len, 4)
    list(engine.run())
    engine.trace.steps.clear()
    if record_to is not None:
        engine.record_to(record_to)
    for index, output in enumerate(outputs):
        submit(str(index), prompt_len, output)
    parts = watch_parts(engine)
    bench.wait()
    start = time.perf_counter()
    records = list(engine.run())
    bench.wait()
    return Run(time.perf_counter() - start, records, parts)


def watch_parts(engine: Engine) -> dict[str, float]:
    """Time the parts of every step from now on: host work by name, the rest is waiting."""
    parts: dict[str, float] = {}

    def timed(owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                parts[part] = parts.get(part, 0.0) + time.perf_counter() - start

        setattr(owner, method, wrapped)

    timed(engine.scheduler, "schedule", "schedule")
    timed(engine.scheduler, "update", "update")
    timed(engine, "_record", "record")
    if hasattr(engine.executor, "launch"):
        timed(engine.executor, "_pack_in", "pack")
        timed(engine.executor, "launch", "launch")
        timed(engine, "_settle", "settle, waiting included")
    return parts


def uniform_row(
    bench: Bench,
    policy: str,
    concurrency: int,
    run: Run,
    output_len: int,
    kv_dtype: str | None = None,
    weight_dtype: str | None = None,
) -> Row:
    """Rates of a uniform load beside their bounds.

    The bounds are those of 16-bit numbers, whatever is stored; bytes moved are those stored.
    """
    load = UniformLoad(concurrency, bench.prompt_len, output_len)
    bounds = uniform_bounds(bench.shape, bench.chip(), load, bench.dtype)
    ideal = CostModel.ideal(bench.shape, bench.chip(), bench.dtype)
    ideal = replace(ideal, kv_dtype=kv_dtype, weight_dtype=weight_dtype)
    # The output layer is never quantised on a GPU.
    head_width = DTYPE_BYTES[bench.dtype] - DTYPE_BYTES[weight_dtype or bench.dtype]
    head = ideal.head_parameters * head_width
    decodes = [r for r in run.records if {s.phase for s in r.scheduled} == {"decode"}]
    prefills = [r for r in run.records if any(s.phase == "prefill" for s in r.scheduled)]
    decode_s = sum(r.duration_s for r in decodes)
    prefill_s = sum(r.duration_s for r in prefills)
    work = [ideal.record_work(record, 16) for record in decodes]
    moved = sum(w.weight_bytes + head + w.kv_bytes for w in work)
    flops = sum(ideal.record_work(record, 16).flops for record in prefills)
    return {
        "policy": policy,
        "concurrency": concurrency,
        "tok/s": run.tokens_per_s,
        "serial bound": bounds.serial,
        "share": run.tokens_per_s / bounds.serial,
        "overlap bound": bounds.overlapped,
        "decode ms": 1e3 * decode_s / len(decodes) if decodes else None,
        "decode GB/s": moved / decode_s / 1e9 if decodes else None,
        "share of copy": moved / decode_s / bench.chip().memory_bandwidth if decodes else None,
        "prefill TFLOP/s": flops / prefill_s / 1e12 if prefills else None,
        "seconds": run.seconds,
        "steps": len(run.records),
        "most rows": max(len(record.scheduled) for record in run.records),
        "parts": run.parts,
    }


SWEEP_HEADER = ("policy", "concurrency", "tok/s", "serial bound", "share", "decode ms",
                "decode GB/s", "share of copy", "prefill TFLOP/s", "most rows")  # fmt: skip


# -- one step, part by part ---------------------------------------------------------------------


def steps(bench: Bench) -> None:
    """Decode steps of each batch size, kernel by kernel and captured."""
    rows: list[Row] = []
    output_len = 6 if bench.quick else 40
    for name in ("eager", "graph"):
        for count in bench.concurrency:
            with (
                bench.attempt("steps", rows, policy=name, concurrency=count),
                make_engine(bench, count, enforce_eager=name == "eager") as engine,
            ):
                run = run_load(bench, engine, bench.prompt_len, [output_len] * count)
                row = uniform_row(bench, name, count, run, output_len)
                for part, seconds in run.parts.items():
                    row[f"{part} ms"] = 1e3 * seconds / len(run.records)
                rows.append(row)
    header = ("policy", "concurrency", "decode ms", "decode GB/s", "share of copy",
              "schedule ms", "update ms", "record ms", "pack ms", "launch ms",
              "settle, waiting included ms")  # fmt: skip
    print_table(header, rows)


# -- the article's sweep ------------------------------------------------------------------------


def sweep(bench: Bench, policies: Sequence[str] = POLICIES) -> None:
    """Generated tokens/s by concurrency and policy. Policies that are not asked for keep the rows
    of an earlier call.
    """
    rows = [row for row in rows_so_far(bench, "sweep") if row["policy"] not in policies]
    for policy in policies:
        for count in bench.concurrency:
            with (
                bench.attempt("sweep", rows, policy=policy, concurrency=count),
                make_engine(bench, count, policy=policy) as engine,
            ):
                run = run_load(bench, engine, bench.prompt_len, [bench.output_len] * count)
                rows.append(uniform_row(bench, policy, count, run, bench.output_len))
    print_table(SWEEP_HEADER, rows)


def rows_so_far(bench: Bench, stage: str) -> list[Row]:
    """What an earlier call has measured of the same model on the same device today."""
    try:
        content = json.loads((bench.out / f"{stage}.json").read_text())
        same = content["model"] == bench.model_name and content["dtype"] == bench.dtype
        today = content["date"] == time.strftime("%Y-%m-%d")
        return content["rows"] if same and today else []
    except (OSError, ValueError, KeyError):
        return []


# -- unequal lengths ----------------------------------------------------------------------------


def spread(bench: Bench) -> None:
    """100 requests whose outputs lie between two lengths: static (32 rows) against continuous."""
    count = 8 if bench.quick else 100
    ranges = [(8, 8), (2, 14)] if bench.quick else [(128, 128), (32, 512), (16, 1024)]
    rows: list[Row] = []
    for low, high in ranges:
        with bench.attempt("spread", rows, outputs=f"{low}-{high}"):
            rng = random.Random(1)
            outputs = [rng.randint(low, high) for _ in range(count)]
            rates = {}
            for policy, slots in (("static", 4 if bench.quick else 32), ("continuous", count)):
                with make_engine(bench, slots, policy=policy) as engine:
                    rates[policy] = run_load(bench, engine, bench.prompt_len, outputs).tokens_per_s
            gain = rates["continuous"] / rates["static"]
            rows.append({"outputs": f"{low}-{high}", **rates, "gain": gain})
    print_table(("outputs", "static", "continuous", "gain"), rows)


# -- eight bits ---------------------------------------------------------------------------------


def quantization(bench: Bench) -> None:
    """The same loads with 8-bit KV, weights, activations. (Quality: ``quantization.py``.)"""
    from minibatch.executor.gpu import quantize

    rows: list[Row] = []
    stored = {"int8": "int8", "fp8": "float8", None: None}
    for weights in (None, "int8", "fp8"):
        bench.forget_model()  # each kind of weights is made from fresh ones
        made = False
        with bench.attempt("quantization", rows, policy=weights or bench.dtype):
            quantize(bench.model(), weights)
            made = True
        for kv in ("auto", "fp8") if made else ():
            name = f"{weights or bench.dtype}, {'fp8 KV' if kv == 'fp8' else 'plain KV'}"
            for count in (1, 4) if bench.quick else (1, 128, 256):
                with (
                    bench.attempt("quantization", rows, policy=name, concurrency=count),
                    make_engine(bench, count, kv_cache_dtype=kv) as engine,
                ):
                    run = run_load(bench, engine, bench.prompt_len, [bench.output_len] * count)
                    kinds = stored["fp8" if kv == "fp8" else None], stored[weights]
                    rows.append(uniform_row(bench, name, count, run, bench.output_len, *kinds))
    bench.forget_model()
    header = ("policy", "concurrency", "tok/s", "serial bound", "share", "decode ms",
              "share of copy", "prefill TFLOP/s", "most rows")  # fmt: skip
    print_table(header, rows)


# -- recorded runs ------------------------------------------------------------------------------


def traces(bench: Bench) -> None:
    """One run a policy, one that swaps and one that recomputes, each small enough for git."""
    small: dict[str, Any] = {"num_gpu_blocks": 17 if bench.quick else 1200}
    swap_space = 0.01 if bench.quick else 4.0
    runs: dict[str, dict[str, Any]] = {
        **{policy: {"policy": policy} for policy in POLICIES},
        "swap": {
            "policy": "continuous",
            "preemption_mode": "swap",
            "swap_space": swap_space,
            **small,
        },
        "recompute": {"policy": "continuous", "preemption_mode": "recompute", **small},
    }
    count = 6 if bench.quick else 48
    rng = random.Random(2)
    outputs = [rng.randint(4, 3 * bench.output_len // 2) for _ in range(count)]
    rows: list[Row] = []
    bench.out.mkdir(parents=True, exist_ok=True)
    for name, knobs in runs.items():
        limit = 128 if bench.quick else 2048
        path = bench.out / f"{bench.model_name}_{name}.jsonl.gz"
        with bench.attempt("traces", rows, run=name):
            with make_engine(bench, count, max_model_len=limit, **knobs) as engine:
                run = run_load(bench, engine, bench.prompt_len, outputs, record_to=path)
            rows.append(
                {
                    "run": name,
                    "steps": len(run.records),
                    "tok/s": run.tokens_per_s,
                    "evictions": sum(len(record.preempted) for record in run.records),
                    "KiB": path.stat().st_size / 1024,
                }
            )
    print_table(("run", "steps", "tok/s", "evictions", "KiB"), rows)


# -- all of it ----------------------------------------------------------------------------------


def report(bench: Bench) -> None:
    """``report.md`` with a table a stage, and ``sweep.svg``."""
    bench.out.mkdir(parents=True, exist_ok=True)
    count = write_report(bench.out, f"{bench.model_name} on one GPU", STAGES)
    print(f"{bench.out / 'report.md'}: {count} tables")


STAGES: dict[str, Callable[[Bench], None]] = {
    stage.__name__: stage
    for stage in (
        limits, kernels, prompts, load, verify, steps, sweep, spread, quantization, traces, report
    )
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage; 1 if some part of it failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--model", default="llama-2-7b", help="a shape of minibatch.model.presets")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="of `sweep`")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try a stage out")
    args = parser.parse_args(arguments)
    bench = Bench(args.model, torch.device(args.device), args.out, args.quick, args.dtype)
    start = time.perf_counter()
    if args.stage == "sweep" and args.policies:
        sweep(bench, args.policies)
    else:
        STAGES[args.stage](bench)
    failed = f", {bench.failures} failed" if bench.failures else ""
    print(f"{args.stage}: {time.perf_counter() - start:.0f} s{failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
