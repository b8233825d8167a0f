"""Heartbeats: a small file per rank with its step, its open collective and its speed, which every other rank can read.

A rank that is stopped or lost cannot report, so the others must find out from what it wrote before. The files are in the run folder, which
all hosts share (checkpoints need that too), so that one mechanism works for one host and for many. Nothing is sent between ranks.

    heartbeats/rank-3.json     written every `SLOW_BEAT_S` seconds; every `FAST_BEAT_S` while the rank makes no progress

A file is overwritten in place: this needs no work of a file system's metadata server, which thousands of ranks share.
Clocks of hosts differ. A reader therefore compares no times: it reads twice, and a rank whose `beat` did not change is silent.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "heartbeats"
SLOW_BEAT_S = 1.0
FAST_BEAT_S = 0.5
BLOCK = 1024  # bytes: files grow by whole blocks, so that a shorter text overwrites a longer one
READS = 3  # of a file that is being written


@dataclass(frozen=True)
class Operation:
    """A collective or message that a rank has entered and not left. It is the `count`-th of its kind in its group."""

    operation: str  # all_reduce, all_gather, …, send, receive
    axis: str
    ranks: tuple[int, ...]  # the group, or sender and receiver of a message
    count: int
    bytes: int = 0
    started: bool = True  # False: issued to a GPU that still computes something before it

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "receive")

    @property
    def key(self) -> str:
        """The counter that this operation increased on its rank."""
        return operation_key(self.axis, self.ranks, self.operation if self.is_message else "")

    @property
    def needed_key(self) -> str:
        """The counter that every other rank of it must have increased as often: a receive needs its send, and the reverse."""
        opposite = {"send": "receive", "receive": "send"}.get(self.operation, "")
        return operation_key(self.axis, self.ranks, opposite)


def operation_key(axis: str, ranks: Iterable[int], direction: str = "") -> str:
    """The name of a counter: collectives of a group share one; sends and receives between two ranks have one each."""
    return f"{axis} {'-'.join(map(str, ranks))} {direction}".rstrip()


@dataclass(frozen=True)
class Heartbeat:
    """The state of one rank."""

    rank: int
    attempt: str  # of the run: heartbeats of an earlier attempt are ignored
    beat: int
    host: str = ""
    pid: int = 0
    started: int = 0  # start time of the process: the number of a process may be used again
    stage: int = 0  # pipeline stage
    step: int = 0
    phase: str = "start"  # start | step | hooks | end
    stalled_s: float = 0.0
    operation: Operation | None = None
    issued: dict[str, int] = field(default_factory=dict)  # operations so far, by `operation_key`
    own_s: float = 0.0  # median seconds of a step in which the rank was not blocked by communication
    usual_s: float = 0.0  # the same over many more steps
    step_s: float = 0.0  # median seconds of a step


class HeartbeatFolder:
    """The heartbeat files of one attempt of a run."""

    def __init__(self, run_folder: Path, attempt: str) -> None:
        self.run_folder, self.folder, self.attempt = run_folder, run_folder / FOLDER, attempt
        self.size = 0  # of this rank's file: it never shrinks

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def write(self, heartbeat: Heartbeat) -> None:
        """Overwrite this rank's file, with one write."""
        text = json.dumps(asdict(heartbeat)).encode()
        self.size = max(self.size, -(-len(text) // BLOCK) * BLOCK)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path(heartbeat.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(file, text.ljust(self.size), 0)
        finally:
            os.close(file)  # a network file system sends it now

    def read(self, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank; None if there is none of this attempt, or the file cannot be read."""
        for _ in range(READS):
            try:
                heartbeat = parse_heartbeat(self.path(rank).read_text("utf-8"))
            except OSError:
                return None
            except (ValueError, TypeError, KeyError):  # read while it was being written
                continue
            return heartbeat if heartbeat.attempt == self.attempt else None
        return None

    def read_all(self, world: int) -> dict[int, Heartbeat]:
        found = {rank: self.read(rank) for rank in range(world)}
        return {rank: heartbeat for rank, heartbeat in found.items() if heartbeat is not None}


def parse_heartbeat(text: str) -> Heartbeat:
    fields: dict[str, Any] = json.loads(text)
    operation = fields.pop("operation")
    if operation is not None:
        operation = Operation(**{**operation, "ranks": tuple(operation["ranks"])})
    return Heartbeat(operation=operation, **fields)


def host_name() -> str:
    return socket.gethostname()
