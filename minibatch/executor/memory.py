"""How many KV blocks there is room for."""

from __future__ import annotations

import torch

from minibatch.config import EngineConfig
from minibatch.errors import ConfigError
from minibatch.model.attention import AttentionMetadata
from minibatch.model.config import ModelConfig
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM

GIB = 2**30
DEFAULT_CPU_POOL_BYTES = GIB


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of ``block_size`` tokens in every layer."""
    return block_size * model.kv_bytes_per_token(dtype.itemsize)


def blocks_in_budget(budget: int, block_bytes: int, knob: str) -> int:
    """Blocks in ``budget`` bytes.

    Raises:
        ConfigError: not even one.
    """
    if budget < block_bytes:
        raise ConfigError(
            f"{knob} leaves {max(budget, 0) / GIB:.2f} GiB for the KV cache, and one block takes "
            f"{block_bytes / GIB:.4f} GiB; raise {knob}, or lower block_size."
        )
    return budget // block_bytes


def num_gpu_blocks(config: EngineConfig, model: LlamaForCausalLM, block_bytes: int) -> int:
    """Blocks of the device pool: as told, or what a byte budget or the GPU's memory holds."""
    if config.num_gpu_blocks is not None:
        return config.num_gpu_blocks
    if config.kv_cache_memory_bytes is not None:
        budget, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif model.device.type == "cuda":
        budget, knob = profiled_budget(config, model), "gpu_memory_utilization"
    else:
        budget, knob = DEFAULT_CPU_POOL_BYTES, "kv_cache_memory_bytes"
    return blocks_in_budget(budget, block_bytes, knob)


def num_cpu_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of the CPU pool; only ``continuous`` swaps."""
    if config.num_cpu_blocks is not None:
        return config.num_cpu_blocks
    if config.policy != "continuous":
        return 0
    return int(config.swap_space * GIB) // block_bytes


def profiled_budget(config: EngineConfig, model: LlamaForCausalLM) -> int:
    """Bytes that a GPU has left for KV under ``gpu_memory_utilization``.

    As vLLM does it: run the largest step that the scheduler could ask for, and see what the
    allocator peaked at. What other processes hold is not ours to use.
    """
    tokens = config.max_num_batched_tokens or 2048
    device = model.device
    torch.cuda.synchronize(device)
    free_before, total = torch.cuda.mem_get_info(device)
    foreign = total - free_before - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(model, min(tokens, model.max_model_len), config.block_size)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return int(total * config.gpu_memory_utilization) - foreign - peak


@torch.inference_mode()
def run_largest_step(model: LlamaForCausalLM, num_tokens: int, block_size: int) -> None:
    """One prompt of ``num_tokens`` through the model, with a cache of its own."""
    num_blocks = -(-num_tokens // block_size)
    cache = KVCache(model.config, num_blocks, block_size, dtype=model.dtype, device=model.device)
    positions = torch.arange(num_tokens, device=model.device)
    meta = AttentionMetadata(
        slot_mapping=positions,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=model.device)[None],
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=model.device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=model.device),
        query_lens=[num_tokens],
        seq_lens_host=[num_tokens],
        num_decodes=0,
        prompt_lens=torch.tensor([num_tokens], dtype=torch.int32, device=model.device),
    )
    hidden = model(torch.zeros_like(positions), positions, cache, meta)
    model.compute_logits(hidden[-1:])
