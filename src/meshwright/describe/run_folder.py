"""The files of a run folder: their names, and how they are read. `training.folder` writes them.

    plan.toml  prediction.json   before the first step: the resolved run file, and what the cost model expects
    present.toml                 the plan of the present number of ranks, while it is not the one of plan.toml
    run.json                     versions, git state, command line, hosts, seed, planned steps, and the attempts of the run
    steps.jsonl                  a line for each step, appended when the step ends (`STEP_KEYS`, and router_… of models with experts)
    events.jsonl                 a line for each event: time, step, kind (docs/runs.md), text, and what else the kind has
    checkpoints/step-00001000/   `training.checkpoint`
    huggingface/                 config and tokenizer of the Transformers folder that the run started from
    measurement.json  difference.json  interference.json  communication.json  timeline.json     at the end
    rank-N.log                   what rank N printed
    lock                         locked while a run writes to the folder

The folder is the only channel between a run and those who watch it: the terminal, the page, `report` and `runs` read it, on this
host or on another one that shares the disk. Lines are only appended. A line without its end is still being written: a reader leaves it
for its next reading. A number that is NaN or infinite is null, because JSON has no such numbers.
"""

import fcntl
import json
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError

PLAN, PRESENT, PREDICTION = "plan.toml", "present.toml", "prediction.json"
RUN, STEPS, EVENTS, LOCK = "run.json", "steps.jsonl", "events.jsonl", "lock"
ORIGINAL = "huggingface"
CHECKPOINTS, PROFILE = "checkpoints", "profile"
# JSON files written at the end
RESULTS = ("measurement", "difference", "interference", "communication", "timeline", "kernels")
VERSION = 1  # of run.json
STEP_KEYS = (
    "step", "time", "loss", "grad_norm", "tokens", "seconds", "tokens_per_s", "learning_rate", "mfu", "memory_gib", "exposed_s",
    "validation_loss", "compile_s", "skipped", "attempt",
)  # fmt: skip
LIMIT = 50_000_000  # bytes of a JSON file
LONGEST_LINE = 100_000  # bytes
RECENT_S = 60.0  # a run on another host that wrote nothing for longer has stopped


class Lock(NamedTuple):
    """Whether a process holds the lock of a run folder, and which process of which host wrote the file."""

    taken: bool = False
    host: str = ""
    pid: int = 0


def rank_log(rank: int) -> str:
    """The name of the file with what a rank printed."""
    return f"rank-{rank}.log"


