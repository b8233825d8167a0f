"""The folder of a run's checkpoints: written under another name, made durable, then renamed.

    step-00001000/            a complete checkpoint: it has this name only after all of it is on the disk
    .writing-step-00001000/   a checkpoint that is being written, or was when its run was killed
    .replaced-step-00001000/  the previous checkpoint of a step that is saved again, until the new one has its name
    damaged-step-00001000/    set aside: damaged, or without a manifest
    unused-step-00001000/     set aside by `train --resume RUN --from-scratch`

The order of a save is: write the files, fsync each, write the manifest, fsync it and the folder, rename, fsync the parent. A rename is
atomic, so that after a kill or a power failure at any point each name either has all of its content or does not exist.
Nothing here imports torch.

**Ranks together** (`together`): each does its part, all learn of every result, and if one failed all raise the same error.

Without it a rank whose disk is full would raise while the other ranks wait for it in the next collective until a timeout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.describe.run_folder import CHECKPOINTS
from meshwright.errors import MeshwrightError, cannot_write, listed
from meshwright.training.checkpoint.manifest import MANIFEST, Manifest, has_manifest, unreadable
from meshwright.units import Json, format_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = re.compile(r"step-(\d{8,})")
WRITING, REPLACED, DAMAGED, UNUSED = ".writing-", ".replaced-", "damaged-", "unused-"
SLACK = 1 << 24  # bytes of the disk that a save leaves free


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def entries(root: Path) -> list[Path]:
    """List a folder; empty if there is none. Raises MW-CKPT-018 if the disk cannot be read."""
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(root, error) from None


def step_folders(root: Path, prefix: str = "") -> list[tuple[int, Path]]:
    """The folders of checkpoints by step, oldest first, complete or not; with a `prefix`, those whose name begins with it."""
    found = [(NAME.fullmatch(p.name.removeprefix(prefix)), p) for p in entries(root) if p.name.startswith(prefix)]
    return sorted((int(match[1]), path) for match, path in found if match)


def complete(root: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run by step, oldest first."""
    return [(step, path) for step, path in step_folders(root) if has_manifest(path)]


def checkpoints_in(source: Path, incomplete: bool = False) -> list[Path]:
    """The complete checkpoints of a run folder or a folder of checkpoints, oldest first, or `source` itself if it is one. With
    `incomplete`, also folders that lack a manifest. Raises if there is none."""
    if has_manifest(source):
        return [source]
    root = checkpoints_of(source)
    found = step_folders(root)
    usable = found if incomplete else complete(root)
    if not usable:
        missing = "It is a file" if root.exists() else "There is no such folder"
        why = "It has no folder step-…" if root.is_dir() else missing
        if found:
            why = f"{listed([path.name for _, path in found])}: incomplete, without {MANIFEST}"
        raise MeshwrightError("MW-CKPT-001", f"'{source}' contains no complete checkpoint", why=why)
    return [path for _, path in usable]


def checkpoints_of(source: Path) -> Path:
    """The folder of checkpoints in a run folder; other folders as they are."""
    inner = source / CHECKPOINTS
    return inner if inner.is_dir() else source


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
    if final.exists() and not has_manifest(final):
        set_aside(final)  # we cannot tell what is in it
    elif final.exists():
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


def abandon(path: Path) -> None:
    """Remove a folder, if it is there: of a save that failed, or that is no longer needed."""
    shutil.rmtree(path, ignore_errors=True)


def recover(root: Path) -> None:
    """Finish or undo what a killed run left: only the one process that owns the run may call it."""
    restore_replaced(root)
    for path in entries(root):
        if path.name.startswith((REPLACED, WRITING)):
            abandon(path)


def restore_replaced(root: Path) -> None:
    """Give a checkpoint its name back whose run was killed before the one that replaces it had the name."""
    for path in entries(root):
        if path.name.startswith(REPLACED) and not (final := root / path.name.removeprefix(REPLACED)).exists():
            path.rename(final)


def set_aside(path: Path, prefix: str = DAMAGED) -> str:
    """Rename a file or folder, so that it is not used or overwritten and can be examined. Returns its new name."""
    name, number = f"{prefix}{path.name}", 1
    while path.with_name(name).exists():
        number += 1
        name = f"{prefix}{path.name}-{number}"
    path.rename(path.with_name(name))
    return name


def set_all_aside(root: Path) -> None:
    """Rename every checkpoint, complete or not, of a run that begins again at step 0."""
    restore_replaced(root)
    for _, path in (*step_folders(root), *step_folders(root, DAMAGED)):
        set_aside(path, UNUSED)


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
    folder = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    present = len(complete(root))
    count, fewest = (max(1, number + 1 - present) for number in (max(1, keep), 1))
    if free < count * size + SLACK:
        raise MeshwrightError(
            "MW-CKPT-006",
            f"the disk of '{root}' has {format_bytes(free)} free",
            why=f"A checkpoint needs {format_bytes(size)}, and {count} more will be on it at once (checkpoint.keep={keep})",
            fix=f"--set checkpoint.keep={int(free >= fewest * size + SLACK)} (0: no checkpoints), or --out on another disk",
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


def together(work: Callable[[], Any], group: ProcessGroup | None) -> list[Any]:
    """Call `work` on every rank of a group and return all results, which must be JSON, on every rank."""
    from meshwright.comm.bench.backends import gather_texts

    try:
        result: Json = {"value": work()}
    except (MeshwrightError, OSError) as error:
        cause = error if isinstance(error, MeshwrightError) else cannot_write(error.filename or "the checkpoint", error)
        result = {"error": {**cause.as_dict(), "exit_code": cause.exit_code}}
    found = [json.loads(text) for text in gather_texts(json.dumps(result), group)]
    for each in found:
        if "error" in each:
            raise MeshwrightError(**each["error"])
    return [each["value"] for each in found]


def on_first(work: Callable[[], Any], group: ProcessGroup | None) -> Any:
    """Call `work` on the first rank of a group and return its result on every rank."""
    return together(work if is_first(group) else lambda: None, group)[0]


def is_first(group: ProcessGroup | None) -> bool:
    return group is None or group.rank() == 0
