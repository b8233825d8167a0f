"""One robust fit of the numbers of all stacks to published runs, with priors: population → stack → source.

    ln y_r = ln t_r(x_s) + ε_r            a run r of a source s; ε: errors of Student's t
    x_s    ~ N(x_f, BETWEEN_SOURCES)      the numbers in one source: another version, another cluster, other data loading
    x_f    ~ N(x̄, BETWEEN_STACKS)         the numbers of a stack (or of the stack that it extends)
    x̄      ~ N(TYPICAL, UNCERTAIN)        the typical stack: what is predicted for a stack that was never measured

Each covariance is diag(own²) + common²·11ᵀ: numbers differ one by one, and all of them together (power limits, stragglers, interruptions).
Given its linearisation the model is a tree of normal distributions, so every conditional distribution is exact and cheap: that of a
source without its runs (left out), or with one, two or five of them, is a product of the messages of the other leaves. The linearisation
is repeated at the posterior mean until nothing moves.

A source of a thousand runs does not know a stack a thousand times better than one run does, because what the cost model lacks is the
same in all of them: its runs together count as at most `MOST_RUNS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.calibrate.runs.response import NUMBERS, Response

NOISE = (
    0.05,
    0.35,
    0.25,
)  # of ln seconds: in all runs; per share of exposed communication; per share of time bound by the host
FREEDOM, MOST_RUNS = 4.0, 24.0
DOUBT = 2.0  # standard deviations at which a run counts half
ROUNDS, NEWTON = 4, 12


def covariance(own: Sequence[float], common: float) -> np.ndarray:
    """diag(own²) + common²·11ᵀ; the share of exposed compute is not a time, so it has no part in what is common."""
    together = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    return np.diag(np.square(own)) + common**2 * np.outer(together, together)


TYPICAL = np.array([np.log(35e-6), 0.06, 0.06, 0.15, 0.20, np.log(0.25 / 0.75)])
UNCERTAIN = covariance((0.50, 0.06, 0.10, 0.25, 0.25, 0.5), 0.05)
BETWEEN_STACKS = covariance((0.60, 0.06, 0.20, 0.25, 0.25, 0.5), 0.06)
BETWEEN_SOURCES = covariance((0.20, 0.04, 0.10, 0.12, 0.15, 0.3), 0.08)


@dataclass(frozen=True)
class Normal:
    """A normal distribution by its precision matrix and shift = precision · mean; a message of one may be singular. Several distributions have
    one array of both: (…, numbers, numbers) and (…, numbers)."""

    precision: np.ndarray
    shift: np.ndarray

    @classmethod
    def of(cls, mean: np.ndarray, covariance: np.ndarray) -> Normal:
        precision = np.linalg.inv(covariance)
        return cls(precision, times(precision, mean))

    @classmethod
    def flat(cls) -> Normal:
        return cls(np.zeros((len(NUMBERS), len(NUMBERS))), np.zeros(len(NUMBERS)))

    @property
    def mean(self) -> np.ndarray:
        return np.linalg.solve(self.precision, self.shift[..., None])[..., 0]

    @property
    def covariance(self) -> np.ndarray:
        return np.linalg.inv(self.precision)

    def __mul__(self, other: Normal) -> Normal:
        return Normal(self.precision + other.precision, self.shift + other.shift)

    def through(self, spread: np.ndarray) -> Normal:
        """The distribution of the sum with an independent normal of mean 0 and covariance `spread`."""
        gain = self.precision @ np.linalg.inv(self.precision + np.linalg.inv(spread))
        return Normal(self.precision - gain @ self.precision, self.shift - gain @ self.shift)


def times(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Matrices times vectors, one or several."""
    return (matrix @ vector[..., None])[..., 0]


def product(parts: Sequence[Normal]) -> Normal:
    out = Normal.flat()
    for part in parts:
        out = out * part
    return out


@dataclass
class Leaf:
    """The runs of one family of stacks in one source."""

    source: str
    family: str  # a stack and those that extend it; a stack without a name is a separate family
    runs: np.ndarray  # indices
    obsolete: bool = False  # the stack is no longer in use, so it does not count in the typical one


