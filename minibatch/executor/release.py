"""Giving memory back for certain: also what somebody else still has a name for.

A tensor lives as long as anybody refers to it. After an error in a notebook cell that is, among
others, the traceback, whose frames stood in the middle of the model. So ``close()`` does not rely
on being the last: it empties the storages themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def empty_storages(tensors: Iterable[Tensor]) -> None:
    """Free the memory behind ``tensors``, and thereby behind all their views.

    None of them may be read any more. Some memory cannot be freed under its other users: an array
    of numpy's, a mapped file, what ``pin_memory()`` returned. Of that the tensors let go, and it is
    free unless somebody has another tensor over it.
    """
    with torch.no_grad():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.resizable():
                storage.resize_(0)
            else:
                tensor.set_()


def release_device_caches() -> None:
    """Hand back what torch keeps for later use: GPU memory, pinned memory, cuBLAS's workspaces."""
    if not torch.cuda.is_available():
        return
    clear_cublas_workspaces()
    _call_if_there("_host_emptyCache")  # no public name in torch 2.11
    torch.cuda.empty_cache()


def clear_cublas_workspaces() -> None:
    """Let go of the scratch memory that cuBLAS has on each stream; it takes new one when needed.

    A captured graph goes on using the one that it saw. That is safe as long as it came from the
    graph's own pool, whose memory nobody else gets: so call this before the first capture too.
    """
    _call_if_there("_cuda_clearCublasWorkspaces")  # no public name in torch 2.11


def _call_if_there(name: str) -> None:
    call = getattr(torch._C, name, None)
    if call is not None:
        call()


def tensors_of(holder: object) -> Iterator[Tensor]:
    """The tensors among an object's attributes, also in lists."""
    for value in vars(holder).values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor):
                yield item
