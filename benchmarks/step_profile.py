"""Where the time of a decode step goes: before and after, and beside a bare step.

    python benchmarks/step_profile.py                          batch 1, 16, 64, both dtypes
    python benchmarks/step_profile.py --batches 16 --dtypes float32 --threads 1

*before* is the model as it is read in ``llama.py``: plain matrices, gathered KV and
``scaled_dot_product_attention``. *after* is what the engine uses: packed matrices, the CPU's own
attention, the flat forward pass. *bare* is the after-model with no engine around it: one tensor
of K and V a layer, no pages, no scheduler, no records, the likeliest token.

All three run in turn in one process, on random weights of SmolLM2's shape. Milliseconds of the
median step, 128 tokens of context and growing.
"""

from __future__ import annotations

import argparse
import json
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
import torch.nn.functional as F
from quiet import Stopwatch, wait_for_quiet
from torch import Tensor, nn

from minibatch.builder import engine_for
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.model.attention import AttentionBackend, PagedReferenceAttention
from minibatch.model.flat_llama import FlatLlama
from minibatch.model.linear import PackedLinear, can_pack, pack_linears
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

    def __init__(self, model: LlamaForCausalLM, batch: int, steps: int, before: bool) -> None:
        longest = PROMPT_LEN + steps + 16
        config = EngineConfig(
            "profile",
            max_model_len=longest,
            max_num_seqs=batch,
            max_num_batched_tokens=max(2048, longest),
            num_gpu_blocks=batch * (longest // 16 + 2) + 8,
            num_cpu_blocks=0,
        )
        backend: AttentionBackend = model.backend
        if before:
            backend = PagedReferenceAttention()
        self.engine: Engine = engine_for(model, config)
        runner: Any = self.engine.executor
        model.backend = backend
        if before:
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
            if isinstance(module, (nn.Linear, PackedLinear)):
                clock.watch(module, "forward", "matrices")
        if model.lm_head is None:
            clock.watch(model, "compute_logits", "matrices")
        if isinstance(runner._forward_pass, FlatLlama):
            runner._forward_pass = FlatLlama(model)  # it holds the functions of before
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


class Dense(AttentionBackend):
    """K and V of a batch in one tensor a layer; also plays the cache that it reads."""

    def __init__(self, model: LlamaForCausalLM, batch: int, length: int) -> None:
        c = model.config
        shape = (c.num_layers, 2, batch, c.num_kv_heads, length, c.head_dim)
        self.kv = torch.zeros(shape, dtype=model.dtype)
        self.used = 0

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.kv[layer, 0, :, :, self.used - 1] = k
        self.kv[layer, 1, :, :, self.used - 1] = v

    def prepare(self, *args: Any) -> None: ...

    def forward(self, q: Tensor, cache: Any, layer: int, meta: Any) -> Tensor:
        k, v = self.kv[layer, :, :, :, : self.used]
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # [B, Hkv, G, D]
        return F.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)


class Bare:
    """The same model without an engine."""

    def __init__(self, model: LlamaForCausalLM, batch: int, steps: int) -> None:
        self.model, self.forward = model, FlatLlama(model)
        self.dense = Dense(model, batch, PROMPT_LEN + steps + 16)
        self.dense.used = PROMPT_LEN
        self.ids = torch.arange(batch)

    @torch.inference_mode()
    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        self.dense.used += 1
        positions = torch.full_like(self.ids, self.dense.used - 1)
        backend, self.model.backend = self.model.backend, self.dense
        hidden = self.forward(self.ids, positions, self.dense, Slots(self.ids))
        self.model.backend = backend
        logits = self.model.compute_logits(hidden)
        self.ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
        return {"step": time.perf_counter() - start}


class Slots:
    """All that the flat pass reads of a step's metadata."""

    def __init__(self, ids: Tensor) -> None:
        self.slot_mapping, self.prompt_lens = ids, None


def measure(dtype: str, batch: int, steps: int, wait_s: float) -> dict[str, Any]:
    """Medians by subject and part, and the share of the cores that others took."""
    shape = preset("smollm2-135m")
    torch_dtype = getattr(torch, dtype)
    models = [random_model(shape, dtype=torch_dtype, max_model_len=1024) for _ in range(3)]
    for model in models[1:]:
        if can_pack(torch_dtype, model.device):
            pack_linears(model)
    subjects: dict[str, Any] = {
        "before": Subject(models[0], batch, steps + 5, before=True),
        "after": Subject(models[1], batch, steps + 5, before=False),
        "bare": Bare(models[2], batch, steps + 5),
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
        for name in ("before", "after", "bare"):
            times = result[name]
            parts = [f"{times[part]:.2f}" if part in times else "" for part in PARTS]
            of_bare = f"{100 * result['bare']['step'] / times['step']:.0f} %"
            yield (
                result["dtype"], str(result["batch"]), name, f"{times['step']:.2f}", *parts,
                of_bare if name != "bare" else "", f"{100 * (result['foreign'] or 0):.0f} %",
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
            print(table(HEADER, lines(results)), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        data = {**machine.describe(), "rows": results}
        args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        text = table(HEADER, lines(results), "markdown")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
