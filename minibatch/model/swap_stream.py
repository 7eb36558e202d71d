"""Swapping on a stream of its own: blocks cross the host link while the model computes.

The link is some hundred times slower than the GPU's own memory. So a block that leaves is first
copied within the device, and its place is free for whoever computes next; the copy then crosses
the link beside the computation. A block that returns crosses the link at once, beside the step
that is still running, and is put in its place when that step is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minibatch.model.kv_cache import KVCache, Pair

STAGED_BLOCKS = 8  # that are copied within the device at a time


class SwapStream:
    """Swaps blocks of one cache. On a CPU streams stand for nothing, and the copies are the same.

    Args:
        device_pool: ``[layers, 2, blocks, ...]``. host_pool: ``[blocks, layers, 2, ...]``.
    """

    def __init__(self, device_pool: Tensor, host_pool: Tensor) -> None:
        self._device_pool, self._host_pool = device_pool, host_pool
        self._module = torch.get_device_module(device_pool.device)
        self._stream = self._module.Stream()

    def swap_out(self, pairs: Sequence[Pair]) -> None:
        """Copy (device block, host block) pairs from the device to the host."""
        for group in _groups(pairs):
            blocks = [self._device_pool[:, :, device_block] for device_block, _ in group]
            staged = torch.stack(blocks)  # [blocks, layers, 2, ...]
            self._stream.wait_stream(self._module.current_stream())
            with self._module.stream(self._stream):
                for copy, (_, host_block) in zip(staged, group, strict=True):
                    self._host_pool[host_block].copy_(copy, non_blocking=True)
            self._keep_until_copied(staged, self._stream)

    def swap_in(self, pairs: Sequence[Pair]) -> None:
        """Copy (host block, device block) pairs from the host to the device."""
        compute = self._module.current_stream()
        for group in _groups(pairs):
            with self._module.stream(self._stream):  # behind any swap-out of the same host block
                staged = torch.empty(
                    (len(group), *self._host_pool.shape[1:]),
                    dtype=self._host_pool.dtype,
                    device=self._device_pool.device,
                )
                for copy, (host_block, _) in zip(staged, group, strict=True):
                    copy.copy_(self._host_pool[host_block], non_blocking=True)
            compute.wait_stream(self._stream)
            for copy, (_, device_block) in zip(staged, group, strict=True):
                self._device_pool[:, :, device_block].copy_(copy)
            self._keep_until_copied(staged, compute)

    @staticmethod
    def _keep_until_copied(staged: Tensor, stream: torch.cuda.Stream) -> None:
        """Its memory was taken on another stream than the one that reads it last."""
        if staged.is_cuda:
            staged.record_stream(stream)


def _groups(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    for start in range(0, len(pairs), STAGED_BLOCKS):
        yield pairs[start : start + STAGED_BLOCKS]


class StreamedSwaps(KVCache):
    """A cache that swaps on a stream of its own."""

    _swaps: SwapStream | None = None

    def swap_out(self, pairs: Sequence[Pair]) -> None:
        self._check(pairs, self.num_blocks, self.num_cpu_blocks)
        self._swap_stream().swap_out(pairs)

    def swap_in(self, pairs: Sequence[Pair]) -> None:
        self._check(pairs, self.num_cpu_blocks, self.num_blocks)
        self._swap_stream().swap_in(pairs)

    def _swap_stream(self) -> SwapStream:
        if self._swaps is None:
            self._swaps = SwapStream(self._device_pool, self._cpu_pool)
        return self._swaps
