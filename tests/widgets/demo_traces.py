"""The small runs that tests and the gallery show, all of them simulated, so always the same.

python -m tests.widgets.demo_traces        writes them to data/traces/demo_*.jsonl.gz
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minibatch.cost_model import CostModel
from minibatch.hardware import hardware
from minibatch.model.presets import preset
from minibatch.simulation import Recipe, Simulation, scheduler_config, simulate
from minibatch.trace import Trace
from minibatch.workload import RequestSpec, Segment, as_workload

FOLDER = Path(__file__).resolve().parents[2] / "data" / "traces"

# Hand-sized: four slots, memory for not quite all of them.
SMALL = {
    "block_size": 4,
    "num_gpu_blocks": 12,
    "num_cpu_blocks": 12,
    "max_num_seqs": 4,
    "max_model_len": 32,
    "max_num_batched_tokens": 32,
}
LENGTHS = {"A": (6, 14), "B": (9, 5), "C": (5, 11), "D": (8, 9), "E": (7, 3), "F": (4, 12)}
LATER = {"G": (6, 4, 0.030), "H": (10, 6, 0.045)}


def requests() -> list[RequestSpec]:
    """Eight requests: six at once, two later."""
    at_once = [RequestSpec(name, 0.0, *lengths) for name, lengths in LENGTHS.items()]
    return at_once + [RequestSpec(n, at, p, o) for n, (p, o, at) in LATER.items()]


def alike() -> list[RequestSpec]:
    """Seven prompts with the same 12 tokens in front, for the prefix cache."""
    system = Segment(1, 12)
    rows = [(14, 6, 0.0), (17, 5, 0.0), (13, 8, 0.004), (18, 4, 0.010), (15, 9, 0.014)]
    rows += [(21, 6, 0.030), (13, 5, 0.036)]
    return [
        RequestSpec("ABCDEFG"[i], at, prompt, output, (system,))
        for i, (prompt, output, at) in enumerate(rows)
    ]


def _run(policy: str, specs: list[RequestSpec] | None = None, **knobs: Any) -> Trace:
    chip, model = "a100-80gb", "llama-2-7b"
    return simulate(specs or requests(), chip, model, policy, {**SMALL, **knobs})


DEMOS = {
    "static": lambda: _run("static", num_gpu_blocks=32, max_num_batched_tokens=64),
    "dynamic": lambda: _run("dynamic", num_gpu_blocks=24, max_num_batched_tokens=64),
    "continuous": lambda: _run("continuous"),
    "swap": lambda: _run("continuous", preemption_mode="swap"),
    "chunked": lambda: _run("continuous", enable_chunked_prefill=True, max_num_batched_tokens=8),
    "unified": lambda: _run("unified", max_num_batched_tokens=12, num_gpu_blocks=13),
    "prefix": lambda: _run(
        "unified", alike(), enable_prefix_caching=True, max_num_batched_tokens=16
    ),
}


def simulation(policy: str, **knobs: Any) -> Simulation:
    """The same requests, not yet run: for live pictures."""
    cost_model = CostModel(preset("llama-2-7b"), hardware("a100-80gb"))
    config = scheduler_config(policy, cost_model, {**SMALL, **knobs})
    return Simulation(Recipe(as_workload(requests()), cost_model, ((0, config),)))


def make(name: str) -> Trace:
    return DEMOS[name]()


def load(name: str) -> Trace:
    return Trace.load(FOLDER / f"demo_{name}.jsonl.gz")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in DEMOS:
        trace = make(name)
        path = trace.save(FOLDER / f"demo_{name}.jsonl.gz")
        print(f"{path.name}: {trace!r}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
