"""Robust fits of T(n) = α + n·β to measured points: relative errors, weights by Huber, no negative constants.

Sizes span six decades, so errors count relative to the measured time: a 10% error at 1 KB weighs as much as one at 1 GB. Each round solves
the least squares of the relative residuals rᵢ = fitᵢ/tᵢ − 1 with weights

    wᵢ = min(1, c·s/|rᵢ|)      s = 1.4826 · median |r|, c = 1.345

so the influence of a stalled measurement is bounded by c·s, about twice the median error, however far off it is. The first rounds use
wᵢ = 1/|rᵢ| (the median regression), from which a minority of outliers cannot move the start. A constant that comes out negative is
set to zero and the others are fitted again.

Factors on the formulas of the cost model, fitted to measured collectives.

The cost model prices a collective by the closed formula of the program that the library runs, on the α and β of pairs of ranks. A library
pays more: gloo's ring posts receives late and pays 4(P−1)α instead of 2(P−1)α, additions take time on a CPU, ranks share cores. So for
each operation two factors are fitted, on the latency and on the seconds of the bytes, with which the formula gives the measured times;
first for groups inside a node, then, with these, for groups of several nodes:

    minimise Σ ρ( ln model(n; latency, bytes) − ln measured )      ρ by Huber; Gauss-Newton in ln latency, ln bytes

A weak pull towards 1 keeps a factor that the measured sizes do not determine (bytes, if only small messages were measured). An operation
with fewer than two + three points gets no factors: two points are met exactly by some factors, whatever was measured. On measured links
factors far from 1 are refused too, since the library then does something else than the formula; a note gives the reason. On the catalog's
links they show that the network is another one (NCCL over TCP is 50 times slower): they are used, down to `PLAUSIBLE`.

Lines of every measured algorithm, and the sizes at which another algorithm becomes the fastest.

Of a program whose closed formula is a·α + b·nβ + c·nγ (`programs.collectives.formulas`), the line A + B·n gives the α and β that the
program reaches: α = A/a, β = B/b. The additions of a reduce-scatter are what it takes longer than the all-gather of the same algorithm:
γ = (B_reduce-scatter − B_all-gather) / c.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from meshwright.calibrate.points import Bench, Point
from meshwright.cost.collective import OPERATIONS, choose
from meshwright.describe.cluster import Cluster, Factors
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.formulas import Terms, terms
from meshwright.units import counted

# Beyond one for each constant: a fit through as many points as constants always has a residual of zero
SPARE_POINTS = 3
HUBER, MAD, LEAST_SCALE = 1.345, 1.4826, 1e-6
MEDIAN_ROUNDS, ROUNDS = 20, 60


@dataclass(frozen=True)
class Line:
    """T(n) = alpha + n·beta, and how well the points follow it."""

    alpha: float
    beta: float
    points: int
    residual: float  # median of |fit/measured − 1|
    deviation: float  # largest |fit/measured − 1| of the medians by size: curvature, a switch of protocol, caches
    deviates_at: int  # bytes where the deviation is largest

    @property
    def bandwidth(self) -> float:
        return 1.0 / self.beta if self.beta else float("inf")

    @property
    def crossover(self) -> float:
        """n* = α/β: below it latency dominates."""
        return self.alpha / self.beta if self.beta else float("inf")

    def time(self, n: float) -> float:
        return self.alpha + n * self.beta

    def as_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line through measured points."""
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    basis = np.stack([np.ones_like(n), n], axis=1)
    alpha, beta = robust_fit(basis, t)
    error = (alpha + beta * n) / t - 1
    by_size = {int(size): float(np.median(error[n == size])) for size in np.unique(n)}
    worst = max(by_size, key=lambda size: abs(by_size[size]))
    return Line(float(alpha), float(beta), len(n), float(np.median(np.abs(error))), abs(by_size[worst]), worst)


