"""Factors on the formulas of the cost model, fitted to measured collectives.

The cost model prices a collective by the closed formula of the program that the library runs, on the α and β of pairs of ranks. A library
pays more: gloo's ring posts receives late and pays 4(P−1)α instead of 2(P−1)α, additions take time on a CPU, ranks share cores. So for
each operation two factors are fitted, on the latency and on the seconds of the bytes, with which the formula gives the measured times;
first for groups inside a node, then, with these, for groups of several nodes:

    minimise Σ ρ( ln model(n; latency, bytes) − ln measured )      ρ by Huber; Gauss-Newton in ln latency, ln bytes

A weak pull towards 1 keeps a factor that the measured sizes do not determine (bytes, if only small messages were measured). An operation
with fewer than two + three points gets no factors: two points are met exactly by some factors, whatever was measured. Factors far from 1
are refused too, since the library then does something else than the formula; a note gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.calibrate.fit import HUBER, LEAST_SCALE, MAD, SPARE_POINTS
from meshwright.calibrate.points import Bench, Point
from meshwright.cost.collective import OPERATIONS, choose
from meshwright.describe.cluster import Cluster, Factors
from meshwright.units import counted

NEEDED = 2 + SPARE_POINTS
PLAUSIBLE = 0.1, 20.0  # smallest and largest factor
PULL = 1e-3  # weight of the pull towards 1, against one point
LARGEST = np.log(300.0)
ROUNDS, STEP = 25, 1e-4
LEAST_SLOPE = 1e-3  # of a factor that changes the times at all
GRID = (0.0, -1.0, 1.0, 2.0, 3.0)  # logarithms of factors; 1 first: of equal errors the formula's own counts


@dataclass(frozen=True)
class FittedFactors:
    """The factors of one operation, and how well the cost model then gives the measured times."""

    operation: str
    across: bool  # between nodes
    factors: Factors
    residual: float = 0.0  # median of |model/measured − 1|
    worst: float = 0.0
    worst_at: int = 0
    points: int = 0
    refused: str = ""  # why the formula is used without factors


def fitted_factors(
    cluster: Cluster, benches: Sequence[Bench], backend: str, from_pairs: bool = True
) -> list[FittedFactors]:
    """Factors of every operation that was measured with the library's own choice of algorithm, inside a node and between nodes. Where the
    links were fitted to transfers between pairs (`from_pairs`), point-to-point needs no factors."""
    found: list[FittedFactors] = []
    everything = [point for bench in benches for point in bench.points]
    for operation in OPERATIONS.values():
        if from_pairs and operation == "point-to-point":
            continue
        points = [point for point in everything if usable(point, operation, backend, cluster)]
        for across in (False, True):
            here = [point for point in points if (len(point.ranks) > cluster.node_size) == across]
            if here:
                found.append(checked_fit(with_factors(cluster, found), operation, here, across))
    return found


def checked_fit(cluster: Cluster, operation: str, points: Sequence[Point], across: bool) -> FittedFactors:
    """The factors of one operation, or why it has none."""
    count, sizes = len({(p.ranks, p.bytes) for p in points}), len({p.bytes for p in points})
    if count < NEEDED or sizes < 2:
        why = f"{counted(count, 'point')} of {counted(sizes, 'size')}, and two factors need {NEEDED} points; "
        why += "bench more sizes, or with a longer --budget"
        return FittedFactors(operation, across, Factors(), points=count, refused=why)
    fitted = fit(cluster, operation, points, across)
    low, high = PLAUSIBLE
    if all(low <= factor <= high for factor in (fitted.factors.latency, fitted.factors.bytes)):
        return fitted
    why = f"latency {fitted.factors.latency:.3g}× and bytes {fitted.factors.bytes:.3g}× are not both between {low:g} and {high:g}: "
    why += "the library runs another algorithm, or the machine was disturbed"
    return replace(fitted, factors=Factors(), refused=why)


def usable(point: Point, operation: str, backend: str, cluster: Cluster) -> bool:
    """Whether the cost model prices the group of a point: the first ranks of the cluster, which fill whole nodes or lie in one."""
    count = len(point.ranks)
    first = point.ranks == tuple(range(count)) and count > 1
    fills = count <= cluster.node_size or count % cluster.node_size == 0
    named = point.operation == operation and point.backend == backend and not point.algorithm
    return named and first and fills and point.bytes > 0


def with_factors(cluster: Cluster, fitted: Sequence[FittedFactors]) -> Cluster:
    """The cluster with these factors in addition to those it has."""
    added = cluster.collectives
    inside = {one.operation: one.factors for one in fitted if not one.across and not one.refused}
    between = {one.operation: one.factors for one in fitted if one.across and not one.refused}
    return cluster.but(
        collectives=added.but(factors={**added.factors, **inside}, factors_across={**added.factors_across, **between})
    )


def model_times(
    cluster: Cluster, operation: str, points: Sequence[Point], logs: np.ndarray, across: bool
) -> np.ndarray:
    """Seconds by the cost model with these factors (logarithms)."""
    factors = Factors(latency=float(np.exp(logs[0])), bytes=float(np.exp(logs[1])))
    priced = with_factors(cluster, [FittedFactors(operation, across, factors)])
    return np.array([choose(priced, operation, float(p.bytes), len(p.ranks)).seconds for p in points])


def derivatives(
    cluster: Cluster, operation: str, points: Sequence[Point], logs: np.ndarray, across: bool
) -> np.ndarray:
    """Derivatives of the logarithms of the modelled times, by point and factor."""
    base = np.log(model_times(cluster, operation, points, logs, across))
    moved = [np.log(model_times(cluster, operation, points, logs + STEP * unit, across)) for unit in np.eye(2)]
    return np.stack([(times - base) / STEP for times in moved], axis=1)


def start_of_fit(cluster: Cluster, operation: str, points: Sequence[Point], across: bool) -> np.ndarray:
    """Factors (logarithms) from which steps lead to the best ones: 1, or those on a coarse grid with the smallest error. Where the links inside and
    between nodes work at the same time, the slower of the two counts: at factors for which the other one is slower, a derivative is zero
    and no step would lead away."""
    if (np.abs(derivatives(cluster, operation, points, np.zeros(2), across)).max(axis=0) > LEAST_SLOPE).all():
        return np.zeros(2)
    measured = np.log([p.median_s for p in points])
    grid = [np.array([latency, size]) for latency in GRID for size in GRID]
    errors = [np.abs(np.log(model_times(cluster, operation, points, logs, across)) - measured).sum() for logs in grid]
    return grid[int(np.argmin(np.round(errors, 9)))]


def fit(cluster: Cluster, operation: str, points: Sequence[Point], across: bool = False) -> FittedFactors:
    """The factors of one operation, inside a node or between nodes."""
    measured = np.log([p.median_s for p in points])
    logs = start_of_fit(cluster, operation, points, across)
    for _ in range(ROUNDS):
        base = np.log(model_times(cluster, operation, points, logs, across))
        slopes = derivatives(cluster, operation, points, logs, across)
        error = base - measured
        bound = HUBER * max(MAD * float(np.median(np.abs(error))), LEAST_SCALE)
        weights = np.minimum(1.0, bound / np.maximum(np.abs(error), LEAST_SCALE))
        normal = slopes.T @ (weights[:, None] * slopes) + PULL * np.eye(2)
        change = -np.linalg.solve(normal, slopes.T @ (weights * error) + PULL * logs)
        logs = np.clip(logs + np.clip(change, -1.5, 1.5), -LARGEST, LARGEST)
        if np.abs(change).max() < 1e-6:
            break
    final = np.abs(model_times(cluster, operation, points, logs, across) / np.exp(measured) - 1)
    worst = int(final.argmax())
    return FittedFactors(
        operation,
        across,
        Factors(latency=round(float(np.exp(logs[0])), 4), bytes=round(float(np.exp(logs[1])), 4)),
        float(np.median(final)),
        float(final[worst]),
        points[worst].bytes,
        len(points),
    )
