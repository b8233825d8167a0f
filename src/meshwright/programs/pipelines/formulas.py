"""Closed forms: the cost of a schedule on equal stages, without building it. All arguments may be arrays over plans.

The makespan of a program is its longest path: a chain of actions in which each waits for the previous one. On equal
stages only a few chains can be the longest, so the makespan is the maximum over them. The length of a chain is counted
in forwards, backwards of inputs, backwards of weights (a full backward is one of each) and transfers between ranks.
With q = P−1 and n = M·V (stage, micro-batch) pieces per rank:

    schedule          F          I          W          transfers    the chain
    naive             M·P        M·P        M·P        2Mq          everything
    gpipe             M+q        M+q        M+q        2q           fill, work, drain
    1f1b              M+q        M+q        M+q        2q + 2⌊…⌋    as gpipe; forwards and backwards wait for each other
    interleaved       n+q        n+q        n+q        2q …         stages are V times shorter, so q costs V times less
    zb-h1             M+q        M          M          3q           Ws fill the drain; the fill remains
                      M          M+q        M          2q
                      M+q        M+q        M−q        4q           … where W is too short to fill it
                      M+q        M+q        1          1f1b's       … where transfers are longer than W
    zb-h2             M+q        M          M          q            only the staggered start is left
    zbv, dualpipev    similar chains, on stages half as long

So for any times f, i, w of equal stages the idle time of GPipe and 1F1B is q(f+i+w), of ZB-H1 q·max(f, i, f+i−w), and
of ZB-H2 q·max(f, i−f, f+i−2w). The **bubble fraction** is idle / makespan: (P−1)/(M+P−1) for GPipe and 1F1B, and
(P−1)/(M·V+P−1) for interleaved. The **bubble overhead** is idle / busy: (P−1)/M and (P−1)/(M·V).

Accuracy (tests compare with `walk`). Without p2p, any f, i, w: exact, except interleaved-zb at M < P and zbv at
P < M < 2P−1, which are exact for equal f, i, w and close otherwise. Overlapped p2p: exact while p2p is small compared
with f, i and w (another chain then cannot become the longest). Blocking p2p: exact for naive, gpipe and 1f1b; for the
other schedules each action is p2p longer, a slight overestimate. f, i and w are the times of one **stage**: with V
stages per rank, 1/V of the rank's time.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from meshwright.describe.schedules import SCHEDULES
from meshwright.programs.pipelines.rules import name_of

Number = int | float | np.ndarray
Path = tuple[Number, Number, Number, Number]  # forwards, backwards of inputs, backwards of weights, transfers


def makespan(
    schedule: str,
    ranks: Number,
    microbatches: Number,
    virtual: Number = 1,
    forward: Number = 1.0,
    input: Number = 1.0,
    weight: Number = 1.0,
    p2p: Number = 0.0,
    overlap: bool = True,
) -> np.ndarray:
    """Seconds from the first action to the last on equal stages; for full backwards only input + weight counts."""
    schedule = costed_as(schedule)
    f, i, w, t = (np.asarray(x, float) for x in (forward, input, weight, p2p))
    if not overlap and not SCHEDULES[schedule].counts_blocking:
        several = np.where(np.asarray(ranks) > 1, t, 0.0)
        f, i, w, t = f + several, i + several, w + several * SCHEDULES[schedule].splits, np.zeros_like(t)
    p, m, v = (np.asarray(x) for x in (ranks, microbatches, virtual))
    paths = SCHEDULES.part(schedule, "paths")(p, m, v, overlap)
    lengths = (nf * f + ni * i + nw * w + nt * t for nf, ni, nw, nt in paths)
    return reduce(np.maximum, lengths)


def bubble_overhead(
    schedule: str, ranks: Number, microbatches: Number, virtual: Number = 1, **times: Any
) -> np.ndarray:
    """Return idle time / busy time of a rank. `times` are the arguments of `makespan`."""
    total = makespan(schedule, ranks, microbatches, virtual, **times)
    forward, *backward = (np.asarray(times.get(name, 1.0), float) for name in ("forward", "input", "weight"))
    return total / (np.asarray(microbatches, float) * virtual * (forward + backward[0] + backward[1])) - 1.0


def bubble_fraction(
    schedule: str, ranks: Number, microbatches: Number, virtual: Number = 1, **times: Any
) -> np.ndarray:
    """Return idle time / makespan; `times` are the arguments of `bubble_overhead`."""
    overhead = bubble_overhead(schedule, ranks, microbatches, virtual, **times)
    return overhead / (1.0 + overhead)


def in_flight(schedule: str, ranks: Number, microbatches: Number, virtual: Number = 1, rank: Number = 0) -> np.ndarray:
    """Return the peak number of activations, in (stage, micro-batch), that a rank holds from F until B or W. It depends on the rank only in
    schedules with `uneven_ranks`."""
    p, m, v, r = (np.asarray(x) for x in (ranks, microbatches, virtual, rank))
    if not p.shape == m.shape == v.shape == r.shape:
        p, m, v, r = np.broadcast_arrays(p, m, v, r)
    counts: np.ndarray = SCHEDULES.part(costed_as(schedule), "in_flight")(p, m, v, r)
    return counts


def costed_as(schedule: str) -> str:
    """The schedule whose closed forms stand for a schedule: itself, unless it is the result of a search."""
    name = name_of(schedule)
    return SCHEDULES[name].costed_as or name


# Activations in flight on rank r, of p ranks with v stages each and m micro-batches.


def _held_in_rounds(p: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Activations of all stages of a rank but the last, of the longest of the ⌊M/P⌋ rounds."""
    return (v - 1) * -(-m // np.maximum(1, m // p))


IN_FLIGHT: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "naive": lambda p, m, v, r: np.ones_like(m * v),
    "gpipe": lambda p, m, v, r: m * v,
    "1f1b": lambda p, m, v, r: np.minimum(m * v, p - r),
    "interleaved": lambda p, m, v, r: np.minimum(m * v, _held_in_rounds(p, m, v) + 2 * (p - 1 - r) + 1),
    "looped-bfs": lambda p, m, v, r: m * v,
    "zb-h1": lambda p, m, v, r: np.minimum(m * v, p),
    "zb-h2": lambda p, m, v, r: np.minimum(m * v, 2 * p - 1),
    "interleaved-zb": lambda p, m, v, r: np.minimum(m * v, _held_in_rounds(p, m, v) + p),
    "zbv": lambda p, m, v, r: np.minimum(2 * p, m + np.minimum(r + 1, m)),
    "dualpipev": lambda p, m, v, r: 2 * p + 1,
}


