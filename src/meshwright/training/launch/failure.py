"""Failures of ranks: which one is the root cause, and the error that is shown for it.

When one rank fails, the others lose their connections a moment later and fail too. The root cause is the earliest failure that is
not such a consequence. Only this one is shown; the logs of the ranks have all of them.

A rank of a training writes its failure to `rank-N.failure.json` in the run folder before its connections close. There the process
that started it, or rank 0 of the next attempt, finds the root cause, on one host and on several that share the folder.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.units import counted

SUFFIX = ".failure.json"
INTERNAL_ERROR = 70  # exit code: the input is not the cause
CONSEQUENCES = (
    "MW-COMM-004",
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Timed out waiting",
    "Socket Timeout",
    "Broken pipe",
)


def lost_connection(text: str) -> bool:
    """Whether a text is what torch.distributed or our backend reports after another rank has gone."""
    return any(words in text for words in CONSEQUENCES)


@dataclass(frozen=True)
class Failure:
    """How one rank failed: it raised, died (of a signal or by exiting), hung, or ended because another rank hangs."""

    rank: int
    state: str  # raised | died | hung | ended
    text: str  # traceback, or signal and last lines of the log
    at: float  # seconds, of one clock for all ranks of a run
    error: dict[str, Any] | None = None  # the fields of a MeshwrightError, if the rank raised one

    @property
    def is_consequence(self) -> bool:
        """Whether this failure only follows from the failure of another rank."""
        return self.state == "ended" or (self.state == "raised" and lost_connection(self.text))

    @property
    def summary(self) -> str:
        """One line: which rank, and why."""
        if self.error is not None:
            return f"rank {self.rank}: {self.error['code']}: {self.error['what']}"
        lines = [line for line in self.text.splitlines() if line.strip()] or [""]
        return f"rank {self.rank} {self.state}: {lines[-1] if self.state == 'raised' else lines[0]}"


class FailedElsewhere(MeshwrightError):
    """Another rank failed and reports why; this one ends without a message."""

    quiet = True


class RankFailure(MeshwrightError):
    """A rank raised, died or hung; `text` is its traceback, `others` the tracebacks of ranks that failed after it."""

    def __init__(self, rank: int, state: str, text: str, others: dict[int, str], logs: Path | None) -> None:
        self.rank, self.state, self.text, self.others = rank, state, text.rstrip(), others
        more = f"\n{counted(len(others), 'more rank')} failed afterwards" if others else ""
        super().__init__(
            "MW-RANK-001",
            f"rank {rank} {state}:\n{self.text}{more}",
            why=f"Per-rank logs: {logs}" if logs else "",
            exit_code=INTERNAL_ERROR,
        )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The likeliest root cause: first a rank that died or raised, then one that hung, then one whose failure is a consequence;
    within each class the earliest."""
    return min(failures, key=lambda f: (2 if f.is_consequence else 1 if f.state == "hung" else 0, f.at))


def error_of(failures: Sequence[Failure], logs: Path | None) -> MeshwrightError:
    """The error that is shown for failed ranks: that of the root cause."""
    root = root_cause(failures)
    if root.error is not None:
        return MeshwrightError(**root.error)
    return RankFailure(root.rank, root.state, root.text, {f.rank: f.text for f in failures if f is not root}, logs)


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure of a rank that raised."""
    fields = {**error.as_dict(), "exit_code": error.exit_code} if isinstance(error, MeshwrightError) else None
    return Failure(rank, "raised", "".join(traceback.format_exception(error)), time.time(), fields)


def write_failure(folder: Path, failure: Failure, spare: Path | None = None) -> None:
    """Write the failure of a rank to the run folder, or to the `spare` folder: a full or lost disk must not hide the failure itself."""
    for target in (folder, spare) if spare is not None else (folder,):
        with suppress(OSError):
            (target / f"rank-{failure.rank}{SUFFIX}").write_text(json.dumps(asdict(failure)), "utf-8")
            return


def read_failures(folder: Path) -> list[Failure]:
    """The failures that ranks have written; a file that is not complete is left out."""
    found = []
    for file in sorted(folder.glob(f"rank-*{SUFFIX}")):
        with suppress(OSError, ValueError, TypeError):
            found.append(Failure(**json.loads(file.read_text("utf-8"))))
    return found


def remove_failures(folder: Path) -> None:
    """Remove the failures of an earlier attempt."""
    for file in folder.glob(f"rank-*{SUFFIX}"):
        file.unlink(missing_ok=True)
