"""What an engine on a GPU is made of, and what stands in where Triton is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from minibatch.config import EngineConfig, SchedulerConfig
from minibatch.errors import ConfigError
from minibatch.executor.cuda_graphs import Graph, cuda_graph_maker
from minibatch.executor.cuda_model_runner import CudaModelRunner
from minibatch.executor.memory import (
    bytes_per_block,
    check_swap_space,
    explained_oom,
    explained_swap_space,
)
from minibatch.model import fp8, quantization
from minibatch.model.attention import AttentionBackend
from minibatch.model.fp8_kv_cache import Fp8KVCache, UnpackingAttention, calibrate, fp8_format
from minibatch.model.kv_cache import KVCache
from minibatch.model.llama import LlamaForCausalLM


def has_kernels(device: torch.device) -> bool:
    """May Triton's kernels be used here?"""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attention_backend(model: LlamaForCausalLM) -> AttentionBackend:
    """Kernels where there are any; else what the model has (right, and slow on a GPU).

    Raises:
        ConfigError: the model is on another GPU than the current one.
    """
    if model.device.type == "cuda":
        check_current(model.device)
    if not has_kernels(model.device):
        return model.backend
    from minibatch.model.triton_attention import TritonAttention

    group = model.config.num_heads // model.config.num_kv_heads
    return TritonAttention.for_device(group, model.device)


def check_current(device: torch.device) -> None:
    """Streams, events, graphs and Triton's launches are those of the process's current GPU.

    Raises:
        ConfigError: that is another one.
    """
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise ConfigError(
            f"device='{device}', but the current GPU of this process is {current}: call "
            f"torch.cuda.set_device({device.index}) first, or set CUDA_VISIBLE_DEVICES="
            f"{device.index} and use device='cuda'."
        )


def make_kv_cache(model: LlamaForCausalLM, config: SchedulerConfig) -> KVCache:
    """The pools, in the model's own dtype.

    Raises:
        DeviceMemoryError, HostMemoryError: one of them does not fit.
    """
    plain: type[KVCache] = KVCache
    if has_kernels(model.device):
        from minibatch.model.triton_attention import TritonKVCache

        plain = TritonKVCache
    with _explained(model, config, model.dtype):
        return plain(
            model.config,
            config.num_gpu_blocks,
            config.block_size,
            dtype=model.dtype,
            device=model.device,
            num_cpu_blocks=config.num_cpu_blocks,
        )


def make_fp8_kv_cache(model: LlamaForCausalLM, config: SchedulerConfig) -> KVCache:
    """Pools of 8-bit numbers, with scales; gives the model a backend that reads them.

    Raises:
        DeviceMemoryError, HostMemoryError: one of them does not fit.
    """
    packed: type[Fp8KVCache] = Fp8KVCache
    number = fp8_format(model.device)
    scales = calibrate(model, number=number)
    if has_kernels(model.device):
        from minibatch.model.triton_attention import TritonFp8KVCache

        packed = TritonFp8KVCache
    elif not isinstance(model.backend, UnpackingAttention):
        model.backend = UnpackingAttention(model.backend)
    with _explained(model, config, number):
        return packed(
            model.config,
            config.num_gpu_blocks,
            config.block_size,
            scales=scales,
            number=number,
            device=model.device,
            num_cpu_blocks=config.num_cpu_blocks,
        )


@contextmanager
def _explained(
    model: LlamaForCausalLM, config: SchedulerConfig, dtype: torch.dtype
) -> Iterator[None]:
    """Either pool may be too large; each has knobs of its own."""
    block_bytes = bytes_per_block(model.config, config.block_size, dtype)
    swapped = config.num_cpu_blocks
    if model.device.type == "cuda":
        check_swap_space(swapped, block_bytes)
    elif swapped <= config.num_gpu_blocks:
        swapped = 0  # both come from the same memory, and the other one is to blame
    with (
        explained_oom(
            f"{config.num_gpu_blocks} KV blocks",
            "lower gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks",
        ),
        explained_swap_space(swapped, block_bytes),
    ):
        yield


def make_runner(
    model: LlamaForCausalLM,
    cache: KVCache,
    config: SchedulerConfig,
    engine_config: EngineConfig,
    owns_model: bool,
) -> CudaModelRunner:
    """The runner. Decode steps are captured, unless ``enforce_eager`` forbids it or the attention
    backend is the plain one, which takes lengths from the host.
    """
    make_graph: Callable[[], Graph] | None = None
    forward = None
    if has_kernels(model.device):
        if not engine_config.enforce_eager:
            make_graph = cuda_graph_maker()
        if model.config.rope.kind != "dynamic":
            from minibatch.model.triton_layers import FusedLlama

            forward = FusedLlama(model)
    with explained_oom(
        "CUDA graphs and step buffers",
        "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager=True",
    ):
        return CudaModelRunner(
            model,
            cache,
            config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            make_graph=make_graph,
            forward=forward,
            owns_model=owns_model,
        )


def quantize(model: LlamaForCausalLM, name: str | None) -> None:
    """Make the matrices of a loaded model 8 bits wide.

    Raises:
        ConfigError: this device has no kernels for it.
    """
    if name == "fp8":
        rows = fp8.quantize_rows
        if has_kernels(model.device):
            from minibatch.model.triton_fp8 import quantize_rows as rows

        fp8.quantize_fp8(model, rows)
    elif name == "int8":
        if model.device.type == "cpu":
            quantization.quantize_int8(model)
            return
        if not has_kernels(model.device):
            raise ConfigError("quantization='int8' on a GPU needs Triton: pip install triton.")
        from minibatch.model.triton_int8 import quantize_int8

        quantize_int8(model)
