"""The engine's knobs, under vLLM's names, checked when they are set and not when they hurt.

``EngineConfig`` is what a user writes. ``SchedulerConfig`` is what is left of it once the model
and the memory are known: plain numbers, all that scheduling needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

from minibatch.errors import ConfigError

PolicyName = Literal["static", "dynamic", "continuous", "unified"]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
KVCacheDtype = Literal["auto", "fp8"]
Quantization = Literal["int8", "fp8"]
CpuKernelsName = Literal["auto", "compiled", "torch"]


class PreemptionMode(str, Enum):
    """What happens to the KV of a request that is evicted (vLLM 0.6.0's enum)."""

    SWAP = "swap"  # copied to the CPU pool, and back when there is room
    RECOMPUTE = "recompute"  # dropped, and computed again from the tokens


@dataclass(frozen=True)
class SchedulerConfig:
    """All that a scheduler and its block manager need to know.

    ``max_num_batched_tokens`` bounds the tokens of one step, ``max_num_seqs`` its sequences,
    ``max_model_len`` the tokens of one sequence. A knob that a policy has no use for is ignored
    by it (``preemption_mode`` by ``static``, say), so that one set of knobs serves all four.

    Raises:
        ConfigError: for a value, or two values together, that cannot work.
    """

    policy: PolicyName = "continuous"
    num_gpu_blocks: int = 256
    num_cpu_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    max_wait: float = 0.0  # seconds that `static` may wait for its batch to fill

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICY_NAMES)
        check_count("block_size", self.block_size)
        check_count("num_gpu_blocks", self.num_gpu_blocks)
        check_count("num_cpu_blocks", self.num_cpu_blocks, least=0)
        check_count("max_model_len", self.max_model_len)
        check_count("max_num_seqs", self.max_num_seqs)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        check_number("max_wait", self.max_wait, 0.0, math.inf)
        object.__setattr__(self, "preemption_mode", as_preemption_mode(self.preemption_mode))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs="
                f"{self.max_num_seqs}: a decode step gives each sequence one token. Raise "
                "max_num_batched_tokens or lower max_num_seqs."
            )
        # vLLM 0.6.0 has the same rule: an evicted request is prefilled again in one piece.
        whole_prefills = self.policy == "continuous" and not self.enable_chunked_prefill
        if whole_prefills and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len="
                f"{self.max_model_len}, so a long sequence could not be prefilled in one step. "
                "Raise max_num_batched_tokens, lower max_model_len, or set "
                "enable_chunked_prefill=True."
            )


