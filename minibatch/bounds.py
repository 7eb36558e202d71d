"""Throughput that no engine can pass on a given chip, whatever its scheduler.

Two ways to get such a bound. For a uniform load (every prompt and every output equally long) it
is a formula, in three variants that lie ever closer to what a real engine may do. For any run at
all it follows from the tokens that came out: their FLOPs and bytes take at least so long.
"""

from __future__ import annotations

from dataclasses import dataclass

from minibatch.cost_model import CostModel
from minibatch.hardware import Hardware
from minibatch.model.config import ModelConfig
from minibatch.trace import Trace


@dataclass(frozen=True)
class UniformLoad:
    """``batch`` sequences at a time, each ``prompt_len`` tokens in and ``output_len`` out."""

    batch: int
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Bounds:
    """Generated tokens/s at most.

    ``decode_only`` leaves the prompts out; ``serial`` prefills the batch, then decodes it;
    ``overlapped`` lets prefills and decodes share steps so well that memory and cores are never
    idle at the same time, which is the best that any schedule can do.
    """

    decode_only: float
    serial: float
    overlapped: float


def uniform_bounds(
    model: ModelConfig, chip: Hardware, load: UniformLoad, dtype: str = "float16"
) -> Bounds:
    """The bounds of ``load``. The first output token comes with the prefill."""
    ideal = CostModel.ideal(model, chip, dtype)
    batch, generated = load.batch, load.batch * load.output_len
    first, last = load.prompt_len + 1, load.prompt_len + load.output_len - 1
    steps = [ideal.decode_cost(batch, context) for context in range(first, last + 1)]
    prefill = ideal.prefill_cost(batch, load.prompt_len)
    typical = ideal.decode_cost(batch, load.prompt_len + load.output_len // 2)
    serial_s = prefill.total_s + sum(step.total_s for step in steps)
    memory_s = sum(step.memory_s for step in steps)
    compute_s = prefill.compute_s + sum(step.compute_s for step in steps)
    return Bounds(
        decode_only=batch / typical.total_s,
        serial=generated / serial_s,
        overlapped=generated / max(memory_s, compute_s),
    )


def least_seconds(trace: Trace, cost_model: CostModel) -> float:
    """Seconds that the tokens of ``trace`` take at least, at the cost model's rates.

    Counted from what went in and came out, not from the steps: every prompt token (but those
    found in a prefix cache) and every output token (but the last) is computed once; every output
    token needs the KV of all before it; weights are read as often as the longest request
    generates, and often enough for all tokens at ``max_num_seqs`` a step.
    """
    generated: dict[str, int] = {}
    cached: dict[str, int] = {}
    for step in trace:
        for request_id, tokens in step.sampled.items():
            generated[request_id] = generated.get(request_id, 0) + len(tokens)
        for admission in step.admitted:
            hit = max(cached.get(admission.request_id, 0), admission.prefix_hit_tokens)
            cached[admission.request_id] = hit
    flops = kv_tokens = 0
    requests = trace.requests
    for request_id, count in generated.items():
        prompt = requests[request_id].num_prompt_tokens
        last = prompt + count - 1  # context of its last step
        new = last - cached[request_id]
        flops += cost_model.work([(new, last, 0, False)]).flops
        flops += 2 * cost_model.head_parameters * count
        kv_tokens += count * (2 * prompt + count - 1) // 2
    most_rows = trace.meta.knobs["max_num_seqs"]
    total = sum(generated.values())
    num_steps = max([*generated.values(), -(-total // most_rows)])
    memory_bytes = num_steps * cost_model.step_weight_bytes + kv_tokens * cost_model.kv_token_bytes
    rates = cost_model.rates
    return max(flops / rates.flops, memory_bytes / rates.bandwidth)
