"""One step of a reference and of ranks, tensor by tensor: how far each part is off, and whether by more than rounding.

Proofs and recordings are judged here: `compare` has the steps of traces, `check.pair` those of two recordings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.proof.parts import INITIAL_VALUE, Beside, Copy, Merged, beside
from meshwright.proof.tolerance import NEARLY_ZERO, Tolerance, error_beyond, tensor_error

Tensors = dict[str, Merged]  # by name


class PartError(NamedTuple):
    """How far what ranks hold of a tensor is off, and the least-squares factor. `raw`: with what noise in the gradients explains."""

    pair: Beside
    error: float
    ratio: float
    raw: float


@dataclass(frozen=True)
class JudgedTensor:
    kind: str
    name: str
    bound: float
    parts: list[PartError]

    @property
    def error(self) -> float:
        return max((part.error for part in self.parts), default=0.0)

    @property
    def wrong(self) -> list[PartError]:
        return [part for part in self.parts if not part.error <= self.bound]


class ComparedStep(ABC):
    """One step of a reference and of ranks. A subclass says where the values are."""

    number: int
    dtype: str
    coordinates: Mapping[int, Mapping[str, int]]  # by rank
    previous: ComparedStep | None
    backwards: tuple[str, ...] = ("gradient",)  # kinds of which the last tensor is computed first

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[Tensors, Tensors]] = {}
        self.floors: dict[tuple[str, bool], float] = {}

    @abstractmethod
    def read(self, kind: str) -> tuple[Tensors, Tensors]:
        """The tensors of a kind of the reference and of the ranks, by the reference's names."""

    @abstractmethod
    def noise(self, pair: Beside, name: str, tolerance: Tolerance) -> Any:
        """How far noise in the gradients may have moved each element of a part of a parameter; None if that is not known."""

    def comparable(self, kind: str, name: str) -> bool:
        return True

    def of(self, kind: str) -> tuple[Tensors, Tensors]:
        if kind not in self.tensors:
            self.tensors[kind] = self.read(kind)
        return self.tensors[kind]

    def pairs(self, kind: str, name: str) -> Iterator[Beside]:
        """What the ranks hold of a tensor beside the reference's; nothing if a side does not have it."""
        expected, got = (side.get(name) for side in self.of(kind))
        if expected is not None and got is not None and expected.shape == got.shape:
            yield from beside(expected, got)

    def floor(self, kind: str, sketched: bool = False) -> float:
        """The smallest scale that a tensor is measured against: a share of the largest of its kind."""
        if (kind, sketched) not in self.floors:
            tensors = (tensor for tensor in self.of(kind)[0].values() if tensor.sketched == sketched)
            sizes = (float(np.abs(part.value).max(initial=0.0)) for tensor in tensors for part in tensor.parts)
            self.floors[kind, sketched] = NEARLY_ZERO[self.dtype] * max(sizes, default=0.0)
        return self.floors[kind, sketched]

    def judge(self, kinds: Iterable[str], tolerance: Tolerance) -> Iterator[JudgedTensor]:
        """Every tensor that both have, in the order of kinds and of computation."""
        for kind in kinds:
            expected, got = self.of(kind)
            for name in reversed(expected) if kind in self.backwards else expected:
                if name in got and self.comparable(kind, name):
                    yield self.judged(kind, name, tolerance)

    def judged(self, kind: str, name: str, tolerance: Tolerance) -> JudgedTensor:
        expected, got = (side[name] for side in self.of(kind))
        bound, floor = tolerance.bound(kind, self.number, name), self.floor(kind, expected.sketched)
        parts = []
        for pair in beside(expected, got):
            raw, ratio = error_of(pair, floor)
            noise = self.noise(pair, name, tolerance) if kind == "parameter" and bound < raw < np.inf else None
            error = raw if noise is None else error_beyond(noise, pair.got, pair.expected, pair.whole, floor)
            parts.append(PartError(pair, error, ratio, raw))
        return JudgedTensor(kind, name, bound, parts)

    def errors(
        self, kinds: Iterable[str], other: Callable[[str], Tensors] | None = None
    ) -> dict[tuple[str, str], float]:
        """How far another run is off the reference, by kind and tensor: the ranks, or one whose tensors are given."""
        return {
            (kind, name): max((error_of(pair, self.floor(kind, one.sketched))[0] for pair in beside(one, run[name])), default=0.0)
            for kind in kinds
            for run in (other(kind) if other is not None else self.of(kind)[1],)
            for name, one in self.of(kind)[0].items()
            if name in run
        }  # fmt: skip

    def copies(self, kind: str, name: str) -> Iterator[Copy]:
        """What the ranks hold of a tensor: of a parameter the change of this step, of a norm its square."""
        before = {(pair.ranks, pair.place): pair for pair in self.before(kind, name)}
        for pair in self.pairs(kind, name):
            yield Copy.of(kind, self.place_of(pair.ranks, name), pair, before.get((pair.ranks, pair.place)))

    def before(self, kind: str, name: str) -> Iterator[Beside]:
        """The same in the step before."""
        if self.previous is not None:
            yield from self.previous.pairs(kind, name)
        elif kind == "parameter":
            yield from self.pairs(INITIAL_VALUE, name)

    def place_of(self, ranks: tuple[int, ...], name: str) -> Mapping[str, int]:
        """A rank's place among those with a tensor; several ranks have none."""
        return self.coordinates[ranks[0]] if len(ranks) == 1 else {}


def error_of(pair: Beside, floor: float) -> tuple[float, float]:
    return tensor_error(pair.got, pair.expected, pair.whole, floor)
