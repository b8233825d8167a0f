"""Put the parts of a tensor that ranks hold together, and lay what each rank has beside the reference's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from meshwright.check.folder import RankStep, RecordedValue


@dataclass
class Merged:
    """A tensor of a parameter: its value, gradient or state, as the ranks together hold it."""

    kind: str
    name: str
    parts: list[RecordedValue] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...] | None:
        shapes = {part.shape for part in self.parts}
        return next(iter(shapes)) if len(shapes) == 1 else None

    @property
    def sketched(self) -> bool:
        return any(part.sketched is not None for part in self.parts)

    @cached_property
    def whole(self) -> np.ndarray | None:
        """Float64, of the first rank that holds each element; None if a part's place is unknown, or an element is held by nobody or in a sketch."""
        if self.shape is None or self.sketched:
            return None
        out, seen = np.zeros(self.shape), np.zeros(self.shape, bool)
        for part in self.parts:
            part.put(out, seen)
        return out if seen.all() else None

    @property
    def distinct(self) -> dict[tuple[int, ...], RecordedValue]:
        """The first copy of every part."""
        out: dict[tuple[int, ...], RecordedValue] = {}
        for part in self.parts:
            out.setdefault(part.place, part)
        return out

    @cached_property
    def sketch(self) -> np.ndarray | None:
        """The sketch of the whole: sketches of parts sum to it. None as for `whole`."""
        if self.whole is not None:
            return whole_part(self).sketch(self.whole)
        distinct = self.distinct.values()
        if self.shape is None or sum(part.elements for part in distinct) != prod(self.shape):
            return None
        return np.sum([part.sketch() for part in distinct], axis=0)

    @property
    def complete(self) -> bool:
        return self.whole is not None or self.sketch is not None


def whole_part(tensor: Merged) -> RecordedValue:
    assert tensor.shape is not None
    return RecordedValue(
        tensor.kind, tensor.name, 0, np.zeros(0), shape=tensor.shape, start=(0,) * len(tensor.shape), size=tensor.shape
    )


@dataclass(frozen=True)
class Beside:
    """What ranks hold of a tensor, the same of the reference, and the whole (or its sketch) whose size an error is measured against."""

    ranks: tuple[int, ...]
    place: tuple[int, ...]
    got: np.ndarray
    expected: np.ndarray
    whole: np.ndarray
    sketched: bool = False


def beside(expected: Merged, got: Merged) -> Iterator[Beside]:
    """Every rank's part beside the same part of the reference. Of sketches of which only the sum is known, the sum of all ranks."""
    if expected.whole is not None and not got.sketched:
        for part in got.parts:
            yield Beside(
                (part.rank,), part.place, part.value.astype(np.float64), part.of(expected.whole), expected.whole
            )
        return
    if expected.whole is not None:
        for part in got.parts:
            yield Beside(
                (part.rank,), part.place, part.sketch(), part.sketch(expected.whole), part.sketch(expected.whole), True
            )
        return
    total, sum_of_parts = expected.sketch, got.sketch
    if total is None or sum_of_parts is None:
        return
    ranks = tuple(sorted({part.rank for part in got.distinct.values()}))
    yield Beside(ranks, (), sum_of_parts, total, total, True)
    for part in got.parts:  # other copies of a part
        first = got.distinct[part.place]
        if part is not first:
            yield Beside((part.rank,), part.place, part.sketch(), first.sketch(), first.sketch(), True)


def merge(steps: Iterable[RankStep], kind: str, rename: Mapping[str, str] | None = None) -> dict[str, Merged]:
    """The tensors of a kind by name, in the order in which they were recorded."""
    out: dict[str, Merged] = {}
    for step in steps:
        for entry in step.of(kind):
            name = (rename or {}).get(entry.name, entry.name)
            out.setdefault(name, Merged(kind, name)).parts.append(entry)
    return out
