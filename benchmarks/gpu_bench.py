"""What the stages of ``gpu.py`` share: the model, the clock, the chip's ceilings, the files."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from machine import commit

from minibatch.builder import describe_device, versions
from minibatch.executor.memory import release_unused
from minibatch.hardware import Hardware, measure_this_machine
from minibatch.model.config import ModelConfig
from minibatch.model.llama import LlamaForCausalLM
from minibatch.model.loader import random_model
from minibatch.model.presets import preset
from minibatch.tables import table

CONCURRENCY = (1, 8, 16, 32, 64, 128, 256)
Row = dict[str, Any]


@dataclass
class Bench:
    """One run of one stage.

    Args:
        model_name: a shape of ``minibatch.model.presets``.
        out: where ``<stage>.json`` goes.
        quick: small sizes, to see that a stage works.
    """

    model_name: str
    device: torch.device
    out: Path
    quick: bool
    dtype: str = "bfloat16"
    failures: int = 0  # parts of the stage that raised
    _model: LlamaForCausalLM | None = None
    _chip: Hardware | None = None

    @property
    def shape(self) -> ModelConfig:
        return preset(self.model_name)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def prompt_len(self) -> int:
        return 32 if self.quick else 512

    @property
    def output_len(self) -> int:
        return 8 if self.quick else 128

    @property
    def concurrency(self) -> Sequence[int]:
        return (1, 4) if self.quick else CONCURRENCY

    @property
    def max_model_len(self) -> int:
        return min(4096, self.shape.max_position_embeddings)

    def model(self) -> LlamaForCausalLM:
        """Random weights, drawn once a process."""
        if self._model is None:
            start = time.perf_counter()
            self._model = random_model(
                self.shape,
                dtype=self.torch_dtype,
                device=self.device,
                max_model_len=self.max_model_len,
            )
            self.wait()
            print(f"random weights drawn in {time.perf_counter() - start:.2f} s")
        return self._model

    def forget_model(self) -> None:
        """The next ``model()`` draws another; this one's memory is free."""
        self._model = None
        release_unused()

    def chip(self) -> Hardware:
        """This device's measured ceilings, from ``limits`` if that has run."""
        file = self.out / "limits.json"
        if self._chip is None and file.exists():
            try:
                self._chip = Hardware.from_dict(json.loads(file.read_text())["chip"])
            except (ValueError, KeyError, TypeError):
                print(f"{file} cannot be read; measuring anew")
        if self._chip is None:
            self._chip = self.measure_chip()
        return self._chip

    def measure_chip(self) -> Hardware:
        seconds = 0.1 if self.quick else 1.0
        self._chip = measure_this_machine(self.device.type, self.dtype, seconds)
        return self._chip

    # -- the clock ----------------------------------------------------------------------------

    def wait(self) -> None:
        torch.get_device_module(self.device).synchronize()

    @torch.inference_mode()
    def device_seconds(self, runs: Sequence[Callable[[], Any]], repeats: int = 50) -> float:
        """Seconds that the device needs for one of ``runs``, which are called in turn.

        On a GPU they are captured into a graph: Python takes longer to launch a small kernel than
        the GPU to run it. Several ``runs`` over different memory keep the chip's cache (some 50 MB)
        from serving what should come from memory.
        """
        repeats = 2 if self.quick else max(repeats, len(runs))

        def all_of_them() -> None:
            for turn in range(repeats):
                runs[turn % len(runs)]()

        for run in runs:  # compiles kernels and chooses algorithms, which capture must not see
            run()
        self.wait()
        again: Callable[[], None] = all_of_them
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_of_them()
            again = graph.replay
        again()
        self.wait()
        best = float("inf")
        for _ in range(1 if self.quick else 5):
            start = time.perf_counter()
            again()
            self.wait()
            best = min(best, time.perf_counter() - start)
        return best / repeats

    # -- what is written ----------------------------------------------------------------------

    @cached_property
    def about(self) -> Row:
        """Where and with what it was measured."""
        return {
            "model": self.model_name,
            "dtype": self.dtype,
            "hardware": describe_device(self.device),
            "software": software(),
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
        }

    @contextmanager
    def attempt(self, stage: str, rows: list[Row], **what: Any) -> Iterator[None]:
        """Measure a part of ``stage``: what it adds to ``rows`` is written at once, and if it
        fails, its error becomes a row, and the stage goes on.

        Args:
            what: names the part in the row of an error.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures += 1
            text = f"{type(error).__name__}: {error}".split("\n")[0]
            rows.append({**what, "error": text[:300]})
        self._release()
        self.save(stage, rows)

    def _release(self) -> None:
        """For the next part. After an error on the device even this may fail."""
        try:
            release_unused()
        except RuntimeError as error:
            print(f"memory was not released: {error}")

    def save(self, stage: str, rows: list[Row]) -> None:
        """Write ``<stage>.json`` with all rows so far; whoever reads it sees a whole file."""
        self.out.mkdir(parents=True, exist_ok=True)
        content = {"stage": stage, **self.about, "chip": self.chip().to_dict(), "rows": rows}
        file = self.out / f"{stage}.json"
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(unfinished, file)


def software() -> dict[str, str]:
    """Versions of all that a figure may depend on."""
    found = versions()
    for name in ("triton", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def print_table(header: Sequence[str], rows: list[Row]) -> None:
    """The columns of ``header``, and the error of a row that has one."""
    names = [*header, "error"] if any("error" in row for row in rows) else header
    print(table(names, [[shown(row.get(name)) for name in names] for row in rows]))


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)
