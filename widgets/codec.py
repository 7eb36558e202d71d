"""Named columns of numbers as bytes, for the browser; ``decode.js`` is the other half.

    "MBT1" | uint32 header length | header (JSON, UTF-8) | columns, each starting at a multiple of 8

The header's ``columns`` lists ``[name, dtype, count]`` in the order of the bytes. Little endian.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

MAGIC = b"MBT1"
Column = tuple[str, Sequence[Any]]  # dtype, numbers

_CODES = {"u1": ("B", 1), "u2": ("H", 2), "i4": ("i", 4), "f4": ("f", 4), "f8": ("d", 8)}
_as_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
DTYPES = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32, "f8": np.float64}


def pack(header: Mapping[str, Any], columns: Mapping[str, Column]) -> bytes:
    """One block of bytes; the same input always gives the same.

    A live run packs a few numbers 30 times a second: one call for all of them, and no array each.
    """
    sizes = tuple((name, dtype, len(values)) for name, (dtype, values) in columns.items())
    listed, layout = _layout(sizes)
    told = f'{_as_json(header)[:-1]}{"," if header else ""}"columns":{listed}}}'
    text = told.encode()
    padding = b" " * (-(8 + len(text)) % 8)
    data = struct.pack(layout, *chain.from_iterable(values for _, values in columns.values()))
    return b"".join((MAGIC, struct.pack("<I", len(text)), text, padding, data))


@lru_cache(64)
def _layout(columns: tuple[tuple[str, str, int], ...]) -> tuple[str, str]:
    """(how the header tells it, how ``struct`` packs it). Often as it was a moment ago."""
    layout = ["<"]
    for _, dtype, count in columns:
        if count:
            code, size = _CODES[dtype]
            layout.append(f"{count}{code}{-count * size % 8}x")
    return _as_json(columns), "".join(layout)


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Inverse of ``pack``; also takes gzip.

    Raises:
        ValueError: not such bytes.
    """
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if data[:4] != MAGIC:
        raise ValueError("not a packed trace.")
    (length,) = struct.unpack_from("<I", data, 4)
    header = json.loads(data[8 : 8 + length])
    offset = 8 + length + (-(8 + length) % 8)
    columns: dict[str, np.ndarray] = {}
    for name, dtype, count in header.pop("columns"):
        columns[name] = np.frombuffer(data, DTYPES[dtype], count, offset)
        size = columns[name].nbytes
        offset += size + (-size % 8)
    return header, columns


def squeeze(data: bytes) -> bytes:
    """gzip without a time stamp, so that equal traces give equal bytes."""
    return gzip.compress(data, compresslevel=6, mtime=0)
