"""Conversions between formats of checkpoints, on one process, one tensor at a time.

source                                       target
a torch checkpoint with torchtitan's names   meshwright: a checkpoint that any plan resumes
a checkpoint of Meshwright                   meshwright: the same tensors whole, in a few files
a checkpoint of Meshwright                   a Transformers folder (`huggingface`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch

from meshwright.describe.model import Model
from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.folder import checkpoints_in
from meshwright.training.checkpoint.full import read_full, write_checkpoint
from meshwright.training.checkpoint.manifest import Manifest, check_files, read_manifest
from meshwright.training.checkpoint.torch_import import METADATA
from meshwright.training.checkpoint.torchtitan import convert_torchtitan

Progress = Callable[[float], None]  # the share that is done


def convert(source: Path, out: Path, model: Model | None = None, progress: Progress = lambda share: None) -> Path:
    """Convert a checkpoint to one of Meshwright and return the folder that was written. A torch checkpoint needs its `model`."""
    if not (source / METADATA).is_file():
        path = checkpoints_in(source)[-1]
        manifest = read_manifest(path)
        check_files(path, manifest)
        gather(path, manifest, out, progress)
    elif model is None:
        raise MeshwrightError(
            "MW-CKPT-012",
            "a torch checkpoint does not contain its model",
            why="Names and shapes of its tensors do not determine the number of heads",
            fix="--model with a catalog name, a config.json or a run file",
        )
    else:
        convert_torchtitan(source, model, out, progress)
    return out


def gather(path: Path, manifest: Manifest, out: Path, progress: Progress) -> None:
    """Write the tensors of all ranks whole, without what belongs to single ranks."""
    keys = [key for key in manifest.tensors if not key.startswith("rank-")]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, key in enumerate(keys):
            yield key, read_full(path, manifest, key)
            progress((number + 1) / len(keys))

    names = {field.name for field in fields(Manifest)} - {"tensors", "files"}
    description = {name: getattr(manifest, name) for name in names}
    description["plan"] = {}  # whole tensors belong to no plan
    description["versions"] = {**manifest.versions, "converted from": "meshwright"}
    write_checkpoint(out, tensors(), description)
