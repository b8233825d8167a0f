"""Full tensors of a checkpoint one after the other: for conversions, which need no ranks and little memory.

A converted checkpoint has the format of one that a run wrote, with one box per tensor and files of a few gigabytes, in the order in which
the tensors came. At most one file's tensors are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import MeshwrightError, cannot_write
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.manifest import Manifest, SavedBox, SavedFile, SavedTensor, file_hash
from meshwright.training.checkpoint.store import Entry, read

FILE_BYTES = 4 << 30
HEADER = {"format": "pt", "DCP_VERSION": "1.0"}  # what torch's distributed checkpoint writes and reads


def read_full(path: Path, manifest: Manifest, key: str) -> torch.Tensor:
    """One full tensor of a checkpoint, in the dtype in which it was saved."""
    saved = manifest.tensors[key]
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    read(path, manifest, [Entry(key, saved.shape, (0,) * len(saved.shape), tensor)])
    return tensor


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    description: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> Manifest:
    """Write full tensors as a checkpoint at `out`, which must not exist. `description` are the other fields of the manifest."""
    if out.exists():
        raise MeshwrightError(
            "MW-CKPT-014", f"'{out}' exists", why="A conversion overwrites nothing", fix="--out with another folder"
        )
    written = out.parent / f"{folder.WRITING}{out.name}"
    saved: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    try:
        folder.abandon(written)
        written.mkdir(parents=True)
        group: dict[str, torch.Tensor] = {}
        for key, tensor in tensors:
            if group and sum(t.nbytes for t in group.values()) + tensor.nbytes > file_bytes:
                _write_file(written, group, saved, files)
                group = {}
            group[key] = tensor.contiguous()
        _write_file(written, group, saved, files)
        manifest = Manifest(tensors=saved, files=files, **description)
        folder.publish(written, manifest, out.name)
    except OSError as error:
        raise cannot_write(error.filename or out, error) from error
    finally:
        folder.abandon(written)
    return manifest


def _write_file(
    written: Path, group: dict[str, torch.Tensor], saved: dict[str, SavedTensor], files: dict[str, SavedFile]
) -> None:
    from safetensors.torch import save_file

    name = f"shard-{len(files) + 1:05d}-model-00001-of-00001.safetensors"
    offsets = {key: {"saved_offsets": [0] * tensor.ndim} for key, tensor in group.items()}
    save_file(group, written / name, metadata={**HEADER, "DCP_SHARDING_INFO": json.dumps(offsets)})
    folder.sync(written / name)
    files[name] = SavedFile((written / name).stat().st_size, file_hash(written / name))
    for key, tensor in group.items():
        shape = tuple(tensor.shape)
        box = SavedBox(name, (0,) * tensor.ndim, shape)
        saved[key] = SavedTensor(str(tensor.dtype).removeprefix("torch."), shape, (box,))