def robust_fit(basis: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients c ≥ 0 of basis·c ≈ seconds, by relative error; a column of zeros has coefficient 0."""
    relative = basis / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    columns = relative / scale  # of order 1, so that constants of 1e-6 s and 1e-11 s/byte solve exactly
    weights = np.ones(len(seconds))
    coefficients = np.zeros(basis.shape[1])
    for k in range(ROUNDS):
        before, coefficients = coefficients, non_negative(columns, weights)
        error = np.abs(columns @ coefficients - 1)
        if k < MEDIAN_ROUNDS:
            weights = 1 / np.maximum(error, 1e-3)
            continue
        weights = huber(error)
        if np.allclose(coefficients, before, rtol=1e-9, atol=0):
            break
    return coefficients / scale


def huber(error: np.ndarray) -> np.ndarray:
    """The weights of absolute errors."""
    bound = HUBER * max(MAD * float(np.median(error)), LEAST_SCALE)
    return np.minimum(1.0, bound / np.maximum(error, LEAST_SCALE))


def non_negative(columns: np.ndarray, weights: np.ndarray, right: np.ndarray | float = 1.0) -> np.ndarray:
    """Weighted least squares of columns·c ≈ right with c ≥ 0: the best over all sets of columns that give no negative coefficient."""
    count = columns.shape[1]
    best, least = np.zeros(count), np.inf
    root = np.sqrt(weights)
    for size in range(count, 0, -1):
        for chosen in map(list, combinations(range(count), size)):
            solved, *_ = np.linalg.lstsq(columns[:, chosen] * root[:, None], root * right, rcond=None)
            if (solved < 0).any():
                continue
            error = float(np.sum(weights * (columns[:, chosen] @ solved - right) ** 2))
            if error < least:
                best, least = np.zeros(count), error
                best[chosen] = solved
        if least < np.inf:
            break  # fewer columns fit no better
    return best


NEEDED = 2 + SPARE_POINTS
PLAUSIBLE = 0.1, 20.0  # smallest and largest factor
PULL = 1e-3  # weight of the pull towards 1, against one point
LARGEST = np.log(300.0)
NEWTON_ROUNDS, STEP = 25, 1e-4
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
    factors: list[FittedFactors] = []
    everything = [point for bench in benches for point in bench.points]
    for operation in OPERATIONS.values():
        if from_pairs and operation == "point-to-point":
            continue
        points = [point for point in everything if usable(point, operation, backend, cluster)]
        for across in (False, True):
            here = [point for point in points if (len(point.ranks) > cluster.node_size) == across]
            if here:
                factors.append(checked_fit(with_factors(cluster, factors), operation, here, across, from_pairs))
    return factors


def checked_fit(
    cluster: Cluster, operation: str, points: Sequence[Point], across: bool, from_pairs: bool
) -> FittedFactors:
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
    if not from_pairs:
        return fit(cluster, operation, points, across, float(np.log(low)))
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


def fit(
    cluster: Cluster, operation: str, points: Sequence[Point], across: bool = False, smallest: float = -LARGEST
) -> FittedFactors:
    """The factors of one operation, inside a node or between nodes; none has a logarithm below `smallest`."""
    measured = np.log([p.median_s for p in points])
    logs = start_of_fit(cluster, operation, points, across)
    for _ in range(NEWTON_ROUNDS):
        base = np.log(model_times(cluster, operation, points, logs, across))
        slopes = derivatives(cluster, operation, points, logs, across)
        error = base - measured
        weights = huber(np.abs(error))
        normal = slopes.T @ (weights[:, None] * slopes) + PULL * np.eye(2)
        change = -np.linalg.solve(normal, slopes.T @ (weights * error) + PULL * logs)
        logs = np.clip(logs + np.clip(change, -1.5, 1.5), smallest, LARGEST)
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


CLEARLY = 0.9  # a new leader takes at most this share of the old one's time


@dataclass(frozen=True)
class Series:
    """The measured points of one algorithm on one group, and their line."""

    operation: str
    backend: str
    algorithm: str
    ranks: tuple[int, ...]
    line: Line
    seconds: dict[int, float]

    @property
    def name(self) -> str:
        return f"{self.backend} {self.algorithm}".strip()

    @property
    def terms(self) -> Terms | None:
        """The formula of the program on one kind of link; None where the library chose, or where it has no formula."""
        try:
            counts = terms(self.operation, self.algorithm, len(self.ranks))
        except MeshwrightError:
            return None
        return counts if isinstance(counts, Terms) else None

    @property
    def alpha(self) -> float | None:
        """Seconds of one message of the program."""
        return self.line.alpha / self.terms.alpha if self.terms and self.terms.alpha else None

    @property
    def rate(self) -> float | None:
        """Bytes/s at which one rank sends, without additions."""
        return self.terms.beta / self.line.beta if self.terms and self.line.beta else None


@dataclass(frozen=True)
class FittedCrossover:
    """From `bytes` on, `after` is faster than `before`."""

    operation: str
    ranks: int
    bytes: int
    before: str
    after: str


def series_of(points: Iterable[Point]) -> list[Series]:
    """One series for each operation, algorithm and group with at least two sizes."""
    series: dict[tuple[str, str, str, tuple[int, ...]], dict[int, float]] = {}
    for p in points:
        if p.concurrent == 1 and p.bytes:
            series.setdefault((p.operation, p.backend, p.algorithm, p.ranks), {})[p.bytes] = p.median_s
    return [
        Series(operation, backend, algorithm, ranks, fit_line(list(seconds), list(seconds.values())), seconds)
        for (operation, backend, algorithm, ranks), seconds in series.items()
        if len(seconds) >= 2
    ]


def crossovers(series: Iterable[Series]) -> list[FittedCrossover]:
    """The sizes, as measured, from which another algorithm is the fastest, by more than `CLEARLY` against the one that led before: two
    algorithms of equal speed would otherwise take turns."""
    groups: dict[tuple, list[Series]] = {}
    for one in series:
        groups.setdefault((one.operation, one.ranks), []).append(one)
    sizes = []
    for (operation, ranks), several in groups.items():
        if len(several) < 2 or operation == "point-to-point":
            continue
        leader: Series | None = None
        for n in sorted(set.intersection(*(set(s.seconds) for s in several))):
            fastest = min(several, key=lambda s: s.seconds[n])
            if leader is None:
                leader = fastest
            elif fastest.seconds[n] < CLEARLY * leader.seconds[n]:
                sizes.append(FittedCrossover(operation, len(ranks), n, leader.name, fastest.name))
                leader = fastest
    return sizes


def additions(series: Iterable[Series]) -> dict[str, float]:
    """γ, seconds to add one byte, by algorithm that has both a reduce-scatter and an all-gather. A library's own choice has none: it may
    run different algorithms for the two."""
    lines = {(s.operation, s.backend, s.algorithm, s.ranks): s for s in series}
    extra = {}
    for (operation, backend, algorithm, ranks), reduce in lines.items():
        dual = {"recursive-halving": "recursive-doubling"}.get(algorithm, algorithm)
        gather = lines.get(("all-gather", backend, dual, ranks))
        if operation == "reduce-scatter" and algorithm and gather and reduce.line.beta > gather.line.beta:
            share = (len(ranks) - 1) / len(ranks)
            extra[reduce.name] = (reduce.line.beta - gather.line.beta) / share
    return extra
