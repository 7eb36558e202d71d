"""A first look: the four policies and transformers' two ways on the same requests, in turn.

    python benchmarks/smoke.py                      concurrency 8 and 16, about two minutes
    python benchmarks/smoke.py --concurrency 4 --rounds 1

Three times as many requests as run at once, 128 tokens in, 8 to 64 out. Each engine has a process
of its own; the median of the rounds counts. ``foreign`` is the share of the cores' time that
other processes took: above 5 % the figures are not to be trusted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import machine
import torch
from cpu import MODEL, Load, Worker, draw
from engines import export_checkpoint

from minibatch.config import POLICY_NAMES
from minibatch.model.hub import resolve
from minibatch.model.loader import load_config
from minibatch.tables import table

HEADER = ("at once", "engine", "generated tok/s", "continuous is", "foreign CPU")
OUTPUTS = (8, 64, 16, 48, 32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md too")
    args = parser.parse_args()
    gguf = resolve(MODEL)
    folder = export_checkpoint(gguf, Path("runs") / f"{gguf.stem}-safetensors")
    paths = ["--model", str(folder), "--gguf", str(gguf), "--threads", str(args.threads)]
    names = [f"minibatch:{policy}" for policy in POLICY_NAMES] + ["generate", "generate_batch"]
    workers = [Worker(name, args.dtype, Path(sys.executable), paths) for name in names]
    vocab_size = load_config(gguf).vocab_size
    rows = []
    for concurrency in args.concurrency:
        lengths = [(128, OUTPUTS[i % len(OUTPUTS)]) for i in range(3 * concurrency)]
        load = Load(f"c{concurrency}", "smoke", draw(vocab_size, lengths), concurrency)
        runs = [[worker.run(load) for worker in workers] for _ in range(args.rounds + 1)]
        runs = runs[1:]  # the first one warms up
        rates = {
            worker.engine: statistics.median(r["tokens"] / r["wall_s"] for r in results)
            for worker, results in zip(workers, zip(*runs, strict=True), strict=True)
            if all(results)
        }
        ours = rates["minibatch:continuous"]
        for worker, results in zip(workers, zip(*runs, strict=True), strict=True):
            rate = rates.get(worker.engine)
            if rate is None:
                rows.append((concurrency, worker.engine, "failed", "", ""))
                continue
            foreign = max(run["foreign"] or 0.0 for run in results)
            rows.append(
                (concurrency, worker.engine, f"{rate:.1f}", f"{ours / rate:.2f}x",
                 f"{100 * foreign:.0f} %")
            )  # fmt: skip
    print(table(HEADER, rows))
    if args.out:
        machine.save(args.out, HEADER, rows, dtype=args.dtype, rounds=args.rounds)
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
