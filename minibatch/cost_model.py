"""How long a step takes, from what it must move and compute: a roofline with its terms in sight.

    step = max( weights + KV  over the memory,  FLOPs  over the cores )  +  overhead  +  link

* **weights**: every matrix is read once a step, however many tokens share the reading. That is
  why batching pays.
* **KV**: each row reads the keys and values of its own context and writes those of its new
  tokens. Nothing is shared here, so this term grows with the batch.
* **compute**: two FLOPs for each weight and token, and attention's dot products.
* memory and cores work at the same time, so the slower of the two counts (Williams et al.,
  "Roofline", 2009). That is a GPU's way; a CPU core that multiplies with weights while it reads
  them hides little of the one behind the other (``overlap`` says how much).
* **overhead**: launching kernels, scheduling, sampling: seconds in which the chip waits.
* **link**: swapped blocks cross the host link before the model runs, as in vLLM 0.6.0.

Three things are left out: the embedding look-up (a few rows), activations (they stay in caches)
and reading the KV of a prompt again for each of its tiles (it comes from the cache as well).
Padding is computed like anything else: the padding of a prompt goes through every matrix, and a
finished row that static batching keeps reads its whole context again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from minibatch.config import check_number
from minibatch.errors import ConfigError
from minibatch.hardware import DTYPE_BYTES, Hardware
from minibatch.model.config import ModelConfig, RopeConfig
from minibatch.record import StepRecord
from minibatch.scheduler.output import SchedulerOutput

# What a good engine reaches of a chip's figures. Assumptions, not measurements of yours: matmul
# and attention kernels commonly reach 80-90 % of either ceiling at these sizes, and a step costs
# some hundred microseconds of launches and Python. ``calibration.fit`` replaces them by your own.
MEMORY_EFFICIENCY = 0.85
COMPUTE_EFFICIENCY = 0.80
LINK_EFFICIENCY = 0.80  # 25 of PCIe 4.0 x16's 31.5 GB/s
STEP_OVERHEAD_S = 0.6e-3


class StepWork(NamedTuple):
    """What a step moves and computes, whoever runs it. Bytes and FLOPs."""

    weight_bytes: int
    kv_bytes: int  # read and written, copy-on-write included
    flops: int
    link_bytes: int
    num_rows: int
    num_tokens: int  # padding included


class Rates(NamedTuple):
    """Bytes/s of the memory, FLOP/s of the cores, bytes/s of the host link."""

    bandwidth: float
    flops: float
    link: float


@dataclass(frozen=True)
class StepCost:
    """The terms of one step's time, in seconds."""

    weights_s: float
    kv_s: float
    compute_s: float
    overhead_s: float
    link_s: float
    overlap: float = 1.0  # share of the smaller of memory and compute that the larger one hides

    @property
    def memory_s(self) -> float:
        """Weights and KV come over the same wires."""
        return self.weights_s + self.kv_s

    @property
    def total_s(self) -> float:
        memory, compute = self.memory_s, self.compute_s
        exposed = (1.0 - self.overlap) * min(memory, compute)
        return max(memory, compute) + exposed + self.overhead_s + self.link_s

    @property
    def bound(self) -> str:
        """What most of the step is spent on: weights, kv, compute, overhead or link."""
        memory = "weights" if self.weights_s >= self.kv_s else "kv"
        terms = {
            memory if self.memory_s >= self.compute_s else "compute": max(
                self.memory_s, self.compute_s
            ),
            "overhead": self.overhead_s,
            "link": self.link_s,
        }
        return max(terms, key=terms.__getitem__)