# The chains of actions of which one is the longest, of p ranks with v stages each and m micro-batches.


def _looped(p: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    return v * np.maximum(m, p) + np.minimum(m, p) - 1


def _turn(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Transfers of one micro-batch until it reaches the last chunk of stages."""
    return (p > 1) * p * (v - 1)


def _one_path(pieces: Number, transfers: Number) -> list[Path]:
    return [(pieces, pieces, pieces, transfers)]


def _transfers_1f1b(p: np.ndarray, m: np.ndarray, overlap: bool) -> np.ndarray:
    """Return the transfers on the longest path. Overlapped: P−1 of every P micro-batches wait for two transfers; blocking: all."""
    if overlap:
        return 2 * (p - 1) + 2 * (m - 1 + (1 - m) // p)
    inner = np.where(m == 1, 2 * (p - 1), 2 * (p + m) - 5)
    return np.select([p == 1, p == 2], [0, m + 1], inner)


def _full_rounds(p: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Whether the first and the last round have at most P micro-batches: then the next chunk of stages waits for transfers."""
    count = np.maximum(1, m // p)
    return np.stack([-(-m // count) <= p, m // count <= p]).astype(int)


def interleaved_zb(p: np.ndarray, m: np.ndarray, v: np.ndarray, overlap: bool) -> list[Path]:
    q, n = p - 1, m * v
    turns = _turn(p, v)
    full_trip = 2 * (v * p - 1)
    enough = turns * _full_rounds(p, m)[0]
    short = 2 * (m == p)
    few = m < p
    wide = v * p + m - 1
    back = p + n - 1
    return [
        (
            np.where(few, wide, n + q),
            np.where(few, (v - 1) * m + p, n),
            n,
            np.where(few, turns + 2 * p + m - 5, enough + 3 * q - short),
        ),
        (np.where(few, v * p, n), np.where(few, back, n + q), n, np.where(few, turns, enough) + 2 * q),
        (
            np.where(few, wide, n + q),
            np.where(few, back, n + q),
            np.where(few, (v - 1) * m + 1, n - q),
            np.where(few, turns + 2 * (p + m) - 6, enough + 4 * q - short),
        ),
        (
            np.where(few, wide, n),
            np.where(few, wide, n),
            np.where(few, 1, n),
            few * (full_trip + 2 * np.maximum(0, m - 2)),
        ),
        (np.where(few, v * p, n), np.where(few, wide, n), np.where(few, m, n), few * full_trip),
        # Transfers longer than W: a forward and a backward then wait for each other as in 1F1B, and weights fill the gaps.
        (n + ~few * q, n + ~few * q, np.ones_like(n), ~few * _transfers_1f1b(p, n, overlap=True)),
    ]


def zb_h2(p: np.ndarray, m: np.ndarray, v: np.ndarray, overlap: bool) -> list[Path]:
    q = p - 1
    few, half, even = m < 2 * p - 1, m // 2, m % 2 == 0
    return [
        (m + q, np.where(few, p - 1 + half + 1 - even, m), m, np.where(few, 2 * q - half, q)),
        (m - np.where(few, m - p, q), m + q, m, 2 * q),
        (m + q, m + q, np.where(few, 1, m - 2 * q), 2 * q),
        (m + q - (few & even), np.where(few, p - 1 + half + 1, m), m, np.where(few, 2 * q - half + even, q)),
        (m + q, np.where(few, p - 1 + half + 1, m), m - (few & even), np.where(few, 2 * q - half + even, q)),
    ]


def zbv(p: np.ndarray, m: np.ndarray, v: np.ndarray, overlap: bool) -> list[Path]:
    q, n = p - 1, 2 * m
    one = (q > 0).astype(int)
    k = q - one  # q − 1, and 0 on a single rank
    enough = [
        (n + q + k, n - k, n, 3 * q - 2 * one),
        (n + one, n, n + k, 3 * q - 2 * one),
        (n, n + one, n + k, 3 * q),
        (n, n + q, n, 5 * q - 2 * one),
        (n + k, n + one, n, 5 * q - 2 * one),
        (n, n + 2 * q, n - 2 * q, 6 * q - 2 * one),
        (n + k, n + q + one, n - 2 * q, 6 * q - 2 * one),
        (n + 2 * q, n - q, n - one, 3 * q),
        (n + 2 * q, n, n - 2 * q - one, 4 * q),
        (n + q + k, n + one, n - 2 * q, 4 * q - 2 * one),
    ]
    late = np.maximum(m - p, 0)
    early = m - late
    few = [
        (2 * p + early - 1 + 2 * late, 2 * p + early - 1 + 2 * late, 2 * early, 4 * q - 2 * (early - 1)),
        (2 * p + 2 * late, 2 * p + 2 * (m - 1), 2 * early, 4 * q),
        (2 * p + 2 * (m - 1), 2 * p - early + 1 + 2 * late, early + 1 + 2 * late, 4 * q),
        (2 * p + 2 * (m - 1), 2 * p, 2, 4 * q),
    ]
    return _when(m > p, enough) + _when((m < 2 * p - 1) | (m <= p), few)


def _when(where: np.ndarray, paths: list[Path]) -> list[Path]:
    """Return the paths where the condition holds, and paths of length 0 elsewhere."""
    if where.all():
        return paths
    if not where.any():
        return []
    return [
        (np.where(where, f, 0), np.where(where, i, 0), np.where(where, w, 0), np.where(where, t, 0))
        for f, i, w, t in paths
    ]


def dualpipev(p: np.ndarray, m: np.ndarray, v: np.ndarray, overlap: bool) -> list[Path]:
    q, n = p - 1, 2 * m
    return [
        (n + q, n, n, 3 * q),
        (n + q, n + q, n - q, 4 * q),
        (n - 1, n + q, n, 5 * q),
        (n - 1, n + 2 * q, n - q, 6 * q),
        (n + 2 * q, n, n - 2 * q, 4 * q),
        (n + 2 * q, n - q, n - q, 4 * q),
    ]


PATHS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, bool], list[Path]]] = {
    "naive": lambda p, m, v, overlap: [(m * p, m * p, m * p, 2 * m * (p - 1))],
    "gpipe": lambda p, m, v, overlap: _one_path(
        m + p - 1, 2 * (p - 1) if overlap else np.where(p > 1, 2 * (m + p - 2), 0)
    ),
    "1f1b": lambda p, m, v, overlap: _one_path(m + p - 1, _transfers_1f1b(p, m, overlap)),
    "interleaved": lambda p, m, v, overlap: _one_path(
        _looped(p, m, v), 2 * (p - 1) + _turn(p, v) * _full_rounds(p, m).sum(axis=0)
    ),
    "looped-bfs": lambda p, m, v, overlap: _one_path(_looped(p, m, v), 2 * (p - 1) + _turn(p, v) * 2 * (m <= p)),
    "zb-h1": lambda p, m, v, overlap: interleaved_zb(p, m, np.ones_like(m), overlap),
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zb,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
