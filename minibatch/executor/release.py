"""Giving memory back for certain: also what somebody else still has a name for.

A tensor lives as long as anybody refers to it. After an error in a notebook cell that is, among
others, the traceback, whose frames stood in the middle of the model. So ``close()`` does not rely
on being the last: it empties the storages themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def empty_storages(tensors: Iterable[Tensor]) -> None:
    """Free the memory behind ``tensors``, and thereby behind all their views.

    None of them may be read any more. Memory that is not torch's own (a mapped file, an array
    of numpy's) stays with its owner.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def tensors_of(holder: object) -> Iterator[Tensor]:
    """The tensors among an object's attributes, also in lists."""
    for value in vars(holder).values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor):
                yield item
