"""What a user tells about his recordings, in a TOML file: other names, and what a rank holds where no framework says it.

[names]                                # patterns of the candidate's names, and what the reference calls them
'blocks\\.(\\d+)\\.(.*)' = 'layers.\\1.\\2'

[axes]                                 # degrees of the ranks; the first varies fastest
tp = 2
dp = 2

[sharding]                             # the patterns and words of `meshwright.parallelize`; "@axis" for an axis other than tp
"layers.*.attention.wq" = "column"     # column, row, vocabulary, logits, replicated, cut:DIM; ":1,1" for parts that are each cut
"layers.*.mlp.w13" = "column:1,1"
"layers.*.experts.w1" = "cut:0@ep"
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import numpy as np

from meshwright.check.folder import Recording
from meshwright.errors import MeshwrightError
from meshwright.proof.parts import RecordedValue

DIMS = {"column": 0, "vocabulary": 0, "logits": 0, "row": 1}


@dataclass(frozen=True)
class TableCut:
    """A dimension of a parameter that is cut over an axis: as one, or in parts of these proportions that are each cut."""

    dim: int
    axis: str
    parts: tuple[int, ...] = (1,)

    @classmethod
    def parse(cls, word: str) -> "TableCut | None":
        """None for "replicated"; raises ValueError for a word that is none of a table."""
        kind, axis = word.partition("@")[::2]
        kind, *more = kind.split(":")
        if kind == "replicated" and not more:
            return None
        dim = int(more.pop(0)) if kind == "cut" else DIMS[kind]
        parts = tuple(map(int, more.pop(0).split(","))) if more else (1,)
        if more or min(parts) < 1:
            raise ValueError
        return cls(dim, axis or "tp", parts)

    def boxes(self, value: RecordedValue, index: int, degree: int) -> Iterator[RecordedValue]:
        """What a rank recorded as a whole, as the boxes of the full tensor that it is."""
        if self.dim >= value.value.ndim:  # the bias of a row: whole on every rank
            yield value
            return
        unit = value.value.shape[self.dim] // sum(self.parts)
        full = tuple(n * degree if i == self.dim else n for i, n in enumerate(value.value.shape))
        for part, at in zip(self.parts, np.cumsum((0, *self.parts)), strict=False):
            box = value.value.take(range(at * unit, (at + part) * unit), self.dim)
            start = tuple((at * degree + index * part) * unit if i == self.dim else 0 for i in range(box.ndim))
            yield replace(value, value=box, shape=full, start=start, size=box.shape)


@dataclass(frozen=True)
class UserTable:
    names: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    sharding: Mapping[str, TableCut | None] = field(default_factory=dict)

    def coordinates(self, rank: int) -> dict[str, int]:
        out = {}
        for axis, degree in self.axes.items():
            rank, out[axis] = divmod(rank, degree)
        return out

    def applied(self, recording: Recording) -> Recording:
        """The recording with the ranks' places and the boxes of its parameters that the table says."""
        if not self.axes:
            return recording
        self.check(recording.world, recording.ranks[0]["parameters"], recording.folder)
        ranks = [{**rank, "coordinates": self.coordinates(rank["rank"])} for rank in recording.ranks]
        return Recording(recording.folder, ranks, self.boxes)

    def check(self, world: int, names: Iterable[str], folder: Path) -> None:
        if prod(self.axes.values()) != world:
            raise MeshwrightError(
                "MW-CHECK-016", f"the axes {dict(self.axes)} are {prod(self.axes.values())} ranks; {folder} has {world}",
                why="The degrees multiply to the number of ranks", fix="correct [axes]",
            )  # fmt: skip
        modules = {module for name in names for module in (name, name.rpartition(".")[0])}
        for pattern in self.sharding:
            if not any(matches(pattern, module) for module in modules):
                raise MeshwrightError(
                    "MW-CHECK-016", f"the pattern '{pattern}' of [sharding] matches no parameter of {folder}",
                    why=f"Its parameters are named as {min(modules, key=len, default='')!r}", fix="correct the pattern",
                )  # fmt: skip

    def cut_of(self, name: str) -> TableCut | None:
        """How a parameter is cut, by its name or its module's."""
        module = name.rpartition(".")[0]
        return next((c for p, c in self.sharding.items() if matches(p, name) or matches(p, module)), None)

    def boxes(self, value: RecordedValue) -> Iterable[RecordedValue]:
        """A value of a parameter as the boxes that the table says; of a parameter that it does not name, as recorded."""
        cut = self.cut_of(value.name)
        if cut is None or value.shape is None or value.flat is not None or value.sketched is not None:
            return (value,)
        return cut.boxes(value, self.coordinates(value.rank)[cut.axis], self.axes[cut.axis])


def matches(pattern: str, name: str) -> bool:
    """`*` matches one part of a dotted name."""
    parts, words = name.split("."), pattern.split(".")
    return len(parts) == len(words) and all(map(fnmatchcase, parts, words))


def read_table(path: Path | None) -> UserTable:
    if path is None:
        return UserTable()
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
        if unknown := set(tables) - {"names", "axes", "sharding"}:
            raise ValueError(f"unknown section [{min(unknown)}]")
        names = {str(k): str(v) for k, v in tables.get("names", {}).items()}
        for pattern in names:
            re.compile(pattern)
        axes = {str(k): int(v) for k, v in tables.get("axes", {}).items()}
        sharding = {pattern: parsed(word, axes) for pattern, word in tables.get("sharding", {}).items()}
        return UserTable(names, axes, sharding)
    except (OSError, AttributeError, TypeError, ValueError, re.error) as error:
        raise MeshwrightError(
            "MW-CHECK-013", f"cannot read the table {path}: {error}",
            valid=["[names] 'pattern' = 'replacement'", "[axes] tp = 2", "[sharding] 'layers.*.up' = 'column'"],
        ) from None  # fmt: skip


def parsed(word: str, axes: Mapping[str, int]) -> TableCut | None:
    try:
        cut = TableCut.parse(word)
    except (KeyError, ValueError, AttributeError, IndexError):
        raise ValueError(f"'{word}' is none of column, row, vocabulary, logits, replicated, cut:DIM") from None
    if cut is not None and cut.axis not in axes:
        raise ValueError(f"[axes] does not name '{cut.axis}', over which '{word}' cuts")
    return cut


def renamed(names: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Each name of the candidate as the reference calls it: the first pattern that matches the whole name."""
    out = {}
    for name in names:
        for pattern, replacement in table.items():
            if match := re.fullmatch(pattern, name):
                out[name] = match.expand(replacement)
                break
    return out
