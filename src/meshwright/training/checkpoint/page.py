"""Checkpoints in the terminal: one row each, with what wrote it and whether its files are intact. No torch."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.plan import Plan
from meshwright.describe.result import values_of
from meshwright.errors import MeshwrightError
from meshwright.training.checkpoint.manifest import Listen, Manifest, check_files, read_manifest
from meshwright.units import Json, format_bytes, format_count
from meshwright.view.tables import filled

COLUMNS = (">checkpoint", ">step", ">written", ">size", ">parameters", ">ranks", "plan", "state")

PROBLEMS = {"MW-CKPT-001": "incomplete", "MW-CKPT-018": "unreadable"}


def summary(path: Path, verify: bool = False, listen: Listen | None = None) -> Json:
    """One checkpoint as plain data. `state` is "complete", or "good" if `verify` read and hashed all files, else what is wrong, with the
    kind of it in `problem`: incomplete, damaged or unreadable (an error of the disk)."""
    about: Json = {"path": str(path)}
    try:
        manifest = read_manifest(path)
        about = described(path, manifest)
        if verify:
            check_files(path, manifest, listen=listen)
        else:
            check_sizes(path, manifest)
    except MeshwrightError as error:
        problem = PROBLEMS.get(error.code, "damaged")
        return {**about, "state": error.why or error.what, "good": False, "problem": problem}
    return {**about, "state": "good" if verify else "complete", "good": True, "problem": None}


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise if a file is missing or has another size; does not read it."""
    for name, file in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != file.bytes:
            missing = "is missing" if found is None else f"has {found:,} of {file.bytes:,} bytes"
            raise MeshwrightError("MW-CKPT-002", f"'{path}' is damaged", why=f"{name} {missing}")


def described(path: Path, manifest: Manifest) -> Json:
    weights = [t for key, t in manifest.tensors.items() if key.startswith(("weight/", "replica-0/weight/"))]
    count = sum(math.prod(tensor.shape) for tensor in weights)
    return {
        "path": str(path),
        **values_of(manifest, "step", "created", "bytes"),
        "parameters": count,
        "dtypes": sorted({tensor.dtype for tensor in weights}),
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "ranks": manifest.world,
        **values_of(manifest, "plan", "model", "versions"),
    }


def page(rows: Sequence[Json]) -> RenderableType:
    """A table of checkpoints; below it what is wrong with some."""
    reasons = [Text(f"{Path(row['path']).name}: {row['state']}", "red") for row in rows if not row["good"]]
    return Group(filled(COLUMNS, [_cells(row) for row in rows]), *reasons)


def _cells(row: Json) -> list[object]:
    state = Text(row["state"], "green") if row["good"] else Text(row["problem"], "red")
    if "step" not in row:
        return [Path(row["path"]).name, "", "", "", "", "", "", state]
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))
    return [
        Path(row["path"]).name,
        f"{row['step']:,}",
        written,
        format_bytes(row["bytes"]),
        format_count(row["parameters"]),
        row["ranks"] or "–",
        "converted" if "converted from" in row["versions"] else plan_title(row["plan"]),
        state,
    ]


def plan_title(plan: Json) -> str:
    """The plan in one line; plans of other versions may have other fields."""
    try:
        return Plan(**plan).title()
    except MeshwrightError:
        return ", ".join(f"{name} {value}" for name, value in plan.items())