@dataclass
class Fit:
    """The distributions of the numbers: of each family, and of the typical stack."""

    leaves: list[Leaf]
    messages: dict[int, Normal]  # of each leaf: what its runs say
    typical: Normal

    def family(self, name: str, without: str = "") -> Normal:
        """The numbers of a stack, from all sources but one."""
        return self._population(name, without).through(BETWEEN_STACKS) * self._runs_say(name, without)

    def source(self, leaf: Leaf) -> Normal:
        """The numbers of a stack in a source, before any run of this source is seen."""
        return self.family(leaf.family, leaf.source).through(BETWEEN_SOURCES)

    def population(self, without: str = "") -> Normal:
        return self._population("", without)

    def _runs_say(self, family: str, without: str) -> Normal:
        return product(
            [
                self.messages[k].through(BETWEEN_SOURCES)
                for k, leaf in enumerate(self.leaves)
                if leaf.family == family and leaf.source != without
            ]
        )

    def _population(self, family: str, without: str) -> Normal:
        """The typical stack by all families that are in use, but one."""
        names = sorted({leaf.family for leaf in self.leaves if not leaf.obsolete} - {family})
        messages = [self._runs_say(name, without).through(BETWEEN_STACKS) for name in names]
        return product([self.typical, *messages])


def evidence(
    response: Response,
    measured: np.ndarray,
    prior: Normal,
    noise: float | np.ndarray = 1.0,
    trust: np.ndarray | None = None,
    steps: int = NEWTON,
) -> Normal:
    """What runs say of their numbers: the likelihood around the most probable numbers under the prior, which Newton's method finds in at most
    `steps`. `measured`: ln seconds. `noise`: a factor on `NOISE`. `trust`: the credibility of each run, if it is known.

    Several priors, each with its noise, have one answer each: a row stops to move when its step is below 0.001."""
    if not len(measured):
        return Normal.flat()
    x = prior.mean
    found = Normal(np.zeros_like(prior.precision), np.zeros_like(prior.shift))
    trust = credibility(response, measured, prior) if trust is None else trust
    trust = trust * min(1.0, MOST_RUNS / len(measured))
    moving = np.ones(x.shape[:-1], dtype=bool)
    for _ in range(steps):
        value, slope = response.with_gradient(x)
        error = value - measured
        precision_of_run = weights(response, error, slope, noise) * trust
        weighted = np.swapaxes(precision_of_run[..., None] * slope, -1, -2)
        precision = weighted @ slope
        shift = times(precision, x) - times(weighted, error)
        found = Normal(
            np.where(moving[..., None, None], precision, found.precision),
            np.where(moving[..., None], shift, found.shift),
        )
        step = np.clip((prior * found).mean - x, -0.7, 0.7) * moving[..., None]
        x = x + step
        moving = moving & (np.abs(step).max(axis=-1) >= 1e-3)
        if not moving.any():
            break
    return found


def credibility(response: Response, measured: np.ndarray, prior: Normal) -> np.ndarray:
    """How far each run is believed, from 1 to 0: a run that is many standard deviations from what the prior expects, and from the other
    runs, stalled. Of one or two runs the closer one to the prior is the reference, of more their median."""
    value, slope = response.with_gradient(prior.mean)
    error = value - measured
    usual = float(np.median(error)) if len(error) > 2 else 0.0
    expected = np.sqrt((slope @ prior.covariance * slope).sum(axis=-1) + variance(response, slope))
    return 1 / (1 + ((error - usual) / (DOUBT * expected)) ** 4)


def variance(response: Response, slope: np.ndarray, noise: float | np.ndarray = 1.0) -> np.ndarray:
    """The variance of ln seconds that no number of a stack explains: of all runs, of experts and of the device (`Response.doubt`), and of
    what a run spends on communication and on its host, whose shares are its responses to these numbers."""
    communication, host = NOISE[1] * slope[..., NUMBERS.index("network")], NOISE[2] * slope[..., 0]
    return np.square(noise)[..., None] * (NOISE[0] ** 2 + communication**2 + host**2) + response.doubt**2


def weights(response: Response, error: np.ndarray, slope: np.ndarray, noise: float | np.ndarray = 1.0) -> np.ndarray:
    """Precision of each run, robust: that of Student's t with `FREEDOM` degrees, for which a stalled run has little weight."""
    spread = variance(response, slope, noise)
    return (FREEDOM + 1) / (FREEDOM + error**2 / spread) / spread


def fit(response: Response, measured: np.ndarray, leaves: list[Leaf]) -> Fit:
    """The fit of all leaves. `measured`: ln seconds of every run."""
    typical = Normal.of(TYPICAL, UNCERTAIN)
    found = Fit(leaves, {k: Normal.flat() for k in range(len(leaves))}, typical)
    parts = [(response.take(leaf.runs), measured[leaf.runs]) for leaf in leaves]
    for _ in range(ROUNDS):
        messages = {}
        for k, leaf in enumerate(leaves):
            others = Fit(leaves, {**found.messages, k: Normal.flat()}, typical)
            messages[k] = evidence(*parts[k], others.family(leaf.family).through(BETWEEN_SOURCES))
        found = Fit(leaves, messages, typical)
    return found
