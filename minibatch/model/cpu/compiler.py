"""Compile a C file of this folder for this machine, once, and load it.

Needs a C compiler (``cc``, or ``$CC``) that knows OpenMP, as most Linux machines have one. What
was compiled is kept in the cache folder, so that only the first engine of its kind waits, for
about a second.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minibatch.errors import ConfigError
from minibatch.model.hub import cache_dir

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
X86_FLAGS = ("-mprefer-vector-width=512",)
TIMEOUT_S = 60.0

POINTER, COUNT, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
Signatures = Mapping[str, tuple[Any, ...]]


@cache
def library(source: str, *defines: str) -> ctypes.CDLL:
    """The functions of ``source``, compiled with ``-D`` and each of ``defines``.

    Raises:
        ConfigError: they cannot be had here; it says why.
    """
    name = os.environ.get("CC") or "cc"
    compiler = shutil.which(name)
    if compiler is None:
        raise ConfigError(f"the CPU kernels need a C compiler, and there is no `{name}` here.")
    x86 = X86_FLAGS if platform.machine().lower() in ("x86_64", "amd64") else ()
    options = [*FLAGS, *x86, *(f"-D{define}" for define in defines)]
    command = [compiler, *options, str(FOLDER / source), *_torch_openmp(), "-lm"]
    file = cache_dir() / "kernels" / f"{_fingerprint(command)}.so"
    if not file.exists():
        _compile(command, file)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise ConfigError(f"the CPU kernels were compiled and cannot be loaded: {error}") from None


def declare(functions: ctypes.CDLL, signatures: Signatures) -> None:
    """Tell ctypes what the functions take; those here return nothing."""
    for name, types in signatures.items():
        getattr(functions, name).argtypes = types
        getattr(functions, name).restype = None


def dtype_defines(dtype: torch.dtype) -> list[str]:
    """What makes ``number`` in the sources mean ``dtype``."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"the CPU kernels are written for float32 and bfloat16, not {dtype}.")
    return ["BF16"] if dtype is torch.bfloat16 else []


def _compile(command: list[str], file: Path) -> None:
    """Compile beside the final place, then move: another process may be doing the same."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=TIMEOUT_S
            )
            if done.returncode:
                raise ConfigError(
                    f"the CPU kernels cannot be compiled: {' '.join(command)} says\n{done.stderr}"
                )
            made.replace(file)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the CPU kernels cannot be compiled: {error}") from None


def _torch_openmp() -> list[str]:
    """torch's own OpenMP library: with a second one there would be two crews of threads, each
    waiting for work at full speed on the cores that the other one needs.
    """
    folder = Path(torch.__file__).parent
    places = [folder / "lib", folder.parent / "torch.libs"]
    return [str(path) for place in places for path in sorted(place.glob("libgomp*.so*"))][:1]


def _fingerprint(command: list[str]) -> str:
    """Names a compiled file by all that it depends on: it may be kept in a shared home folder."""
    compiler = Path(command[0]).resolve()
    sources = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))]
    parts = [*sources, *command, str(compiler), str(compiler.stat().st_mtime_ns)]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # -march=native: what the processor can do
        lines = cpuinfo.read_text().splitlines()
        parts += sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hashlib.sha256("\0".join([*parts, platform.processor()]).encode()).hexdigest()[:24]
