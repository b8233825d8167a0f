"""Save a state: all ranks write their boxes, rank 0 writes the manifest and gives the folder its name.

    1  folder     rank 0 creates `.writing-step-…`; every rank checks that it sees it
    2  boxes      each rank writes its file (`store`)
    3  hashes     each rank reads its file back, hashes it and waits until it is on the disk
    4  manifest   rank 0 checks that it sees every file, writes the manifest, renames the folder, deletes old checkpoints

If a rank fails at any point, all ranks raise the same error, and the folder is removed: earlier checkpoints are not touched.

**While training continues** (`Saver`): the state is copied to the host at the end of a step, and a thread writes the copy.

    step 1000 ends   copy to the host          the loop waits: bytes / memory bandwidth
    steps 1001 …     write, hash, fsync, rename     a thread, with a process group that nothing else uses
    next save        wait for the thread       only where writing takes longer than the steps between two saves

The copies are reused by the next save. On a GPU they are in pinned memory and all copies are issued before the loop waits once. Saves
start in the same order on every rank, so that the collectives of the thread match. A save that fails does not end the training: the error is
reported, and the next save tries again. The last save of a run waits, and raises. The hook `Checkpoints` saves every n steps, and at the end.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.folder import is_first, on_first, together
from meshwright.training.checkpoint.manifest import Manifest, SavedFile, SavedTensor, file_hash
from meshwright.training.checkpoint.state import (
    OPTIMIZER,
    SavableTrainer,
    TrainerState,
    expected_states,
    replicas_of,
    state_of,
)
from meshwright.training.checkpoint.store import BoxEntry, write
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.loop import Trainer
from meshwright.units import Json, format_bytes, format_seconds
from meshwright.version import VERSION


def run_description(trainer: SavableTrainer, data: Json | None = None) -> Json:
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
        "base": parallel.base,
        "versions": {"meshwright": VERSION, "torch": torch.__version__, "safetensors": safetensors_version()},
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
    root: Path, state: TrainerState, description: Json, group: ProcessGroup | None, keep: int = 0
) -> tuple[Path, int]:
    """Save a state under `root`; a collective of a group on the CPU. Returns the checkpoint and its bytes. With `keep`, only
    the newest checkpoints are kept."""
    target = root / f"{folder.WRITING}{folder.step_name(state.step)}"
    try:
        on_first(lambda: str(folder.begin(root, state.step)), group)
        together(lambda: check_visible(target), group)
        files, tensors = write_boxes(state, target, group)
        records = together(lambda: {"files": hashed(target, files), "numbers": state.numbers}, group)
        size = on_first(lambda: publish(target, state, description, tensors, records, keep), group)
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
    state: TrainerState, target: Path, group: ProcessGroup | None
) -> tuple[list[str], dict[str, SavedTensor]]:
    """Write this rank's boxes. Returns the files of this rank, and on rank 0 the boxes of all ranks."""
    try:
        return write([entry for entry in state.entries if entry.written], target, group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        raise failed(target, f"Rank {rank}: {str(why)[:300]}") from None


def failed(target: Path, why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-CKPT-007",
        f"cannot save '{target.parent / target.name.removeprefix(folder.WRITING)}'",
        why=why,
        fix="free disk space, or lower checkpoint.keep; earlier checkpoints are not touched",
    )


def hashed(target: Path, names: list[str]) -> dict[str, list[Any]]:
    """Size and hash of each file, once it is on the disk."""
    for name in names:
        folder.sync(target / name)
    return {name: [(target / name).stat().st_size, file_hash(target / name)] for name in names}


def publish(
    target: Path,
    state: TrainerState,
    description: Json,
    tensors: dict[str, SavedTensor],
    records: list[Json],
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


TIMEOUT = timedelta(hours=1)  # how long the ranks' threads wait for the slowest disk
Report = Callable[..., None]  # as `RunFolder.event`: kind, step, text, further fields


def checkpoint_group() -> ProcessGroup | None:
    """A process group for checkpoints alone, on the CPU; a collective of all ranks. None for a single process."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    return distributed.new_group(backend="gloo", timeout=TIMEOUT)


class Saver:
    """Saves the state of a trainer under `root`. On the first rank `report` gets events, and `sync` is called before a checkpoint is
    complete: it makes the rows of its steps durable. `stalled_s` is what saves cost the loop."""

    def __init__(
        self,
        trainer: Trainer,
        root: Path,
        group: ProcessGroup | None,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        data: Json | None = None,
        report: Report = lambda kind, step, text, **fields: None,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        self.trainer, self.root, self.group = trainer, root, group
        self.keep, self.asynchronous = keep, asynchronous
        self.description = run_description(trainer, data)
        self.report: Report = report if is_first(group) else lambda kind, step, text, **fields: None
        self.sync = sync if is_first(group) else lambda: None
        self.stalled_s = 0.0
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: MeshwrightError | None = None

    def check(self) -> None:
        """Before the first step, on all ranks: raise if a checkpoint could not be written, and clean up after a killed run."""
        safetensors_version()
        on_first(lambda: folder.check_writable(self.root), self.group)
        on_first(lambda: folder.recover(self.root), self.group)
        size = sum(together(self.expected_bytes, self.group))
        on_first(lambda: folder.check_room(self.root, size, self.keep), self.group)

    def expected_bytes(self) -> int:
        """Bytes that this rank writes per save, with the states that the optimizer is going to have."""
        state, parallel = state_of(self.trainer), self.trainer.parallel
        if any(self.trainer.optimizer.state.values()):
            return state.bytes
        moments = {
            piece.name: sum(kind.startswith(OPTIMIZER) for kind in expected_states(piece, parallel.workload.optimizer))
            for piece in parallel.updated
            if piece.parameter.requires_grad
        }
        written = [(e.key.rpartition("weight/")[2], e.tensor.nbytes) for e in state.entries if e.written]
        return state.bytes + sum(moments.get(name, 0) * size for name, size in written)

    def save(self, wait: bool = False) -> None:
        """Save the state of this moment, between two steps; on all ranks. With `wait` the save is complete when this returns,
        and raises if it failed."""
        began = time.perf_counter()
        self.finish()
        state = self.copy_to_host(state_of(self.trainer))
        self.report("checkpoint-begun", state.step, f"saving step {state.step}")
        if self.asynchronous and not wait:
            self._thread = threading.Thread(target=self._save, args=(state,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._save(state)
        self.stalled_s += time.perf_counter() - began
        if wait and self._error is not None:
            raise self._error

    def finish(self) -> MeshwrightError | None:
        """Wait for the save in progress. Returns its error, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def copy_to_host(self, state: TrainerState) -> TrainerState:
        """A copy of the state that later steps do not change; only what this rank writes."""
        written = [entry for entry in state.entries if entry.written]
        copies = [replace(entry, tensor=self._copy(entry)) for entry in written]
        self._copies = {(entry.key, entry.start): entry.tensor for entry in copies}
        if any(entry.tensor.is_cuda for entry in written):
            torch.cuda.current_stream().synchronize()
        return TrainerState(state.step, copies, state.numbers)

    def _copy(self, entry: BoxEntry) -> Tensor:
        source, copy = entry.tensor.detach(), self._copies.get((entry.key, entry.start))
        if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return copy.copy_(source, non_blocking=source.is_cuda)

    def _save(self, state: TrainerState) -> None:
        began = time.perf_counter()
        self._error = None
        try:
            self.sync()
            path, size = save(self.root, state, self.description, self.group, self.keep)
        except MeshwrightError as error:
            self._fail(state.step, error)
        except Exception as error:  # a lost rank, or an error of torch: the loop gets it too, in its next collective
            why = f"{type(error).__name__}: {error}"[:300]
            self._fail(state.step, MeshwrightError("MW-CKPT-007", f"cannot save step {state.step}", why=why))
        else:
            seconds = time.perf_counter() - began
            text = f"saved {path.name}: {format_bytes(size)} in {format_seconds(seconds)}"
            self.report("checkpoint-finished", state.step, text, bytes=size, seconds=seconds)

    def _fail(self, step: int, error: MeshwrightError) -> None:
        self._error = error
        self.report("checkpoint-failed", step, f"step {step} was not saved: {error}", code=error.code)


class Checkpoints(Hook):
    """Saves after every n-th step while training continues (0: no saves), and after the last one, which is complete when `finish` returns,
    unless `Saver.finish` returns its error."""

    def __init__(self, saver: Saver, every: int) -> None:
        self.saver, self.every = saver, every
        self.requested_step: int | None = None  # the last step that was saved, or is being saved

    def start(self, trainer: Any) -> None:
        if self.requested_step is None:
            self.saver.check()

    def after_step(self, trainer: Any, record: StepRecord) -> StepRecord | None:
        if trainer.policy.error is not None:
            return None  # gradients were not finite: the run goes back or stops, and the state of this step is not one to go back to
        if self.every and trainer.step % self.every == 0:
            self.requested_step = trainer.step
            self.saver.save()
        return None

    def finish(self, trainer: Any) -> None:
        failed = self.saver.finish() is not None
        if self.requested_step != trainer.step or failed:
            self.requested_step = trainer.step
            with suppress(MeshwrightError):
                self.saver.save(wait=True)
