"""Bytes go where they are told, all of them, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from minibatch.model.kv_cache import KVCache
from minibatch.model.presets import preset

CONFIG = preset("tiny")  # 2 layers, 2 KV heads of 16
BLOCKS, BLOCK_SIZE = 5, 4


@pytest.fixture
def cache() -> KVCache:
    """Every element of the device pool different from every other."""
    cache = KVCache(CONFIG, BLOCKS, BLOCK_SIZE, num_cpu_blocks=3)
    for start, pool in enumerate((*cache.keys, *cache.values)):
        pool.copy_(torch.arange(pool.numel()).view(pool.shape) + start * pool.numel())
    return cache


def snapshot(cache: KVCache) -> torch.Tensor:
    return torch.stack([torch.stack(cache.keys), torch.stack(cache.values)])  # [2, layers, ...]


def test_shapes_and_size(cache: KVCache) -> None:
    assert len(cache.keys) == len(cache.values) == CONFIG.num_layers
    assert cache.keys[0].shape == (BLOCKS, BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)
    assert cache.bytes_per_block == BLOCK_SIZE * CONFIG.kv_bytes_per_token(dtype_bytes=4)
    half = KVCache(CONFIG, BLOCKS, BLOCK_SIZE, dtype=torch.bfloat16)
    assert half.bytes_per_block == BLOCK_SIZE * CONFIG.kv_bytes_per_token(dtype_bytes=2)
    assert not snapshot(half).any()  # a new pool is all zeros


def test_store_writes_its_slots_and_no_others(cache: KVCache) -> None:
    before = snapshot(cache)
    k, v = torch.randn(2, 3, CONFIG.num_kv_heads, CONFIG.head_dim)
    cache.store(1, k, v, torch.tensor([7, 0, 18]))
    expected = before.clone()
    for row, slot in enumerate((7, 0, 18)):
        expected[0, 1, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = k[row]
        expected[1, 1, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = v[row]
    assert torch.equal(snapshot(cache), expected)


def test_slot_minus_one_writes_nowhere(cache: KVCache) -> None:
    """As an index, -1 would be the last slot of the pool: here it holds somebody's token."""
    before = snapshot(cache)
    nan = torch.full((3, CONFIG.num_kv_heads, CONFIG.head_dim), float("nan"))
    cache.store(0, nan, nan, torch.tensor([-1, -1, -1]))
    assert torch.equal(snapshot(cache), before)


def test_swap_out_and_in_moves_every_layer(cache: KVCache) -> None:
    before = snapshot(cache)
    cache.swap_out([(4, 0), (1, 2)])
    for pool in (*cache.keys, *cache.values):
        pool.zero_()
    cache.swap_in([(2, 3), (0, 1)])
    after = snapshot(cache)
    assert torch.equal(after[:, :, 3], before[:, :, 1])
    assert torch.equal(after[:, :, 1], before[:, :, 4])
    assert not after[:, :, [0, 2, 4]].any()


def test_copy_blocks_reads_before_it_writes(cache: KVCache) -> None:
    before = snapshot(cache)
    cache.copy_blocks([(0, 1), (1, 2)])
    after = snapshot(cache)
    assert torch.equal(after[:, :, 1], before[:, :, 0])
    assert torch.equal(after[:, :, 2], before[:, :, 1])
    assert torch.equal(after[:, :, [0, 3, 4]], before[:, :, [0, 3, 4]])


@pytest.mark.parametrize("times", [1, 3])
def test_repeating_a_move_changes_nothing_more(cache: KVCache, times: int) -> None:
    for _ in range(times):
        cache.swap_out([(3, 1)])
    for _ in range(times):
        cache.swap_in([(1, 0)])
    for _ in range(times):
        cache.copy_blocks([(3, 2)])
    after = snapshot(cache)
    assert torch.equal(after[:, :, 0], after[:, :, 3])
    assert torch.equal(after[:, :, 2], after[:, :, 3])


def test_no_pairs_and_no_host_pool(cache: KVCache) -> None:
    before = snapshot(cache)
    for move in (cache.swap_out, cache.swap_in, cache.copy_blocks):
        move([])
    assert torch.equal(snapshot(cache), before)


def test_blocks_that_do_not_exist_are_refused(cache: KVCache) -> None:
    for move, pair in (
        (cache.swap_out, (BLOCKS, 0)),  # the spare block is nobody's
        (cache.swap_out, (0, 3)),
        (cache.swap_in, (-1, 0)),
        (cache.copy_blocks, (0, BLOCKS)),
    ):
        with pytest.raises(IndexError, match="cannot copy block"):
            move([pair])
