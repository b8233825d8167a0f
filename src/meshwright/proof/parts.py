"""Parts of tensors: where the part of a rank lies in the whole, and what a rank has beside what one device has there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

Box = tuple[slice, ...]
Pair = tuple[np.ndarray, np.ndarray]  # of a rank, and the same part of one device's


def box_at(start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The indices of a part that starts here."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def assembled(parts: Iterable[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    """The whole tensor of parts and their starts."""
    parts = list(parts)
    out = np.zeros(np.max([np.add(start, part.shape) for start, part in parts], axis=0))
    for start, part in parts:
        out[box_at(start, part.shape)] = part
    return out


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
    def of(
        cls, kind: str, coordinates: Mapping[str, int], start: tuple[int, ...], now: Pair, then: Pair | None
    ) -> "Copy":
        """Of a parameter the change of the step, of a norm its square."""
        if kind == "parameter" and then is not None:
            return cls(coordinates, start, now[0] - then[0], now[1] - then[1], is_change=True)
        if kind == "norm":
            return cls(coordinates, start, now[0] ** 2, now[1] ** 2)
        return cls(coordinates, start, *now, *(then or ()))
