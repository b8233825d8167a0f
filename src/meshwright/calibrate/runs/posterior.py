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
from meshwright.calibrate.runs.stack_fit import FREEDOM, MOST_RUNS, Normal, credibility, evidence, variance

SCALES = (0.3, 1.0)  # λ
NOISES = (1.0, 2.0, 4.0)  # κ
NEWTON = 5


def posterior(response: Response, measured: np.ndarray, prior: Normal, scales: Sequence[float] = SCALES) -> Normal:
    """The numbers of a source after some of its runs, by mean and covariance. `measured`: ln seconds of the runs. `scales` is 1 alone if the
    prior is itself a posterior: how far the source is from its stack is then part of it."""
    if not len(measured):
        return prior
    trust = credibility(response, measured, prior)
    parts = [_component(response, measured, prior, scale, noise, trust) for scale in scales for noise in NOISES]
    logs = np.array([log for _, log in parts])
    weight = np.exp(logs - logs.max())
    weight /= weight.sum()
    means = np.array([normal.mean for normal, _ in parts])
    mean = weight @ means
    spread = sum(w * normal.covariance for w, (normal, _) in zip(weight, parts, strict=True))
    away = means - mean
    return Normal.of(mean, spread + away.T @ (weight[:, None] * away))


def _component(
    response: Response, measured: np.ndarray, prior: Normal, scale: float, noise: float, trust: np.ndarray
) -> tuple[Normal, float]:
    """The numbers for one λ and κ, and ln p(runs | λ, κ)."""
    covariance = scale**2 * prior.covariance
    narrow = Normal.of(prior.mean, covariance)
    found = evidence(response, measured, narrow, noise, trust, NEWTON)
    after = narrow * found
    value, slope = response.with_gradient(after.mean)
    spread = variance(response, slope, noise)
    runs = -(FREEDOM + 1) / 2 * np.log1p((value - measured) ** 2 / spread / FREEDOM) - np.log(spread) / 2
    move = after.mean - prior.mean
    distance = move @ np.linalg.solve(covariance, move)
    volume = np.linalg.slogdet(np.eye(len(move)) + covariance @ found.precision)[1]
    return after, float(min(1.0, MOST_RUNS / len(measured)) * runs.sum() - (distance + volume) / 2)
