"""Write a run folder. Rank 0 does it; everyone else reads (`describe.run_folder` names the files and reads them).

    folder = RunFolder.create(path, config, prediction, steps=1000, seed=0)    or RunFolder.reopen(path, …) to resume
    folder.begin_attempt(world=8, plan=config.plan.title(), first_step=0)
    folder.add(record)                              after each step
    folder.event("checkpoint-finished", step, "checkpoint of step 100 written", seconds=0.4)
    folder.end_attempt()                            or end_attempt("rank 3 was killed")

A row is one write to a file opened for appending: a crash leaves whole rows and at most one unfinished line at the end, which the
next attempt removes. An attempt that resumes at a step first removes the rows of that step and of all later ones, so `steps.jsonl` has
each step once. Rows reach the disk at the next `sync`, which every checkpoint calls: a host that loses power loses no row
of a step that its checkpoint contains. On a full disk rows and results wait in memory until there is room; `close` says what was not written.

The folder is locked while a run writes to it, and the process that starts local ranks locks it from its first moment (`claimed`). A second
run in the same folder is refused, and so is a new run in a folder that already has steps: nothing is overwritten. The kernel frees the locks of
a killed process. They are `flock` locks: NFS servers since version 4 share them between hosts, some other network disks do not.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.files import write_text
from meshwright.describe.result import Prediction
from meshwright.describe.run_folder import (
    EVENTS,
    LOCK,
    PLAN,
    PREDICTION,
    PRESENT,
    RESULTS,
    RUN,
    STEPS,
    VERSION,
    finite,
    json_line,
    lock_of,
    parsed,
    read_about,
    read_events,
    read_steps,
)
from meshwright.errors import IO_ERROR, MeshwrightError, cannot_write, listed
from meshwright.host import replace_file
from meshwright.training.checkpoint.folder import UNUSED, set_aside
from meshwright.training.environment import environment
from meshwright.training.hooks import Hook, StepRecord
from meshwright.training.rows import remove_rows, remove_unfinished_line
from meshwright.units import Json, counted

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, or for this user, or in this file
MOST_WAITING = 100_000  # lines
FROM_SCRATCH = "from-scratch"  # the kind of the event
LOCK_S = 1.0  # a reader that asks whether a run is running holds the lock for a moment


class StepWriter(Hook):
    """The hook of rank 0 that writes the row of every step, and events for evaluations and skipped updates, and calls `listen` with the
    record. It stands behind the hooks that add to the record."""

    def __init__(self, folder: RunFolder, listen: Callable[[StepRecord], None] | None = None) -> None:
        self.folder, self.listen = folder, listen

    def after_step(self, trainer: Any, record: StepRecord) -> None:
        self.folder.add(record)
        if record.validation_loss is not None:
            text = f"validation loss {record.validation_loss:.4f}"
            self.folder.event("evaluation", record.step, text, validation_loss=record.validation_loss)
        if not record.updated:
            self.folder.event("skipped", record.step, "gradients are NaN or infinite: the update was skipped")
        if self.listen is not None:
            self.listen(record)


class RunFolder:
    """The folder of a run, locked for this process until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, int] = {}  # name → descriptor, opened for appending
        self.waiting: dict[str, list[bytes]] = {}  # lines that a full disk did not take yet
        self.unwritten: dict[str, str] = {}  # files that it did not take, with their content
        self.lost: list[str] = []  # what was still not written when the folder was closed
        self.plans: tuple[Config, Prediction] | None = None  # those that the next attempt writes
        self.asked: Config | None = None  # the user's configuration, of a run that was resized
        self.appending = threading.Lock()
        self.about: Json = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(path / LOCK, error) from error
        self._take_lock()

    @classmethod
    def create(
        cls, path: Path, config: Config, prediction: Prediction, aim: Config | None = None, **about: Any
    ) -> RunFolder:
        """A new run. `about` goes to run.json: `steps` and `seed`, `device`, `backend`, `agents`."""
        check_unused(path)
        folder = cls(path)
        with folder._closed_on_error():
            folder.asked = aim
            folder._write_plan(config, prediction)
            if config.run.start_from:
                from meshwright.training.start import copy_companions

                copy_companions(config, path)
            folder.about = {"version": VERSION, **environment(), **about, "attempts": []}
            folder._write_about()
            try:
                folder._open(STEPS)
            except OSError as error:
                raise cannot_write(path / STEPS, error) from error
        return folder

    @classmethod
    def reopen(
        cls, path: Path, config: Config, prediction: Prediction, aim: Config | None = None, **about: Any
    ) -> RunFolder:
        """A run that continues: after a restart, or with `--resume`. Nothing is written before `begin_attempt`, which overwrites its
        measurement and other results: a resume that is refused changes nothing. `aim`: the user's plan, if `config` has another one."""
        folder = cls(path)
        with folder._closed_on_error():
            before, now = read_about(path), {"agents": [], **environment(), **about}
            folder.plans, folder.asked = (config, prediction), aim
            lists = {name: list(dict.fromkeys([*before.get(name, ()), *now[name]])) for name in ("hosts", "agents")}
            kept = {"started": before.get("started", now["started"]), "attempts": list(before.get("attempts", ()))}
            folder.about = {**before, **now, **lists, **kept, "version": VERSION}
        return folder

    @property
    def aim(self) -> str:
        """The plan that the user asked for, in one line; empty if the run has it."""
        return self.asked.plan.title() if self.asked is not None else ""

    def begin_from_scratch(self) -> None:
        """Set the rows of a run aside that begins again at step 0."""
        if (self.path / STEPS).is_file():
            set_aside(self.path / STEPS, UNUSED)
        text = f"begins again at step 0: earlier checkpoints and rows are kept under names that begin with {UNUSED}"
        self.event(FROM_SCRATCH, 0, text)

    def begin_attempt(
        self, *, world: int, plan: str, first_step: int = 0, cause: str = "", failed_at: float = 0.0
    ) -> int:
        """Note that ranks begin to train at `first_step`, and return the number of this attempt. `cause`: why the attempt before
        ended, if it could not note it before its process died; `failed_at`: when that was noticed."""
        if self.plans is not None:
            self._write_plan(*self.plans)
            self.plans = None
        now, attempts = time.time(), self.about["attempts"]
        if attempts and attempts[-1]["ended"] is None:
            attempts[-1] |= {"ended": now, "cause": cause or "the process that wrote the run folder died"}
        fields = {"start": now, "world": world, "plan": plan, "resumed_from": first_step or None}
        attempts.append({**fields, "ended": None, "cause": None})
        rows = remove_rows(self.path / STEPS, first_step)
        self._write_about()
        if rows < first_step:
            self.event(
                "resumed", first_step, f"{STEPS} has the rows of {rows} of the {first_step} steps before this one"
            )
        if failed_at:
            self.event("fault", first_step, cause, time=round(failed_at, 3))
        if self.aim and attempts[-2:-1] and attempts[-2]["plan"] != plan:
            self.event("resized", first_step, f"{plan} on {world} ranks; asked for: {self.aim}")
        if len(attempts) > 1:
            self.event("restart", first_step, f"attempt {len(attempts)} begins at step {first_step} on {world} ranks")
        return len(attempts) - 1

    def note_compilation(self, mode: str, notes: list[str], step: int) -> None:
        """Write to run.json, and as an event, what torch.compile compiles and what it cannot compile. No event if it is off."""
        self.about["compile"] = {"mode": mode, "notes": notes}
        self._write_about()
        if mode != "off" or notes:
            reasons = f" ({'; '.join(notes)})" if notes else ""
            self.event("compile", step, f"torch.compile: {mode}{reasons}")

    def end_attempt(self, cause: str = "") -> None:
        """Note how an attempt ended: `cause` is empty if it did all its steps, "stopped" after a signal, else the root cause."""
        attempts = self.about.get("attempts")
        if attempts and attempts[-1]["ended"] is None:
            attempts[-1] |= {"ended": time.time(), "cause": cause}
            self._write_about()

    def add(self, record: StepRecord) -> None:
        """Append the row of a finished step."""
        attempt = max(len(self.about.get("attempts", ())) - 1, 0)
        self._append(STEPS, {**record.row(), "attempt": attempt, "time": round(time.time(), 3)})

    def event(self, kind: str, step: int, text: str, **fields: Any) -> None:
        """Append an event: a kind for programs (docs/runs.md), a sentence for people."""
        self._append(EVENTS, {"time": round(time.time(), 3), "step": step, "kind": kind, "text": text, **fields})

    def save(self, name: str, content: Any, indent: int | None = 2) -> None:
        """Write one of the `RESULTS`."""
        self._replace(f"{name}.json", json.dumps(finite(content), indent=indent))

    def rows(self) -> list[Json]:
        """The rows of all steps, also of those that wait for room on the disk."""
        return [*read_steps(self.path), *(row for line in self.waiting.get(STEPS, ()) for row in parsed(line))]

    def sync(self) -> None:
        """Make sure that all rows until now survive a loss of power."""
        for descriptor in list(self.files.values()):  # a thread that writes a checkpoint calls this
            os.fsync(descriptor)

    def close(self) -> None:
        """Write what waits for room on the disk, and release the folder; may be called twice. `lost` is then what was not written."""
        for name in self.waiting:
            with suppress(OSError):
                self._write_waiting(name)
        for name, text in list(self.unwritten.items()):
            self._replace(name, text)
        self.lost += [lost_lines(name, lines) for name, lines in self.waiting.items() if lines]
        self.lost += self.unwritten
        self.waiting.clear()
        self.unwritten.clear()
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def _append(self, name: str, row: Json) -> None:
        """Append a row. On a full disk it waits in memory, with those after it, until the disk has room again."""
        with self.appending:  # a thread that saves writes events too
            waiting = self.waiting.setdefault(name, [])
            waiting.append(json_line(row))
            try:
                self._write_waiting(name)
            except OSError as error:
                if error.errno not in FULL or len(waiting) > MOST_WAITING:
                    raise cannot_write(self.path / name, error) from error

    def _write_waiting(self, name: str) -> None:
        descriptor = self.files[name] if name in self.files else self._open(name)
        waiting = self.waiting[name]
        while waiting:
            written = os.write(descriptor, waiting[0])
            if written < len(waiting[0]):  # the disk became full in the middle: leave no unfinished line
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            waiting.pop(0)

    def _open(self, name: str) -> int:
        remove_unfinished_line(self.path / name)
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self.files.setdefault(name, descriptor)

    def _replace(self, name: str, text: str) -> None:
        """Replace a file. On a full disk its content waits in memory until `close`."""
        try:
            replace_file(self.path / name, text)
            self.unwritten.pop(name, None)
        except OSError as error:
            if error.errno not in FULL:
                raise cannot_write(self.path / name, error) from error
            self.unwritten[name] = text

    def _take_lock(self) -> None:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(self.lock)
                    self.lock = -1
                    raise in_use(self.path) from None
                time.sleep(0.02)
            except OSError:  # a disk without locks
                break
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json_line({"host": socket.gethostname(), "pid": os.getpid()}), 0)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _write_plan(self, config: Config, prediction: Prediction) -> None:
        """Write the resolved run file and its prediction; remove what an earlier attempt measured. A run that was resized has its present
        plan in a second file next to the plan that the user asked for: with the ranks of that one it returns to it."""
        for name in (*(f"{result}.json" for result in RESULTS), PRESENT):
            (self.path / name).unlink(missing_ok=True)
        write_text(self.path / PLAN, (self.asked or config).to_toml())
        if self.asked is not None:
            write_text(self.path / PRESENT, config.to_toml())
        write_text(self.path / PREDICTION, json.dumps(finite(prediction.as_dict()), indent=2))

    def _write_about(self) -> None:
        self._replace(RUN, json.dumps(finite(self.about), indent=2, ensure_ascii=False))


