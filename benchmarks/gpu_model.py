"""The stages of ``gpu.py`` about the model as a whole: loading it, and whether it is right."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from gpu_bench import Bench, Row, print_table

from minibatch.model.config import ModelConfig
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_model

if TYPE_CHECKING:
    from transformers import LlamaConfig

SHARD_BYTES = 4 * 10**9


def transformers_config(shape: ModelConfig) -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
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


# -- loading ------------------------------------------------------------------------------------


def load(bench: Bench) -> None:
    """Random weights, then the same ones from a checkpoint in shards, which was just written and so
    comes from the page cache.
    """
    rows: list[Row] = []
    with bench.attempt("load", rows):
        torch.zeros(1, device=bench.device)  # starts the device
        start = time.perf_counter()
        model = bench.model()
        add_row(bench, rows, "random weights", model, time.perf_counter() - start)
        with TemporaryDirectory() as folder:
            write_checkpoint(model, Path(folder))
            for name in ("checkpoint", "checkpoint again"):
                start = time.perf_counter()
                read = load_model(folder, dtype=model.dtype, device=bench.device)
                bench.wait()
                seconds = time.perf_counter() - start
                add_row(bench, rows, name, read, seconds, same=same_weights(model, read))
                del read
    print_table(("what", "GB", "seconds", "GB/s", "same"), rows)


def add_row(
    bench: Bench,
    rows: list[Row],
    what: str,
    model: LlamaForCausalLM,
    seconds: float,
    same: bool | None = None,
) -> None:
    size = sum(view.nbytes for view in model.checkpoint_views().values()) / 1e9
    rows.append(
        {"what": what, "GB": size, "seconds": seconds, "GB/s": size / seconds, "same": same}
    )
    bench.save("load", rows)


def write_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """As Hugging Face has them: ``config.json``, shards, and an index of what is where."""
    from safetensors.torch import save_file

    transformers_config(model.config).save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, view in model.checkpoint_views().items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) + view.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = view
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        on_host = {name: view.cpu().contiguous() for name, view in shard.items()}
        save_file(on_host, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def same_weights(a: LlamaForCausalLM, b: LlamaForCausalLM) -> bool:
    pairs = zip(a.checkpoint_views().values(), b.checkpoint_views().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


# -- the whole forward pass ---------------------------------------------------------------------


def verify(bench: Bench) -> None:
    """See ``verify_rows``."""
    rows: list[Row] = []
    with bench.attempt("verify", rows):
        verify_rows(bench, rows)
    print_table(
        ("model", "largest error", "relative error", "same token", "same where clear", "clear"),
        rows,
    )
    errors = [row["relative error"] for row in rows if "error" not in row]
    if len(errors) == 2 and errors[0] > 0:
        ratio = errors[1] / errors[0]
        print(f"ours is off by {ratio:.2f} times what transformers is off (1.5 is the limit)")


@torch.inference_mode()
def verify_rows(bench: Bench, rows: list[Row]) -> None:
    """Ours and transformers' over the same storage, against transformers in float32.

    No second copy of the weights exists but the float32 one. Ours may be off by 1.5 times what
    transformers in the same dtype is off, and must name the same token wherever the best two lie
    further apart than that.
    """
    from transformers import LlamaForCausalLM as HFLlama

    from minibatch.executor.gpu import attention_backend, has_kernels
    from minibatch.model.kv_cache import KVCache
    from minibatch.model.one_prompt import one_prompt

    ours, shape = bench.model(), bench.shape
    config = transformers_config(shape)

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
    # Ours may be off by 1.5 times what theirs is, either way: nearer tokens may change places.
    clear = margin > 2 * 1.5 * (theirs - truth).abs().amax(dim=-1)
    for name, logits in ((f"transformers {bench.dtype}", theirs), ("minibatch", found)):
        error = (logits - truth).abs().amax(dim=-1)
        agree = logits.argmax(-1) == truth.argmax(-1)
        rows.append(
            {
                "model": name,
                "largest error": float(error.max()),
                "relative error": float((logits - truth).norm() / truth.norm()),
                "same token": float(agree.float().mean()),
                "same where clear": float(agree[clear].float().mean()) if clear.any() else None,
                "clear": float(clear.float().mean()),
            }
        )
