"""The KV cache: two pools of blocks, and the four ways in which bytes move.

A block holds K and V of ``block_size`` consecutive tokens of one sequence, in every layer. Which
block belongs to whom is the block manager's business; here a block is only a number, and token
t of a sequence lives in *slot* ``block_table[t // block_size] * block_size + t % block_size``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minibatch.model.config import ModelConfig

Pair = tuple[int, int]  # (source block, destination block)


class KVCache:
    """A pool on the device and a pool in host memory, pinned if the device is a GPU.

    ``keys[layer]`` and ``values[layer]`` are views of the device pool,
    ``[num_blocks, block_size, num_kv_heads, head_dim]``. All blocks start as zeros. On a CPU the
    host pool is simply a second pool, and swapping copies real bytes between the two.

    Args:
        config: gives layers, KV heads and head size.
        num_blocks: blocks of the device pool.
        block_size: tokens a block.
        num_cpu_blocks: blocks of the host pool, for swapped-out sequences.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_cpu_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        self.num_layers = config.num_layers
        self.dtype = dtype
        self.device = torch.device(device)

        layers, block = config.num_layers, (block_size, config.num_kv_heads, config.head_dim)
        # One spare block at the end takes what must be written nowhere (see `store`).
        self._device_pool = _zeros(layers, 2, num_blocks + 1, *block, dtype=dtype, device=device)
        self._spare_slot = num_blocks * block_size
        # In host memory a block is one piece, all layers together, so that it travels as one.
        self._cpu_pool = _zeros(num_cpu_blocks, layers, 2, *block, dtype=dtype, device="cpu")
        if self.device.type == "cuda":
            self._cpu_pool = self._cpu_pool.pin_memory()
        self.keys = [layer[0, :num_blocks] for layer in self._device_pool]
        self.values = [layer[1, :num_blocks] for layer in self._device_pool]
        self._key_slots = [layer[0].flatten(0, 1) for layer in self._device_pool]
        self._value_slots = [layer[1].flatten(0, 1) for layer in self._device_pool]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V in all layers."""
        return self._device_pool[:, :, 0].numel() * self.dtype.itemsize

    def store(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write ``k`` and ``v [T, Hkv, D]`` to the slots ``slot_mapping [T]`` of one layer.

        Slot -1 writes nowhere: as an index it would mean the *last* slot, which is somebody's.
        Such rows go to the spare block, so that no shape depends on how many there are.
        """
        slots = torch.where(slot_mapping < 0, self._spare_slot, slot_mapping)
        self._key_slots[layer].index_copy_(0, slots, k)
        self._value_slots[layer].index_copy_(0, slots, v)

    def swap_out(self, pairs: Sequence[Pair]) -> None:
        """Copy blocks from the device to the host: ``pairs`` of (device block, host block)."""
        self._check(pairs, self.num_blocks, self.num_cpu_blocks)
        for device_block, host_block in pairs:
            # Need not be waited for: whatever reads either block next is queued behind it.
            self._cpu_pool[host_block].copy_(
                self._device_pool[:, :, device_block], non_blocking=True
            )

    def swap_in(self, pairs: Sequence[Pair]) -> None:
        """Copy blocks from the host to the device: ``pairs`` of (host block, device block)."""
        self._check(pairs, self.num_cpu_blocks, self.num_blocks)
        for host_block, device_block in pairs:
            self._device_pool[:, :, device_block].copy_(
                self._cpu_pool[host_block], non_blocking=True
            )

    def copy_blocks(self, pairs: Sequence[Pair]) -> None:
        """Copy blocks within the device, for copy-on-write: ``pairs`` of (source, destination).

        All sources are read before any destination is written.
        """
        self._check(pairs, self.num_blocks, self.num_blocks)
        ids = torch.tensor(pairs, dtype=torch.int64, device=self.device).view(len(pairs), 2)
        for layer in self._device_pool:  # [2, blocks, ...]; one by one, to hold little in between
            layer.index_copy_(1, ids[:, 1], layer.index_select(1, ids[:, 0]))

    @staticmethod
    def _check(pairs: Sequence[Pair], num_sources: int, num_destinations: int) -> None:
        for source, destination in pairs:
            if not (0 <= source < num_sources and 0 <= destination < num_destinations):
                raise IndexError(
                    f"cannot copy block {source} to block {destination}: there are "
                    f"{num_sources} blocks to copy from and {num_destinations} to copy to"
                )


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros. In host memory numpy's, which the operating system hands out page by page as they
    are touched: a pool of some GiB costs nothing until it fills (torch's would write them all).
    """
    if torch.device(device).type != "cpu" or 0 in shape:
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(*shape)