def lost_lines(name: str, lines: list[bytes]) -> str:
    """A description of lines that were not written: their number, file and steps."""
    steps = [row["step"] for line in lines for row in parsed(line) if "step" in row]
    of = f" (steps {steps[0]} to {steps[-1]})" if steps else ""
    return f"{counted(len(lines), 'row')} of {name}{of}"


@contextmanager
def claimed(path: Path | None) -> Iterator[None]:
    """Refuse a folder at once in which another process starts or runs a training. The lock is one of the folder itself: rank 0, another
    process, locks the file in it."""
    if path is None or not path.is_dir():
        yield
        return
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(path) from None
        except OSError:  # a disk without locks of folders: rank 0 still locks its file
            pass
        check_free(path)
        yield
    finally:
        os.close(handle)


def check_free(path: Path) -> None:
    """Raise if a run writes to this folder."""
    if lock_of(path).taken:
        raise in_use(path)


def saved_before(path: Path) -> bool:
    """Whether a run has completed a checkpoint since it last began from scratch, by its events."""
    saved = False
    for event in read_events(path):
        saved = event.get("kind") == "checkpoint-finished" or (saved and event.get("kind") != FROM_SCRATCH)
    return saved


def check_unused(path: Path) -> None:
    """Raise if a run writes to this folder, or has written steps to it."""
    check_free(path)
    if (path / STEPS).is_file() and (path / STEPS).stat().st_size:
        raise MeshwrightError(
            "MW-FOLDER-002",
            f"'{path}' already contains a run",
            why="A new run would overwrite its steps",
            fix=f"meshwright train --resume {path}, or --out with another folder",
        )


def in_use(path: Path) -> MeshwrightError:
    by = lock_of(path)
    why = f"Process {by.pid} of {by.host} writes to it" if by.taken else "Another process uses it"
    fix = "wait until it has ended, or use another folder"
    return MeshwrightError("MW-FOLDER-001", f"'{path}' is in use by another run", why=why, fix=fix)


def not_written(path: Path, lost: list[str], reason: str) -> MeshwrightError:
    """The error at the end of a training whose disk stayed full."""
    return MeshwrightError(
        "MW-FOLDER-003",
        f"the disk is full: the training in '{path}' ended, and this was not written: {listed(lost)}",
        why=reason or "Rows and results waited in memory for room on the disk, until the end",
        fix=f"free disk space, then meshwright train --resume {path}",
        exit_code=IO_ERROR,
    )
