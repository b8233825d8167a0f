"""Megatron's indexed datasets: PREFIX.bin has the tokens, PREFIX.idx says where sequences and documents begin.

The index, little-endian:

    bytes 0–8     "MMIDIDX\\0\\0"
    8 bytes       version, 1
    1 byte        type of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6 and 7 are floats)
    8 bytes       number of sequences, S
    8 bytes       number of document boundaries, documents + 1
    S × int32     length of each sequence, in tokens
    S × int64     first byte of each sequence in PREFIX.bin
    … × int64     number of the first sequence of each document, and S at the end

A document is usually one sequence. We need documents that follow each other without gaps, as Megatron's own tools write them.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from meshwright.errors import MeshwrightError

MAGIC = b"MMIDIDX\x00\x00"
PREAMBLE = struct.Struct("<QBQQ")  # version, type, sequences, document boundaries
TYPES = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_pair(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens as a memory map, and the document offsets."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
        size = data.stat().st_size
    except OSError as error:
        name = error.filename or str(prefix)
        raise MeshwrightError("MW-DATA-003", f"cannot read '{name}'", why=error.strerror or str(error)) from None
    dtype, lengths, pointers, first = read_index(index, raw)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    if not len(ends) or not ends[-1]:
        raise damaged(index, "It contains no tokens")
    if (pointers != starts * dtype.itemsize).any():
        raise damaged(index, "Its sequences do not follow each other without gaps")
    if size != ends[-1] * dtype.itemsize:
        raise damaged(data, f"It has {size:,} bytes; the index describes {ends[-1] * dtype.itemsize:,}")
    if first[0] != 0 or first[-1] != len(lengths) or (first[1:] < first[:-1]).any():
        raise damaged(index, "Its documents do not cover its sequences in order")
    offsets = np.append(starts, ends[-1])[first]
    return np.memmap(data, dtype, "r"), offsets


def read_index(index: Path, raw: np.ndarray) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Type of the tokens, lengths and first bytes of the sequences, and the first sequence of each document."""
    start = len(MAGIC) + PREAMBLE.size
    if len(raw) < start or raw[: len(MAGIC)].tobytes() != MAGIC:
        raise MeshwrightError(
            "MW-DATA-003", f"'{index}' is not an index of Megatron", why="It does not begin with MMIDIDX"
        )
    version, code, sequences, boundaries = PREAMBLE.unpack(raw[len(MAGIC) : start].tobytes())
    if version != 1 or code not in TYPES:
        raise MeshwrightError(
            "MW-DATA-005",
            f"'{index}' has version {version} and type {code}",
            why=f"Version 1 and the integer types {', '.join(map(str, TYPES))} are supported",
        )
    sizes = (4 * sequences, 8 * sequences, 8 * boundaries)
    if boundaries < 2 or len(raw) < start + sum(sizes):
        raise damaged(index, f"It has {len(raw):,} bytes and describes {sequences:,} sequences")
    parts = []
    for size, dtype in zip(sizes, ("<i4", "<i8", "<i8"), strict=True):
        parts.append(np.frombuffer(raw[start : start + size].tobytes(), dtype))
        start += size
    lengths, pointers, first = parts
    if (lengths < 0).any():
        raise damaged(index, "A sequence has a negative length")
    return np.dtype(TYPES[code]), lengths, pointers, first


def damaged(path: Path, why: str) -> MeshwrightError:
    return MeshwrightError("MW-DATA-004", f"Megatron's file '{path}' is damaged", why=why)
