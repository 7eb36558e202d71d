"""What 8 bits cost in quality: logits and perplexity of SmolLM2-135M on two public-domain texts.

    python benchmarks/quantization.py            (a minute or two on one core)

Every variant reads the same text in float32 arithmetic, but for what it quantises. Perplexity is
exp of the mean negative log-probability of each next token. Writes
``benchmarks/results/quantization_smollm2.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minibatch.model.attention import PagedReferenceAttention
from minibatch.model.fp8 import quantize_fp8
from minibatch.model.fp8_kv_cache import Fp8KVCache, UnpackingAttention, calibrate
from minibatch.model.hub import resolve
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model
from minibatch.model.one_prompt import one_prompt
from minibatch.model.replace import replace_linears
from minibatch.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE = 16


class RoundedInt8Linear(nn.Module):
    """The numbers of int8 weight-only, without its speed: weights rounded to 255 steps a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("weight", (linear.weight / scale).round() * scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@dataclass
class Row:
    variant: str
    text: str
    tokens: int
    perplexity: float
    logits_error: float  # norm of the difference over norm, of logits less their mean
    same_top_1: float  # share of positions whose likeliest token is the baseline's


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, cache: KVCache, ids: Tensor) -> Tensor:
    meta = one_prompt(len(ids), BLOCK_SIZE, model.device)
    return model.compute_logits(model(ids, torch.arange(len(ids)), cache, meta))


def plain_cache(model: LlamaForCausalLM, tokens: int) -> KVCache:
    model.backend = PagedReferenceAttention()
    return KVCache(model.config, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, dtype=model.dtype)


def fp8_cache(number: torch.dtype) -> Callable[[LlamaForCausalLM, int], KVCache]:
    def make(model: LlamaForCausalLM, tokens: int) -> KVCache:
        model.backend = PagedReferenceAttention()
        scales = calibrate(model, number=number)
        model.backend = UnpackingAttention()
        blocks = -(-tokens // BLOCK_SIZE)
        return Fp8KVCache(model.config, blocks, BLOCK_SIZE, scales=scales, number=number)

    return make


def compare(variant: str, text: str, ids: Tensor, found: Tensor, baseline: Tensor) -> Row:
    loss = nn.functional.cross_entropy(found[:-1], ids[1:])
    centred, reference = (x - x.mean(dim=-1, keepdim=True) for x in (found, baseline))
    return Row(
        variant=variant,
        text=text,
        tokens=len(ids),
        perplexity=round(float(loss.exp()), 3),
        logits_error=round(float((centred - reference).norm() / reference.norm()), 5),
        same_top_1=round(float((found.argmax(-1) == baseline.argmax(-1)).float().mean()), 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    path = resolve(args.model)
    tokenizer = Tokenizer.from_path(path)
    texts = {
        file.stem: torch.tensor(tokenizer.encode(file.read_text(encoding="utf-8")))
        for file in sorted((ROOT / "data" / "texts").glob("*.txt"))
    }

    def nothing(model: LlamaForCausalLM) -> None:
        pass

    variants: dict[str, tuple[str, Callable[[LlamaForCausalLM], None], Callable]] = {
        "float32": ("float32", nothing, plain_cache),
        "bfloat16": ("bfloat16", nothing, plain_cache),
        "int8 weights": (
            "float32", lambda model: replace_linears(model, RoundedInt8Linear), plain_cache
        ),
        "fp8 weights and activations": ("float32", quantize_fp8, plain_cache),
        "fp8 KV (e4m3)": ("float32", nothing, fp8_cache(torch.float8_e4m3fn)),
        "fp8 KV (e5m2)": ("float32", nothing, fp8_cache(torch.float8_e5m2)),
        "int8 weights, fp8 KV": (
            "float32",
            lambda model: replace_linears(model, RoundedInt8Linear),
            fp8_cache(torch.float8_e4m3fn),
        ),
        "fp8 weights and activations, fp8 KV": (
            "float32", quantize_fp8, fp8_cache(torch.float8_e4m3fn)
        ),
    }  # fmt: skip
    rows: list[Row] = []
    baseline: dict[str, Tensor] = {}
    for variant, (dtype, quantize, make_cache) in variants.items():
        model = load_model(path, dtype=getattr(torch, dtype), max_model_len=2048)
        quantize(model)
        for name, ids in texts.items():
            found = logits_of(model, make_cache(model, len(ids)), ids)
            rows.append(compare(variant, name, ids, found, baseline.setdefault(name, found)))
    print(f"{'variant':36} {'text':10} {'perplexity':>10} {'logits off':>10} {'same top 1':>10}")
    for row in rows:
        print(
            f"{row.variant:36} {row.text:10} {row.perplexity:10.3f} {row.logits_error:10.3%} "
            f"{row.same_top_1:10.1%}"
        )
    result = {
        "model": args.model,
        "hardware": f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "note": "lm_head and embedding stay as they are in every variant",
        "rows": [asdict(row) for row in rows],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "quantization_smollm2.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
