"""What a chip can do at best: four published figures, or four measured ones.

Every prediction of the cost model starts here. A chip computes at most ``flops`` operations a
second, moves at most ``memory_bandwidth`` bytes a second between its memory and its cores, holds
``memory_bytes``, and exchanges at most ``link_bandwidth`` bytes a second with the host.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from minibatch.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}


@dataclass(frozen=True)
class Hardware:
    """One chip's ceilings.

    Args:
        name: short, as on the command line.
        title: for people.
        flops: dense FLOP/s by dtype (a multiply-add counts as two). Data sheets often print the
            rate "with sparsity", which is twice that and of no use here.
        memory_bandwidth: bytes/s between device memory and cores.
        memory_bytes: device memory; 0 where it is not known.
        link_bandwidth: bytes/s between host and device, one way.
        source: where the figures are from.
        date: of the source, or of the measurement.

    Raises:
        ConfigError: for a rate that is not above 0.
    """

    name: str
    title: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    source: str
    date: str

    def __post_init__(self) -> None:
        rates = {"memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        rates.update({f"flops[{dtype}]": rate for dtype, rate in self.flops.items()})
        for figure, rate in rates.items():
            if not rate > 0:
                raise ConfigError(f"hardware {self.name!r}: {figure}={rate!r} must be above 0.")
        if self.memory_bytes < 0:
            raise ConfigError(f"hardware {self.name!r}: memory_bytes={self.memory_bytes} is < 0.")

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s in ``dtype``.

        Raises:
            ConfigError: the chip's figures do not name that dtype.
        """
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ConfigError(f"hardware {self.name!r} has no figure for {dtype}; it has {known}.")
        return self.flops[dtype]

    def ridge(self, dtype: str = "float16") -> float:
        """FLOP per byte above which computing takes longer than moving the data."""
        return self.peak_flops(dtype) / self.memory_bandwidth

    def describe(self) -> str:
        """The figures in a few lines, with where they are from."""
        rates = ", ".join(f"{rate / 1e12:.4g} {dtype}" for dtype, rate in self.flops.items())
        return (
            f"{self.title} ({self.name})\n"
            f"  compute   {rates} TFLOP/s, dense\n"
            f"  memory    {self.memory_bytes / 2**30:.1f} GiB at "
            f"{self.memory_bandwidth / 1e9:.4g} GB/s\n"
            f"  host link {self.link_bandwidth / 1e9:.3g} GB/s\n"
            f"  source    {self.source}, {self.date}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Hardware:
        """Inverse of ``to_dict``."""
        return cls(**data)


@cache
def all_hardware() -> dict[str, Hardware]:
    """Every chip of ``data/hardware.json``, by name."""
    text = resources.files("minibatch").joinpath("data/hardware.json").read_text("utf-8")
    return {entry["name"]: Hardware.from_dict(entry) for entry in json.loads(text)}


def hardware(name: str | Hardware) -> Hardware:
    """The chip called ``name`` (a ``Hardware`` is passed through).

    Raises:
        ConfigError: for a name that the table does not have.
    """
    if isinstance(name, Hardware):
        return name
    chips = all_hardware()
    if name not in chips:
        raise ConfigError(f"no hardware {name!r}; there are {', '.join(chips)}.")
    return chips[name]


# -- measuring ----------------------------------------------------------------------------------


def measure_this_machine(
    device: str | None = None, dtype: str | None = None, seconds: float = 0.3
) -> Hardware:
    """Copy bandwidth and matmul rate of the local device, with torch.

    The best of several runs counts: a ceiling is asked for, and disturbances only slow down. A
    copy of n bytes moves 2n (read and written).

    Args:
        device: ``"cpu"``, ``"cuda"``...; by default a GPU if there is one.
        dtype: of the matmul; by default float16 on a GPU and float32 elsewhere.
        seconds: spent on each figure, about.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    dtype = dtype or ("float16" if on_gpu else "float32")

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    copy_bytes = 2**30 if on_gpu else 2**27  # far more than any cache holds
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copy_bytes / _best_time(lambda: target.copy_(source), wait, seconds)

    size = 8192 if on_gpu else 1024
    left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    right = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    rate = 2 * size**3 / _best_time(lambda: left @ right, wait, seconds)

    if on_gpu:
        host = torch.ones(copy_bytes // 4, dtype=torch.uint8, pin_memory=True)
        on_device = target[: host.numel()]
        link = host.numel() / _best_time(lambda: on_device.copy_(host), wait, seconds)
        title = torch.cuda.get_device_name()
        memory_bytes = torch.cuda.mem_get_info()[1]
    else:
        link = bandwidth  # "swapping" is one more copy within the same memory
        title = f"this machine's CPU, {torch.get_num_threads()} threads"
        memory_bytes = _physical_memory()
    return Hardware(
        name="this-machine",
        title=title,
        flops={dtype: rate},
        memory_bandwidth=bandwidth,
        memory_bytes=memory_bytes,
        link_bandwidth=link,
        source=f"measured: a copy of {copy_bytes >> 20} MiB, a {dtype} matmul of {size} x {size}",
        date=time.strftime("%Y-%m-%d"),
    )


def _best_time(run: Callable[[], torch.Tensor], wait: Callable[[], None], seconds: float) -> float:
    """Least seconds of one ``run``; the device is idle before and after each."""
    run()  # warm-up: allocations, kernel choice
    wait()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def _physical_memory() -> int:
    if not hasattr(os, "sysconf"):  # Windows
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
