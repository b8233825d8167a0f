"""What is believed of the step times of candidates, before and after some of them were measured; and which one to measure next.

Predictions of similar plans are wrong in the same way. With the exposed seconds of the parts p of plan a as shares s_ap of its step:

    ln y_a = ln t_a + c + Σ_p s_ap · e_p + d_a        t predicted, y measured

    c     error of all plans alike: the machine is slower than thought        standard deviation: the band of the prediction
    e_p   error of one part: the network, waiting for the host, products       the doubts of `cost.band`, for differences between plans
    d_a   error of this plan alone                                             `PLAN_DOUBT` of two plans

All are normal, so what measured plans say of the others is one linear equation (a Gaussian process). Where measurements lie further from
the predictions than these doubts allow, all doubts grow by that factor. The next plan is that with the largest expected gain

    gain_a = P(a fits) · E[ max(0, ln y_best − ln y_a) ]

which is large where a plan is predicted fast, or is uncertain. Below 1% no plan is worth a run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.cost.band import (
    BUBBLE_DOUBT,
    COMMUNICATION_DOUBT,
    COMPUTE_DOUBT,
    PLAN_DOUBT,
    WAITING_DOUBT,
)
from meshwright.describe.result import AXES, QUANTILES, Prediction

NOISE = 0.01  # of ln seconds: the median step of the same plan, run again
MEDIAN_OF_SPREAD = 0.15  # noise of the median of some steps, as a share of their spread
NINE_OF_TEN = 2 * 1.645  # standard deviations between the edges of a band
MOST_GROWTH = 4.0  # of all doubts together
OWN_MEMORY = 0.03  # of ln bytes: the error of one plan's memory beyond that of all plans
KINDS = {**dict.fromkeys(AXES, COMMUNICATION_DOUBT), "host": WAITING_DOUBT, "bubble": BUBBLE_DOUBT}


@dataclass
class Belief:
    """Step times of candidates: the prediction, and the covariance of its errors in ln seconds."""

    log_times: np.ndarray
    covariance: np.ndarray
    measured: dict[int, float] = field(default_factory=dict)  # ln seconds
    noise: dict[int, float] = field(default_factory=dict)  # standard deviation of those that are noisier than `NOISE`

    def learn(self, candidate: int, seconds: float, spread: float = 0.0) -> None:
        """Take in a measured step; `spread` is that between its slowest and its fastest step, as a share."""
        self.measured[candidate] = math.log(seconds)
        self.noise[candidate] = max(NOISE, min(spread, 1.0) * MEDIAN_OF_SPREAD)

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> "Belief":
        times = np.array([p.step_time_s for p in predictions])
        edges = [math.log(p.step_time_high_s / p.step_time_low_s) / NINE_OF_TEN for p in predictions]
        return cls.from_parts(times, [p.exposed_s for p in predictions], float(np.median(edges)))

    @classmethod
    def from_parts(cls, times: np.ndarray, exposed: Sequence[Mapping[str, float]], common: float) -> "Belief":
        """From predicted seconds, the seconds of each part, and the doubt that all plans share."""
        parts = sorted({part for each in exposed for part in each})
        doubts = np.array([KINDS.get(part, COMPUTE_DOUBT) for part in parts])
        shares = np.array(
            [[each.get(part, 0.0) / max(sum(each.values()), 1e-30) for part in parts] for each in exposed]
        )
        weighted = shares * doubts
        own = np.eye(len(times)) * PLAN_DOUBT**2 / 2
        return cls(np.log(times), common**2 + weighted @ weighted.T + own)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of ln seconds of every candidate."""
        seen = list(self.measured)
        if not seen:
            return self.log_times, np.sqrt(np.diag(self.covariance))
        errors = np.array([self.measured[i] - self.log_times[i] for i in seen])
        noise = np.diag([self.noise.get(i, NOISE) ** 2 for i in seen])
        among = self.covariance[np.ix_(seen, seen)] + noise
        gain = np.linalg.solve(among, self.covariance[seen]).T
        mean = self.log_times + gain @ errors
        variance = np.diag(self.covariance) - (gain * self.covariance[:, seen]).sum(axis=1)
        surprise = float(errors @ np.linalg.solve(among, errors)) / len(seen)
        growth = min(max(1.0, math.sqrt(surprise)), MOST_GROWTH)
        return mean, growth * np.sqrt(np.maximum(variance, 1e-12))

    def gains(self, chances: np.ndarray | None = None) -> np.ndarray:
        """The expected gain of measuring each candidate, as a share of the best measured step; 0 for those that were measured.
        Before any measurement: how much faster it may be than the slowest prediction."""
        mean, deviation = self.posterior()
        best = min(self.measured.values(), default=float(self.log_times.max()) + 1.0)
        z = (best - mean) / deviation
        density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        below = normal_share(z)
        expected = deviation * (z * below + density) if self.measured else best - mean
        gains = expected * (np.ones(len(mean)) if chances is None else chances)
        gains[list(self.measured)] = 0.0
        return np.maximum(gains, 0.0)


def normal_share(z: np.ndarray) -> np.ndarray:
    """The share of a standard normal distribution below z."""
    return np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in np.atleast_1d(z)])


@dataclass
class MemoryBelief:
    """How far measured peaks lie above predicted ones, from what fitted and what did not.

    The factor has the distribution of published runs (`describe.result.QUANTILES`) before a run. A plan that fitted says that predicted × factor is
    below the capacity; one that ran out of memory says the opposite; a measured peak says the factor itself."""

    predicted: np.ndarray  # bytes of each candidate
    capacity: float

    def __post_init__(self) -> None:
        edges, shares = list(QUANTILES.values()), list(QUANTILES)
        self.factors = np.exp(np.linspace(math.log(edges[0] / 1.3), math.log(edges[-1] * 2), 400))
        cumulative = np.interp(self.factors, [edges[0] / 1.3, *edges, edges[-1] * 2], [0.0, *shares, 1.0])
        self.logs = np.log(np.maximum(np.gradient(cumulative), 1e-12))

    def fits(self, candidate: int) -> None:
        self.logs += np.log(self._chance_to_fit(candidate) + 1e-9)

    def fails(self, candidate: int) -> None:
        self.logs += np.log(1 - self._chance_to_fit(candidate) + 1e-9)

    def measures(self, candidate: int, peak: float) -> None:
        away = (np.log(self.factors) - math.log(peak / self.predicted[candidate])) / OWN_MEMORY
        self.logs -= np.minimum(away**2 / 2, 20.0)

    def _chance_to_fit(self, candidate: int) -> np.ndarray:
        room = math.log(self.capacity / max(self.predicted[candidate], 1.0))
        return normal_share((room - np.log(self.factors)) / OWN_MEMORY)

    @property
    def weights(self) -> np.ndarray:
        weights = np.exp(self.logs - self.logs.max())
        return weights / weights.sum()

    @property
    def factor(self) -> float:
        """The median factor on predicted memory."""
        return float(np.interp(0.5, np.cumsum(self.weights), self.factors))

    def chances(self) -> np.ndarray:
        """The chance of each candidate to fit."""
        weights = self.weights
        return np.array([float(weights @ self._chance_to_fit(i)) for i in range(len(self.predicted))])
