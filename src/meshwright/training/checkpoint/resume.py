"""Resume: find the last good checkpoint, check that it is of this model, and fill a trainer with it.

On the plan that wrote the checkpoint, training continues bit for bit as if it had not stopped. On another plan the same numbers are in other
places, and sums are rounded in another order (`load`). Nothing of a trainer is changed before everything has been checked: the hash of every file,
which the ranks share out, and that the tensors are those of the model (`fit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.fit import check_fits
from meshwright.training.checkpoint.load import load
from meshwright.training.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest
from meshwright.training.checkpoint.together import is_first, on_first, together
from meshwright.training.loop import Trainer

Notify = Callable[[str], None]


@dataclass
class Resumed:
    """What was loaded, and what could not be carried over."""

    path: Path
    manifest: Manifest
    messages: list[str] = field(default_factory=list)


def resume(
    trainer: Trainer, source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """Fill a trainer from `source`: one checkpoint, or a run folder, of which the last good checkpoint is used. None if a run folder
    has no checkpoint. A collective of a group of all ranks on the CPU; `notify` gets messages on the first rank.

    A run folder must be that of this run: what a killed process of it left unfinished is cleaned up."""
    on_first(lambda: folder.recover(checkpoints_of(source)), group)
    found = open_checkpoint(source, group, notify)
    if found is None:
        return None
    together(lambda: check_fits(trainer, found.manifest), group)
    found.messages += load(trainer, found.path, found.manifest)
    for text in found.messages if is_first(group) else ():
        notify(text)
    return found


def open_checkpoint(
    source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """The checkpoint to load, with its files verified; the ranks share the work. A checkpoint that was named must be good; of a run
    folder damaged ones are set aside and the last good one is used."""
    source = checkpoints_of(source)
    if on_first(lambda: (source / MANIFEST).exists(), group):
        verify_together(source, group)
        return Resumed(source, read_manifest(source))
    while True:
        name = on_first(lambda: next((path.name for _, path in reversed(folder.complete(source))), ""), group)
        if not name:
            return None
        path = source / name
        try:
            verify_together(path, group)
            return Resumed(path, read_manifest(path))
        except MeshwrightError as error:
            if error.code != "MW-CKPT-002":
                raise
            aside = on_first(partial(set_aside, path), group)
            if is_first(group):
                notify(f"{name} is damaged ({error.why}); it is now {aside}, and the checkpoint before it is used")


def checkpoints_of(source: Path) -> Path:
    """The folder of checkpoints in a run folder; other folders as they are."""
    inner = source / folder.CHECKPOINTS
    return inner if inner.is_dir() else source


def set_aside(path: Path) -> str:
    return folder.set_aside(path).name


def verify_together(path: Path, group: ProcessGroup | None) -> None:
    """Read and hash the files of a checkpoint, each on one rank of the group; all ranks raise if one is damaged."""
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)

    def check() -> None:
        manifest = read_manifest(path)
        check_files(path, manifest, sorted(manifest.files)[rank::ranks])

    together(check, group)
