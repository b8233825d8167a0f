"""Save while training continues: copy the state to the host at the end of a step, write the copy on a thread.

    step 1000 ends   copy to the host          the loop waits: bytes / memory bandwidth
    steps 1001 …     write, hash, fsync, rename     a thread, with a process group that nothing else uses
    next save        wait for the thread       only where writing takes longer than the steps between two saves

The copies are reused by the next save. On a GPU they are in pinned memory and all copies are issued before the loop waits once. Saves
start in the same order on every rank, so that the collectives of the thread match. A save that fails does not end the training: the error is
reported, and the next save tries again. The last save of a run waits, and raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint import folder
from meshwright.training.checkpoint.save import run_description, safetensors_version, save
from meshwright.training.checkpoint.state import OPTIMIZER, State, expected_states, state_of
from meshwright.training.checkpoint.store import Entry
from meshwright.training.checkpoint.together import is_first, on_first, together
from meshwright.training.loop import Trainer
from meshwright.units import format_bytes, format_seconds

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
        data: dict[str, Any] | None = None,
        report: Report = lambda kind, step, text, **fields: None,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        self.trainer, self.root, self.group = trainer, root, group
        self.keep, self.asynchronous = keep, asynchronous
        self.description = run_description(trainer, data)
        self.report: Report = report if is_first(group) else lambda kind, step, text, **fields: None
        self.sync = sync if is_first(group) else lambda: None
        self.stalled_s = 0.0
        self.saved_step: int | None = None  # the last one that is complete
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
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

    def copy_to_host(self, state: State) -> State:
        """A copy of the state that later steps do not change; only what this rank writes."""
        written = [entry for entry in state.entries if entry.written]
        copies = [replace(entry, tensor=self._copy(entry)) for entry in written]
        self._copies = {(entry.key, entry.start): entry.tensor for entry in copies}
        if any(entry.tensor.is_cuda for entry in written):
            torch.cuda.current_stream().synchronize()
        return State(state.step, copies, state.numbers)

    def _copy(self, entry: Entry) -> torch.Tensor:
        source, copy = entry.tensor.detach(), self._copies.get((entry.key, entry.start))
        if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return copy.copy_(source, non_blocking=source.is_cuda)

    def _save(self, state: State) -> None:
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
            self.saved_step = state.step
            text = f"saved {path.name}: {format_bytes(size)} in {format_seconds(seconds)}"
            self.report("checkpoint-finished", state.step, text, bytes=size, seconds=seconds)

    def _fail(self, step: int, error: MeshwrightError) -> None:
        self._error = error
        self.report("checkpoint-failed", step, f"step {step} was not saved: {error}", code=error.code)
