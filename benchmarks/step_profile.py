"""Where the time of a decode step goes: before and after, and beside a bare step.

    python benchmarks/step_profile.py                          batch 1, 16, 64, both dtypes
    python benchmarks/step_profile.py --batches 16 --dtypes float32 --threads 1

*before* is the model as it is read in ``llama.py``: plain matrices, gathered KV and
``scaled_dot_product_attention``. *torch* is what the engine uses without a C compiler, and *after*
with one: packed matrices, an attention of the CPU's own, the flat forward pass. *bare* is the
after-model with no engine around it: no scheduler, no sampler, no records, the likeliest token.

All four run in turn in one process, on random weights of SmolLM2's shape. Milliseconds of the
median step, 128 tokens of context and growing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import machine
import torch
from quiet import Stopwatch, wait_for_quiet

from minibatch.builder import cpu_forward, engine_for, pack_for_cpu
from minibatch.config import CpuKernelsName, EngineConfig
from minibatch.engine import Engine
from minibatch.model.attention import AttentionMetadata, PagedReferenceAttention
from minibatch.model.flat_llama import FlatLlama
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import random_model
from minibatch.model.presets import preset
from minibatch.sampling_params import SamplingParams
from minibatch.tables import table

PROMPT_LEN = 128
PARTS = ("matrices", "attention", "other model", "sampling", "inputs", "scheduling", "records")


class Clock:
    """Adds up the time spent inside functions, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spent[part] += time.perf_counter() - start
            return result

        return run


