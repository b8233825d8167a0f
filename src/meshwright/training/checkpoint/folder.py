"""The folder of a run's checkpoints: written under another name, made durable, then renamed.

    step-00001000/            a complete checkpoint: it has this name only after all of it is on the disk
    .writing-step-00001000/   a checkpoint that is being written, or was when its run was killed
    .replaced-step-00001000/  the previous checkpoint of a step that is saved again, until the new one has its name
    damaged-step-00001000/    set aside by a resume that found it damaged

The order of a save is: write the files, fsync each, write the manifest, fsync it and the folder, rename, fsync the parent. A rename is
atomic, so that after a kill or a power failure at any point each name either has all of its content or does not exist.
Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from meshwright.describe.run_folder import CHECKPOINTS
from meshwright.errors import MeshwrightError, cannot_write
from meshwright.training.checkpoint.manifest import MANIFEST, Manifest
from meshwright.units import format_bytes

NAME = re.compile(r"step-(\d{8,})")
WRITING, REPLACED, DAMAGED = ".writing-", ".replaced-", "damaged-"
SLACK = 1 << 24  # bytes of the disk that a save leaves free


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(root: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run by step, oldest first."""
    found = [(NAME.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match and (path / MANIFEST).is_file())


def checkpoints_in(source: Path) -> list[Path]:
    """The complete checkpoints of a run folder or a folder of checkpoints, oldest first, or `source` itself if it is one. Raises if there
    is none."""
    if (source / MANIFEST).is_file():
        return [source]
    root = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    found = [path for _, path in complete(root)]
    if not found:
        missing = "It is a file" if root.exists() else "There is no such folder"
        why = "It has no folder step-…" if root.is_dir() else missing
        raise MeshwrightError("MW-CKPT-001", f"'{source}' contains no checkpoint", why=why)
    return found


def begin(root: Path, step: int) -> Path:
    """A new, empty folder in which to write the checkpoint of a step."""
    path = root / f"{WRITING}{step_name(step)}"
    try:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def publish(written: Path, manifest: Manifest, name: str = "") -> Path:
    """Write the manifest of a checkpoint whose files are on the disk, and give the folder its final name, by default that of its step."""
    root = written.parent
    final = root / (name or step_name(manifest.step))
    with (written / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    sync(written)
    replaced = root / f"{REPLACED}{final.name}"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    sync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def abandon(written: Path) -> None:
    """Remove the folder of a save that failed."""
    shutil.rmtree(written, ignore_errors=True)


def recover(root: Path) -> None:
    """Finish or undo what a killed run left: only the one process that owns the run may call it."""
    for path in list(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(REPLACED):
            final = root / path.name.removeprefix(REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)
        elif path.name.startswith(WRITING):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not used again and can be examined."""
    target = path.with_name(f"{DAMAGED}{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{DAMAGED}{path.name}-{number}")
    path.rename(target)
    return target


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all complete checkpoints but the newest `keep`; at least one is kept. Returns what was deleted. A checkpoint is
    renamed before it is deleted, so that a kill in between leaves no half of one under its name."""
    deleted = []
    for _, path in complete(root)[: -max(1, keep)]:
        doomed = path.with_name(f"{WRITING}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):  # another process deleted it
            path.rename(doomed)
            deleted.append(path)
        shutil.rmtree(doomed, ignore_errors=True)
    return deleted


def check_room(root: Path, size: int, keep: int) -> None:
    """Raise MW-CKPT-006 if the disk has no room for the checkpoints that a run is going to keep, of `size` bytes each. While one
    is written, the `keep` before it still exist."""
    have = len(complete(root))
    count = max(1, max(1, keep) + 1 - have)
    folder = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < count * size + SLACK:
        raise MeshwrightError(
            "MW-CKPT-006",
            f"the disk of '{root}' has {format_bytes(free)} free",
            why=f"A checkpoint needs {format_bytes(size)}, and {count} more will be on it at once (checkpoint.keep={keep})",
            fix="--set checkpoint.keep=1 (0: no checkpoints), or --out on another disk",
            exit_code=3,
        )


def check_writable(root: Path) -> None:
    """Raise if checkpoints cannot be written to the folder; creates it."""
    probe = root / f"{WRITING}probe"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError as error:
        raise cannot_write(root, error) from error
