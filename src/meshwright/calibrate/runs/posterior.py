"""What runs of one source say of its numbers, when neither the distance of the source from its stack nor its noise is known.

    x_s ~ N(x_f, λ²·C)        C: the prior of `stack_fit`, as wide as the sources that differ most from their stack
    ε_r ~ κ·noise_r           Student's t, `stack_fit.variance`
    (λ, κ)                    uniform over SCALES × NOISES

    p(x | runs) = Σ w(λ, κ)·p(x | runs, λ, κ),      w ∝ p(runs | λ, κ)

Of published sources about half are as predicted (λ near 0: what their runs differ by is their own noise), and a third are far off as a
whole. One run cannot say which of the two it belongs to. With λ = κ = 1 the prediction follows it at once: that mends the sources that are off
and makes the others worse, by a fifth in several of them. Averaged over λ and κ, one run moves little. Further runs that agree with it make a large
λ and a small κ likely, so five runs that agree move most of what they would with the full prior.

p(runs | λ, κ) by Laplace's method, with x̂ the most probable numbers and P the precision of the runs there:

    ln p = Σ ln t₄(ε_r(x̂)) − ½·(x̂ − x_f)ᵀ(λ²C)⁻¹(x̂ − x_f) − ½·ln det(1 + λ²C·P)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.calibrate.runs.response import Response
from meshwright.calibrate.runs.stack_fit import FREEDOM, MOST_RUNS, Normal, credibility, evidence, times, variance

SCALES = (0.3, 1.0)  # λ
NOISES = (1.0, 2.0, 4.0)  # κ
NEWTON = 5


def posterior(response: Response, measured: np.ndarray, prior: Normal, scales: Sequence[float] = SCALES) -> Normal:
    """The numbers of a source after some of its runs, by mean and covariance. `measured`: ln seconds of the runs. `scales` is 1 alone if the
    prior is itself a posterior: how far the source is from its stack is then part of it."""
    if not len(measured):
        return prior
    scale, noise = np.array([(scale, noise) for scale in scales for noise in NOISES]).T
    covariance = scale[:, None, None] ** 2 * prior.covariance
    narrow = Normal.of(np.tile(prior.mean, (len(scale), 1)), covariance)
    found = evidence(response, measured, narrow, noise, credibility(response, measured, prior), NEWTON)
    after = narrow * found
    means, covariances = after.mean, after.covariance
    move = means - prior.mean
    distance = (move * times(narrow.precision, move)).sum(axis=-1)
    volume = np.linalg.slogdet(np.eye(len(prior.mean)) + covariance @ found.precision)[1]
    logs = _log_likelihood(response, measured, means, noise) - (distance + volume) / 2
    weight = np.exp(logs - logs.max())
    weight /= weight.sum()
    mean = weight @ means
    away = means - mean
    return Normal.of(mean, np.tensordot(weight, covariances, 1) + away.T @ (weight[:, None] * away))


def _log_likelihood(response: Response, measured: np.ndarray, x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Σ ln t₄(ε_r) over the runs, for each row of numbers and its κ. Many runs count as `MOST_RUNS`."""
    value, slope = response.with_gradient(x)
    spread = variance(response, slope, noise)
    runs = -(FREEDOM + 1) / 2 * np.log1p((value - measured) ** 2 / spread / FREEDOM) - np.log(spread) / 2
    return min(1.0, MOST_RUNS / len(measured)) * runs.sum(axis=-1)
