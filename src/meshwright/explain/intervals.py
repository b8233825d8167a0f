"""Sets of time as arrays of intervals: n rows of start and end, sorted and disjoint, in nanoseconds or in seconds. All operations are exact
and take n log n."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[Any]  # of whole numbers, or of floats
EMPTY: Intervals = np.empty((0, 2), np.int64)


def union(*sets: Intervals) -> Intervals:
    """All times that lie in one of the sets, whose intervals may overlap and need no order."""
    rows = np.concatenate([EMPTY, *sets])
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return EMPTY
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reached = np.maximum.accumulate(rows[:, 1])
    first = np.flatnonzero(np.concatenate([[True], rows[1:, 0] > reached[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(rows) - 1]])
    return np.column_stack([rows[first, 0], reached[last]])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Times in both of two disjoint sets."""
    if not len(a) or not len(b):
        return EMPTY
    at = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    change = np.repeat([1, -1, 1, -1], [len(a), len(a), len(b), len(b)])
    order = np.argsort(at, kind="stable")
    at, depth = at[order], np.cumsum(change[order])
    inside = np.flatnonzero(depth[:-1] == 2)
    return union(np.column_stack([at[inside], at[inside + 1]]))


def complement(a: Intervals, start: int, end: int) -> Intervals:
    """Times from start to end that are not in a disjoint set."""
    edges = np.concatenate([[start], np.clip(a.ravel(), start, end), [end]]).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Times in a disjoint set that are not in another one."""
    return intersect(a, complement(b, int(a[0, 0]), int(a[-1, 1]))) if len(a) and len(b) else a


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """The part of a disjoint set from start to end."""
    first, last = np.searchsorted(a[:, 1], start, side="right"), np.searchsorted(a[:, 0], end)
    rows = np.clip(a[first:last], start, end)
    return rows[rows[:, 1] > rows[:, 0]]


def length(a: Intervals) -> Any:
    """Total time of a disjoint set."""
    return (a[:, 1] - a[:, 0]).sum().item()


def contains(a: Intervals, times: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which times lie in a disjoint set."""
    at = np.searchsorted(a[:, 0], times, side="right") - 1
    return (at >= 0) & (times < a[:, 1][np.maximum(at, 0)]) if len(a) else np.zeros(len(times), bool)


def of_spans(spans: Iterable[tuple[float, float]]) -> Intervals:
    """The times that lie in one of some spans."""
    return union(np.array([tuple(span) for span in spans]).reshape(-1, 2))


def innermost(start: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[Intervals, NDArray[np.int64]]:
    """Pieces of time of nested events of one thread and the event that is innermost in each: its own time, without its children's.
    Events are ordered by start, a parent before its children; a child that outlasts its parent by rounding is cut."""
    pieces, owners = list[tuple[int, int]](), list[int]()
    open_events: list[tuple[int, int]] = []  # index, end
    at = 0

    def close_until(time: int) -> None:
        nonlocal at
        while open_events and open_events[-1][1] <= time:
            index, finish = open_events.pop()
            add(index, finish)

    def add(index: int, until: int) -> None:
        nonlocal at
        if until > at:
            pieces.append((at, until))
            owners.append(index)
            at = until

    for index, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        close_until(begin)
        if open_events:
            add(open_events[-1][0], begin)
            finish = min(finish, open_events[-1][1])
        at = max(at, begin) if open_events else begin
        open_events.append((index, finish))
    close_until(1 << 62)
    return np.array(pieces, np.int64).reshape(-1, 2), np.array(owners, np.int64)
