"""Runs in the terminal: a list of run folders, and several runs next to each other."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.config import Config, diff, load
from meshwright.describe.run_folder import (
    PLAN,
    PREDICTION,
    is_run,
    last_rows,
    modified,
    present_plan,
    read_about,
    read_json,
    state,
)
from meshwright.errors import MeshwrightError, listed
from meshwright.units import format_bytes, format_count, format_seconds
from meshwright.view.live import WIDE, WINDOW, format_clock, is_comparable
from meshwright.view.tables import filled

UNREADABLE = "unreadable"
STATES = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow", UNREADABLE: "red"}
MOST_RUNS = 1000
MEASURED_SECTIONS = (
    "cluster.",
    "stack.",
)  # a calibration changes many constants of these: they are counted, not listed


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The run folders that are given, and those directly below a folder that is none; the newest first."""
    folders: dict[Path, None] = {}
    for place in places:
        check_folder(place)
        inside = [place] if is_run(place) else sorted(p for p in place.iterdir() if p.is_dir() and is_run(p))
        folders |= dict.fromkeys(inside[:MOST_RUNS])
    return sorted(folders, key=modified, reverse=True)


def check_folder(folder: Path) -> None:
    """Raise if there is no such folder."""
    if not folder.is_dir():
        what = f"the folder '{folder}' {'is a file' if folder.exists() else 'does not exist'}"
        raise MeshwrightError("MW-REP-001", what, fix="meshwright train PLAN.toml --out FOLDER")


def summary(folder: Path) -> dict[str, Any]:
    """Summarise a run for a list; a value that the folder does not have is None. A folder with a broken file is `unreadable`."""
    try:
        return {**_values(folder, modified(folder)), "state": state(folder)}
    except MeshwrightError as error:
        unread = dict.fromkeys(("planned_steps", *(key for _, key, _ in RESULTS)))
        names = {"name": folder.name, "folder": str(folder), "model": "", "title": "", "unit": "tokens"}
        return {**unread, **names, "started": None, "modified_s": modified(folder), "attempts": 0, "steps": 0,
                "state": UNREADABLE, "cause": str(error)}  # fmt: skip


@lru_cache(maxsize=2 * MOST_RUNS)
def _values(folder: Path, modified_s: float) -> dict[str, Any]:
    """The summary of a folder that was last written at `modified_s`: the page asks for it every second or two."""
    about, rows = read_about(folder), last_rows(folder)
    measured, prediction = read_table(folder / "measurement.json"), read_table(folder / PREDICTION)
    config = configuration(folder)
    attempts = about.get("attempts") or []
    begun, ended = about.get("started"), (attempts[-1].get("ended") if attempts else None)
    last, recent = (rows[-1] if rows else {}), rows[-WINDOW:]

    def middle(key: str, measured_key: str) -> float | None:
        values = [row[key] for row in recent if isinstance(row.get(key), int | float)]
        return measured.get(measured_key) or (median(values) if values else None)

    validation = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    validation = validation or [loss for _, loss in measured.get("validation_loss", [])]
    return {
        "name": folder.name,
        "folder": str(folder),
        "model": config.model.name if config else "",
        "title": title_of(folder, config) if config else "",
        "world": config.plan.world if config else None,
        "steps": int(last["step"]) + 1 if "step" in last else 0,
        "planned_steps": about.get("steps") or measured.get("steps"),
        "loss": last.get("loss"),
        "validation_loss": validation[-1] if validation else None,
        "step_time_s": middle("seconds", "step_time_s"),
        "predicted_step_time_s": prediction.get("step_time_s"),
        "comparable": is_comparable(about, config),
        "tokens_per_s": middle("tokens_per_s", "tokens_per_s"),
        "unit": config.model.unit if config else "tokens",
        "mfu": middle("mfu", "mfu"),
        "memory_gib": measured.get("memory_gib") or last.get("memory_gib"),
        "started": begun,
        "elapsed_s": max(0.0, (ended or modified_s) - begun) if begun else None,
        "attempts": len(attempts),
        "cause": (attempts[-1].get("cause") if attempts else None) or "",
        "modified_s": modified_s,
    }


def read_table(file: Path) -> dict[str, Any]:
    """A JSON file that holds a table; empty if there is none."""
    table = read_json(file) if file.is_file() else {}
    if not isinstance(table, dict):
        raise MeshwrightError("MW-REP-002", f"{file.name} of {file.parent.name} is not a file that `train` writes")
    return table


def configuration(folder: Path) -> Config | None:
    """The run file of a run; None if this release cannot read it."""
    return _readable(present_plan(folder))


def _readable(file: Path) -> Config | None:
    try:
        return _loaded(file, file.stat().st_mtime_ns)
    except (OSError, MeshwrightError):
        return None


def title_of(folder: Path, config: Config) -> str:
    """The plan that a run uses, and after a resize also the one that was asked for."""
    asked = None if present_plan(folder) == folder / PLAN else _readable(folder / PLAN)
    return config.plan.title() + (f" (asked for: {asked.plan.title()})" if asked is not None else "")


@lru_cache(maxsize=2 * MOST_RUNS)
def _loaded(file: Path, modified_ns: int) -> Config:
    return load(file)


