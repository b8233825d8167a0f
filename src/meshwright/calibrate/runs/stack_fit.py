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

How the predicted step time of published runs responds to the numbers of their stacks: costed once, then interpolated.

A fit needs the step times of a thousand runs for hundreds of values of the stack's numbers. Each run is lowered once, as a batch of
equal plans in which the numbers of the stack differ from plan to plan, and costed in one pass. Between these points

    t(x) = t(x₀)·( 1 + Σ (exp(q_p) − 1) ),      q_p = a_p(x₀)·d_p + c_p(x₀)·d_p²,   d_p = x_p − centre_p

The parts of a step add up, and so do the seconds that each number adds. ln t is interpolated in x₀ = ln launch, by parabolas through three
neighbours of `LAUNCHES`: a run that is bound by its host does not respond to the rates of its device, so every other number has a
response for each launch time. The numbers, as coordinates that grow with the step time:

    launch        ln of the host seconds of an operator; a collective takes those of `Stack.collective_operators`
    products      −ln of the rate of matrix products over the benchmarked rate
    attention     −ln of the rate of attention kernels over the benchmarked rate
    elementwise   ln of the time of memory-bound operations over one pass per kernel
    network       −ln of the rate of collectives between nodes over the benchmarked rate
    exposed       logit of the share of compute that hides no communication (1 − hides)

What runs of one source say of its numbers, when neither the distance of the source from its stack nor its noise is known.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.calibrate.runs.normal import NUMBERS, Normal, covariance, product, times
from meshwright.cost.band import EXPERT_DOUBT, LEAST_DOUBT, expert_share
from meshwright.cost.step import step_cost
from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.result import Prediction
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

LEAST_LAUNCH = 1e-7  # seconds
LAUNCHES = np.log(np.geomspace(1.5e-6, 160e-6, 9))
CENTRE = np.array([np.log(20e-6), 0.1, 0.1, 0.2, 0.2, np.log(0.25 / 0.75)])
STEP = np.array([0.0, 0.2, 0.3, 0.4, 0.4, 0.8])  # distance of the costed points from the centre


def numbers_of(stack: Stack) -> np.ndarray:
    """The numbers of a stack as coordinates."""
    open_share = np.clip(1 - stack.hides, 1e-3, 1 - 1e-3)
    return np.array(
        [
            np.log(max(stack.launch, LEAST_LAUNCH)),
            -np.log(stack.products),
            -np.log(stack.attention_rate),
            np.log(stack.elementwise),
            -np.log(stack.network),
            np.log(open_share / (1 - open_share)),
        ]
    )


def fields_of(x: np.ndarray, stack: Stack) -> dict[str, np.ndarray]:
    """The fields of the stack with these coordinates (last axis: the numbers)."""
    launch = np.exp(x[..., 0])
    return {
        "launch": launch,
        "collective_launch": stack.collective_operators * launch,
        "products": np.exp(-x[..., 1]),
        "attention_rate": np.exp(-x[..., 2]),
        "elementwise": np.exp(x[..., 3]),
        "network": np.exp(-x[..., 4]),
        "hides": 1 / (1 + np.exp(x[..., 5])),
    }


def grid() -> np.ndarray:
    """The costed points: every launch time, with each other number at its centre, below it and above it."""
    moves = [np.zeros(len(NUMBERS))]
    for p in range(1, len(NUMBERS)):
        for sign in (-1.0, 1.0):
            move = np.zeros(len(NUMBERS))
            move[p] = sign * STEP[p]
            moves.append(move)
    points = CENTRE + np.array(moves)[None, :, :] * np.ones((len(LAUNCHES), 1, 1))
    points[:, :, 0] = LAUNCHES[:, None]
    return points.reshape(-1, len(NUMBERS))


def step_times(
    model: Model, cluster: Cluster, plans: Sequence[Plan], workload: Workload, stack: Stack, x: np.ndarray
) -> np.ndarray:
    """Predicted seconds of each plan with the coordinates in the same row of `x`."""
    program = step_program(model, plans, workload, varied_stack(stack, 0, x))
    return np.broadcast_to(step_cost(program, cluster).time, len(x))


def doubt_of(prediction: Prediction, cluster: Cluster) -> float:
    """Standard deviation of ln seconds that the experts of a run add, and shares of peak of its device that were assumed."""
    experts = LEAST_DOUBT * EXPERT_DOUBT * expert_share(prediction.exposed_s)
    return math.hypot(experts, cluster.accelerator.efficiency.doubt)