class Subject:
    """An engine whose decode steps are measured, part by part."""

    def __init__(
        self, model: LlamaForCausalLM, batch: int, steps: int, kernels: CpuKernelsName | None
    ) -> None:
        longest = PROMPT_LEN + steps + 16
        config = EngineConfig(
            "profile",
            max_model_len=longest,
            max_num_seqs=batch,
            max_num_batched_tokens=max(2048, longest),
            num_gpu_blocks=batch * (longest // 16 + 2) + 8,
            num_cpu_blocks=0,
            cpu_kernels=kernels or "torch",
        )
        self.engine: Engine = engine_for(model, config)
        runner: Any = self.engine.executor
        if kernels is None:  # the model as it is read
            model.backend = PagedReferenceAttention()
            runner._forward_pass = model
        self.clock = Clock()
        self._watch(model, runner)
        params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
        for number in range(batch):
            prompt = [(7 * number + 13 * i) % 40000 + 5 for i in range(PROMPT_LEN)]
            self.engine.add_request(str(number), prompt, params)
        while self.engine.step().num_generated_tokens < batch:
            pass

    def _watch(self, model: LlamaForCausalLM, runner: Any) -> None:
        """Matrices wherever they are called from; the rest by its owner."""
        clock = self.clock
        for module in model.modules():
            if type(module).__name__.endswith("Linear"):
                clock.watch(module, "forward", "matrices")
        if model.lm_head is None:
            clock.watch(model, "compute_logits", "matrices")
        if isinstance(runner._forward_pass, FlatLlama):
            # Made anew: it holds the functions of before.
            runner._forward_pass = FlatLlama(model, runner._forward_pass.ops)
        clock.watch(model.backend, "forward", "attention")
        clock.watch(model.backend, "prepare", "attention")
        clock.watch(runner, "_pack", "inputs")
        clock.watch(runner, "sampler", "sampling")
        clock.watch(runner, "execute", "execute")

    def step(self) -> dict[str, float]:
        """Seconds of one step, by part and in all."""
        self.clock.spent.clear()
        start = time.perf_counter()
        record = self.engine.step()
        whole = time.perf_counter() - start
        spent = dict(self.clock.spent)
        inside = sum(spent.get(part, 0.0) for part in PARTS)
        execute = spent.pop("execute")
        return spent | {
            "other model": execute - inside,
            "scheduling": record.schedule_s,
            "records": whole - execute - record.schedule_s,
            "step": whole,
        }


class Bare:
    """The same forward pass without an engine, over blocks in a row."""

    def __init__(self, model: LlamaForCausalLM, batch: int, steps: int) -> None:
        self.model, self.forward = model, cpu_forward(model, EngineConfig("bare"))
        self.batch, self.used = batch, PROMPT_LEN
        blocks_each = (PROMPT_LEN + steps) // 16 + 2
        self.kv_cache = KVCache(model.config, batch * blocks_each, 16, dtype=model.dtype)
        blocks = torch.arange(batch * blocks_each, dtype=torch.int32)
        self.block_tables = blocks.view(batch, blocks_each)
        self.query_start = torch.arange(batch + 1, dtype=torch.int32)
        self.ids = torch.arange(batch)

    @torch.inference_mode()
    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        last, self.used = self.used, self.used + 1
        positions = torch.full_like(self.ids, last)
        meta = AttentionMetadata(
            slot_mapping=self.block_tables[:, last // 16].long() * 16 + last % 16,
            block_tables=self.block_tables,
            query_start=self.query_start,
            seq_lens=torch.full((self.batch,), self.used, dtype=torch.int32),
            query_lens=[1] * self.batch,
            seq_lens_host=[self.used] * self.batch,
            num_decodes=self.batch,
        )
        hidden = self.forward(self.ids, positions, self.kv_cache, meta)
        logits = self.model.compute_logits(hidden)
        self.ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
        return {"step": time.perf_counter() - start}


def measure(dtype: str, batch: int, steps: int, wait_s: float) -> dict[str, Any]:
    """Medians by subject and part, and the share of the cores that others took."""
    shape = preset("smollm2-135m")
    torch_dtype = getattr(torch, dtype)
    models = [random_model(shape, dtype=torch_dtype, max_model_len=1024) for _ in range(4)]
    pack_for_cpu(models[1], EngineConfig("profile", cpu_kernels="torch"))
    for model in models[2:]:
        pack_for_cpu(model, EngineConfig("profile"))
    subjects: dict[str, Any] = {
        "before": Subject(models[0], batch, steps + 5, None),
        "torch": Subject(models[1], batch, steps + 5, "torch"),
        "after": Subject(models[2], batch, steps + 5, "auto"),
        "bare": Bare(models[3], batch, steps + 5),
    }
    wait_for_quiet(wait_s)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    with Stopwatch() as watch:
        for turn in range(steps + 5):
            for name, subject in subjects.items():
                found = subject.step()
                if turn >= 5:
                    times[name].append(found)
    result: dict[str, Any] = {"dtype": dtype, "batch": batch, "foreign": watch.span.foreign}
    for name, found in times.items():
        keys = found[0].keys()
        result[name] = {key: 1e3 * statistics.median(t[key] for t in found) for key in keys}
    return result


def lines(results: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for result in results:
        for name in ("before", "torch", "after", "bare"):
            times = result[name]
            parts = [f"{times[part]:.2f}" if part in times else "" for part in PARTS]
            of_bare = ""
            if name == "after":
                of_bare = f"{100 * result['bare']['step'] / times['step']:.0f} %"
            yield (
                result["dtype"], str(result["batch"]), name, f"{times['step']:.2f}", *parts,
                of_bare, f"{100 * (result['foreign'] or 0):.0f} %",
            )  # fmt: skip


HEADER = ("dtype", "batch", "", "step ms", *PARTS, "bare / step", "foreign CPU")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--wait", type=float, default=30, help="seconds at most, for quiet")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtypes:
        for batch in args.batches:
            results.append(measure(dtype, batch, args.steps, args.wait))
            print(f"{dtype}, batch {batch}: done", file=sys.stderr, flush=True)
    print(table(HEADER, lines(results)))
    if args.out:
        machine.save(args.out, HEADER, list(lines(results)), steps=args.steps)


if __name__ == "__main__":
    main()
