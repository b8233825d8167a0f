"""Run folders as `meshwright train --out DIR` writes them (`describe.run_folder`): a list of runs, and one run as it grows.

A reader sends back the `seen` of the last answer and gets only newer rows, events and files, so a run can be watched while it
trains. A run that was restarted has removed rows: its answer has `fresh`, and all rows.

Only folders directly below the one given at start are shown (or that one, if it is a run folder). Names are looked up among
those found there and never joined to a path; a link that leads out of the folder is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from meshwright.describe.run_folder import (
    EVENTS,
    RESULTS,
    STEP_KEYS,
    STEPS,
    complete_lines,
    is_inside,
    is_run,
    modified,
    new_lines,
    parsed,
    read_about,
    read_json,
    state,
)
from meshwright.errors import MeshwrightError, unknown
from meshwright.units import Json
from meshwright.view.runs import configuration, summary

PARTS = ("prediction", *RESULTS, "proof")
MOST_RUNS, MOST_ROWS, LONGEST_SEEN = 200, 4000, 20_000
LISTED_S = 0.4


class SeenFiles(NamedTuple):
    """The position of an earlier answer: offsets in the files of steps and events, the number of rows, the time of the newest
    file, and the number of attempts."""

    steps: int = 0
    events: int = 0
    rows: int = 0
    newest: int = 0
    attempts: int = 0

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> SeenFiles:
        """Of an earlier answer; nothing seen if it is anything else."""
        parts = text.split("-")
        good = len(parts) == len(cls._fields) and all(p.isascii() and p.isdecimal() and len(p) < 20 for p in parts)
        return cls(*map(int, parts)) if good else cls()


class RunFolders:
    """The run folders below one folder."""

    def __init__(self, root: Path | None) -> None:
        self.root = root.resolve() if root is not None else None
        self._listed: tuple[float, Json] = -math.inf, {}

    def found(self) -> dict[str, Path]:
        """Run folders by name, the newest first."""
        root = self.root
        if root is None or not root.is_dir():
            return {}
        if is_run(root):
            return {root.name: root}
        inside = [path for path in root.iterdir() if not path.is_symlink() and path.is_dir() and is_run(path)]
        inside.sort(key=modified, reverse=True)
        return {path.name: path for path in inside[:MOST_RUNS]}

    def listing(self) -> Json:
        """All runs, each with its plan and whether it is running, done, failed or stopped."""
        rows = [{**run_entry(path), "name": name} for name, path in self.found().items()]
        return {"folder": self.root.name if self.root else "", "runs": rows}

    def recent_listing(self) -> Json:
        """The list as it was at most `LISTED_S` ago: all that watch share one reading of all folders."""
        if time.monotonic() - self._listed[0] > LISTED_S:
            self._listed = time.monotonic(), self.listing()
        return self._listed[1]

    def run(self, name: str, seen: str = "") -> Json:
        """One run: its rows, events and files that are newer than `seen`; all of them without it."""
        known = self.found()
        if name not in known:
            raise unknown("MW-REP-001", "run folder", name, known)
        return {**run_data(known[name], seen), "name": name}


class RunWatch:
    """What is new since the last time in the list of runs and in some of them. `seen` is the position of what was given out, as text that has
    only letters of an address: a new watch that begins with it goes on from there."""

    def __init__(self, folders: RunFolders, names: Sequence[str], seen: str = "") -> None:
        self.folders, self.names = folders, names
        self.listed: Json | None = None
        pairs = parse_qsl(seen) if len(seen) < LONGEST_SEEN else []
        self.positions = {name: position for name, position in pairs if name in names}
        self.states: dict[str, str] = {}

    @property
    def seen(self) -> str:
        return urlencode(self.positions)

    def news(self) -> list[tuple[str, Json]]:
        """The events since the last call: ("runs", the list), then ("run", what is new in one run, or why it cannot be read)."""
        try:
            listed = self.folders.recent_listing()
        except OSError as error:
            listed = {"folder": "", "runs": [], "error": unreadable(error).as_dict()}
        out = [] if listed == self.listed else [("runs", listed)]
        self.listed, known = listed, {row["name"] for row in listed["runs"]}
        for name in (name for name in self.names if name in known):
            before = self.positions.get(name, "")
            try:
                run = self.folders.run(name, before)
            except (OSError, MeshwrightError) as error:
                found = unreadable(error) if isinstance(error, OSError) else error
                run = {"name": name, "error": found.as_dict(), "seen": before, "state": "unreadable"}
            if run["seen"] != before or run["state"] != self.states.get(name):
                out.append(("run", run))
            self.positions[name], self.states[name] = run["seen"], run["state"]
        return out


def unreadable(error: OSError) -> MeshwrightError:
    return MeshwrightError("MW-REP-001", "the run folder cannot be read", why=error.strerror or "")


def run_entry(folder: Path) -> Json:
    """A run in a list."""
    return {key: value for key, value in summary(folder).items() if key != "folder"}


def run_data(folder: Path, seen: str = "") -> Json:
    """The rows, events and files of a run that are newer than `seen`."""
    about, file, before = read_about(folder), folder / STEPS, SeenFiles.parse(seen)
    attempts = len(about.get("attempts") or [])
    size = file.stat().st_size if is_inside(file, folder) else 0
    if attempts != before.attempts or size < before.steps:
        before = SeenFiles()
    parts, newest = {}, before.newest
    for part in PARTS:
        result = folder / f"{part}.json"
        changed = result.stat().st_mtime_ns if is_inside(result, folder) else 0
        if changed > before.newest:
            parts[part], newest = read_json(result), max(newest, changed)
    rows, offset, count = rows_after(file, before) if size else ([], 0, 0)
    events, events_offset = new_lines(folder / EVENTS, before.events) if is_inside(folder / EVENTS, folder) else ([], 0)
    return {
        "name": folder.name,
        **plan_facts(folder),
        "state": state(folder),
        "about": about,
        "parts": parts,
        "columns": list(STEP_KEYS),
        "rows": rows,
        "events": events[-MOST_ROWS:],
        "steps": count,
        "fresh": before == SeenFiles(),
        "seen": str(SeenFiles(offset, events_offset, count, newest, attempts)),
    }


def plan_facts(folder: Path) -> Json:
    """The plan that was trained, its model, and the accelerator that the prediction is for."""
    config = configuration(folder)
    if config is None:
        return {"title": "", "model": "", "accelerator": ""}
    return {"title": config.plan.title(), "model": config.model.name, "accelerator": config.cluster.accelerator.name}


def rows_after(file: Path, seen: SeenFiles) -> tuple[list[list[Any]], int, int]:
    """Rows after a position, each with the values of `STEP_KEYS`, evenly thinned if there are many; the position after them, and
    the number of all rows. The last row is always one of them."""
    offset, count, last, stride = seen.steps, seen.rows, b"", 0
    rows: list[Json] = []
    for line in complete_lines(file, offset):
        # Lines have about the same length: the first one says how many there are.
        stride = stride or max(1, math.ceil((file.stat().st_size - offset) / len(line) / MOST_ROWS))
        offset, count, last = offset + len(line), count + 1, line
        if stride == 1 or count % stride == 0:
            rows += parsed(line)
    if stride > 1 and count % stride:
        rows += parsed(last)
    return [[row.get(key) for key in STEP_KEYS] for row in rows], offset, count