def varied_stack(stack: Stack, unchanged: int, x: np.ndarray) -> Stack:
    """The stack of a batch of plans, with arrays over the batch in the place of numbers: its own for the first `unchanged` plans, then those of
    the coordinates `x`."""
    fields = fields_of(x, stack)
    own = {name: np.full(unchanged, getattr(stack, name)) for name in fields}
    return stack.model_copy(update={name: np.concatenate([own[name], values]) for name, values in fields.items()})


@dataclass
class Response:
    """The responses of several runs: arrays over launch times and runs (and numbers)."""

    base: np.ndarray  # ln seconds
    slope: np.ndarray
    curve: np.ndarray
    doubt: np.ndarray  # standard deviation of ln seconds that experts and the device of each run add (`doubt_of`)

    @classmethod
    def of(cls, times: Sequence[np.ndarray], doubts: Sequence[float]) -> Response:
        """From the seconds of each run at the points of `grid`, and the doubt of each run."""
        logs = np.log(np.array(times)).reshape(len(times), len(LAUNCHES), -1).swapaxes(0, 1)
        base = logs[:, :, 0]
        low, high = (logs[:, :, first::2] - base[:, :, None] for first in (1, 2))
        step = STEP[1:]
        return cls(base, (high - low) / (2 * step), (high + low) / (2 * step**2), np.array(doubts))

    def take(self, rows: np.ndarray) -> Response:
        return Response(self.base[:, rows], self.slope[:, rows], self.curve[:, rows], self.doubt[rows])

    def __len__(self) -> int:
        return len(self.doubt)

    def log_time(self, x: np.ndarray) -> np.ndarray:
        """ln of the predicted seconds of each run; `x` are the coordinates of all runs, or several rows of them."""
        return self.with_gradient(x)[0]

    def with_gradient(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`log_time`, and its derivative by each number: (…, runs) and (…, runs, numbers) of `x` (…, numbers)."""
        spacing = LAUNCHES[1] - LAUNCHES[0]
        at = (x[..., 0] - LAUNCHES[0]) / spacing
        middle = np.clip(np.round(at).astype(int), 1, len(LAUNCHES) - 2)
        u = np.clip(at - middle, -1.5, 1.5)
        # Over three neighbours: (…, 3, runs) or (…, 3, runs, numbers).
        near = middle[..., None] + np.array([-1, 0, 1])
        weights = np.stack([u * (u - 1) / 2, 1 - u * u, u * (u + 1) / 2], axis=-1)[..., None]
        changes = np.stack([u - 0.5, -2 * u, u + 0.5], axis=-1)[..., None] / spacing
        move = np.clip(x[..., 1:] - CENTRE[1:], -2 * STEP[1:], 2 * STEP[1:])[..., None, None, :]
        slope, bend = self.slope[near], self.curve[near] * move
        factor = np.exp((slope + bend) * move)
        total = np.maximum(1 + (factor - 1).sum(axis=-1), 0.05)
        point = self.base[near] + np.log(total)
        by_launch = (changes * point).sum(axis=-2)
        by_others = ((weights / total)[..., None] * factor * (slope + 2 * bend)).sum(axis=-3)
        return (weights * point).sum(axis=-2), np.concatenate([by_launch[..., None], by_others], axis=-1)


# Of ln seconds: in all runs; per share of exposed communication; per share of time bound by the host
NOISE = (0.05, 0.35, 0.25)
FREEDOM, MOST_RUNS = 4.0, 24.0
DOUBT = 2.0  # standard deviations at which a run counts half
ROUNDS, NEWTON = 4, 12


TYPICAL = np.array([np.log(35e-6), 0.06, 0.06, 0.15, 0.20, np.log(0.25 / 0.75)])
UNCERTAIN = covariance((0.50, 0.06, 0.10, 0.25, 0.25, 0.5), 0.05)
BETWEEN_STACKS = covariance((0.60, 0.06, 0.20, 0.25, 0.25, 0.5), 0.06)
BETWEEN_SOURCES = covariance((0.20, 0.04, 0.10, 0.12, 0.15, 0.3), 0.08)


@dataclass
class Leaf:
    """The runs of one family of stacks in one source."""

    source: str
    family: str  # a stack and those that extend it; a stack without a name is a separate family
    runs: np.ndarray  # indices
    obsolete: bool = False  # the stack is no longer in use, so it does not count in the typical one
    framework: str = ""  # the leaves of one framework are left out together; empty: each source alone


@dataclass
class StackFit:
    """The distributions of the numbers: of each family, and of the typical stack."""

    leaves: list[Leaf]
    messages: dict[int, Normal]  # of each leaf: what its runs say
    typical: Normal

    def family(self, name: str, without: str = "", framework: str = "") -> Normal:
        """The numbers of a stack, from all sources but one, and from stacks that are not of one framework."""
        population = self.population(name, without, framework)
        return population.through(BETWEEN_STACKS) * self._runs_say(name, without)

    def source(self, leaf: Leaf) -> Normal:
        """The numbers of a stack in a source, before any run of this source, or of its framework, is seen."""
        return self.family(leaf.family, leaf.source, leaf.framework).through(BETWEEN_SOURCES)

    def _runs_say(self, family: str, without: str) -> Normal:
        return product(
            [
                self.messages[k].through(BETWEEN_SOURCES)
                for k, leaf in enumerate(self.leaves)
                if leaf.family == family and leaf.source != without
            ]
        )

    def population(self, family: str = "", without: str = "", framework: str = "") -> Normal:
        """The typical stack by all families that are in use, but one, and but those of one framework."""
        unseen = {family} | {leaf.family for leaf in self.leaves if framework and leaf.framework == framework}
        names = sorted({leaf.family for leaf in self.leaves if not leaf.obsolete} - unseen)
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
    """Return the likelihood of runs as a normal distribution around the most probable numbers, which Newton's method finds in at most
    `steps`. `measured`: ln seconds. `noise`: a factor on `NOISE`. `trust`: the credibility of each run, if it is known.

    Several priors, each with its noise, have one answer each: a row stops to move when its step is below 0.001."""
    if not len(measured):
        return Normal.flat()
    x = prior.mean
    total = Normal(np.zeros_like(prior.precision), np.zeros_like(prior.shift))
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
        total = Normal(
            np.where(moving[..., None, None], precision, total.precision),
            np.where(moving[..., None], shift, total.shift),
        )
        step = np.clip((prior * total).mean - x, -0.7, 0.7) * moving[..., None]
        x = x + step
        moving = moving & (np.abs(step).max(axis=-1) >= 1e-3)
        if not moving.any():
            break
    return total


def credibility(response: Response, measured: np.ndarray, prior: Normal) -> np.ndarray:
    """Return the weight of each run, from 1 to 0: a run that is many standard deviations from what the prior expects, and from the other
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


def fit(response: Response, measured: np.ndarray, leaves: list[Leaf]) -> StackFit:
    """The fit of all leaves. `measured`: ln seconds of every run."""
    typical = Normal.of(TYPICAL, UNCERTAIN)
    fitted = StackFit(leaves, {k: Normal.flat() for k in range(len(leaves))}, typical)
    parts = [(response.take(leaf.runs), measured[leaf.runs]) for leaf in leaves]
    for _ in range(ROUNDS):
        messages = {}
        for k, leaf in enumerate(leaves):
            others = StackFit(leaves, {**fitted.messages, k: Normal.flat()}, typical)
            messages[k] = evidence(*parts[k], others.family(leaf.family).through(BETWEEN_SOURCES))
        fitted = StackFit(leaves, messages, typical)
    return fitted


SCALES = (0.3, 1.0)  # λ
NOISES = (1.0, 2.0, 4.0)  # κ
NEWTON_STEPS = 5


def posterior(
    response: Response,
    measured: np.ndarray,
    prior: Normal,
    scales: Sequence[float] = SCALES,
    noises: Sequence[float] = NOISES,
) -> Normal:
    """The numbers of a source after some of its runs, by mean and covariance. `measured`: ln seconds of the runs. `scales` is 1 alone if the
    prior is itself a posterior: how far the source is from its stack is then part of it."""
    if not len(measured):
        return prior
    scale, noise = np.array([(scale, noise) for scale in scales for noise in noises]).T
    covariance = scale[:, None, None] ** 2 * prior.covariance
    narrow = Normal.of(np.tile(prior.mean, (len(scale), 1)), covariance)
    updated = evidence(response, measured, narrow, noise, credibility(response, measured, prior), NEWTON_STEPS)
    after = narrow * updated
    means, covariances = after.mean, after.covariance
    move = means - prior.mean
    distance = (move * times(narrow.precision, move)).sum(axis=-1)
    volume = np.linalg.slogdet(np.eye(len(prior.mean)) + covariance @ updated.precision)[1]
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
