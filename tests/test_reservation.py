"""How many sequences fit a card: by arithmetic, by the schedulers, and by filling them up."""

from __future__ import annotations

import pytest

from minibatch.config import POLICY_NAMES
from minibatch.cost_model import CostModel
from minibatch.errors import ConfigError
from minibatch.hardware import hardware
from minibatch.model.presets import preset
from minibatch.reservation import kv_memory, reservation
from minibatch.simulation import simulate
from minibatch.workload import generate

LLAMA = preset("llama-2-7b")
A100 = hardware("a100-80gb")
GIB = 2**30


def fits(policy: str, chip: str, reserve: int, max_model_len: int = 4096, output: int = 128) -> int:
    memory = kv_memory(hardware(chip), LLAMA, activation_bytes=reserve)
    return reservation(
        policy, memory.num_blocks, 512, output, max_model_len=max_model_len
    ).num_sequences


def test_the_memory_left_for_kv() -> None:
    memory = kv_memory(A100, LLAMA)
    assert memory.num_tokens == pytest.approx(121_750, abs=2)
    assert kv_memory(A100, LLAMA, activation_bytes=2 * GIB).num_tokens == pytest.approx(
        117_654, abs=2
    )
    assert memory.num_blocks == memory.num_tokens // 16
    assert "72.00 - 12.55 weights" in memory.describe()


@pytest.mark.parametrize(
    ("policy", "chip", "with_reserve", "without"),
    [
        ("static", "a100-80gb", 28, 29),
        ("dynamic", "a100-80gb", 114, 118),
        ("continuous", "a100-80gb", 183, 190),
        ("unified", "a100-80gb", 183, 190),
        ("static", "h200", 55, 56),
        ("dynamic", "h200", 223, 227),
        ("continuous", "h200", 357, 364),
    ],
)
def test_sequences_that_fit(policy: str, chip: str, with_reserve: int, without: int) -> None:
    assert fits(policy, chip, 2 * GIB) == with_reserve
    assert fits(policy, chip, 0) == without


def test_reserving_2048_would_fit_57_to_59() -> None:
    assert fits("static", "a100-80gb", 2 * GIB, max_model_len=2048) == 57
    assert fits("static", "a100-80gb", 0, max_model_len=2048) == 59


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_as_many_run_at_once_as_the_count_says(policy: str) -> None:
    """Fill a small pool: nobody is evicted with that many, and there is no room for one more."""
    blocks, prompt, output, longest = 101, 40, 30, 128
    expected = reservation(policy, blocks, prompt, output, max_model_len=longest)
    tokens = {"static": 128, "dynamic": 128, "continuous": 69, "unified": 69}[policy]
    assert expected.blocks_per_sequence == -(-tokens // 16)

    def peak(count: int) -> tuple[int, int]:
        knobs = {"num_gpu_blocks": blocks, "max_model_len": longest, "max_num_seqs": 64}
        trace = simulate(generate(count, prompt, output), model="tiny", policy=policy, knobs=knobs)
        return max(len(step.running) for step in trace), trace.summary["num_preemptions"]

    assert expected.fits(expected.num_sequences) and not expected.fits(expected.num_sequences + 1)
    assert peak(expected.num_sequences) == (expected.num_sequences, 0)
    most, preemptions = peak(expected.num_sequences + 1)
    assert most == expected.num_sequences or preemptions > 0


def test_a_model_that_does_not_fit_says_why() -> None:
    with pytest.raises(ConfigError, match=r"RTX 4090.*no memory for KV: 21\.60 - 131\.42 weights"):
        kv_memory(hardware("rtx-4090"), preset("llama-3-70b"))
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        kv_memory(A100, LLAMA, gpu_memory_utilization=1.5)


def test_smaller_dtypes_leave_more_room() -> None:
    plain = kv_memory(A100, LLAMA)
    assert kv_memory(A100, LLAMA, kv_dtype="float8").num_tokens == pytest.approx(
        2 * plain.num_tokens, abs=1
    )
    saved = kv_memory(A100, LLAMA, weight_dtype="int8").num_bytes - plain.num_bytes
    assert saved == CostModel(LLAMA, A100, weight_dtype="int8").resident_weight_bytes
