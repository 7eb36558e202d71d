"""Named columns of numbers as bytes, for the browser; ``decode.js`` is the other half.

    "MBT1" | uint32 header length | header (JSON, UTF-8) | columns, each starting at a multiple of 8

The header's ``columns`` lists ``[name, dtype, count]`` in the order of the bytes. Little endian.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

MAGIC = b"MBT1"
DTYPES = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32, "f8": np.float64}


def pack(header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """One block of bytes; the same input always gives the same."""
    listed = [[name, array.dtype.str[1:], array.size] for name, array in columns.items()]
    text = json.dumps(
        {**header, "columns": listed}, separators=(",", ":"), ensure_ascii=False
    ).encode()
    parts = [MAGIC, struct.pack("<I", len(text)), text, b" " * (-(8 + len(text)) % 8)]
    for array in columns.values():
        data = array.tobytes()
        parts += [data, b"\0" * (-len(data) % 8)]
    return b"".join(parts)


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