@dataclass(frozen=True)
class EngineConfig:
    """What a user asks for. ``None`` means: found out from the model, the device or the memory.

    Args:
        model: a folder, a ``.gguf`` file, a hub id, or a short name (``minibatch models``).
        tokenizer: as ``model``, where it is kept elsewhere.
        load_format: ``auto`` reads the checkpoint; ``dummy`` draws random weights of the
            model's shape (vLLM's word), for speed work.
        dtype: ``auto`` takes float32 on a CPU and the checkpoint's own type on a GPU.
        device: ``auto``, ``cpu``, ``cuda``...
        quantization: ``int8`` weights, or ``fp8`` weights and activations (Ada and Hopper).
        kv_cache_dtype: ``auto`` stores KV in ``dtype``; ``fp8`` in 8 bits, with scales.
        max_model_len: longest sequence, prompt and output, in tokens.
        block_size: tokens a KV block.
        num_gpu_blocks: size of the KV pool; by default what memory allows.
        num_cpu_blocks: size of the swap pool; by default what ``swap_space`` holds.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and KV.
        kv_cache_memory_bytes: bytes of the KV pool, where no GPU can be profiled.
        swap_space: GiB of CPU memory for swapped KV.
        policy: who runs when: one of four batching policies.
        max_num_seqs: sequences in one step at most.
        max_num_batched_tokens: tokens in one step at most.
        enable_chunked_prefill: ``continuous`` mixes decodes and pieces of prompts in a step.
        enable_prefix_caching: keep the KV of full blocks for prompts that begin alike.
        preemption_mode: what ``continuous`` does with the KV of an evicted request.
        max_wait: seconds that ``static`` waits for its batch to fill.
        tensor_parallel_size: devices; this version has 1.
        enforce_eager: no CUDA graphs.
        cpu_kernels: ``compiled`` builds a layer's small operations and decodes' attention with the
            C compiler of this machine (for float32 and bfloat16 on a CPU); ``torch`` uses torch's
            own; ``auto`` takes the compiled ones where they can be had.
        seed: where the seeds of unseeded requests come from.
        check_invariants: verify the books after every step (slow; for tests and lessons).
    """

    model: str
    tokenizer: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DtypeName = "auto"
    device: str = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    gpu_memory_utilization: float = 0.90
    kv_cache_memory_bytes: int | None = None
    swap_space: float = 4.0
    policy: PolicyName = "continuous"
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    max_wait: float = 0.0
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    cpu_kernels: CpuKernelsName = "auto"
    seed: int = 0
    check_invariants: bool = False

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICY_NAMES)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r}: expected a path, a hub id or a short name.")
        check_choice("load_format", self.load_format, get_args(LoadFormat))
        check_choice("dtype", self.dtype, get_args(DtypeName))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        check_choice("cpu_kernels", self.cpu_kernels, get_args(CpuKernelsName))
        if self.quantization is not None:
            check_choice("quantization", self.quantization, get_args(Quantization))
        check_count("block_size", self.block_size)
        for knob in ("max_model_len", "num_gpu_blocks", "max_num_batched_tokens"):
            if getattr(self, knob) is not None:
                check_count(knob, getattr(self, knob))
        if self.num_cpu_blocks is not None:
            check_count("num_cpu_blocks", self.num_cpu_blocks, least=0)
        if self.kv_cache_memory_bytes is not None:
            check_count("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
        check_count("max_num_seqs", self.max_num_seqs)
        check_number("swap_space", self.swap_space, 0.0, math.inf)
        check_number("max_wait", self.max_wait, 0.0, math.inf)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0)
        if self.gpu_memory_utilization == 0.0:
            raise ConfigError("gpu_memory_utilization=0.0 leaves no memory: use a value in (0, 1].")
        object.__setattr__(self, "preemption_mode", as_preemption_mode(self.preemption_mode))
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: this version runs on one "
                "device; set tensor_parallel_size=1."
            )

    def scheduler_config(
        self, *, max_model_len: int, num_gpu_blocks: int, num_cpu_blocks: int
    ) -> SchedulerConfig:
        """The scheduling half, once the model and the memory have spoken."""
        return SchedulerConfig(
            policy=self.policy,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens
            or default_max_num_batched_tokens(self, max_model_len),
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            max_wait=self.max_wait,
        )


def default_max_num_batched_tokens(config: EngineConfig, max_model_len: int) -> int:
    """2048 as in vLLM, or more where a whole sequence must fit one step."""
    splits_prefills = config.policy == "unified" or config.enable_chunked_prefill
    least = config.max_num_seqs if splits_prefills else max(max_model_len, config.max_num_seqs)
    return max(2048, least)


def check_choice(knob: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{knob}={value!r}: expected one of {', '.join(choices)}.")


def check_count(knob: str, value: Any, least: int = 1) -> None:
    """A whole number of at least ``least`` (``True`` is not a count)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{knob}={value!r}: expected a whole number of at least {least}.")


def check_number(knob: str, value: Any, least: float, most: float) -> None:
    """A number in [least, most]; NaN is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ConfigError(f"{knob}={value!r}: expected a number in [{least}, {most}].")


def as_preemption_mode(value: PreemptionMode | str) -> PreemptionMode:
    try:
        return PreemptionMode(value)
    except ValueError:
        names = ", ".join(mode.value for mode in PreemptionMode)
        raise ConfigError(f"preemption_mode={value!r}: expected one of {names}.") from None
