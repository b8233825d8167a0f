"""Resume: find the last good checkpoint, check that it is of this model, and fill a trainer with it.

On the plan that wrote the checkpoint, training continues bit for bit as if it had not stopped. On another plan the same numbers are in other
places, and sums are rounded in another order (`load`). Nothing of a trainer is changed before everything has been checked: the hash of every file,
which the ranks share out, and that the tensors are those of the model (`fit`).

A checkpoint that is damaged or has no manifest is set aside once an intact older one was found. If none is intact, the resume stops and nothing
is renamed: the first weights are never used in their place. An error of the disk stops it too, since the checkpoint may be intact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.fit import check_fits
from meshwright.training.checkpoint.folder import checkpoints_of
from meshwright.training.checkpoint.load import load
from meshwright.training.checkpoint.manifest import Manifest, check_files, has_manifest, read_manifest
from meshwright.training.checkpoint.state import Training
from meshwright.training.checkpoint.together import is_first, on_first, together

Notify = Callable[[str], None]


@dataclass
class Resumed:
    """The loaded state, and what could not be carried over."""

    path: Path
    manifest: Manifest
    messages: list[str] = field(default_factory=list)


def resume(
    trainer: Training, source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """Fill a trainer from `source`: one checkpoint, or a run folder, of which the last good checkpoint is used. None if a run folder
    has no checkpoint; raises MW-CKPT-019 if it has some and none is intact. A collective of a group of all ranks on the CPU; `notify` gets
    messages on the first rank.

    A run folder must be that of this run: what a killed process of it left unfinished is cleaned up."""
    on_first(lambda: folder.restore_replaced(checkpoints_of(source)), group)
    found = open_checkpoint(source, group, notify)
    if found is None:
        return None
    on_first(lambda: folder.recover(checkpoints_of(source)), group)
    together(lambda: check_fits(trainer, found.manifest), group)
    found.messages += load(trainer, found.path, found.manifest)
    for text in found.messages if is_first(group) else ():
        notify(text)
    return found


def open_checkpoint(
    source: Path, group: ProcessGroup | None = None, notify: Notify = lambda text: None
) -> Resumed | None:
    """The checkpoint to load, with its files verified; the ranks share the work. A checkpoint that was named must be good; of a run
    folder the last good one is used, and those after it are set aside."""
    source = checkpoints_of(source)
    if on_first(lambda: has_manifest(source), group):
        verify_together(source, group)
        return Resumed(source, read_manifest(source))
    unusable: dict[str, str] = {}
    for name in on_first(lambda: [path.name for _, path in reversed(folder.step_folders(source))], group):
        try:
            verify_together(source / name, group)
        except MeshwrightError as error:
            if error.code not in UNUSABLE:
                raise
            unusable[name] = f"{UNUSABLE[error.code]} ({error.why})"
            continue
        for other, reason in unusable.items():
            aside = on_first(partial(set_aside, source / other), group)
            if is_first(group):
                notify(f"{other} is {reason}; it is now {aside}, and the checkpoint before it is used")
        return Resumed(source / name, read_manifest(source / name))
    unusable |= on_first(lambda: {path.name: reason for path, reason in never_used(source)}, group)
    if any(not name.startswith(folder.WRITING) for name in unusable):
        raise none_intact(source, unusable)
    return None


UNUSABLE = {"MW-CKPT-001": "incomplete", "MW-CKPT-002": "damaged"}


def never_used(root: Path) -> Iterator[tuple[Path, str]]:
    """List folders that cannot be resumed, with reasons: saves that were not completed, checkpoints set aside."""
    yield from (
        (path, "incomplete (its save was not completed)") for _, path in folder.step_folders(root, folder.WRITING)
    )
    yield from ((path, "set aside by an earlier resume") for _, path in folder.step_folders(root, folder.DAMAGED))


def none_intact(source: Path, unusable: Mapping[str, str]) -> MeshwrightError:
    """The error of a resume that found no intact checkpoint, although there are or were some; `unusable`: the reason by name."""
    reasons = "; ".join(f"{name} is {reason}" for name, reason in unusable.items())
    return MeshwrightError(
        "MW-CKPT-019",
        f"no checkpoint in '{source}' can be resumed",
        why=f"{reasons[:2000]}. Nothing was changed",
        fix="restore a checkpoint from a copy, or begin again at step 0 with --from-scratch, which keeps these files under other names",
    )


def set_aside(path: Path) -> str:
    return folder.set_aside(path).name


def verify_together(path: Path, group: ProcessGroup | None) -> None:
    """Read and hash the files of a checkpoint, each on one rank of the group; all ranks raise if one is damaged."""
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)

    def check() -> None:
        manifest = read_manifest(path)
        check_files(path, manifest, sorted(manifest.files)[rank::ranks])

    together(check, group)