@dataclass(frozen=True)
class CostModel:
    """Step times of one model on one chip.

    Args:
        model: its shape.
        hardware: the chip's ceilings.
        dtype: of activations and arithmetic.
        weight_dtype: of stored weights, if another (``"int8"``: weight-only quantisation).
        kv_dtype: of stored keys and values, if another.
        memory_efficiency: share of the memory bandwidth that is reached. May be above 1, where a
            small model lives in caches.
        compute_efficiency: share of the peak FLOP/s that is reached.
        link_efficiency: share of the host link that is reached.
        step_overhead_s: seconds a step, whatever is in it.
        row_overhead_s: seconds for each row of the batch.
        overlap: share of the smaller of memory and compute time that is hidden behind the larger.

    Raises:
        ConfigError: an impossible constant, or a dtype that the chip has no figure for.
    """

    model: ModelConfig
    hardware: Hardware
    dtype: str = "float16"
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    memory_efficiency: float = MEMORY_EFFICIENCY
    compute_efficiency: float = COMPUTE_EFFICIENCY
    link_efficiency: float = LINK_EFFICIENCY
    step_overhead_s: float = STEP_OVERHEAD_S
    row_overhead_s: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for name in ("memory_efficiency", "compute_efficiency", "link_efficiency"):
            check_number(name, getattr(self, name), 0.0, float("inf"))
            if getattr(self, name) == 0.0:
                raise ConfigError(f"{name}=0.0 would make every step endless.")
        for name in ("step_overhead_s", "row_overhead_s"):
            check_number(name, getattr(self, name), 0.0, float("inf"))
        check_number("overlap", self.overlap, 0.0, 1.0)
        for name in ("dtype", "weight_dtype", "kv_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPE_BYTES:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(DTYPE_BYTES)}.")
        self.hardware.peak_flops(self.dtype)

    @classmethod
    def ideal(cls, model: ModelConfig, hardware: Hardware, dtype: str = "float16") -> CostModel:
        """All of every ceiling and no overhead: no engine can be faster than this."""
        return cls(
            model,
            hardware,
            dtype,
            memory_efficiency=1.0,
            compute_efficiency=1.0,
            link_efficiency=1.0,
            step_overhead_s=0.0,
        )

    # -- the model's shape, in bytes and FLOPs ------------------------------------------------

    @cached_property
    def layer_parameters(self) -> int:
        """Weights that every token is multiplied with."""
        m = self.model
        query_size, kv_size = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        attention = m.hidden_size * 2 * (query_size + kv_size)
        return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)

    @cached_property
    def head_parameters(self) -> int:
        """Weights of the output layer: only tokens that sample are multiplied with these."""
        return self.model.vocab_size * self.model.hidden_size

    @cached_property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step reads. The input embedding is a look-up, not read whole."""
        width = DTYPE_BYTES[self.weight_dtype or self.dtype]
        return (self.layer_parameters + self.head_parameters) * width

    @cached_property
    def resident_weight_bytes(self) -> int:
        """Bytes of weights that lie in device memory, embedding and norms included."""
        return self.model.num_parameters * DTYPE_BYTES[self.weight_dtype or self.dtype]

    @cached_property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values that one token keeps alive."""
        return self.model.kv_bytes_per_token(DTYPE_BYTES[self.kv_dtype or self.dtype])

    @cached_property
    def pair_flops(self) -> int:
        """FLOPs of attention for one token looking at one other: q.k and p.v, in all layers."""
        return 4 * self.model.num_layers * self.model.num_heads * self.model.head_dim

    # -- what a step does ---------------------------------------------------------------------

    def work(
        self,
        rows: Iterable[tuple[int, int, int, bool]],
        *,
        copied_tokens: int = 0,
        swapped_tokens: int = 0,
    ) -> StepWork:
        """Count a step.

        Args:
            rows: (tokens computed, context once they are, padding beside them, does it sample).
            copied_tokens: in blocks that are copied on the device (copy-on-write).
            swapped_tokens: in blocks that cross the host link.
        """
        num_rows = tokens = samples = context = pairs = 0
        for new, end, padding, sample in rows:
            num_rows += 1
            tokens += new + padding
            context += end  # end - new tokens are read, new ones written
            pairs += new * (2 * end - new + 1)  # twice the sum of the contexts end-new+1 .. end
            samples += sample
        linear = self.layer_parameters * tokens + self.head_parameters * samples
        return StepWork(
            weight_bytes=self.step_weight_bytes if num_rows else 0,
            kv_bytes=(context + 2 * copied_tokens) * self.kv_token_bytes,
            flops=2 * linear + self.pair_flops * pairs // 2,
            link_bytes=swapped_tokens * self.kv_token_bytes,
            num_rows=num_rows,
            num_tokens=tokens,
        )

    def output_work(self, output: SchedulerOutput, block_size: int) -> StepWork:
        """The work of a step that is about to run."""
        rows: list[tuple[int, int, int, bool]] = []
        for request, start, new, phase, padding, _ in output.scheduled:
            end = start + new
            if phase == "padding":  # its last token again, over its whole context
                rows.append((1, end + 1, 0, False))
            else:
                rows.append((new, end, padding, end == len(request.token_ids)))
        return self.work(
            rows,
            copied_tokens=len(output.copies) * block_size,
            swapped_tokens=(len(output.swap_in) + len(output.swap_out)) * block_size,
        )

    def record_work(self, record: StepRecord, block_size: int) -> StepWork:
        """The work of a step that was recorded."""
        sampled = record.sampled
        rows: list[tuple[int, int, int, bool]] = []
        for request_id, _, phase, new, context, padding in record.scheduled:
            if phase == "padding":
                rows.append((1, context + 1, 0, False))
            else:
                rows.append((new, context, padding, request_id in sampled))
        swapped = sum(record.swapped_in.values()) + sum(record.swapped_out.values())
        return self.work(
            rows,
            copied_tokens=len(record.blocks_copied) * block_size,
            swapped_tokens=swapped * block_size,
        )

    def useful_flops(self, record: StepRecord) -> int:
        """FLOPs of a recorded step, all padding left out."""
        sampled = record.sampled
        rows = [
            (row.num_tokens, row.context_len, 0, row.request_id in sampled)
            for row in record.scheduled
            if row.num_tokens
        ]
        return self.work(rows).flops

    # -- how long it takes --------------------------------------------------------------------

    def cost(self, work: StepWork) -> StepCost:
        """Seconds for ``work``, term by term."""
        bandwidth, flops, link = self.rates
        return StepCost(
            weights_s=work.weight_bytes / bandwidth,
            kv_s=work.kv_bytes / bandwidth,
            compute_s=work.flops / flops,
            overhead_s=self.step_overhead_s + self.row_overhead_s * work.num_rows,
            link_s=work.link_bytes / link,
            overlap=self.overlap,
        )

    def decode_cost(self, batch: int, context: int) -> StepCost:
        """A step in which ``batch`` rows of ``context`` tokens decode one token each."""
        return self.cost(self.work([(1, context, 0, True)] * batch))

    def prefill_cost(self, batch: int, prompt_len: int) -> StepCost:
        """A step that computes ``batch`` whole prompts and samples their first tokens."""
        return self.cost(self.work([(prompt_len, prompt_len, 0, True)] * batch))

    @cached_property
    def rates(self) -> Rates:
        """What is reached of the chip's ceilings."""
        chip = self.hardware
        return Rates(
            bandwidth=chip.memory_bandwidth * self.memory_efficiency,
            flops=chip.peak_flops(self.dtype) * self.compute_efficiency,
            link=chip.link_bandwidth * self.link_efficiency,
        )

    # -- keeping ------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CostModel:
        """Inverse of ``to_dict``, also after a way through JSON."""
        shape = dict(data["model"])
        rope = dict(shape["rope"])
        shape["rope"] = RopeConfig(**{**rope, "divisors": tuple(rope["divisors"])})
        shape["eos_token_ids"] = tuple(shape["eos_token_ids"])
        parts = {"model": ModelConfig(**shape), "hardware": Hardware.from_dict(data["hardware"])}
        return cls(**{**data, **parts})
