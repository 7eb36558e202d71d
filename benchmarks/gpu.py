"""Llama-2-7B on one GPU, measured in pieces that take a few minutes each.

    python benchmarks/gpu.py limits          copy bandwidth, matrix rates: what the chip gives
    python benchmarks/gpu.py kernels         attention: right to the last bit that counts, and GB/s
    python benchmarks/gpu.py verify          our forward pass against transformers' on one storage
    python benchmarks/gpu.py steps           a decode step, eager and captured, part by part
    python benchmarks/gpu.py sweep           concurrency 1 to 256, 512 in / 128 out, four policies
    python benchmarks/gpu.py spread          the same work in outputs of ever more unequal length
    python benchmarks/gpu.py quantization    8-bit weights, activations and KV
    python benchmarks/gpu.py traces          one recorded run a policy, for data/traces/
    python benchmarks/gpu.py report          tables and plots of all that was written so far

Each writes ``OUT/<stage>.json`` (``--out``, by default ``benchmarks/results/gpu``) and prints its
table last. Weights are random: speed does not depend on what they say. ``gpu_checklist.md`` has
the order and what to look for. ``--quick`` runs a stage in small, on any device, to see that it
works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minibatch.bounds import UniformLoad, uniform_bounds
from minibatch.builder import describe_device, engine_for, versions
from minibatch.config import EngineConfig
from minibatch.cost_model import CostModel
from minibatch.engine import Engine
from minibatch.hardware import Hardware, measure_this_machine
from minibatch.model.config import ModelConfig
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import random_model
from minibatch.model.presets import preset
from minibatch.record import StepRecord
from minibatch.sampling_params import SamplingParams
from minibatch.tables import table

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("static", "dynamic", "continuous", "unified")
CONCURRENCY = (1, 8, 16, 32, 64, 128, 256)


@dataclass
class Bench:
    """What all stages share."""

    model_name: str
    device: torch.device
    out: Path
    quick: bool
    dtype: str = "bfloat16"
    _model: LlamaForCausalLM | None = None
    _chip: Hardware | None = None

    @property
    def shape(self) -> ModelConfig:
        return preset(self.model_name)

    @property
    def prompt_len(self) -> int:
        return 32 if self.quick else 512

    @property
    def output_len(self) -> int:
        return 8 if self.quick else 128

    @property
    def concurrency(self) -> Sequence[int]:
        return (1, 4) if self.quick else CONCURRENCY

    @property
    def max_model_len(self) -> int:
        return min(4096, self.shape.max_position_embeddings)

    def model(self) -> LlamaForCausalLM:
        """Random weights, drawn once a process."""
        if self._model is None:
            dtype = getattr(torch, self.dtype)
            start = time.perf_counter()
            self._model = random_model(
                self.shape, dtype=dtype, device=self.device, max_model_len=self.max_model_len
            )
            self.wait()
            print(f"random weights drawn in {time.perf_counter() - start:.2f} s")
        return self._model

    def chip(self) -> Hardware:
        """This device's measured ceilings, from ``limits`` if that has run."""
        file = self.out / "limits.json"
        if self._chip is None and file.exists():
            self._chip = Hardware.from_dict(json.loads(file.read_text())["chip"])
        if self._chip is None:
            self._chip = measure_this_machine(self.device.type, self.dtype)
        return self._chip

    def wait(self) -> None:
        torch.get_device_module(self.device).synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Mean seconds of ``run``, the device being idle before the first and after the last."""
        run()
        self.wait()
        repeats = 2 if self.quick else repeats
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def save(self, stage: str, header: Sequence[str], rows: list[dict[str, Any]]) -> None:
        """Write the JSON, print the table."""
        self.out.mkdir(parents=True, exist_ok=True)
        content = {
            "stage": stage,
            "model": self.model_name,
            "dtype": self.dtype,
            "hardware": describe_device(self.device),
            "software": versions(),
            "date": time.strftime("%Y-%m-%d"),
            "chip": self.chip().to_dict(),
            "rows": rows,
        }
        (self.out / f"{stage}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(table(header, [[shown(row.get(name)) for name in header] for row in rows]))


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


# -- 1 what the chip gives ----------------------------------------------------------------------


def limits(bench: Bench) -> None:
    """Copy bandwidth and peak rate, then every matrix of the model at all batch sizes."""
    bench._chip = measure_this_machine(bench.device.type, bench.dtype, 0.1 if bench.quick else 1.0)
    chip, shape = bench._chip, bench.shape
    dtype = getattr(torch, bench.dtype)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    matrices = {
        "qkv": (heads * shape.head_dim, shape.hidden_size),
        "o": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "lm_head": (shape.vocab_size, shape.hidden_size),
    }
    rows = []
    for name, (outputs, inner) in matrices.items():
        # Several copies in turn, so that none stays in the cache between two uses.
        copies = max(1, min(8, 2**29 // (outputs * inner * 2)))
        weights = [
            torch.randn(outputs, inner, dtype=dtype, device=bench.device) for _ in range(copies)
        ]
        for batch in (1, 4) if bench.quick else (1, 8, 32, 128, 256, 512, 8192):
            x = torch.randn(batch, inner, dtype=dtype, device=bench.device)
            turns = itertools.cycle(weights)
            seconds = bench.seconds(
                lambda x=x, turns=turns: torch.nn.functional.linear(x, next(turns))
            )
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
    bench.save("limits", ("matrix", "batch", "us", "GB/s", "TFLOP/s", "share of bound"), rows)
    print(chip.describe())


# -- 2 attention alone --------------------------------------------------------------------------


def kernels(bench: Bench) -> None:
    """Errors against float32, then GB/s of decodes over tilings."""
    from minibatch.model.fp8_kv_cache import Fp8KVCache, UnpackingAttention
    from minibatch.model.kv_cache import KVCache
    from minibatch.model.triton_attention import TritonAttention
    from minibatch.model.triton_kernels import Tiling

    shape = ModelConfig(**{**vars(bench.shape), "num_layers": 1})
    group, context = shape.num_heads // shape.num_kv_heads, 48 if bench.quick else 576
    dtype = getattr(torch, bench.dtype)
    rows: list[dict[str, Any]] = []
    for batch in (1, 2) if bench.quick else (1, 8, 32, 128, 256):
        blocks = batch * -(-context // 16)
        plain = KVCache(shape, blocks, 16, dtype=dtype, device=bench.device)
        noise = torch.randn(2, *plain.keys[0].shape, device=bench.device)
        plain.keys[0].copy_(noise[0])
        plain.values[0].copy_(noise[1])
        scales = torch.full((1, 2, shape.num_kv_heads), 0.02)
        packed = Fp8KVCache(shape, blocks, 16, scales=scales, device=bench.device)
        slots = torch.arange(blocks * 16, device=bench.device)
        packed.store(0, noise[0].flatten(0, 1), noise[1].flatten(0, 1), slots)
        q = torch.randn(batch, shape.num_heads, shape.head_dim, device=bench.device).to(dtype)
        choices = [Tiling(16)] if bench.quick else tilings(batch, shape.num_kv_heads)
        for kind, cache in (("plain", plain), ("fp8", packed)):
            for tiling in choices:
                backend = TritonAttention(group, decode=tiling)
                meta = decode_step(batch, context, blocks, bench.device)
                backend.prepare(meta, cache, dtype)
                found = backend.forward(q, cache, 0, meta).float()
                reference = UnpackingAttention() if kind == "fp8" else None
                expected = reference_attention(reference, q, cache, batch, context, bench.device)
                seconds = bench.seconds(
                    lambda b=backend, c=cache, m=meta, q=q: b.forward(q, c, 0, m)
                )
                moved = 2 * batch * context * shape.num_kv_heads * shape.head_dim
                moved *= cache.keys[0].dtype.itemsize
                rows.append(
                    {
                        "cache": kind,
                        "batch": batch,
                        "keys": tiling.keys,
                        "splits": tiling.splits,
                        "warps": tiling.warps,
                        "largest error": float((found - expected).abs().max()),
                        "us": 1e6 * seconds,
                        "GB/s": moved / seconds / 1e9,
                        "share of copy": moved / seconds / bench.chip().memory_bandwidth,
                    }
                )
    header = ("cache", "batch", "keys", "splits", "warps", "largest error", "us", "GB/s",
              "share of copy")  # fmt: skip
    bench.save("kernels", header, rows)


def tilings(batch: int, kv_heads: int) -> list[Any]:
    """What is worth a try: enough programs for the chip, tiles of 32 to 128 keys."""
    from minibatch.model.triton_kernels import Tiling

    splits = [n for n in (1, 2, 4, 8, 16, 32) if 64 <= n * batch * kv_heads <= 8192] or [1]
    return [
        Tiling(16, keys, count, warps)
        for keys in (32, 64, 128)
        for count in splits
        for warps in (2, 4, 8)
    ]


def decode_step(batch: int, context: int, blocks: int, device: torch.device) -> Any:
    """Metadata of ``batch`` rows, their blocks dealt at random."""
    from minibatch.model.attention import AttentionMetadata

    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((batch,), context, dtype=torch.int32)
    return AttentionMetadata(
        slot_mapping=torch.full((batch,), -1, device=device),
        block_tables=tables.view(batch, -1).int().to(device),
        query_start=torch.arange(batch + 1, dtype=torch.int32, device=device),
        seq_lens=lengths.to(device),
        query_lens=[1] * batch,
        seq_lens_host=lengths.tolist(),
        num_decodes=batch,
    )


def reference_attention(
    backend: Any, q: torch.Tensor, cache: Any, batch: int, context: int, device: torch.device
) -> torch.Tensor:
    """The plain backend, in float32."""
    from minibatch.model.attention import PagedReferenceAttention
    from minibatch.model.kv_cache import KVCache

    meta = decode_step(batch, context, cache.num_blocks, device)
    if backend is None:
        shape = ModelConfig(
            8, 8, 8, 1, q.shape[1], cache.keys[0].shape[2], q.shape[2], max_position_embeddings=8
        )
        exact = KVCache(shape, cache.num_blocks, 16, dtype=torch.float32, device=device)
        exact.keys[0].copy_(cache.keys[0])
        exact.values[0].copy_(cache.values[0])
        backend, cache = PagedReferenceAttention(), exact
    backend.prepare(meta, cache, torch.float32)
    return backend.forward(q.float(), cache, 0, meta)


# -- 3 the whole forward pass -------------------------------------------------------------------


@torch.inference_mode()
def verify(bench: Bench) -> None:
    """Ours and transformers' over the same storage, against transformers in float32.

    No second copy of the weights exists but the float32 one. Ours may be off by 1.5 times what
    transformers in the same dtype is off, and must name the same token wherever the best two lie
    further apart than that.
    """
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as HFLlama

    from minibatch.executor.gpu import attention_backend, has_kernels
    from minibatch.model.kv_cache import KVCache
    from minibatch.model.one_prompt import one_prompt

    ours, shape = bench.model(), bench.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope.theta,
        tie_word_embeddings=shape.tie_word_embeddings,
    )

    def transformers_model(dtype: torch.dtype) -> HFLlama:
        with torch.device("meta"):
            model = HFLlama(config).to(dtype).eval()
        views = {name: view.to(dtype) for name, view in ours.checkpoint_views().items()}
        model.load_state_dict(views, assign=True, strict=False)
        model.tie_weights()
        # On meta its table of angles was never computed, and no checkpoint holds it.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(bench.device)
        return model

    count = 40 if bench.quick else 512
    ids = torch.randint(shape.vocab_size, (count,), generator=torch.Generator().manual_seed(1))
    ids = ids.to(bench.device)
    truth = transformers_model(torch.float32)(ids[None], use_cache=False).logits[0]
    theirs = transformers_model(ours.dtype)(ids[None], use_cache=False).logits[0].float()

    ours.backend = attention_backend(ours)
    forward: Callable[..., torch.Tensor] = ours
    if has_kernels(bench.device):
        from minibatch.model.triton_layers import FusedLlama

        forward = FusedLlama(ours)
    cache = KVCache(shape, -(-count // 16), 16, dtype=ours.dtype, device=bench.device)
    positions = torch.arange(count, device=bench.device)
    meta = one_prompt(count, 16, bench.device)
    found = ours.compute_logits(forward(ids, positions, cache, meta))
    best = truth.topk(2, dim=-1).values
    margin = best[:, 0] - best[:, 1]
    rows = []
    for name, logits in ((f"transformers {bench.dtype}", theirs), ("minibatch", found)):
        error = (logits - truth).abs().amax(dim=-1)
        clear = margin > 2 * error
        agree = logits.argmax(-1) == truth.argmax(-1)
        rows.append(
            {
                "model": name,
                "largest error": float(error.max()),
                "relative error": float((logits - truth).norm() / truth.norm()),
                "same token": float(agree.float().mean()),
                "same where clear": float(agree[clear].float().mean()) if clear.any() else None,
            }
        )
    header = ("model", "largest error", "relative error", "same token", "same where clear")
    bench.save("verify", header, rows)
    if rows[0]["relative error"] > 0:
        ratio = rows[1]["relative error"] / rows[0]["relative error"]
        print(f"ours is off by {ratio:.2f} times what transformers is off (1.5 is the limit)")


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
    if bench.device.type == "cpu":
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


def run_load(bench: Bench, engine: Engine, prompt_len: int, outputs: Iterable[int]) -> Run:
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
    bench: Bench, policy: str, concurrency: int, run: Run, kv_dtype: str | None = None
) -> dict[str, Any]:
    """Rates of a uniform load beside their bounds."""
    load = UniformLoad(concurrency, bench.prompt_len, bench.output_len)
    bounds = uniform_bounds(bench.shape, bench.chip(), load, bench.dtype)
    ideal = CostModel.ideal(bench.shape, bench.chip(), bench.dtype)
    if kv_dtype is not None:
        ideal = CostModel(**{**vars_of(ideal), "kv_dtype": kv_dtype})
    decodes = [r for r in run.records if {s.phase for s in r.scheduled} == {"decode"}]
    prefills = [r for r in run.records if any(s.phase == "prefill" for s in r.scheduled)]
    decode_s = sum(r.duration_s for r in decodes)
    prefill_s = sum(r.duration_s for r in prefills)
    work = [ideal.record_work(record, 16) for record in decodes]
    moved = sum(w.weight_bytes + w.kv_bytes for w in work)
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


def vars_of(cost_model: CostModel) -> dict[str, Any]:
    return {name: getattr(cost_model, name) for name in cost_model.__dataclass_fields__}


SWEEP_HEADER = ("policy", "concurrency", "tok/s", "serial bound", "share", "decode ms",
                "decode GB/s", "share of copy", "prefill TFLOP/s", "most rows")  # fmt: skip


# -- 4 one step, part by part -------------------------------------------------------------------


def steps(bench: Bench) -> None:
    """Decode steps of each batch size, kernel by kernel and captured."""
    rows = []
    for enforce_eager in (True, False):
        for concurrency in bench.concurrency:
            engine = make_engine(bench, concurrency, enforce_eager=enforce_eager)
            output = 6 if bench.quick else 40
            run = run_load(bench, engine, bench.prompt_len, [output] * concurrency)
            row = uniform_row(bench, "eager" if enforce_eager else "graph", concurrency, run)
            count = len(run.records)
            for part, seconds in run.parts.items():
                row[f"{part} ms"] = 1e3 * seconds / count
            rows.append(row)
            engine.close()
    header = ("policy", "concurrency", "decode ms", "decode GB/s", "share of copy",
              "schedule ms", "update ms", "record ms", "pack ms", "launch ms",
              "settle, waiting included ms")  # fmt: skip
    bench.save("steps", header, rows)


# -- 5 the article's sweep ----------------------------------------------------------------------


def sweep(bench: Bench, policies: Sequence[str] = POLICIES) -> None:
    """Generated tokens/s by concurrency and policy; rewritten after every policy."""
    rows: list[dict[str, Any]] = []
    for policy in policies:
        for concurrency in bench.concurrency:
            engine = make_engine(bench, concurrency, policy=policy)
            run = run_load(bench, engine, bench.prompt_len, [bench.output_len] * concurrency)
            rows.append(uniform_row(bench, policy, concurrency, run))
            engine.close()
        bench.save("sweep", SWEEP_HEADER, rows)


# -- 6 unequal lengths --------------------------------------------------------------------------


def spread(bench: Bench) -> None:
    """100 requests whose outputs lie between two lengths: static (32 rows) against continuous."""
    count = 8 if bench.quick else 100
    ranges = [(8, 8), (2, 14)] if bench.quick else [(128, 128), (32, 512), (16, 1024)]
    rows = []
    for low, high in ranges:
        rng = random.Random(1)
        outputs = [rng.randint(low, high) for _ in range(count)]
        rates = {}
        for policy, slots in (("static", 4 if bench.quick else 32), ("continuous", count)):
            engine = make_engine(bench, slots, policy=policy)
            rates[policy] = run_load(bench, engine, bench.prompt_len, outputs).tokens_per_s
            engine.close()
        gain = rates["continuous"] / rates["static"]
        rows.append({"outputs": f"{low}-{high}", **rates, "gain": gain})
    bench.save("spread", ("outputs", "static", "continuous", "gain"), rows)


# -- 7 eight bits -------------------------------------------------------------------------------


def quantization(bench: Bench) -> None:
    """The same sweep with 8-bit KV, weights, activations. (Quality: ``quantization.py``.)"""
    from minibatch.executor.gpu import quantize

    rows: list[dict[str, Any]] = []
    concurrency = (1, 4) if bench.quick else (1, 128, 256)
    for weights in (None, "int8", "fp8"):
        for kv in ("auto", "fp8"):
            for count in concurrency:
                engine = make_engine(bench, count, kv_cache_dtype=kv)
                run = run_load(bench, engine, bench.prompt_len, [bench.output_len] * count)
                kv_dtype = "float8" if kv == "fp8" else None
                name = f"{weights or bench.dtype}, {'fp8 KV' if kv == 'fp8' else 'plain KV'}"
                rows.append(uniform_row(bench, name, count, run, kv_dtype))
                engine.close()
        bench._model = None  # the next kind of weights is made from fresh ones
        following = {None: "int8", "int8": "fp8"}.get(weights)
        if following is not None:
            quantize(bench.model(), following)
    header = ("policy", "concurrency", "tok/s", "serial bound", "share", "decode ms", "most rows")
    bench.save("quantization", header, rows)


# -- 8 recorded runs ----------------------------------------------------------------------------


def traces(bench: Bench) -> None:
    """One run a policy, one that swaps and one that recomputes, each small enough for git."""
    small: dict[str, Any] = {"num_gpu_blocks": 17 if bench.quick else 1200}
    runs: dict[str, dict[str, Any]] = {
        **{policy: {"policy": policy} for policy in POLICIES},
        "swap": {"policy": "continuous", "preemption_mode": "swap", "swap_space": 4.0, **small},
        "recompute": {"policy": "continuous", "preemption_mode": "recompute", **small},
    }
    count = 6 if bench.quick else 48
    rng = random.Random(2)
    outputs = [rng.randint(4, 3 * bench.output_len // 2) for _ in range(count)]
    rows = []
    for name, knobs in runs.items():
        limit = 128 if bench.quick else 2048
        engine = make_engine(bench, count, max_model_len=limit, **knobs)
        bench.out.mkdir(parents=True, exist_ok=True)
        path = bench.out / f"{bench.model_name}_{name}.jsonl.gz"
        engine.record_to(path)
        run = run_load(bench, engine, bench.prompt_len, outputs)
        evicted = sum(len(record.preempted) for record in run.records)
        engine.close()
        rows.append(
            {
                "run": name,
                "steps": len(run.records),
                "tok/s": run.tokens_per_s,
                "evictions": evicted,
                "KiB": path.stat().st_size / 1024,
            }
        )
    bench.save("traces", ("run", "steps", "tok/s", "evictions", "KiB"), rows)


# -- 9 tables and plots -------------------------------------------------------------------------


def report(bench: Bench) -> None:
    """``report.md`` with a table a stage, and ``sweep.svg``."""
    parts = [f"# {bench.model_name} on one GPU\n"]
    for stage in STAGES:
        file = bench.out / f"{stage}.json"
        if stage == "report" or not file.exists():
            continue
        content = json.loads(file.read_text())
        rows = content["rows"]
        names = [name for name in rows[0] if name != "parts"]
        parts.append(f"## {stage}\n\n{content['hardware']}, {content['date']}, "
                     f"{content['software']}\n")  # fmt: skip
        parts.append("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        parts += ["| " + " | ".join(shown(row.get(name)) for name in names) + " |" for row in rows]
        parts.append("")
        if stage == "sweep":
            (bench.out / "sweep.svg").write_text(sweep_plot(rows))
            parts.append("![throughput by concurrency](sweep.svg)\n")
    (bench.out / "report.md").write_text("\n".join(parts))
    print(f"{bench.out / 'report.md'}: {len(parts)} parts")


COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000")  # Okabe and Ito's


def sweep_plot(rows: list[dict[str, Any]]) -> str:
    """Tokens/s over concurrency, a line a policy and the serial bound dashed; SVG."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["policy"], []).append((row["concurrency"], row["tok/s"]))
    first = rows[0]["policy"]
    lines["serial bound"] = [
        (row["concurrency"], row["serial bound"]) for row in rows if row["policy"] == first
    ]
    width, height, left, bottom = 640, 400, 70, 50
    most_x = max(x for points in lines.values() for x, _ in points)
    most_y = 1.05 * max(y for points in lines.values() for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - 130) * x / most_x,
            height - bottom - (height - bottom - 20) * y / most_y,
        )

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Generated tokens a second by concurrency</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for tick in range(5):
        y = most_y * tick / 4
        x0, y0 = place(0, y)
        x1, _ = place(most_x, y)
        svg.append(f'<path d="M{x0:.1f} {y0:.1f}H{x1:.1f}" stroke="#dddddd"/>')
        svg.append(f'<text x="{x0 - 6:.1f}" y="{y0 + 4:.1f}" text-anchor="end">{y:.0f}</text>')
    for x, _ in lines["serial bound"]:
        x0, y0 = place(x, 0)
        svg.append(f'<text x="{x0:.1f}" y="{y0 + 16:.1f}" text-anchor="middle">{x}</text>')
    svg.append(f'<text x="{left}" y="{height - 12}">requests at a time</text>')
    for (name, points), colour in zip(lines.items(), COLOURS, strict=False):
        places = [place(x, y) for x, y in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if name == "serial bound" else ""
        svg.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        x, y = places[-1]
        svg.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*svg, "</svg>\n"])


STAGES: dict[str, Callable[[Bench], None]] = {
    stage.__name__: stage
    for stage in (limits, kernels, verify, steps, sweep, spread, quantization, traces, report)
}


def main(arguments: Sequence[str] | None = None) -> None:
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
    print(f"{args.stage}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
