"""Faults on purpose: a seeded list of faults that the ranks of a run inflict on themselves, to test that the run survives them.

    MESHWRIGHT_FAULTS=faults.json meshwright train RUN.toml --out DIR

The file, relative to the run folder, is a list of {"kind", "rank", "step", "seconds", "steps"}. Each fault happens once, also if its step is
repeated after a restart: a mark in the run folder says that it has happened. `injected.jsonl` in the run folder gets a row with the time before each.

    kill         SIGKILL `seconds` after the step began: the process is gone at once
    stop         SIGSTOP `seconds` after the step began: the process stays and does nothing, like a lost host
    hang         the rank never enters the next collective, and still answers
    exception    the step raises
    slow         the rank sleeps `seconds` in each of `steps` steps
    nan          a gradient becomes NaN, on all ranks: the reduction would carry it to all of them
    spike        the last weight of every rank is multiplied by 100
    kill-save    SIGKILL `seconds` after the step began, while the checkpoint of the step before is being written
    bit-flip     a bit of the newest checkpoint is flipped, then SIGKILL: the restart must find the damage
    truncate     a file of the newest checkpoint loses its end, then SIGKILL
    disk-full    for `steps` steps writes of this process fail as on a full disk

Damage on purpose: flip a bit of the newest checkpoint, truncate it, or make the disk look full.
"""

import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.describe.run_folder import CHECKPOINTS
from meshwright.errors import MeshwrightError, unknown
from meshwright.training.hooks import Hook

FULL_DISK_BYTES = 4096  # a file may still grow to this size: a full disk has a few free blocks too


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The complete checkpoint of the latest step."""
    found = sorted(path for path in checkpoints.glob("step-*") if path.is_dir())
    return found[-1] if found else None


def damage(checkpoint: Path, how: str, seed: int) -> Path:
    """Flip one bit of a file of a checkpoint ("bit-flip"), or cut off its end ("truncate"). Returns the file."""
    draw = random.Random(seed)
    file = draw.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size))
    size = file.stat().st_size
    with file.open("r+b") as stream:
        if how == "truncate":
            stream.truncate(draw.randrange(size))
        else:
            position = draw.randrange(size)
            stream.seek(position)
            byte = stream.read(1)[0]
            stream.seek(position)
            stream.write(bytes([byte ^ (1 << draw.randrange(8))]))
    return file


def set_disk_full(full: bool) -> None:
    """Let every write of this process that makes a file larger than a block fail, or end that. Needs no rights."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES if full else most, most))


VARIABLE = "MESHWRIGHT_FAULTS"
LOG = "injected.jsonl"
EVERYWHERE = ("nan", "spike")  # happen on all ranks
KINDS = ("kill", "stop", "hang", "exception", "slow", "nan", "spike", "kill-save", "bit-flip", "truncate", "disk-full")


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int
    seconds: float = 0.0
    steps: int = 1


def read_faults(path: Path) -> list[Fault]:
    """The faults of a file."""
    try:
        faults = [Fault(**row) for row in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise MeshwrightError(
            "MW-FAULT-002",
            f"{VARIABLE}={path} cannot be read",
            why=str(error),
            valid=['[{"kind": "kill", "rank": 1, "step": 20}]'],
        ) from error
    for fault in faults:
        if fault.kind not in KINDS:
            raise unknown("MW-FAULT-002", "kind of fault", fault.kind, KINDS)
    return faults


class Injector(Hook):
    """The faults of one rank."""

    def __init__(self, faults: Sequence[Fault], rank: int, folder: Path) -> None:
        self.folder = folder
        self.rank = rank
        self.faults = {
            number: fault for number, fault in enumerate(faults) if fault.rank == rank or fault.kind in EVERYWHERE
        }
        self.left: dict[int, int] = {}  # faults that last: steps until their end

    def before_step(self, trainer: Any) -> None:
        for number, fault in self.due(trainer.step, ("nan",), exclude=True):
            self.mark(number, fault, trainer.step)
            self.inflict(number, fault, trainer)

    def after_gradients(self, trainer: Any) -> None:
        for number in [number for number, left in self.left.items() if left]:
            self.left[number] -= 1
            if self.faults[number].kind == "slow":
                time.sleep(self.faults[number].seconds)  # inside of the step: it counts as work of this rank
            elif not self.left[number]:
                set_disk_full(False)
        for number, fault in self.due(trainer.step, ("nan",)):
            self.mark(number, fault, trainer.step)
            trainer.parallel.pieces[0].gradient.fill_(float("nan"))

    def due(self, step: int, kinds: Sequence[str], exclude: bool = False) -> list[tuple[int, Fault]]:
        found = [(n, f) for n, f in self.faults.items() if f.step == step and (f.kind in kinds) != exclude]
        return [(number, fault) for number, fault in found if not self.mark_file(number).exists()]

    def mark_file(self, number: int) -> Path:
        rank = f"-{self.rank}" if self.faults[number].kind in EVERYWHERE else ""
        return self.folder / f"fault-{number}{rank}.done"

    def mark(self, number: int, fault: Fault, step: int) -> None:
        """Write down that the fault happens now; on disk before it does."""
        self.mark_file(number).touch()
        if fault.rank != self.rank:
            return
        row = json.dumps({"time": time.time(), "number": number, "step": step, "kind": fault.kind, "rank": fault.rank})
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(row + "\n")
            log.flush()
            os.fsync(log.fileno())

    def inflict(self, number: int, fault: Fault, trainer: Any) -> None:
        match fault.kind:
            case "kill" | "kill-save" | "stop":
                deadly = signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL
                timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), deadly))
                timer.daemon = True
                timer.start()
            case "bit-flip" | "truncate":
                newest = newest_checkpoint(self.folder / CHECKPOINTS)
                if newest is not None:
                    damage(newest, fault.kind, seed=number)
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                threading.Event().wait()
            case "exception":
                raise RuntimeError(f"injected fault {number} in step {trainer.step}")
            case "slow":
                self.left[number] = fault.steps
            case "disk-full":
                self.left[number] = fault.steps
                set_disk_full(True)
            case "spike":
                # Of the head: a norm before it would remove the factor
                trainer.parallel.pieces[-1].local.detach().mul_(100.0)
