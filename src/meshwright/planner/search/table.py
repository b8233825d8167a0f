"""The tables of the search: a million plans as arrays, with their bounds. One column a field, one row a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.describe.plan_fields import Column, PlanArrays

LARGEST_TABLE = 1 << 16  # entries of a table of distinct values
Options = Callable[..., PlanArrays]


def crossed(plans: PlanArrays, keys: Sequence[Column], options: Options) -> PlanArrays:
    """Every row with each of its options, which depend only on the row's keys."""
    tables = [options(*(1 for _ in keys)).take(slice(0, 0))]
    rows_of, options_of, total = [np.zeros(0, int)], [np.zeros(0, int)], 0
    for key, rows in grouped(keys):
        several = options(*key)
        tables.append(several)
        rows_of.append(np.repeat(rows, len(several)))
        options_of.append(np.tile(np.arange(total, total + len(several)), len(rows)))
        total += len(several)
    return plans.take(np.concatenate(rows_of)).but(**join(tables).take(np.concatenate(options_of)).columns)


def counted(plans: PlanArrays, keys: Sequence[Column], options: Options) -> Column:
    """Count the options of each row."""
    out = np.zeros(len(plans), np.int64)
    for key, rows in grouped(keys):
        out[rows] = len(options(*key))
    return out


def grouped(keys: Sequence[Column]) -> Iterator[tuple[tuple[int, ...], Column]]:
    """The distinct tuples of some whole-number columns, and the rows of each."""
    if not len(keys[0]):
        return
    code = codes(keys)
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        yield tuple(int(key[rows[0]]) for key in keys), rows


def codes(keys: Sequence[Column]) -> Column:
    """One integer per row, equal exactly where all keys are equal."""
    code = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        place, count = places(key)
        code = code * count + place
    return code


def places(key: Column) -> tuple[Column, int]:
    """Rank of each value among the sorted distinct values, and their number. A lookup table is faster than sorting while it is small."""
    if not len(key) or key.max() >= LARGEST_TABLE:
        distinct, place = np.unique(key, return_inverse=True)
        return place, len(distinct)
    key = key.astype(np.int64)
    seen = np.bincount(key) > 0
    return (np.cumsum(seen) - 1)[key], int(np.count_nonzero(seen))


def join(tables: Sequence[PlanArrays]) -> PlanArrays:
    """Concatenate tables with the same columns."""
    return PlanArrays(**{name: np.concatenate([t.columns[name] for t in tables]) for name in tables[0].columns})


def grid(**columns: Sequence[Any]) -> PlanArrays:
    """Every combination of some values, the first column slowest."""
    places = np.indices([len(values) for values in columns.values()]).reshape(len(columns), -1)
    return PlanArrays(
        **{name: np.asarray(values)[place] for (name, values), place in zip(columns.items(), places, strict=True)}
    )