def json_line(fields: dict[str, Any]) -> bytes:
    """One line of a JSONL file."""
    return json.dumps(finite(fields), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def finite(value: Any) -> Any:
    """A value for JSON: NaN and infinity become null, in tables and lists too."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_run(folder: Path) -> bool:
    return is_inside(folder / PLAN, folder) and is_inside(folder / PREDICTION, folder)


def present_plan(folder: Path) -> Path:
    """Return the file of the plan that a run uses or used last; after a resize it differs from the user's `plan.toml`."""
    return folder / PRESENT if is_inside(folder / PRESENT, folder) else folder / PLAN


def is_inside(file: Path, folder: Path) -> bool:
    """Whether a regular file lies in the folder, not behind a link."""
    return file.is_file() and not file.is_symlink() and file.parent == folder


def read_json(file: Path) -> Any:
    """The content of a JSON file of a run folder."""
    shown = f"{file.name} of {file.parent.name}"
    if file.stat().st_size > LIMIT:
        raise MeshwrightError("MW-REP-002", f"{shown} is larger than {LIMIT // 10**6} MB")
    try:
        return finite(json.loads(file.read_text("utf-8")))
    except (ValueError, RecursionError) as error:
        raise MeshwrightError("MW-REP-002", f"{shown} is not JSON", why=str(error)[:100]) from None


def read_about(folder: Path) -> dict[str, Any]:
    """The content of run.json; empty if there is none."""
    about = read_json(folder / RUN) if is_inside(folder / RUN, folder) else {}
    if not isinstance(about, dict) or about.get("version", VERSION) != VERSION:
        why = f"This release reads version {VERSION}"
        raise MeshwrightError("MW-REP-002", f"{RUN} of {folder.name} is not a file that `train` writes", why=why)
    return about


def complete_lines(file: Path, offset: int = 0) -> Iterator[bytes]:
    """The lines of a file after a position, without one that is still being written; none if there is no such file."""
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
                if not line.endswith(b"\n"):
                    break
                yield line
    except FileNotFoundError:
        return


def new_lines(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSONL file after a position, and the position after them. Lines that are not JSON are left out."""
    rows: list[dict[str, Any]] = []
    for line in complete_lines(file, offset):
        offset += len(line)
        rows += parsed(line)
    return rows, offset


def parsed(line: bytes) -> list[dict[str, Any]]:
    """A line of a JSONL file, or nothing if it is not a table."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [row] if isinstance(row, dict) else []


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, one for each step."""
    return new_lines(folder / STEPS, 0)[0]


def last_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows at the end of a run: those in the last 64 KiB."""
    file = folder / STEPS
    try:
        begin = max(0, file.stat().st_size - 2**16)
    except FileNotFoundError:
        return []
    lines = list(complete_lines(file, begin))[1 if begin else 0 :]  # the first one may have begun before
    return [row for line in lines for row in parsed(line)]


def read_events(folder: Path) -> list[dict[str, Any]]:
    return new_lines(folder / EVENTS, 0)[0]


def modified(folder: Path) -> float:
    """Return when the newest of the files that a run appends to was written."""
    names = (STEPS, EVENTS, RUN, "measurement.json", PLAN)
    return max((file.stat().st_mtime for name in names if (file := folder / name).is_file()), default=0.0)


def state(folder: Path) -> str:
    """running, done, failed or stopped. The last attempt in run.json says how it ended; an attempt without an end is running as long
    as its process holds the lock. Locks of another host may be invisible: there, recent files count."""
    attempts = read_about(folder).get("attempts") or []
    if attempts and attempts[-1].get("ended") is not None:
        return {"": "done", "stopped": "stopped"}.get(attempts[-1].get("cause") or "", "failed")
    if not attempts and (folder / "measurement.json").is_file():
        return "done"
    lock = lock_of(folder)
    if lock.taken:
        return "running"
    elsewhere = lock.host != socket.gethostname()
    return "running" if elsewhere and time.time() - modified(folder) < RECENT_S else "stopped"


def lock_of(folder: Path) -> Lock:
    """Read the lock of a folder by taking and releasing it at once; `training.folder` retries for longer than this takes."""
    try:
        with (folder / LOCK).open("rb") as file:
            by = next(iter(parsed(file.read(LONGEST_LINE))), {})
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                taken = False
            except BlockingIOError:
                taken = True
            return Lock(taken, str(by.get("host", "")), int(by.get("pid", 0)))
    except (OSError, TypeError, ValueError):  # there is no such file, or the disk has no locks
        return Lock()


class RunFollower:
    """Reads a run folder while it grows: `new_steps` and `new_events` return what was appended since the last call.

    An attempt that resumes removes the rows after its checkpoint and trains their steps again; `new_steps` then returns the rows of the
    new attempt, so the steps of its result may begin before the last one that it returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about: dict[str, Any] = {}
        self.offset = self.events_offset = 0
        self.last = (-1, -1)  # attempt and step of the last row
        self._about_read = 0

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return list(self.about.get("attempts") or [])

    def new_steps(self) -> list[dict[str, Any]]:
        file, before = self.folder / STEPS, len(self.attempts)
        self._read_about()
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            return []
        if len(self.attempts) != before or size < self.offset:
            self.offset = 0
        rows, self.offset = new_lines(file, self.offset)
        fresh = [row for row in rows if (row.get("attempt", 0), row.get("step", 0)) > self.last]
        if fresh:
            self.last = fresh[-1].get("attempt", 0), fresh[-1].get("step", 0)
        return fresh

    def new_events(self) -> list[dict[str, Any]]:
        events, self.events_offset = new_lines(self.folder / EVENTS, self.events_offset)
        return events

    def _read_about(self) -> None:
        try:
            written = (self.folder / RUN).stat().st_mtime_ns
        except FileNotFoundError:
            return
        if written != self._about_read:
            self._about_read, self.about = written, read_about(self.folder)
