"""Lines of every measured algorithm, and the sizes at which another algorithm becomes the fastest.

Of a program whose closed formula is a·α + b·nβ + c·nγ (`programs.collectives.formulas`), the line A + B·n gives the α and β that the
program reaches: α = A/a, β = B/b. The additions of a reduce-scatter are what it takes longer than the all-gather of the same algorithm:
γ = (B_reduce-scatter − B_all-gather) / c.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.calibrate.fit import Line, fit_line
from meshwright.calibrate.points import Point
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.formulas import Terms, terms

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
            found = terms(self.operation, self.algorithm, len(self.ranks))
        except MeshwrightError:
            return None
        return found if isinstance(found, Terms) else None

    @property
    def alpha(self) -> float | None:
        """Seconds of one message of the program."""
        return self.line.alpha / self.terms.alpha if self.terms and self.terms.alpha else None

    @property
    def rate(self) -> float | None:
        """Bytes/s at which one rank sends, without additions."""
        return self.terms.beta / self.line.beta if self.terms and self.line.beta else None


@dataclass(frozen=True)
class Crossover:
    """From `bytes` on, `after` is faster than `before`."""

    operation: str
    ranks: int
    bytes: int
    before: str
    after: str


def series_of(points: Iterable[Point]) -> list[Series]:
    """One series for each operation, algorithm and group with at least two sizes."""
    found: dict[tuple[str, str, str, tuple[int, ...]], dict[int, float]] = {}
    for p in points:
        if p.concurrent == 1 and p.bytes:
            found.setdefault((p.operation, p.backend, p.algorithm, p.ranks), {})[p.bytes] = p.median_s
    return [
        Series(operation, backend, algorithm, ranks, fit_line(list(seconds), list(seconds.values())), seconds)
        for (operation, backend, algorithm, ranks), seconds in found.items()
        if len(seconds) >= 2
    ]


def crossovers(series: Iterable[Series]) -> list[Crossover]:
    """The sizes, as measured, from which another algorithm is the fastest, by more than `CLEARLY` against the one that led before: two
    algorithms of equal speed would otherwise take turns."""
    groups: dict[tuple, list[Series]] = {}
    for one in series:
        groups.setdefault((one.operation, one.ranks), []).append(one)
    found = []
    for (operation, ranks), several in groups.items():
        if len(several) < 2 or operation == "point-to-point":
            continue
        leader: Series | None = None
        for n in sorted(set.intersection(*(set(s.seconds) for s in several))):
            fastest = min(several, key=lambda s: s.seconds[n])
            if leader is None:
                leader = fastest
            elif fastest.seconds[n] < CLEARLY * leader.seconds[n]:
                found.append(Crossover(operation, len(ranks), n, leader.name, fastest.name))
                leader = fastest
    return found


def additions(series: Iterable[Series]) -> dict[str, float]:
    """γ, seconds to add one byte, by algorithm that has both a reduce-scatter and an all-gather. A library's own choice has none: it may
    run different algorithms for the two."""
    lines = {(s.operation, s.backend, s.algorithm, s.ranks): s for s in series}
    found = {}
    for (operation, backend, algorithm, ranks), reduce in lines.items():
        dual = {"recursive-halving": "recursive-doubling"}.get(algorithm, algorithm)
        gather = lines.get(("all-gather", backend, dual, ranks))
        if operation == "reduce-scatter" and algorithm and gather and reduce.line.beta > gather.line.beta:
            share = (len(ranks) - 1) / len(ranks)
            found[reduce.name] = (reduce.line.beta - gather.line.beta) / share
    return found
