"""Run folders as `meshwright train --out DIR` writes them: a list of runs, and one run as it grows.

A run folder has `plan.toml` and `prediction.json` from the start and a row in `steps.csv` after each step; `measurement.json`,
`difference.json` and what else `PARTS` names appear at the end. A reader sends back the `seen` of the last answer and gets
only newer rows and files, so a run can be watched while it trains.

Only folders directly below the one given at start are shown (or that one, if it is a run folder). Names are looked up among
those found there and never joined to a path; a link that leads out of the folder is left out.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, unknown
from meshwright.view.report import LIMIT, plan_title

PARTS = ("prediction", "measurement", "difference", "interference", "communication", "timeline", "proof")
STEPS = "steps.csv"
MOST_RUNS, MOST_ROWS = 200, 4000
RUNNING_S = 60.0  # a run without a measurement and without a new step for longer has stopped


class RunFolders:
    """The run folders below one folder."""

    def __init__(self, root: Path | None) -> None:
        self.root = root.resolve() if root is not None else None

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

    def listing(self) -> dict[str, Any]:
        """All runs, each with its plan and whether it is running, done or stopped."""
        rows = [
            {"name": name, "title": plan_title(path), "state": state(path), "modified_s": modified(path)}
            for name, path in self.found().items()
        ]
        return {"folder": self.root.name if self.root else "", "runs": rows}

    def run(self, name: str, seen: str = "") -> dict[str, Any]:
        """One run: its rows and files that are newer than `seen`; all of them without it."""
        known = self.found()
        if name not in known:
            raise unknown("MW-REP-001", "run folder", name, known)
        rows_seen, time_seen = read_seen(seen)
        folder = known[name]
        parts, newest = {}, time_seen
        for part in PARTS:
            file = folder / f"{part}.json"
            changed = file.stat().st_mtime_ns if is_inside(file, folder) else 0
            if changed > time_seen:
                parts[part], newest = read_json(file), max(newest, changed)
        columns, rows, count = (
            read_steps(folder / STEPS, rows_seen) if is_inside(folder / STEPS, folder) else ([], [], 0)
        )
        return {
            "name": name,
            "title": plan_title(folder),
            "state": state(folder),
            "parts": parts,
            "columns": columns,
            "rows": rows,
            "steps": count,
            "seen": f"{count}-{newest}",
        }


def is_run(path: Path) -> bool:
    return is_inside(path / "plan.toml", path) and is_inside(path / "prediction.json", path)


def is_inside(file: Path, folder: Path) -> bool:
    """Whether a regular file lies in the folder, not behind a link."""
    return file.is_file() and not file.is_symlink() and file.parent == folder


def modified(folder: Path) -> float:
    """When the newest of the files of a run was written."""
    times = [
        file.stat().st_mtime for name in (STEPS, "measurement.json", "plan.toml") if (file := folder / name).is_file()
    ]
    return max(times, default=0.0)


def state(folder: Path) -> str:
    if (folder / "measurement.json").is_file():
        return "done"
    return "running" if time.time() - modified(folder) < RUNNING_S else "stopped"


def read_seen(seen: str) -> tuple[int, int]:
    """The number of rows and the time of the newest file in an earlier answer."""
    rows, _, newest = seen.partition("-")
    good = all(part.isascii() and part.isdecimal() and len(part) < 20 for part in (rows, newest))
    return (int(rows), int(newest)) if good else (0, 0)


def read_json(file: Path) -> Any:
    """The content of a JSON file; a number that is not finite becomes null, as JSON has none."""
    if file.stat().st_size > LIMIT:
        raise MeshwrightError("MW-REP-002", f"{file.name} of {file.parent.name} is larger than {LIMIT // 10**6} MB")
    try:
        return finite(json.loads(file.read_text("utf-8")))
    except (ValueError, RecursionError) as error:
        why = str(error)[:100]
        raise MeshwrightError("MW-REP-002", f"{file.name} of {file.parent.name} is not JSON", why=why) from None


def read_steps(file: Path, after: int) -> tuple[list[str], list[list[Any]], int]:
    """The columns and the rows of steps.csv after the first `after`, evenly thinned if there are many, and the number of all rows.
    A last line without its end is still being written and is left for the next reading."""
    if file.stat().st_size > LIMIT:
        raise MeshwrightError("MW-REP-002", f"{file.name} of {file.parent.name} is larger than {LIMIT // 10**6} MB")
    text = file.read_text("utf-8", errors="replace")
    table = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
    if not table:
        return [], [], 0
    columns, rows = table[0], table[1:]
    new = rows[after:] if after <= len(rows) else rows  # fewer rows than before: the run was started anew
    stride = math.ceil(len(new) / MOST_ROWS) or 1
    thinned = new[::-stride][::-1]
    return columns, [[number(cell) for cell in row] for row in thinned if len(row) == len(columns)], len(rows)


def number(text: str) -> float | bool | str | None:
    """A cell of steps.csv as JSON: a number, a flag, or null for NaN and infinity."""
    if text in ("True", "False"):
        return text == "True"
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else None


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
