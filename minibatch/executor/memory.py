"""How many KV blocks there is room for, and what to turn where there is none."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minibatch.config import EngineConfig, default_max_num_batched_tokens
from minibatch.errors import ConfigError, DeviceMemoryError, HostMemoryError
from minibatch.executor.device_sampler import Needs, sample
from minibatch.executor.release import release_device_caches
from minibatch.executor.step_inputs import NUM_KNOBS
from minibatch.model.attention import AttentionMetadata
from minibatch.model.config import ModelConfig
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM

GIB = 2**30
DEFAULT_CPU_POOL_BYTES = GIB
GRAPH_BYTES = GIB // 2  # for captured decode steps (vLLM's PR 11005 tells of 0.32 GiB for an 8B)


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


# -- what a GPU has left ------------------------------------------------------------------------


def profiled_budget(config: EngineConfig, model: LlamaForCausalLM) -> int:
    """Bytes that a GPU has left for KV under ``gpu_memory_utilization``.

    As vLLM does it: run the largest step that the scheduler could ask for, and see what the
    allocator peaked at. What other processes hold is not ours to use.
    """
    longest = config.max_model_len or model.max_model_len
    tokens = config.max_num_batched_tokens or default_max_num_batched_tokens(config, longest)
    device = model.device
    release_unused()
    torch.cuda.synchronize(device)
    free_before, total = torch.cuda.mem_get_info(device)
    foreign = total - free_before - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with explained_oom("the largest step", "lower max_num_batched_tokens or max_num_seqs"):
        run_largest_step(model, tokens, config.max_num_seqs, config.block_size)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    graphs = 0 if config.enforce_eager else GRAPH_BYTES
    return int(total * config.gpu_memory_utilization) - foreign - peak - graphs


@torch.inference_mode()
def run_largest_step(
    model: LlamaForCausalLM, num_tokens: int, max_num_seqs: int, block_size: int
) -> None:
    """Prompts of ``num_tokens`` in all through the model, and the dearest way to sample
    ``max_num_seqs`` tokens. All blocks are the same one: the numbers are nonsense, their memory is
    not.
    """
    device, longest = model.device, model.max_model_len
    num_tokens = min(num_tokens, max_num_seqs * longest)
    lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
    cache = KVCache(model.config, 1, block_size, dtype=model.dtype, device=device)
    positions = torch.arange(num_tokens, device=device) % longest
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    width = -(-lengths[0] // block_size)
    meta = AttentionMetadata(
        slot_mapping=positions % block_size,
        block_tables=torch.zeros(len(lengths), width, dtype=torch.int32, device=device),
        query_start=torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int(),
        seq_lens=seq_lens,
        query_lens=lengths,
        seq_lens_host=lengths,
        num_decodes=0,
        prompt_lens=seq_lens,
    )
    hidden = model(torch.zeros_like(positions), positions, cache, meta)
    rows = hidden[-max_num_seqs:]
    logits = model.compute_logits(rows.repeat(-(-max_num_seqs // len(rows)), 1)[:max_num_seqs])
    knobs = torch.full((len(logits), NUM_KNOBS), 0.5, device=device)
    whole = logits.shape[-1]  # a top_p without top_k sorts all of them
    sample(logits, knobs, Needs(random=True, min_p=True, largest_top_k=1, nucleus_size=whole))


# -- what to do about it ------------------------------------------------------------------------


@contextmanager
def explained_oom(what: str, remedy: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that says what to turn.

    Args:
        what: did not fit.
        remedy: an imperative, naming the knob.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        detail = str(error).split(". ")[0]
        raise DeviceMemoryError(f"out of GPU memory for {what}: {remedy}. ({detail}.)") from error


@contextmanager
def explained_swap_space(num_blocks: int, block_bytes: int) -> Iterator[None]:
    """Turn a failure to get host memory for swapped KV into an error that says what to turn.

    Pinned memory (which a GPU reads by itself) is taken from the machine at once and whole, and
    the operating system cannot put any of it aside. torch has no error of its own for it: it
    passes on CUDA's.

    Args:
        num_blocks: of the CPU pool. block_bytes: of one of them.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # the GPU's memory: not about this
    except (MemoryError, RuntimeError) as error:
        if not num_blocks:
            raise
        detail = str(error).split("\n")[0].rstrip(".")
        raise HostMemoryError(
            f"no {num_blocks * block_bytes / GIB:.2f} GiB of host memory for {num_blocks} swapped "
            f"KV blocks (this machine has {physical_memory() / GIB:.0f} GiB in all): lower "
            "swap_space (in GiB) or num_cpu_blocks; with 0 a preempted request is recomputed. "
            f"({detail}.)"
        ) from error


def physical_memory() -> int:
    """Bytes of this machine's memory; 0 where the system does not tell."""
    if not hasattr(os, "sysconf"):  # Windows
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_swap_space(num_blocks: int, block_bytes: int) -> None:
    """Refuse a pinned pool that cannot be: asked for it, a machine may kill the process instead.

    Raises:
        HostMemoryError: it is larger than this machine's memory.
    """
    with explained_swap_space(num_blocks, block_bytes):
        if num_blocks * block_bytes > (physical_memory() or float("inf")):
            raise MemoryError("more than there is")


def release_unused() -> None:
    """Give back what no object holds any more, such as an earlier engine of this notebook."""
    gc.collect()
    release_device_caches()
