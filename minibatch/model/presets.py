"""Published shapes by name, for random weights and for the cost model: no checkpoint, no torch.

Sources: the ``config.json`` of meta-llama/Llama-2-7b-hf, meta-llama/Meta-Llama-3-8B,
meta-llama/Meta-Llama-3-70B and HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

from minibatch.errors import ConfigError
from minibatch.model.config import ModelConfig, RopeConfig

PRESETS: dict[str, ModelConfig] = {
    "llama-2-7b": ModelConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        eos_token_ids=(2,),
        bos_token_id=1,
        torch_dtype="float16",
    ),
    "llama-3-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=500_000.0),
        eos_token_ids=(128_001,),
        bos_token_id=128_000,
        torch_dtype="bfloat16",
    ),
    "llama-3-70b": ModelConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=500_000.0),
        eos_token_ids=(128_001,),
        bos_token_id=128_000,
        torch_dtype="bfloat16",
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
        torch_dtype="bfloat16",
    ),
    "tiny": ModelConfig(  # ours: small enough to run thousands of steps in a test
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
}


def preset(name: str) -> ModelConfig:
    """The shape called ``name``.

    Raises:
        ConfigError: for a name that is not in ``PRESETS``.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
