"""CUDA graphs for decode steps: record a step's kernels once, then start them all with one call.

A decode step of Llama-2-7B is some five hundred kernels of a few microseconds each; Python cannot
start them as fast as the GPU finishes them. A captured graph can, at a price: it repeats exactly
what it saw. The same kernels with the same shapes, reading and writing the same addresses.

* **Addresses**: inputs lie in one static buffer (``step_inputs``), written anew before each
  replay; outputs stay where capture put them.
* **Shapes**: a graph serves one batch size. A few sizes are captured, and a batch is padded up to
  the next one. Padding rows write nowhere (slot -1) and read nothing (length 0).
* **Host values** are frozen in: nothing in the captured code may depend on a Python number that
  changes from step to step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minibatch.executor.release import clear_cublas_workspaces


class Graph(Protocol):
    """One captured piece of work."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what ``run`` does; returns its result, which every replay writes anew."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """``torch.cuda.CUDAGraph``; all graphs of a pool share scratch memory."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.graph(self._graph, pool=self._pool):
            return run()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graph_maker() -> Callable[[], Graph]:
    """Makes graphs that share one memory pool: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    clear_cublas_workspaces()  # an earlier engine's would be freed with that engine's graphs
    return lambda: CudaGraph(pool)


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 16th, and ``largest``: a batch is padded by 15 rows at most."""
    smaller = [size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest]
    return [*smaller, largest]


class DecodeGraphs:
    """One graph a batch size.

    Args:
        run: the decode step of a given (padded) size over the static inputs; its result has a row
            for each row of the batch.
        sizes: ascending.
        make_graph: a new, empty graph.
        clear_inputs: make the static inputs of a size those of a batch of padding.
    """

    def __init__(
        self,
        run: Callable[[int], Tensor],
        sizes: Sequence[int],
        make_graph: Callable[[], Graph],
        clear_inputs: Callable[[int], None],
    ) -> None:
        self.sizes = list(sizes)
        self._graphs: dict[int, Graph] = {}
        self._outputs: dict[int, Tensor] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            clear_inputs(size)
            run(size)  # compiles kernels and chooses algorithms, which capture must not see
            graph = make_graph()
            self._outputs[size] = graph.capture(lambda size=size: run(size))
            self._graphs[size] = graph

    def padded_size(self, batch: int) -> int | None:
        """The smallest captured size for ``batch`` rows; None: there is none so large."""
        index = bisect_left(self.sizes, batch)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int) -> Tensor:
        """Run the step of ``size`` rows; the result is overwritten by the next replay."""
        self._graphs[size].replay()
        return self._outputs[size]

    def close(self) -> None:
        self._graphs.clear()
        self._outputs.clear()
