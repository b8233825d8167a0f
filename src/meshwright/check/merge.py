"""Put the parts of parameters that ranks hold together, and find what nobody holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    def whole(self) -> np.ndarray | None:
        """Float64, of the first rank that holds each element; None if a part's place is unknown or an element is held by nobody."""
        if self.shape is None:
            return None
        out, seen = np.zeros(self.shape), np.zeros(self.shape, bool)
        for part in self.parts:
            part.put(out, seen)
        return out if seen.all() else None


def merge(steps: Iterable[RankStep], kind: str, rename: dict[str, str] | None = None) -> dict[str, Merged]:
    """The tensors of a kind by name, in the order in which they were recorded."""
    out: dict[str, Merged] = {}
    for step in steps:
        for entry in step.of(kind):
            name = (rename or {}).get(entry.name, entry.name)
            out.setdefault(name, Merged(kind, name)).parts.append(entry)
    return out
