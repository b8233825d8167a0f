"""Parts of tensors: the box of the whole that a rank holds, what the ranks hold together, and each part beside the same part of a reference.

A part is a box of the whole tensor. Where only some elements of the flattened box are held, as optimizers cut parameters without looking at their
shape, `flat` says which. A part that is too large to store is a sketch of it (`sketch`): a linear image, so the sketches of the parts sum to that
of the whole. Plain data: proofs and recordings both compare these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

Box = tuple[slice, ...]
INITIAL_VALUE = "initial parameter"  # the kind of a parameter before the first step


def box_at(start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The indices of a part that starts here."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


@dataclass
class RecordedValue:
    """One value of a step on one rank: a tensor, the part of it that the rank holds, or a number."""

    kind: str
    name: str
    rank: int
    value: np.ndarray
    dtype: str = "float64"
    call: int = 0
    index: int = 0
    shape: tuple[int, ...] | None = None  # of the whole tensor; None: it is not known which part this is
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    flat: tuple[int, int] | None = None
    partial: tuple[str, ...] = ()
    # The shape of what `value` is a sketch of; of an activation, one for each sample
    sketched: tuple[int, ...] | None = None

    @property
    def here(self) -> Box:
        return box_at(self.start, self.size)

    @property
    def place(self) -> tuple[int, ...]:
        """What tells this part from others of the same tensor."""
        return (*self.start, *self.size, *(self.flat or ()))

    @property
    def elements(self) -> int:
        return prod(self.size) if self.flat is None else self.flat[1] - self.flat[0]

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The same part of a whole tensor."""
        box = whole[self.here]
        return box if self.flat is None else box.reshape(-1)[slice(*self.flat)].reshape(self.value.shape)

    def put(self, whole: np.ndarray, seen: np.ndarray) -> None:
        """Write this part into a whole tensor, where nobody has written yet."""
        for target, value in ((whole, self.value), (seen, True)):
            box = target[self.here].copy()
            part = box.reshape(-1)[slice(*self.flat)].reshape(self.value.shape) if self.flat else box
            part[...] = np.where(self.of(seen), part, value) if target is whole else True
            target[self.here] = box

    def sketch(self, whole: np.ndarray | None = None) -> np.ndarray:
        """The sketch of this part, or of the same part of a whole tensor."""
        if whole is None and self.sketched is not None:
            return self.value
        assert self.shape is not None
        value = self.value if whole is None else self.of(whole)
        return sketched(value, self.shape, self.start, self.size, (self.flat or (0,))[0])


def sketched(
    part: np.ndarray, shape: Sequence[int], start: Sequence[int], size: Sequence[int], first: int = 0
) -> np.ndarray:
    """`sketch.sketch` of an array."""
    import torch

    from meshwright.proof.sketch import sketch

    return sketch(torch.from_numpy(np.ascontiguousarray(part)), shape, start, size, first).numpy()


def whole_value(kind: str, name: str, value: np.ndarray) -> RecordedValue:
    return RecordedValue(kind, name, 0, value, shape=value.shape, start=(0,) * value.ndim, size=value.shape)


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
        first = self.parts[0]
        if first.size == self.shape and first.flat is None:
            return first.value.astype(np.float64, copy=False)
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
            return whole_value(self.kind, self.name, self.whole).sketch()
        distinct = self.distinct.values()
        if self.shape is None or sum(part.elements for part in distinct) != prod(self.shape):
            return None
        return np.sum([part.sketch() for part in distinct], axis=0)

    @property
    def complete(self) -> bool:
        return self.whole is not None or self.sketch is not None


def merge(values: Iterable[RecordedValue], rename: Mapping[str, str] | None = None) -> dict[str, Merged]:
    """The tensors of values of one kind by name, in the order in which they were recorded."""
    out: dict[str, Merged] = {}
    for value in values:
        name = (rename or {}).get(value.name, value.name)
        out.setdefault(name, Merged(value.kind, name)).parts.append(value)
    return out


@dataclass(frozen=True)
class Beside:
    """What ranks hold of a tensor, the same of the reference, and the whole (or its sketch) whose size an error is measured against. `part` is None
    where several ranks are summed."""

    ranks: tuple[int, ...]
    got: np.ndarray
    expected: np.ndarray
    whole: np.ndarray
    part: RecordedValue | None = None
    sketched: bool = True

    @property
    def place(self) -> tuple[int, ...]:
        return () if self.part is None else self.part.place

    @property
    def start(self) -> tuple[int, ...]:
        """Where a box starts in the whole; of other parts their place."""
        return self.place if self.part is None or self.sketched or self.part.flat else self.part.start


def beside(expected: Merged, got: Merged) -> Iterator[Beside]:
    """Every rank's part beside the same part of the reference. Of sketches of which only the sum is known, the sum of all ranks."""
    whole = expected.whole
    if whole is not None and not got.sketched:
        for part in got.parts:
            yield Beside((part.rank,), part.value.astype(np.float64, copy=False), part.of(whole), whole, part, False)
        return
    if whole is not None:
        for part in got.parts:
            yield Beside((part.rank,), part.sketch(), part.sketch(whole), part.sketch(whole), part)
        return
    total, sum_of_parts = expected.sketch, got.sketch
    if total is None or sum_of_parts is None:
        return
    yield Beside(tuple(sorted({part.rank for part in got.distinct.values()})), sum_of_parts, total, total)
    for part in got.parts:  # other copies of a part
        first = got.distinct[part.place]
        if part is not first:
            yield Beside((part.rank,), part.sketch(), first.sketch(), first.sketch(), part)


@dataclass(frozen=True)
class Copy:
    """The part of a tensor that a rank holds, beside the same part of one device's."""

    coordinates: Mapping[str, int]
    start: tuple[int, ...]
    got: np.ndarray
    expected: np.ndarray
    before: np.ndarray | None = None  # what this rank had in the step before
    expected_before: np.ndarray | None = None
    dims: tuple[str, ...] = ("rows", "columns")  # what the dimensions are called
    is_change: bool = False  # of a parameter in a step

    @property
    def box(self) -> Box:
        return box_at(self.start, self.got.shape)

    @classmethod
    def of(cls, kind: str, coordinates: Mapping[str, int], now: Beside, then: Beside | None) -> Copy:
        """Of a parameter the change of the step, of a norm its square."""
        if kind == "parameter" and then is not None:
            return cls(coordinates, now.start, now.got - then.got, now.expected - then.expected, is_change=True)
        if kind == "norm":
            return cls(coordinates, now.start, now.got**2, now.expected**2)
        old = () if then is None else (then.got, then.expected)
        return cls(coordinates, now.start, now.got, now.expected, *old)
