"""A CUDA graph for CPUs: a tape of torch's own operations, played again on the same memory.

Like the real one it repeats what it saw: same operations, same tensors at the same addresses, same
Python numbers. And like the real one it refuses to capture a question to the device (``.item()``,
``.tolist()``, ``if tensor``) or a tensor made from a Python list, since those would be frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = ("_local_scalar_dense", "lift_fresh", "nonzero", "unique")


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if any(word in name for word in FORBIDDEN):
            raise RuntimeError(f"{name} cannot be captured")
        result = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, result))
        return result


class TapeGraph:
    """See the module. ``captured`` counts operations."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        with _Recorder(self.tape):
            return run()

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, recorded in self.tape:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(recorded), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # not a view, not in place
                    old.copy_(new)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class RepeatedCall:
    """A graph that calls the captured function again: a tape does not see Triton's kernels."""

    def __init__(self) -> None:
        self._again: Callable[[], None] = lambda: None

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        result = run()

        def again() -> None:
            result.copy_(run())

        self._again = again
        return result

    def replay(self) -> None:
        self._again()
