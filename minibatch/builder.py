"""From a user's knobs to an engine over a real model."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

import minibatch
from minibatch.config import EngineConfig
from minibatch.engine import Engine
from minibatch.errors import ConfigError
from minibatch.executor.gpu import (
    attention_backend,
    make_fp8_kv_cache,
    make_kv_cache,
    make_runner,
    quantize,
)
from minibatch.executor.host_memory import keep_freed_memory
from minibatch.executor.memory import (
    bytes_per_block,
    explained_oom,
    num_cpu_blocks,
    num_gpu_blocks,
    release_unused,
)
from minibatch.executor.model_runner import ModelRunner
from minibatch.executor.release import empty_storages
from minibatch.model.backends import default_backend
from minibatch.model.config import ModelConfig
from minibatch.model.cpu.kernels import layer_kernels
from minibatch.model.cpu.linear import compiled_linear
from minibatch.model.cpu.ops import CompiledAttention, CompiledOps
from minibatch.model.flat_llama import FlatLlama
from minibatch.model.hub import resolve
from minibatch.model.linear import can_pack, pack_linears
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import load_config, load_model, random_model
from minibatch.model.presets import PRESETS
from minibatch.pipelined import PipelinedEngine
from minibatch.tokenizer import Tokenizer
from minibatch.trace import TraceMeta

T = TypeVar("T")


def build_engine(config: EngineConfig) -> Engine:
    """Load the model, size the pools, and put an engine around them.

    With ``load_format="dummy"`` the model may also be one of the named shapes
    (``minibatch.model.presets``); such an engine has no tokenizer unless one is named.

    Raises:
        ConfigError, CheckpointError: see there.
    """
    path, shape = find_model(config)
    device = pick_device(config.device)
    if device.type == "cuda":
        release_unused()
    dtype = pick_dtype(config.dtype, device, shape)
    longest = config.max_model_len or shape.context_length
    if longest > shape.context_length:
        raise ConfigError(
            f"max_model_len={longest} is more than the {shape.context_length} positions that "
            f"{config.model} was made for; lower max_model_len."
        )
    tokenizer_path = resolve(config.tokenizer) if config.tokenizer else path
    tokenizer = Tokenizer.from_path(tokenizer_path) if tokenizer_path else None
    with explained_oom("the weights", "use dtype='bfloat16' or a smaller model"):
        if config.load_format == "dummy" or path is None:
            model = random_model(
                shape, dtype=dtype, device=device, seed=config.seed, max_model_len=longest
            )
        else:
            model = load_model(path, dtype=dtype, device=device, max_model_len=longest)
    try:
        if device.type == "cpu":
            pack_for_cpu(model, config)
            keep_freed_memory()
        elif config.quantization is not None:
            quantize(model, config.quantization)
        return engine_for(model, config, tokenizer, owns_model=True)
    except BaseException:  # the traceback holds the model; its memory is wanted back all the same
        empty_storages([*model.parameters(), *model.buffers()])
        raise


def engine_for(
    model: LlamaForCausalLM,
    config: EngineConfig,
    tokenizer: Tokenizer | None = None,
    *,
    owns_model: bool = False,
) -> Engine:
    """An engine around a model that is loaded already.

    Args:
        owns_model: closing the engine gives the model's weights back too.
    """
    shape = model.config
    model.backend = attention_backend(model)
    kv_dtype = torch.uint8 if config.kv_cache_dtype == "fp8" else model.dtype
    block_bytes = bytes_per_block(shape, config.block_size, kv_dtype)
    blocks = num_gpu_blocks(config, model, block_bytes)
    cpu_blocks = num_cpu_blocks(config, block_bytes)
    usable_tokens = blocks * config.block_size
    scheduler_config = config.scheduler_config(
        max_model_len=config.max_model_len or min(model.max_model_len, usable_tokens),
        num_gpu_blocks=blocks,
        num_cpu_blocks=cpu_blocks,
    )
    forward = cpu_forward(model, config) if model.device.type == "cpu" else None
    make_cache = make_fp8_kv_cache if config.kv_cache_dtype == "fp8" else make_kv_cache
    kv_cache = make_cache(model, scheduler_config)
    engine_class: type[Engine]
    executor: ModelRunner
    if model.device.type == "cuda":
        engine_class = PipelinedEngine
        executor = make_runner(model, kv_cache, scheduler_config, config, owns_model)
    else:
        engine_class = Engine
        executor = ModelRunner(model, kv_cache, scheduler_config.max_model_len, forward)
    return engine_class(
        scheduler_config,
        executor,
        tokenizer=tokenizer,
        meta=TraceMeta(
            source="measured",
            model=config.model,
            hardware=describe_device(model.device),
            software=versions() | cpu_software(model),
        ),
        vocab_size=shape.vocab_size,
        eos_token_ids=end_tokens(shape, tokenizer),
        salt=prefix_salt(shape),
        seed=config.seed,
        check=config.check_invariants,
    )


def pack_for_cpu(model: LlamaForCausalLM, config: EngineConfig) -> None:
    """Bring the matrices into the form that is multiplied fastest here; 8-bit ones if wanted.

    Raises:
        ConfigError: ``cpu_kernels="compiled"``, and they cannot be had; it says why.
    """
    int8 = config.quantization == "int8"
    make: Callable[[nn.Linear], nn.Module] | None = None
    if int8 or config.quantization is None:
        make = compiled(config, lambda: compiled_linear(model, int8))
    if make is not None:
        pack_linears(model, make)
    elif config.quantization is not None:
        quantize(model, config.quantization)
    elif can_pack(model.dtype, model.device):
        pack_linears(model)


def cpu_forward(model: LlamaForCausalLM, config: EngineConfig) -> FlatLlama:
    """The forward pass of a CPU, and the attention that goes with it.

    Raises:
        ConfigError: ``cpu_kernels="compiled"``, and they cannot be had; it says why.
    """
    kernels = compiled(config, lambda: layer_kernels(model, config.kv_cache_dtype))
    if kernels is None:
        model.backend = default_backend(model.config, model.device)
        return FlatLlama(model)
    model.backend = CompiledAttention(kernels)
    return FlatLlama(model, CompiledOps(kernels, model.config.num_heads))


def compiled(config: EngineConfig, make: Callable[[], T]) -> T | None:
    """What ``make`` makes of the C sources; None where torch is wanted, or is all there is."""
    if config.cpu_kernels == "torch":
        return None
    try:
        return make()
    except ConfigError as error:
        if config.cpu_kernels == "compiled":
            raise ConfigError(f"cpu_kernels='compiled': {error} Use 'auto' or 'torch'.") from None
        return None


def cpu_software(model: LlamaForCausalLM) -> dict[str, str]:
    """Which kernels ran, for whoever reads speeds in a trace."""
    if model.device.type != "cpu":
        return {}
    compiled = isinstance(model.backend, CompiledAttention)
    return {"cpu_kernels": "compiled" if compiled else "torch"}


def find_model(config: EngineConfig) -> tuple[Path | None, ModelConfig]:
    """The checkpoint and its shape; a named shape needs no checkpoint for random weights."""
    if config.load_format == "dummy" and config.model in PRESETS:
        return None, PRESETS[config.model]
    path = resolve(config.model)
    return path, load_config(path)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: expected 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch {torch.__version__} sees no GPU; use 'cpu'.")
    return device


def pick_dtype(name: str, device: torch.device, shape: ModelConfig) -> torch.dtype:
    """``auto``: float32 on a CPU, where it is exact; on a GPU the checkpoint's own."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else shape.torch_dtype
    return getattr(torch, name)


def prefix_salt(shape: ModelConfig) -> Callable[[Sequence[int]], int | None]:
    """Under dynamic rope a long prompt rotates differently from a short one: no sharing."""
    limit = shape.rope.original_max_position or 0
    depends = shape.rope.depends_on_prompt_length

    def salt(prompt_token_ids: Sequence[int]) -> int | None:
        return len(prompt_token_ids) if depends and len(prompt_token_ids) > limit else None

    return salt


def end_tokens(shape: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """The checkpoint's end tokens, which may be several, and the tokenizer's own."""
    ids = set(shape.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    return {
        "minibatch-lab": minibatch.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
