"""Save a state: all ranks write their boxes, rank 0 writes the manifest and gives the folder its name.

    1  folder     rank 0 creates `.writing-step-…`; every rank checks that it sees it
    2  boxes      each rank writes its file (`store`)
    3  hashes     each rank reads its file back, hashes it and waits until it is on the disk
    4  manifest   rank 0 checks that it sees every file, writes the manifest, renames the folder, deletes old checkpoints

If a rank fails at any point, all ranks raise the same error, and the folder is removed: earlier checkpoints are not touched.
"""

from __future__ import annotations

import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.manifest import Manifest, SavedFile, SavedTensor, file_hash
from meshwright.training.checkpoint.state import State, Training, replicas_of
from meshwright.training.checkpoint.store import write
from meshwright.training.checkpoint.together import is_first, on_first, together
from meshwright.version import VERSION


def run_description(trainer: Training, data: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a manifest that do not change during a run."""
    parallel = trainer.parallel
    return {
        "model": parallel.description,
        "plan": parallel.plan.as_dict(),
        "workload": parallel.workload.as_dict(),
        "order": parallel.mesh.layout.axes,
        "replicas": replicas_of(trainer),
        "seed": parallel.seed,
        "data": data or {},
        "versions": {
            "meshwright": VERSION,
            "torch": torch.__version__,
            "safetensors": safetensors_version(),
        },
    }


def safetensors_version() -> str:
    """Raises if safetensors is not installed."""
    try:
        return version("safetensors")
    except PackageNotFoundError:
        raise MeshwrightError(
            "MW-CKPT-013",
            "checkpoints need the package safetensors",
            why="torch writes them through it",
            fix="pip install safetensors",
        ) from None


def save(
    root: Path, state: State, description: dict[str, Any], group: ProcessGroup | None, keep: int = 0
) -> tuple[Path, int]:
    """Save a state under `root`; a collective of a group on the CPU. Returns the checkpoint and its bytes. With `keep`, only
    the newest checkpoints are kept."""
    target = root / f"{folder.WRITING}{folder.step_name(state.step)}"
    try:
        on_first(lambda: str(folder.begin(root, state.step)), group)
        together(lambda: check_visible(target), group)
        tensors, files = write_boxes(state, target, group)
        records = together(lambda: {"files": hashed(target, files), "numbers": state.numbers}, group)
        size = on_first(lambda: publish(target, state, description, tensors or {}, records, keep), group)
    except BaseException:
        if is_first(group):
            folder.abandon(target)
        raise
    return root / folder.step_name(state.step), size


def check_visible(path: Path) -> None:
    """Raise if this rank does not see the folder that rank 0 created."""
    with suppress(OSError):
        next(path.parent.iterdir(), None)  # a network file system then asks its server again
    if not path.is_dir():
        raise MeshwrightError(
            "MW-CKPT-009",
            f"a rank does not see the folder '{path.parent}' that rank 0 writes to",
            why="Checkpoints need a folder that all nodes share",
            fix="--out on a shared file system",
        )


def write_boxes(
    state: State, target: Path, group: ProcessGroup | None
) -> tuple[dict[str, SavedTensor] | None, list[str]]:
    """Write this rank's boxes. Returns the boxes of all ranks, on rank 0, and the files of this rank."""
    try:
        written = write([entry for entry in state.entries if entry.written], target, group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        raise failed(target, f"Rank {rank}: {str(why)[:300]}") from None
    return written.tensors, written.files


def failed(target: Path, why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-CKPT-007",
        f"cannot save '{target.parent / target.name.removeprefix(folder.WRITING)}'",
        why=why,
        fix="free disk space, or lower checkpoint.keep; earlier checkpoints are not touched",
    )


def hashed(target: Path, names: list[str]) -> dict[str, list[Any]]:
    """Size and hash of each file, once it is on the disk."""
    out: dict[str, list[Any]] = {}
    for name in names:
        path = target / name
        folder.sync(path)
        out[name] = [path.stat().st_size, file_hash(path)]
    return out


def publish(
    target: Path,
    state: State,
    description: dict[str, Any],
    tensors: dict[str, SavedTensor],
    records: list[dict[str, Any]],
    keep: int,
) -> int:
    """Rank 0: complete the checkpoint. Returns its bytes."""
    files = {name: SavedFile(*entry) for record in records for name, entry in record["files"].items()}
    for name, file in files.items():
        if not (target / name).is_file() or (target / name).stat().st_size != file.bytes:
            raise failed(target, f"rank 0 does not see the file {name}, {file.bytes:,} bytes, of another rank")
    manifest = Manifest(
        step=state.step,
        tensors=tensors,
        files=files,
        ranks=tuple(record["numbers"] for record in records),
        created=time.time(),
        **description,
    )
    folder.publish(target, manifest)
    if keep:
        folder.prune(target.parent, keep)
    return manifest.bytes
