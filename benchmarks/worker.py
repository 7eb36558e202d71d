"""One engine in a process of its own: a job list a line in, a measurement a line out.

    python benchmarks/worker.py ENGINE --model DIR --gguf FILE --dtype float32 --threads 2

``cpu.py`` starts one for each engine and dtype, and lets them run in turn; whoever is not asked
waits for a line and uses no time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    out = os.fdopen(
        os.dup(1), "w"
    )  # libraries print what they like; answers have a line of their own
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from engines import Job, make
    from quiet import Stopwatch

    try:
        import torch

        torch.set_num_threads(args.threads)
    except ImportError:
        pass  # llama.cpp has none
    before_mb = peak_mb()
    engine = make(args.engine, args.model, args.gguf, args.dtype, args.threads)
    print(json.dumps({"imported_mb": before_mb, "loaded_mb": peak_mb()}), file=out, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        jobs = [Job(*job) for job in task["jobs"]]
        with Stopwatch() as watch:
            tokens = engine.run(jobs, task["concurrency"], task["shared_prefix"])
        assert [len(row) for row in tokens] == [job.max_tokens for job in jobs], "wrong lengths"
        answer = {
            "wall_s": watch.span.wall_s,
            "cpu_s": watch.span.cpu_s,
            "foreign": watch.span.foreign,
            "tokens": sum(map(len, tokens)),
            "peak_mb": peak_mb(),
        }
        if task.get("want_tokens"):
            answer["ids"] = tokens
        print(json.dumps(answer), file=out, flush=True)


def peak_mb() -> float:
    """The most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss would count the process that started this one
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main()
