"""Ask the C library to give memory back after loading, and then to keep it from step to step.

A step allocates and frees the same tensors as the step before. By default glibc hands large ones
back to the operating system at once, and every page of the next one must be fetched and zeroed
anew: up to a sixth of a prefill's time. What is kept is what the largest step needs anyway.
"""

from __future__ import annotations

import ctypes
import platform

# From malloc.h. Both are upper limits of what malloc treats as small and lasting.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 32 * 2**20  # glibc allows no more: larger tensors still come and go
MOST_KEPT = 256 * 2**20


def keep_freed_memory() -> None:
    """For the whole process, once the model is loaded; does nothing where there is no glibc.

    What loading left behind goes back to the operating system first.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
