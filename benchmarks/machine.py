"""What this machine is, and the most that it can do: the ceilings of every row."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minibatch.bounds import UniformLoad, uniform_bounds
from minibatch.builder import versions
from minibatch.errors import ConfigError
from minibatch.hardware import Hardware
from minibatch.model.config import ModelConfig
from minibatch.model.cpu.linear import CompiledLinear
from minibatch.model.linear import PackedLinear, can_pack
from minibatch.tables import table

INTERESTING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8")


def describe() -> dict[str, Any]:
    """Processor, instruction sets, memory, versions, date and commit."""
    info: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    try:
        text = Path("/proc/cpuinfo").read_text()
        info["cpu"] = text.split("model name", 1)[1].split(":", 1)[1].split("\n", 1)[0].strip()
        flags = text.split("flags", 1)[1].split("\n", 1)[0].split()
        info["instructions"] = [name for name in INTERESTING if name in flags]
    except (OSError, IndexError):
        pass
    if hasattr(os, "sysconf"):
        info["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return info | {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def save(out: Path, header: Sequence[str], rows: Sequence[Sequence[object]], **more: Any) -> None:
    """``OUT.json`` and ``OUT.md``: a table, and where and when it was measured."""
    out.parent.mkdir(parents=True, exist_ok=True)
    info = describe()
    named = [dict(zip(header, row, strict=True)) for row in rows]
    data = json.dumps({**info, "rows": named, **more}, indent=1)
    out.with_suffix(".json").write_text(data + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    where = (
        f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads used; {versions}; "
        f"{info['date']}, commit {info['commit']}."
    )
    out.with_suffix(".md").write_text(f"{where}\n\n{table(header, rows, 'markdown')}\n")


def commit() -> str:
    """The commit that was measured, with a + if the working tree differed from it."""
    try:
        command = ["git", "describe", "--always", "--dirty=+"]
        where = Path(__file__).parent
        return subprocess.run(command, cwd=where, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def ceilings(seconds: float = 1.0) -> Hardware:
    """The rate of copies and of matrix products, each the median of ``seconds`` of them.

    Not the best: on a machine that others share, memory may be twice as fast at one time as at
    another, so ceilings are measured when the engines are.
    """
    flops = {name: matmul_rate(getattr(torch, name), seconds) for name in ("float32", "bfloat16")}
    return Hardware(
        name="this-machine",
        title=describe()["cpu"],
        flops=flops,
        memory_bandwidth=copy_rate(seconds),
        memory_bytes=0,
        link_bandwidth=1.0,
        source="measured: copies of 128 MiB, products of 1024 x 1024 matrices",
        date=time.strftime("%Y-%m-%d"),
    )


def median_of(chips: Sequence[Hardware]) -> Hardware:
    """Of several measurements, rate by rate."""
    names = chips[0].flops
    return replace(
        chips[0],
        flops={name: statistics.median(chip.flops[name] for chip in chips) for name in names},
        memory_bandwidth=statistics.median(chip.memory_bandwidth for chip in chips),
    )


def copy_rate(seconds: float) -> float:
    """Bytes read and written a second."""
    source = torch.ones(2**27, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_time(lambda: target.copy_(source), seconds)


@torch.inference_mode()
def matmul_rate(dtype: torch.dtype, seconds: float, size: int = 1024) -> float:
    """FLOP/s; a multiplication with its addition counts as two.

    Of the fastest way that is known here: the rate is asked for, not a library's.
    """
    plain: nn.Module = nn.Linear(size, size, bias=False, dtype=dtype).requires_grad_(False)
    ways = [plain]
    if can_pack(dtype, torch.device("cpu")):
        ways.append(PackedLinear(plain))
    with contextlib.suppress(ConfigError):  # no compiler
        ways.append(CompiledLinear(plain))
    x = torch.randn(size, size).to(dtype)
    times = [median_time(lambda way=way: way(x), seconds / len(ways)) for way in ways]
    return 2 * size**3 / min(times)


def median_time(run: Callable[[], object], seconds: float) -> float:
    run()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def roofline(model: ModelConfig, chip: Hardware, load: UniformLoad, dtype: str) -> float:
    """Generated tokens/s that nothing can pass which prefills the batch and then decodes it."""
    return uniform_bounds(model, chip, load, dtype).serial
