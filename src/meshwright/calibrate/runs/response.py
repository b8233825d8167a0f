"""How the predicted step time of published runs responds to the numbers of their stacks: costed once, then interpolated.

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
    network       −ln of the rate of collectives over the benchmarked rate
    exposed       logit of the share of compute that hides no communication (1 − hides)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.band import EXPERT_DOUBT, LEAST_DOUBT, expert_share
from meshwright.cost.step import step_cost
from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.result import Prediction
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.step import step_program

NUMBERS = ("launch", "products", "attention", "elementwise", "network", "exposed")
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
