"""Reading config.json: both spellings, no silent defaults, errors that carry the numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minibatch.errors import CheckpointError, ConfigError, UnsupportedModelError
from minibatch.model.config import ModelConfig, RopeConfig
from minibatch.model.presets import PRESETS, preset

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(generation: dict[str, Any] | None = None, /, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(BASE | changes, generation)


def test_the_plain_case() -> None:
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 6, 2)
    assert config.head_dim == 8
    assert config.rope == RopeConfig("plain", 10_000.0)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.eos_token_ids, config.bos_token_id, config.torch_dtype) == ((), None, "float32")


def test_head_dim_frees_the_hidden_size() -> None:
    assert read(num_attention_heads=5, num_key_value_heads=5, head_dim=8).head_dim == 8
    with pytest.raises(ConfigError, match=r"48.*5.*head_dim"):
        read(num_attention_heads=5, num_key_value_heads=5)


def test_absent_kv_heads_mean_one_a_head() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_theta_is_found_wherever_it_stands(changes: dict[str, Any]) -> None:
    assert read(**changes).rope == RopeConfig("plain", 5e5)


@pytest.mark.parametrize("form", ["rope_type", "type"])
def test_rope_scaling_of_both_forms(form: str) -> None:
    linear = read(rope_theta=2e4, rope_scaling={form: "linear", "factor": 4.0})
    assert linear.rope == RopeConfig("linear", 2e4, 4.0)
    assert linear.context_length == 256
    dynamic = read(rope_scaling={form: "dynamic", "factor": 2.0})
    assert dynamic.rope == RopeConfig("dynamic", 1e4, 2.0, original_max_position=64)
    assert dynamic.context_length == 128 and dynamic.rope.depends_on_prompt_length
    llama3 = read(
        rope_scaling={form: "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    )
    assert llama3.rope == RopeConfig("llama3", 1e4, 8.0, 8192, 1.0, 4.0)
    assert llama3 == read(rope_parameters=LLAMA3 | {"rope_theta": 1e4})
    assert llama3.context_length == 64 and not llama3.rope.depends_on_prompt_length


def test_rope_that_we_do_not_run_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        read(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor is 0\.5"):
        read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("key", sorted(set(LLAMA3) - {"rope_type"}))
def test_rope_settings_have_no_defaults(key: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != key}
    with pytest.raises(CheckpointError, match=key):
        read(rope_scaling=scaling)


@pytest.mark.parametrize("eos", [5, [2, 5]])
def test_end_tokens_are_an_int_or_a_list(eos: int | list[int]) -> None:
    expected = (5,) if eos == 5 else (2, 5)
    assert read(eos_token_id=eos).eos_token_ids == expected
    assert read({"eos_token_id": eos}, eos_token_id=7).eos_token_ids == expected
    assert read({"temperature": 0.6}, eos_token_id=7).eos_token_ids == (7,)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_of_both_spellings(key: str) -> None:
    assert read(**{key: "bfloat16"}).torch_dtype == "bfloat16"


@pytest.mark.parametrize("key", sorted(set(BASE) - {"architectures", "num_key_value_heads"}))
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        ModelConfig.from_dict({name: value for name, value in BASE.items() if name != key})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_other_models_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
        ({"num_hidden_layers": 2.0}, "num_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, r"num_heads \(6\) must be a multiple of num_kv_heads \(4\)"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope theta must be a number above 0, got 0"),
        ({"rope_theta": float("nan")}, "rope theta"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "at least 1, got 0.5"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)
def test_impossible_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_rope_config_checks_itself() -> None:
    with pytest.raises(ConfigError, match="'yarn' is none of plain"):
        RopeConfig("yarn")
    with pytest.raises(ConfigError, match="3 divisors, a head_dim of 16 needs 8"):
        from dataclasses import replace

        replace(preset("tiny"), rope=RopeConfig("divisors", divisors=(1.0, 1.0, 1.0)))


def test_published_sizes() -> None:
    published = {
        "llama-2-7b": (6_738_415_616, 524_288),
        "llama-3-8b": (8_030_261_248, 131_072),
        "llama-3-70b": (70_553_706_496, 327_680),
        "smollm2-135m": (134_515_008, 23_040),
    }
    for name, (parameters, kv_bytes) in published.items():
        assert PRESETS[name].num_parameters == parameters
        assert PRESETS[name].kv_bytes_per_token(dtype_bytes=2) == kv_bytes
    with pytest.raises(ConfigError, match="no preset 'llama-9'; there are llama-2-7b"):
        preset("llama-9")


def test_shapes_and_names_need_no_torch() -> None:
    modules = "minibatch.model.config, minibatch.model.presets, minibatch.model.hub"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
