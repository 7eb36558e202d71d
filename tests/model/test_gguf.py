"""GGUF files written here as llama.cpp's converter writes them, read back, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantisation
from gguf.quants import dequantize, quantize
from model_helpers import (
    assert_close,
    hf_config,
    hf_logits,
    hf_model,
    paged_logits,
    random_tokens,
    save,
)
from transformers import LlamaForCausalLM as HFLlama

from minibatch.errors import CheckpointError, UnsupportedModelError
from minibatch.model.gguf import GGUFFile
from minibatch.model.loader import load_config, load_model
from minibatch.model.rotary import rope_frequencies

HEADS = {
    "4/2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "4/4": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "9/3": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288},
}
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Each head's two halves interleaved, row by row, as llama.cpp's converter does."""
    out = np.empty_like(weights)
    head_dim = len(weights) // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * i] = weights[start + i]
            out[start + 2 * i + 1] = weights[start + head_dim // 2 + i]
    return out


def write_gguf(
    path: Path,
    model: HFLlama,
    quantisation: Quantisation = Quantisation.F32,
    *,
    extra: Sequence[tuple[str, np.ndarray]] = (),
    **changes: Any,
) -> Path:
    """Write transformers' ``model``; ``changes`` replace metadata (None leaves it out)."""
    config = model.config
    metadata = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {key: value for key, value in changes.items() if key != "architecture"}
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}é" for i in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.token_type", [1] * config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        kind = quantisation if values.ndim > 1 else Quantisation.F32
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, kind = name.removeprefix("model.").rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
        stem
    ] + f".{kind}"


def rounded(model: HFLlama, quantisation: Quantisation) -> HFLlama:
    """``model`` with its matrices as this quantisation keeps them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                kept = dequantize(quantize(parameter.numpy(), quantisation), quantisation)
                parameter.copy_(torch.from_numpy(kept))
    return model


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_round_trip(heads: str, kind: str, tmp_path: Path) -> None:
    theirs = hf_model(hf_config(**HEADS[heads]))
    path = write_gguf(tmp_path / "model.gguf", theirs, Quantisation[kind])
    ours = load_model(path)
    expected = rounded(theirs, Quantisation[kind]).state_dict()
    for name, view in ours.checkpoint_views().items():
        assert torch.equal(view, expected[name]), name
    tokens = random_tokens(19)
    assert_close(paged_logits(ours, tokens, chunk=6), hf_logits(theirs, tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},  # q's and k's biases are permuted too
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_gguf_is_the_model_it_was_written_from(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = hf_model(hf_config(**changes))
    from_gguf = load_model(write_gguf(tmp_path / "model.gguf", theirs))
    from_folder = load_model(save(theirs, tmp_path / "folder"))
    tokens = random_tokens(21)
    assert torch.equal(paged_logits(from_gguf, tokens), paged_logits(from_folder, tokens))
    assert_close(paged_logits(from_gguf, tokens), hf_logits(theirs, tokens))


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    theirs = hf_model(hf_config(head_dim=24))
    ours = load_model(
        write_gguf(tmp_path / "model.gguf", theirs, **{"llama.attention.key_length": 24})
    )
    tokens = random_tokens(11)
    assert_close(paged_logits(ours, tokens), hf_logits(theirs, tokens))


def test_llama3_rope_comes_as_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    theirs = hf_model(hf_config(rope_parameters=rope))
    scaled = load_model(save(theirs, tmp_path / "folder")).config
    plain = 1.0 / 10_000.0 ** (np.arange(0, scaled.head_dim, 2) / scaled.head_dim)
    divisors = plain / rope_frequencies(scaled.rope, scaled.head_dim).numpy()
    assert divisors.min() == pytest.approx(1) and divisors.max() == pytest.approx(8)
    extra = [("rope_freqs.weight", divisors.astype(np.float32))]
    ours = load_model(write_gguf(tmp_path / "model.gguf", theirs, extra=extra))
    assert ours.config.rope.kind == "divisors"
    tokens = random_tokens(100)
    assert_close(paged_logits(ours, tokens), hf_logits(theirs, tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope(changes: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    theirs = hf_model(hf_config(rope_parameters=rope))
    ours = load_model(write_gguf(tmp_path / "model.gguf", theirs, **changes))
    tokens = random_tokens(50)
    assert_close(paged_logits(ours, tokens), hf_logits(theirs, tokens))


def test_metadata_are_plain_values(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hf_model(hf_config()), **{"general.name": "Café"})
    metadata = GGUFFile(path).metadata
    assert metadata["general.name"] == "Café"
    assert metadata["tokenizer.ggml.tokens"][:2] == ["t0é", "t1é"]
    assert metadata["tokenizer.ggml.token_type"][:2] == [1, 1]
    assert metadata["llama.rope.freq_base"] == 10_000.0


def test_end_tokens(tmp_path: Path) -> None:
    model = hf_model(hf_config())
    path = write_gguf(tmp_path / "a.gguf", model)
    assert load_config(path).eos_token_ids == (2,) and load_config(path).bos_token_id == 1
    path = write_gguf(tmp_path / "b.gguf", model, **{"tokenizer.ggml.eot_token_id": 5})
    assert load_config(path).eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architecture": "qwen2"}, UnsupportedModelError, "'qwen2'"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedModelError, "'yarn'"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModelError, "8 of 16"),
        ({"llama.block_count": None}, CheckpointError, "llama.block_count"),
        ({"llama.block_count": 3}, CheckpointError, r"missing: model\.layers\.2"),
        ({"llama.block_count": 1}, CheckpointError, r"not part of this model: model\.layers\.1"),
        (
            {"llama.feed_forward_length": 80},
            CheckpointError,
            r"\[96, 64\] and should be \[80, 64\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", hf_model(hf_config()), **changes)
    with pytest.raises(error, match=message):
        load_model(path)


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    extra = [("blk.0.attn_q_norm.weight", np.ones(16, np.float32)), ("odd", np.ones(2, np.float32))]
    path = write_gguf(tmp_path / "model.gguf", hf_model(hf_config()), extra=extra)
    with pytest.raises(CheckpointError, match=r"not part of this model: blk\.0\.attn_q_norm.*odd"):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 2000, 0.5, 0.999])
def test_a_file_cut_short(keep: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hf_model(hf_config()))
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load_model(path)


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match="cannot read"):
        load_model(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        load_model(path)
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(16))
    with pytest.raises(CheckpointError, match="version 1"):
        load_model(path)
