"""Columns of equal length: how the planner holds a million plans. One column a field, one row a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

LARGEST_TABLE = 1 << 16  # entries of a table of distinct values


class Table:
    """A set of named columns; `table.tp` is a column, `table.take(rows)` a smaller table."""

    def __init__(self, **columns: np.ndarray) -> None:
        self.columns = columns
        self.length = len(next(iter(columns.values()))) if columns else 0

    def __len__(self) -> int:
        return self.length

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def take(self, rows: Any) -> Table:
        """The rows at some positions, or where a mask is true."""
        return Table(**{name: column[rows] for name, column in self.columns.items()})

    def but(self, **columns: np.ndarray) -> Table:
        """With some columns added or replaced."""
        return Table(**{**self.columns, **columns})

    def row(self, i: int) -> dict[str, Any]:
        return {name: column[i].item() for name, column in self.columns.items()}

    def chunks(self, size: int) -> Iterator[Table]:
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def select(self, *names: str) -> Table:
        """Keep the named columns that exist."""
        return Table(**{name: self.columns[name] for name in names if name in self.columns})

    def crossed(self, keys: Sequence[np.ndarray], options: Callable[..., Table]) -> Table:
        """Every row with each of its options; what is possible depends on the row's keys alone."""
        found, mine, theirs, total = (
            [options(*(1 for _ in keys)).take(slice(0, 0))],
            [np.zeros(0, int)],
            [np.zeros(0, int)],
            0,
        )
        for key, rows in grouped(keys):
            several = options(*key)
            found.append(several)
            mine.append(np.repeat(rows, len(several)))
            theirs.append(np.tile(np.arange(total, total + len(several)), len(rows)))
            total += len(several)
        return self.take(np.concatenate(mine)).but(**join(found).take(np.concatenate(theirs)).columns)

    def counted(self, keys: Sequence[np.ndarray], options: Callable[..., Table]) -> np.ndarray:
        """How many options each row has."""
        out = np.zeros(len(self), np.int64)
        for key, rows in grouped(keys):
            out[rows] = len(options(*key))
        return out


def grouped(keys: Sequence[np.ndarray]) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The distinct tuples of some whole-number columns, and the rows of each."""
    if not len(keys[0]):
        return
    code = codes(keys)
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        yield tuple(int(key[rows[0]]) for key in keys), rows


def codes(keys: Sequence[np.ndarray]) -> np.ndarray:
    """One integer per row, equal exactly where all keys are equal."""
    code = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        place, count = places(key)
        code = code * count + place
    return code


def places(key: np.ndarray) -> tuple[np.ndarray, int]:
    """Rank of each value among the sorted distinct values, and their number. A lookup table is faster than sorting while it is small."""
    if not len(key) or key.max() >= LARGEST_TABLE:
        distinct, place = np.unique(key, return_inverse=True)
        return place, len(distinct)
    key = key.astype(np.int64)
    seen = np.bincount(key) > 0
    return (np.cumsum(seen) - 1)[key], int(np.count_nonzero(seen))


def join(tables: Sequence[Table]) -> Table:
    """Concatenate tables with the same columns."""
    return Table(**{name: np.concatenate([t.columns[name] for t in tables]) for name in tables[0].columns})


def grid(**columns: Sequence[Any]) -> Table:
    """Every combination of some values, the first column slowest."""
    places = np.indices([len(values) for values in columns.values()]).reshape(len(columns), -1)
    return Table(
        **{name: np.asarray(values)[place] for (name, values), place in zip(columns.items(), places, strict=True)}
    )
