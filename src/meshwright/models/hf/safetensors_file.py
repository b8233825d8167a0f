"""Safetensors files: named tensors in one file, of which any slice is read without the others.

    8 bytes      length of the header, little-endian
    header       JSON: {"__metadata__": {...}, name: {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}}
    data         the tensors one after the other, row-major, without gaps

`safetensors.safe_open` reads them: it checks lengths, offsets and shapes against each other and against the size of the file before any
tensor is read, so a truncated or hostile file is an error, and copies slices out of a memory map. `bytes_read` counts the bytes of the
slices. Files are written here, tensor by tensor: the package's own writer needs all tensors of a file in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError, cannot_write

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8


class StoredTensor(NamedTuple):
    """A tensor of a file, or one to write: its name, dtype and shape are known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class SafetensorsFile:
    """The tensors of one file by name."""

    path: Path
    entries: dict[str, StoredTensor]
    data: Any  # the open file of `safetensors`
    bytes_read: int = 0

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFile:
        """Read and check the header."""
        from safetensors import SafetensorError, safe_open

        try:
            data = safe_open(path, framework="pt")
            slices = {name: data.get_slice(name) for name in data.keys()}  # noqa: SIM118  it is no dictionary
        except SafetensorError as error:
            raise damaged(Path(path), str(error)) from None
        except OSError as error:
            raise MeshwrightError("MW-HF-011", f"'{path}' cannot be read", why=error.strerror or str(error)) from None
        for name, part in slices.items():
            if part.get_dtype() not in DTYPES:
                what = f"'{name[:200]}' in '{path}' has the dtype {part.get_dtype()}"
                raise MeshwrightError("MW-HF-012", what, valid=list(DTYPES))
        entries = {n: StoredTensor(n, DTYPES[s.get_dtype()], tuple(s.get_shape())) for n, s in slices.items()}
        return cls(Path(path), entries, data)

    def read(self, name: str, box: tuple[slice, ...] = ()) -> Tensor:
        """A copy of a slice of a tensor; without `box` the whole tensor."""
        part = self.data.get_slice(name)[box].contiguous() if box else self.data.get_tensor(name)
        self.bytes_read += part.nbytes
        return part


def damaged(path: Path, why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-HF-011",
        f"'{path}' is not a safetensors file, or it is damaged",
        why=why[0].upper() + why[1:],
        fix="download or copy it again",
    )


def write_safetensors(
    path: Path, tensors: Iterable[StoredTensor], value: Callable[[str], Tensor], metadata: dict[str, str]
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
