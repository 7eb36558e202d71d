"""How many sequences fit on a card, by the way in which memory is reserved for them.

Before paging, the KV of a sequence had to lie in one piece, as long as the sequence might get
(Kwon et al. 2023 call the variants that Orca could use Max and Pow2):

* **max** (our ``static``): room for ``max_model_len`` tokens, whatever is asked for;
* **pow2** (our ``dynamic``): prompt and answer, rounded up to a power of two;
* **paged** (``continuous`` and ``unified``): the blocks that tokens really fill.

"Out of memory at concurrency N" then means: fewer than N sequences fit. What a sequence needs is
asked of the schedulers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from minibatch.config import SchedulerConfig, check_number
from minibatch.cost_model import CostModel
from minibatch.errors import ConfigError
from minibatch.hardware import Hardware
from minibatch.model.config import ModelConfig
from minibatch.request import Request
from minibatch.sampling_params import SamplingParams
from minibatch.scheduler import make_scheduler

SCHEMES = {"static": "max", "dynamic": "pow2", "continuous": "paged", "unified": "paged"}


@dataclass(frozen=True)
class KVMemory:
    """What a card has left for keys and values. ``num_blocks`` are whole ones."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    token_bytes: int
    block_size: int

    @property
    def num_bytes(self) -> int:
        return self.budget_bytes - self.weight_bytes - self.activation_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // self.token_bytes

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block_size

    def describe(self) -> str:
        """The subtraction, in GiB."""
        gib = 2**30
        return (
            f"{self.budget_bytes / gib:.2f} - {self.weight_bytes / gib:.2f} weights - "
            f"{self.activation_bytes / gib:.2f} activations = {self.num_bytes / gib:.2f} GiB for "
            f"KV, {self.num_tokens} tokens of {self.token_bytes / 1024:g} KiB"
        )


def kv_memory(
    chip: Hardware,
    model: ModelConfig,
    *,
    dtype: str = "float16",
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    gpu_memory_utilization: float = 0.90,
    activation_bytes: int = 0,
    block_size: int = 16,
) -> KVMemory:
    """What ``chip`` has left beside the weights of ``model``.

    Args:
        gpu_memory_utilization: share of the card's memory that the engine may use.
        activation_bytes: set aside for activations (vLLM measures them in a trial run).

    Raises:
        ConfigError: not even one block is left.
    """
    check_number("gpu_memory_utilization", gpu_memory_utilization, 0.0, 1.0)
    shape = CostModel(model, chip, dtype, weight_dtype, kv_dtype)
    memory = KVMemory(
        budget_bytes=int(gpu_memory_utilization * chip.memory_bytes),
        weight_bytes=shape.resident_weight_bytes,
        activation_bytes=activation_bytes,
        token_bytes=shape.kv_token_bytes,
        block_size=block_size,
    )
    if memory.num_blocks < 1:
        raise ConfigError(
            f"{chip.title} has no memory for KV: {memory.describe()}. Raise "
            "gpu_memory_utilization, or take a smaller model, a smaller dtype or a larger card."
        )
    return memory


@dataclass(frozen=True)
class Reservation:
    """What one sequence reserves under a policy, and how many such sequences a pool holds."""

    policy: str
    scheme: str  # "max" | "pow2" | "paged"
    blocks_per_sequence: int
    num_sequences: int
    block_size: int

    @property
    def tokens_per_sequence(self) -> int:
        return self.blocks_per_sequence * self.block_size

    def fits(self, concurrency: int) -> bool:
        """Do that many sequences fit at once? If not, it is what an article calls OOM."""
        return concurrency <= self.num_sequences


def reservation(
    policy: str,
    num_blocks: int,
    prompt_len: int,
    output_len: int,
    *,
    max_model_len: int,
    block_size: int = 16,
) -> Reservation:
    """How many sequences of ``prompt_len`` + ``output_len`` tokens a pool of blocks holds, all
    of them at full length.
    """
    config = SchedulerConfig(
        policy=policy,
        num_gpu_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        max_num_seqs=1,
    )
    scheduler = make_scheduler(config)
    request = Request("r", [0] * prompt_len, SamplingParams(max_tokens=output_len))
    needed = scheduler.max_blocks(request)
    return Reservation(
        policy=policy,
        scheme=SCHEMES[policy],
        blocks_per_sequence=needed,
        num_sequences=scheduler.block_manager.num_usable_blocks // needed,
        block_size=block_size,
    )
