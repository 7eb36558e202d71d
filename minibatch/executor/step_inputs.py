"""A step's numbers on their way to the device: many small arrays, one copy.

Each copy to a GPU costs some microseconds of the host's time, and one from ordinary memory waits
for all that the GPU still has to do. So a step's arrays are written into one pinned buffer, side
by side, and cross as one. On the device they lie at addresses that depend on nothing but the
number of tokens and rows, which is what a CUDA graph needs.

Each array begins at a multiple of 16 bytes. Triton compiles a kernel anew for every combination of
pointers that do and do not, seconds each in the middle of serving; so all of them do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)

NUM_KNOBS = 5  # temperature, uniform, min_p, top_k, top_p
ALIGNMENT = 4  # int32 numbers in 16 bytes
TURNS = 2  # host buffers: one is filled while the other may still be read


@dataclass
class StepInputs(Generic[Array]):
    """A step of T packed tokens and S rows, as views of one int32 buffer, on either side."""

    ids: Array  # [T]; a row's last one may be unknown to the host, see `source`
    positions: Array  # [T]
    slots: Array  # [T]; -1: nowhere
    query_start: Array  # [S + 1]
    seq_lens: Array  # [S]; 0: this row pads the batch
    lanes: Array  # [S]: which block table
    source: Array  # [S]: the place of its last token among those sampled last; -1: it is in `ids`
    prompt_lens: Array  # [S]
    knobs: Array  # float32 [S, NUM_KNOBS], of the first rows that sample
    due: Array  # [S]: the tokens whose logits are sampled
    where: Array  # [U]: entries of the block tables that changed...
    blocks: Array  # [U]: ...and what they hold now

    @classmethod
    def over(cls, buffer: Array, tokens: int, rows: int, updates: int = 0) -> StepInputs[Array]:
        """Lay the arrays out in ``buffer``. Updates come last: a graph need not know how many."""
        sizes = _sizes(tokens, rows, updates)
        starts = np.cumsum([0, *map(aligned, sizes)]).tolist()
        parts = [buffer[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        float32 = np.float32 if isinstance(buffer, np.ndarray) else torch.float32
        parts[8] = parts[8].view(float32).reshape(rows, NUM_KNOBS)
        return cls(*parts)

    @staticmethod
    def size(tokens: int, rows: int, updates: int = 0) -> int:
        """int32 numbers of all arrays, and of the gaps between them."""
        return sum(map(aligned, _sizes(tokens, rows, updates)))

    def pad(self, tokens: int, rows: int) -> None:
        """Fill what lies behind the first ``tokens`` and ``rows``: it reads and writes nothing."""
        self.ids[tokens:] = self.positions[tokens:] = 0
        self.slots[tokens:] = -1
        self.seq_lens[rows:] = self.lanes[rows:] = self.prompt_lens[rows:] = 0
        self.source[rows:] = -1
        last = int(self.query_start[rows])
        self.query_start[rows + 1 :] = np.arange(last + 1, last + 1 + len(self.seq_lens) - rows)


def _sizes(tokens: int, rows: int, updates: int) -> list[int]:
    """Numbers of each array, in the order of ``StepInputs``."""
    return [tokens] * 3 + [rows + 1] + [rows] * 4 + [rows * NUM_KNOBS, rows] + [updates] * 2


def aligned(count: int) -> int:
    """The next multiple of 16 bytes, in int32 numbers."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class CopyIn:
    """The two ends of the copy, and who may touch them when.

    Args:
        capacity: int32 numbers of the largest step.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        pinned = device.type == "cuda"
        self.device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(TURNS)
        ]
        self._copied = [self._module.Event() for _ in range(TURNS)]
        self._turn = 0

    def begin(self) -> np.ndarray:
        """A host buffer to write to; waits if an earlier step is still being copied from it."""
        self._turn = (self._turn + 1) % TURNS
        self._copied[self._turn].synchronize()
        return self._host[self._turn].numpy()

    def send(self, used: int) -> None:
        """Copy the first ``used`` numbers, behind what the device has to do before."""
        host = self._host[self._turn]
        self.device_buffer[:used].copy_(host[:used], non_blocking=True)
        self._copied[self._turn].record()

    def tensors(self) -> list[Tensor]:
        """All memory held, to be given back."""
        return [self.device_buffer, *self._host]
