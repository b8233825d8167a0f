"""The safetensors format: named tensors in one file, of which any slice is read without the others.

    8 bytes      length of the header, little-endian
    header       JSON: {"__metadata__": {...}, name: {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}}
    data         the tensors one after the other, row-major, without gaps

A file is foreign until its header is checked: lengths, offsets and shapes must agree with each other and with the size of the file,
so that a truncated or hostile file is an error before any tensor is read. Slices are copied out of a memory map: only the pages they
touch are read from the disk. `bytes_read` counts the bytes of the slices.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.errors import MeshwrightError, cannot_write

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}  # numpy has no bf16 or fp8: elements are copied as integers
LENGTH_BYTES = 8
MOST_HEADER = 100_000_000  # bytes
MOST_ELEMENTS = 2**48


class Entry(NamedTuple):
    """A tensor of a file; `start` is its first byte, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class SafetensorsFile:
    """The tensors of one file by name. The file is mapped into memory at the first read."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    bytes_read: int = 0
    _data: np.ndarray | None = None

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFile:
        """Read and check the header."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                if size < LENGTH_BYTES or not 0 < length <= min(MOST_HEADER, size - LENGTH_BYTES):
                    raise damaged(path, f"its header would have {length:,} bytes and the file has {size:,}")
                raw = file.read(length)
        except OSError as error:
            raise MeshwrightError("MW-HF-011", f"'{path}' cannot be read", why=error.strerror or str(error)) from None
        entries, metadata = parse_header(path, raw, LENGTH_BYTES + length, size)
        return cls(path, entries, metadata)

    def read(self, name: str, box: tuple[slice, ...] = ()) -> torch.Tensor:
        """A copy of a slice of a tensor; without `box` the whole tensor."""
        entry = self.entries[name]
        if self._data is None:
            self._data = self._map()
        width = entry.dtype.itemsize
        flat = self._data[entry.start : entry.start + entry.nbytes].view(BITS[width])
        part = np.array(flat.reshape(entry.shape)[box], order="C", copy=True)
        self.bytes_read += part.nbytes
        return torch.from_numpy(part.reshape(-1).view(np.uint8)).view(entry.dtype).reshape(part.shape)

    def _map(self) -> np.ndarray:
        with self.path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def parse_header(path: Path, raw: bytes, data_start: int, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors and the metadata of a header. `data_start`: the first byte after it; `size`: bytes of the whole file."""
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise damaged(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int]] = []
    for name, fields in header.items():
        dtype, shape, (start, stop) = parse_entry(path, name, fields)
        entries[name] = entry = Entry(dtype, shape, data_start + start)
        if stop - start != entry.nbytes:
            raise damaged(path, f"'{name[:200]}' has {stop - start:,} bytes and its shape needs {entry.nbytes:,}")
        spans.append((start, stop))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise damaged(path, f"there is a gap or an overlap at byte {end:,} of its data")
        end = stop
    if data_start + end != size:
        raise damaged(path, f"its tensors need {data_start + end:,} bytes and the file has {size:,}")
    return entries, metadata if isinstance(metadata, dict) else {}


def parse_entry(path: Path, name: str, fields: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """dtype, shape and offsets of one tensor."""
    if not isinstance(fields, dict):
        raise damaged(path, f"the entry of '{name[:200]}' is not a JSON object")
    shape, offsets, dtype = sizes_of(fields.get("shape")), sizes_of(fields.get("data_offsets")), fields.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or math.prod(shape) > MOST_ELEMENTS:
        raise damaged(path, f"the entry of '{name[:200]}' has no valid shape and offsets")
    if dtype not in DTYPES:
        raise MeshwrightError(
            "MW-HF-012", f"'{name[:200]}' in '{path}' has the dtype {str(dtype)[:40]}", valid=list(DTYPES)
        )
    return DTYPES[dtype], shape, (offsets[0], offsets[1])


def sizes_of(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers within bounds; None if it is anything else."""
    valid = isinstance(value, list) and all(type(n) is int and 0 <= n <= MOST_ELEMENTS * 8 for n in value)
    return tuple(value) if valid else None


def damaged(path: Path, why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-HF-011",
        f"'{path}' is not a safetensors file, or it is damaged",
        why=why[0].upper() + why[1:],
        fix="download or copy it again",
    )


class Described(NamedTuple):
    """A tensor to write: its name, dtype and shape are known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, tensors: Iterable[Described], value: Callable[[str], torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write a file tensor by tensor: `value(name)` is called once for each, so that one tensor is in memory at a time."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for t in tensors:
        header[t.name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [start, start + t.nbytes]}
        start += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            for t in tensors:
                data = value(t.name).to(t.dtype).contiguous()
                assert tuple(data.shape) == t.shape, f"{t.name}: {tuple(data.shape)} is not {t.shape}"
                file.write(data.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from error