def listing(rows: Sequence[dict[str, Any]], width: int) -> RenderableType:
    """The table of `meshwright runs`: one line for each run; the plan is cut to the width that is left, and a narrow terminal
    does not show when a run began."""
    if not rows:
        return Text("There is no run here. Train one with: meshwright train PLAN.toml --out runs/NAME", "dim")
    columns = ["run", "state", ">steps", ">loss", ">step", ">predicted", ">tokens/s", ">MFU", ">time", "begun", "plan"]
    cells = [listed_cells(row) for row in rows]
    if width < WIDE:
        cells, columns = [[*line[:-2], line[-1]] for line in cells], [*columns[:-2], columns[-1]]
    used = sum(max(len(name.lstrip(">")), *(len(line[i]) for line in cells)) + 3 for i, name in enumerate(columns[:-1]))
    for line in cells:
        line[-1].truncate(max(10, width - used - 2), overflow="ellipsis")
    notes = [
        f"{row['name']}: {row['cause']}" for row in rows if row["state"] in ("failed", UNREADABLE) and row["cause"]
    ]
    return Group(filled(columns, cells), *(Text(note.splitlines()[0], "red") for note in notes))


def listed_cells(row: dict[str, Any]) -> list[Text]:
    steps = f"{row['steps']:,}" + (f" of {row['planned_steps']:,}" if row["planned_steps"] else "")
    restarts = f" ({row['attempts']})" if row["attempts"] > 1 else ""
    predicted, error = Text(formatted(row["predicted_step_time_s"], format_seconds)), relative_error(row)
    if error is not None:
        predicted.append(f" {error:+.0%}", "green" if abs(error) <= 0.25 else "yellow")
    rate = formatted(row["tokens_per_s"], format_count) + ("" if row["unit"] == "tokens" else f" {row['unit']}")
    begun = time.strftime("%d %b %H:%M", time.localtime(row["started"] or row["modified_s"]))
    plan = " · ".join(part for part in (row["model"], row["title"]) if part)
    before = steps, formatted(row["loss"], lambda x: f"{x:.3f}"), formatted(row["step_time_s"], format_seconds)
    after = rate, formatted(row["mfu"], lambda x: f"{x:.1%}"), formatted(row["elapsed_s"], format_clock)
    first = Text(row["name"], "bold"), Text(row["state"] + restarts, STATES[row["state"]])
    return [*first, *map(Text, before), predicted, *map(Text, after), Text(begun, "dim"), Text(plan, "dim")]


def comparison(folders: Sequence[Path]) -> RenderableType:
    """Several runs as columns: results first, then the values of the run files in which they differ from the first one."""
    summaries = [summary(folder) for folder in folders]
    lines: list[list[object]] = []
    units = "/s, ".join(sorted({row["unit"] for row in summaries}))
    for name, key, form in RESULTS:
        name = f"{units}/s" if key == "tokens_per_s" else name
        values = [row[key] for row in summaries]
        if any(value not in (None, "") for value in values):
            lines.append([name, *(formatted(value, form) for value in values)])
    columns = ["", *(f">{row['name']}" for row in summaries)]
    tables: list[RenderableType] = [filled(columns, lines, title="Results")]
    configs = [configuration(folder) for folder in folders]
    changed = differences(configs)
    names = ["", *(row["name"] for row in summaries)]
    equal = Text("The run files are equal", "dim")
    readable = filled(names, changed, title="Different in the run files") if changed else equal
    notes = [f"{row['name']}: {row['cause']}" for row in summaries if row["state"] == UNREADABLE]
    unread = [row["name"] for row, config in zip(summaries, configs, strict=True) if config is None]
    notes += [f"The run files of {listed(unread)} cannot be read: not compared"] * bool(unread)
    return Group(*tables, *([readable] if len(unread) < len(configs) - 1 else []), *(Text(n, "red") for n in notes))


RESULTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("state", "state", str),
    ("steps", "steps", lambda x: f"{x:,}"),
    ("loss", "loss", lambda x: f"{x:.4f}"),
    ("validation loss", "validation_loss", lambda x: f"{x:.4f}"),
    ("step", "step_time_s", format_seconds),
    ("predicted step", "predicted_step_time_s", format_seconds),
    ("tokens/s", "tokens_per_s", format_count),
    ("MFU", "mfu", lambda x: f"{x:.1%}"),
    ("memory", "memory_gib", lambda x: format_bytes(x * 2**30)),
    ("time", "elapsed_s", format_clock),
    ("attempts", "attempts", str),
)


def differences(configs: Sequence[Config | None]) -> list[list[object]]:
    """Rows (field, value in each run) of the fields that are not the same in all runs."""
    base = next((config for config in configs if config is not None), None)
    if base is None:
        return []
    changed = [diff(base, config) if config is not None else {} for config in configs]
    paths = dict.fromkeys(path for changes in changed for path in changes)
    base_values = {path: next(changes[path][0] for changes in changed if path in changes) for path in paths}
    shown = [path for path in paths if not path.startswith(MEASURED_SECTIONS)]
    rows: list[list[object]] = [
        [
            path,
            *(
                "–" if config is None else plain(changes[path][1] if path in changes else base_values[path])
                for config, changes in zip(configs, changed, strict=True)
            ),
        ]
        for path in shown
    ]
    for section in MEASURED_SECTIONS:
        counts = [sum(path.startswith(section) for path in changes) for changes in changed]
        if any(counts):
            rows.append([f"{section[:-1]} constants", *(f"{count} differ" if count else "base" for count in counts)])
    return rows


def relative_error(row: dict[str, Any]) -> float | None:
    predicted, measured = row["predicted_step_time_s"], row["step_time_s"]
    return predicted / measured - 1 if predicted and measured and row.get("comparable") else None


def formatted(value: Any, form: Callable[[Any], str]) -> str:
    return "–" if value is None or value == "" else form(value)


def plain(value: Any) -> str:
    return "–" if value in ("", None, ()) else str(value)
