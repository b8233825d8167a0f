"""Training runs as one HTML file: the page's view of runs, with the data of run folders inside. It draws what the live page draws.

A run may still be running, or have failed: curves come from the rows of its steps, and what `train` writes at the end is shown if it is
there. The file opens from disk and reaches no address.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.describe.run_folder import PLAN, PREDICTION, PROFILE, is_inside, is_run, read_json
from meshwright.errors import MeshwrightError
from meshwright.view.page.bundle import written
from meshwright.view.page.runs import PARTS, run_data, run_entry
from meshwright.view.runs import check_folder
from meshwright.view.trace import MICROSECONDS, VERSION, both_steps

TITLE = "Training runs: predicted and measured"


def page(folders: Sequence[Path], title: str = "") -> str:
    """The HTML of some runs, of which the first is shown when the file opens."""
    names = unique_names(folders)
    for folder in folders:
        check_run(folder)
    entries = [{**run_entry(folder), "name": name} for name, folder in zip(names, folders, strict=True)]
    data = {name: {**run_data(folder), "name": name} for name, folder in zip(names, folders, strict=True)}
    return written({}, title or TITLE, "runs", bare=True, runs={"folder": "", "runs": entries}, run=data)


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder; its path where two have the same name."""
    names = [folder.absolute().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def check_run(folder: Path) -> None:
    """Raise if a folder is not that of a run, or has a file that `train` did not write; the error names the file."""
    check_folder(folder)
    if not is_run(folder):
        missing = PLAN if not is_inside(folder / PLAN, folder) else PREDICTION
        why = "`train` writes it before the first step"
        raise MeshwrightError("MW-REP-001", f"{folder.name} lacks {missing}", why=why)
    for name in PARTS:
        read_part(folder, name)


def foreign(
    file: str, folder: Path, problem: str = "is not a file that `train` writes", why: str = ""
) -> MeshwrightError:
    return MeshwrightError("MW-REP-002", f"{file} of {folder.name} {problem}", why=why)


def read_part(folder: Path, name: str) -> Any:
    """One JSON file of a run folder; None if it is missing."""
    path = folder / f"{name}.json"
    if not is_inside(path, folder):
        return None
    value = read_json(path)
    if not isinstance(value, list if name == "difference" else dict):
        raise foreign(path.name, folder)
    version = value.get("version") if isinstance(value, dict) else None
    if name in ("communication", "timeline") and version != VERSION:
        raise foreign(path.name, folder, f"has version {version}", f"This release reads version {VERSION}")
    for row in value if name == "difference" else ():
        if not isinstance(row, dict) or not {"what", "unit", "predicted", "measured"} <= set(row):
            raise foreign(path.name, folder, why="A row lacks what, unit, predicted or measured")
    if name == "timeline" and isinstance(value, dict):
        try:
            both_steps(value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise foreign(path.name, folder, "lacks a value that `train` writes", repr(error)[:100]) from None
    return value


def trace_of(folders: Sequence[Path]) -> dict[str, Any]:
    """One trace of one run: the ranks that torch profiled, or the measured step, and below them the simulated step."""
    folder = folders[0]
    check_run(folder)
    timeline, profiled = read_part(folder, "timeline"), profiles(folder)
    if len(folders) != 1 or (timeline is None and not profiled):
        what = f"{len(folders)} runs" if len(folders) != 1 else f"{folder.name}, which lacks timeline.json"
        why = "A trace shows one run, which is complete or was trained with --profile"
        raise MeshwrightError("MW-REP-003", f"--trace of {what}", why=why, fix="meshwright report RUN --trace FILE")
    trace = both_steps(timeline, {"plan": run_entry(folder)["title"]})
    first = min((profile["otherData"]["origin_s"] for profile in profiled), default=0.0)
    above = 1 + max((event["pid"] for event in trace["traceEvents"]), default=-1)
    for profile in profiled:
        rank, later = profile["otherData"]["rank"], MICROSECONDS * (profile["otherData"]["origin_s"] - first)
        for event in profile["traceEvents"]:
            event |= {"pid": above + rank, "ts": event["ts"] + later if event["ph"] != "M" else 0}
            if event["ph"] == "M" and event["name"] == "process_name":
                event["args"] = {"name": f"profiled: rank {rank}"}
            trace["traceEvents"].append(event)
    return trace


def profiles(folder: Path) -> list[dict[str, Any]]:
    """The traces that `train --profile` wrote, by rank."""
    traces = [read_json(file) for file in sorted((folder / PROFILE).glob("rank-*.json"))]
    for trace in traces:
        if not isinstance(trace, dict) or not {"rank", "origin_s"} <= set(trace.get("otherData", {})):
            raise MeshwrightError("MW-REP-002", f"a file in {PROFILE}/ of {folder.name} is not one that `train` writes")
    return sorted(traces, key=lambda trace: int(trace["otherData"]["rank"]))
