"""Which files belong to a traced run: some files, a folder with a file per rank, or a run folder of ours."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path

from meshwright.describe.run_folder import PLAN, PROFILE, RUN
from meshwright.errors import MeshwrightError
from meshwright.explain.reader import MOST_EVENTS, read_trace
from meshwright.explain.trace import RankTrace

ENDINGS = (".json", ".json.gz")
MOST_FILES = 4096


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """The traces of all ranks, in the order of ranks; of a rank with several files the first. What is left out is a note of the first trace."""
    traces: dict[int, RankTrace] = {}
    left, refused, unnumbered, notes = MOST_EVENTS, list[MeshwrightError](), list[RankTrace](), list[str]()
    files = trace_files(paths, notes)
    for number, file in enumerate(files):
        if left <= 0:
            notes.append(f"{len(files) - number} further files were not read: there are {MOST_EVENTS:,} events before")
            break
        try:
            trace = read_trace(file, left)
        except MeshwrightError as error:
            refused.append(error)
            continue
        left -= len(trace.events)
        if trace.rank < 0:
            unnumbered.append(trace)
        elif trace.rank in traces:
            notes.append(f"{trace.file} was not used: it is another file of rank {trace.rank}")
        else:
            traces[trace.rank] = trace
    if not traces and not unnumbered:
        raise refused[0]
    free = (rank for rank in count() if rank not in traces)
    for rank, trace in zip(free, unnumbered, strict=False):
        note = f"the trace does not say its rank: taken as {rank}, in the order of the files"
        traces[rank] = replace(trace, rank=rank, world=rank + 1, notes=(*trace.notes, note))
    notes += [f"{error.what}: {error.why}" for error in refused]
    ranks = sorted(traces)
    first = traces[ranks[0]]
    return [replace(first, notes=(*first.notes, *notes)), *(traces[rank] for rank in ranks[1:])]


def plan_of_run(paths: Iterable[Path]) -> str:
    """The plan file of our own run folder, if one of the paths is one; else empty."""
    plans = [path / PLAN for path in paths if (path / PROFILE).is_dir() and (path / PLAN).is_file()]
    return str(plans[0]) if plans else ""


def trace_files(paths: Iterable[Path], notes: list[str]) -> list[Path]:
    """The files that the paths name; of a folder those whose names end like a trace's. Adds a note on those that are too many."""
    out, paths = list[Path](), list(paths)
    for path in paths:
        if path.is_dir():
            if (path / RUN).is_file() and not (path / PROFILE).is_dir():
                raise MeshwrightError(
                    "MW-EXPL-003",
                    f"the run in '{path}' was not profiled",
                    why="It has no folder profile",
                    fix="meshwright train RUN.toml --profile 3",
                )
            folder = path / PROFILE if (path / PROFILE).is_dir() else path
            files = sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS) and file.is_file())
            out += files[:MOST_FILES]
            if len(files) > MOST_FILES:
                notes.append(
                    f"{folder}: {len(files) - MOST_FILES:,} files after the first {MOST_FILES:,} were not read"
                )
        elif path.is_file():
            out.append(path)
        else:
            why = "It is a pipe or a device" if path.exists() else "There is no file or folder of that name"
            raise MeshwrightError("MW-EXPL-001", f"cannot read '{path}'", why=why)
    if not out:
        names = ", ".join(str(path) for path in paths)
        raise MeshwrightError(
            "MW-EXPL-003",
            f"no trace in {names}",
            why="No file there ends with .json or .json.gz",
            fix=f"meshwright explain --flight {paths[0]} for flight records; name memory snapshots one by one",
        )
    return out
