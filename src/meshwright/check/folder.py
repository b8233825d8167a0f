"""Read what the ranks of a training recorded: a folder with one folder for each rank. Plain data, without torch.

rank.json                  the rank, the world, the framework, its layout, this rank's place on every axis
step-000.json              the entries of a step in the order in which they were computed, and its collectives
step-000.safetensors       their tensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.proof.parts import RecordedValue

FORMAT = 2
LIMIT = 2.0 * 1024**3  # bytes of tensors that a rank stores whole
RANK_FIELDS: dict[str, Callable[[Any], Any]] = {
    "world": int, "rank": int, "steps": int, "batch_dim": int, "coordinates": dict, "parameters": list, "modules": list, "groups": dict,
    "framework": str, "layout": str,
}  # fmt: skip


@dataclass
class RankStep:
    """A step of one rank."""

    rank: int
    entries: list[RecordedValue]
    collectives: list[dict[str, Any]]
    ended: str = ""
    seconds: float = 0.0
    recording_seconds: float = 0.0

    def of(self, kind: str) -> list[RecordedValue]:
        return [entry for entry in self.entries if entry.kind == kind]


def of_ranks(steps: Iterable[RankStep], kind: str) -> Iterator[RecordedValue]:
    return (value for step in steps for value in step.of(kind))


@dataclass
class Recording:
    """The ranks of one training."""

    folder: Path
    ranks: list[dict[str, Any]] = field(default_factory=list)
    # The boxes of a parameter, as a user's table says them
    boxes: Callable[[RecordedValue], Iterable[RecordedValue]] | None = None

    @classmethod
    def read(cls, folder: str | Path) -> Recording:
        folder = Path(folder)
        if not folder.is_dir():
            raise MeshwrightError(
                "MW-CHECK-001", f"there is no folder {folder}", fix="meshwright check record --out DIR -- COMMAND"
            )
        files = sorted(folder.glob("rank-*/rank.json"))
        if not files:
            raise MeshwrightError(
                "MW-CHECK-002",
                f"{folder} is not a recording",
                why="It has no rank-*/rank.json: the script may have ended before its first step, or does not use torch",
                fix="meshwright check record --out DIR -- COMMAND",
            )
        ranks = [read_json(file) for file in files]
        if any(rank.get("format") != FORMAT for rank in ranks):
            raise MeshwrightError("MW-CHECK-003", f"{folder} was recorded by another version", fix="record it again")
        for file, rank in zip(files, ranks, strict=True):
            with understood(file):
                rank |= {name: kind(rank[name]) for name, kind in RANK_FIELDS.items()}
        world = max(rank["world"] for rank in ranks)
        if missing := sorted(set(range(world)) - {rank["rank"] for rank in ranks}):
            raise MeshwrightError(
                "MW-CHECK-004", f"{folder} has {len(ranks)} of {world} ranks; missing: {', '.join(map(str, missing[:8]))}",
                why="A rank that ended before its first update leaves nothing", fix="record it again",
            )  # fmt: skip
        return cls(folder, sorted(ranks, key=lambda rank: rank["rank"]))

    def perturbed(self) -> list[Recording]:
        """Its repetitions with weights moved by one unit in their last place."""
        return [Recording.read(folder) for folder in sorted(self.folder.glob("perturbed-*"))]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @cached_property
    def steps(self) -> int:
        """Steps that all ranks have."""
        return min(rank["steps"] for rank in self.ranks)

    @property
    def batch_dim(self) -> int:
        return int(self.ranks[0]["batch_dim"])

    @property
    def coordinates(self) -> list[dict[str, int]]:
        return [rank["coordinates"] for rank in self.ranks]

    @property
    def axes(self) -> dict[str, int]:
        """Degrees by axis."""
        names = {axis for place in self.coordinates for axis in place}
        return {axis: 1 + max(place.get(axis, 0) for place in self.coordinates) for axis in sorted(names)}

    def step(self, number: int) -> list[RankStep]:
        return [self.rank_step(rank["rank"], number) for rank in self.ranks]

    def rank_step(self, rank: int, number: int) -> RankStep:
        base = self.folder / f"rank-{rank:05d}" / f"step-{number:03d}"
        about = read_json(base.with_suffix(".json"))
        tensors = read_tensors(base.with_suffix(".safetensors"))
        with understood(base.with_suffix(".json")):
            entries = list(entries_of(rank, about["entries"], tensors))
            step = RankStep(
                rank, entries, about["collectives"], about["ended"], about["seconds"], about["recording_seconds"]
            )
        if self.boxes is not None:
            cut = set(self.ranks[rank]["parameters"])
            step.entries = [box for e in entries for box in (self.boxes(e) if e.name in cut else (e,))]
        return step


def entries_of(rank: int, rows: list[dict[str, Any]], tensors: dict[str, np.ndarray]) -> Iterator[RecordedValue]:
    for row in rows:
        if "value" in row:
            yield RecordedValue(
                row["kind"], row["name"], rank, np.array([row["value"]]), shape=(1,), start=(0,), size=(1,)
            )
            continue
        box = row["holding"] or {"shape": None, "start": (), "size": (), "flat": None, "partial": ()}
        shape = None if box["shape"] is None else tuple(box["shape"])
        sketched = tuple(row["sketched"]) if "sketched" in row else None
        yield RecordedValue(
            row["kind"], row["name"], rank, tensors[row["key"]], row["dtype"], row.get("call", 0), row.get("index", 0),
            shape, tuple(box["start"]), tuple(box["size"]), box["flat"] and tuple(box["flat"]), tuple(box["partial"]), sketched,
        )  # fmt: skip


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """A file whose parts are missing, or of another kind, is an error with its name."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable(path, f"it is not as it was recorded ({type(error).__name__}: {error})") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if not isinstance(value, dict):
        raise unreadable(path, "it is not an object")
    return value


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, why: object) -> MeshwrightError:
    return MeshwrightError("MW-CHECK-005", f"cannot read {path}: {why}", fix="record it again")
