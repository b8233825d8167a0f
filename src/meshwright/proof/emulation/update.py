"""Replay of updates: recompute the optimizer, the masters and the rounding from the gradients of a rank.

All operations after the gradient reduction work element by element, so one device can repeat them exactly for any shard of a
tensor (Muon's update of a matrix needs all shards: `orthogonal`). In each step a rank records the reduced gradient g, the gradient
given to the optimizer, the value before and after the update, and the parameter of the model at the end:

    given      g / S · min(1, c / (‖g‖ + 10⁻⁶))             the loss scale S undone, and clipped
    after      AdamW(before, given)                         on the fp32 master; without masters in 16 bits, rounded after each operation
    model      round(master)                                bit by bit

This finds bugs that a comparison of training runs cannot: Adam divides a gradient by its magnitude, so a loss scale that is left in
the gradient of a vector changes nothing, and a bf16 weight near 1 that is never updated from its master stays within a rounding error.

Which parameters decay, and the learning rate of each step in closed form, stand here too: the formulas of docs/optimizers.md.

This file shares no code with `parallel.numerics` or `training.optimizer`: it uses numpy and explicit rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import numpy as np

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload
from meshwright.proof.compare import Break
from meshwright.proof.emulation.orthogonal import replay_matrices
from meshwright.proof.records import Job, PieceTrace, Trace, Update
from meshwright.proof.tolerance import tensor_error

BITS = {"fp64": 52, "fp32": 23, "bf16": 7, "fp16": 10}  # of the mantissa
# Below it steps are of equal size How far a replay may be off, in steps of the dtype: wide ones are replayed in float64, 16 bits with every rounding.
SMALLEST = {"fp64": 2.0**-1022, "fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-14}
UPDATED, AVERAGE = "updated parameter", "moving average"
NORM_BOUND = 1e-5  # relative: squares are summed in fp32
STEPS = {"fp64": 64, "fp32": 8, "bf16": 2, "fp16": 2}


# How the learning rate grows with the batch, as a power: that of SGD in proportion, because its step is the gradient.
BATCH_POWER = {"sgd": 1.0, "momentum": 1.0, "adam": 0.5, "adamw": 0.5, "muon": 0.5}


def role_of(name: str, dims: int) -> str:
    """How an optimizer treats a parameter, by its name: vector, embedding, head, router or matrix."""
    if dims < 2 or name.endswith("bias"):
        return "vector"
    if "moe.router" in name or "moe.shared_scale" in name:
        return "router"
    return next((end for end in ("embedding", "head") if name.startswith(end)), "matrix")


def decays(role: str, settings: Optimizer) -> bool:
    """Whether weight decay applies: to matrices, and to embeddings unless `decay_embeddings` is false."""
    return role != "vector" and (role != "embedding" or settings.decay_embeddings)


def learning_rate(settings: Optimizer, workload: Workload, step: int, role: str = "vector", hidden: int = 1) -> float:
    """The learning rate of a step in closed form: it grows for `warmup` steps, then decays to the share `min_learning_rate`."""
    s, kind, rate = settings, workload.optimizer, settings.learning_rate
    if s.scale_with_batch:
        power = BATCH_POWER.get(kind, 1.0 if OPTIMIZERS[kind].scales_linearly else 0.5)
        rate *= (workload.batch / s.scale_with_batch) ** power
    if s.scale_with_width and role not in ("vector", "embedding"):
        rate *= (s.scale_with_width / hidden) ** (0.5 if OPTIMIZERS[kind].by_matrix and role == "matrix" else 1.0)
    if step + 1 < s.warmup:
        rate *= (step + 1) / s.warmup
    if s.schedule == "constant":
        return rate
    begin = s.decay_start if s.schedule == "wsd" else s.warmup
    done = min(max(step - begin, 0) / max(s.decay_steps, 1), 1.0)
    left = 0.5 + 0.5 * cos(pi * done) if s.schedule == "cosine" else 1.0 - done
    return rate * (s.min_learning_rate + (1 - s.min_learning_rate) * left)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Each number to the nearest one of the dtype, ties to an even last bit; beyond the largest to infinity."""
    wide = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.maximum(np.abs(wide), SMALLEST[dtype]))
    step = np.ldexp(1.0, exponent - 1 - BITS[dtype])
    out = np.rint(wide / step) * step
    return np.where(np.abs(out) > 65504.0, np.copysign(np.inf, wide), out) if dtype == "fp16" else out


def replay(ranks: list[Trace], job: Job, plan: Plan) -> list[Break]:
    """The values that differ from the replay, the earliest step first. `plan` has the dtypes of the run."""
    rates = [rate_of(job, step, "matrix") for step in range(len(ranks[0].losses))]
    with np.errstate(all="ignore"):  # a run that diverged is replayed as it was
        breaks = [b for trace in ranks for piece in trace.pieces for b in replay_piece(trace, piece, job, plan)]
        breaks += replay_matrices(ranks, plan, rates, job.optimizer)
        breaks += [] if plan.average_every else replay_norms(ranks)
    return sorted(breaks, key=lambda b: (b.step, b.rank))


def replay_norms(ranks: list[Trace]) -> Iterator[Break]:
    """The norm of every step, from the gradients of the ranks: each part of a tensor once."""
    for step in range(len(ranks[0].losses)):
        parts = {
            (piece.name, piece.start): piece.gradients[step].astype(np.float64)
            for trace in ranks
            for piece in trace.pieces
            if step < len(piece.updates) and piece.updates[step] is not None
        }
        norm = float(np.sqrt(sum(float((part**2).sum()) for part in parts.values())))
        for trace in ranks if norm > 0 else ():
            error = abs(trace.norms[step] - norm) / norm
            if not error <= NORM_BOUND:
                ratio = trace.norms[step] / norm
                yield Break(step, "gradient norm", "", trace.rank, error, NORM_BOUND, trace.dtype, ratio)


def rate_of(job: Job, step: int, role: str) -> float:
    return learning_rate(job.optimizer, job.workload, step, role, job.model.hidden)


def replay_piece(trace: Trace, piece: PieceTrace, job: Job, plan: Plan) -> list[Break]:
    settings, workload, found = job.optimizer, job.workload, list[Break]()
    optimizer = ReplayedOptimizer(workload.optimizer, settings, decays(piece.role, settings))
    for step, update in enumerate(piece.updates[: len(trace.losses)]):  # not of a step that is only observed
        if update is None:  # frozen, or a step that overflowed
            continue
        rate = rate_of(job, step, piece.role)
        factor = min(1.0, settings.clip / (trace.norms[step] + 1e-6)) if workload.clip else 1.0
        given = piece.gradients[step].astype(np.float64) * factor
        after = None if piece.orthogonal else optimizer.step(update.before, update.gradient, rate, update.dtype)
        narrowest = narrower(plan.grad_dtype, update.dtype)
        for what, got, expected, bound in (
            ("gradient given to the optimizer", update.gradient, given, allowed(narrowest)),
            *([(UPDATED, update.after, after, allowed(update.dtype))] if after is not None else []),
            *model_values(piece, step, update),
            *average_values(piece, step, update, settings.ema),
        ):
            scale = SMALLEST[narrowest] if what.startswith("gradient") else 0.0
            error, ratio = tensor_error(got, expected, expected, scale)
            if not error <= bound:
                ratio = change_ratio(got, expected, update.before) if what == UPDATED else ratio
                old = average_of(piece, step, update, update.before, settings.ema) if what == AVERAGE else expected
                if what == AVERAGE and tensor_error(got, old, old, 0.0)[0] <= 0.02 * error:
                    ratio = 0.0  # of the weight before the update
                where = (step, what, piece.name, trace.rank)
                found.append(Break(*where, error, bound, trace.dtype, ratio, "the formula's"))
    return found


def change_ratio(got: np.ndarray, expected: np.ndarray, before: np.ndarray) -> float:
    """The factor between two changes of a tensor; not a number if they are not proportional, beyond the rounding of small changes."""
    change, right = got.astype(np.float64) - before, expected.astype(np.float64) - before
    ratio = float((change * right).sum() / max((right * right).sum(), 1e-300))
    return ratio if np.abs(change - ratio * right).max() <= 0.05 * np.abs(right).max() else float("nan")


def model_values(piece: PieceTrace, step: int, update: Update) -> list[tuple]:
    """The parameter in the model must equal its rounded master exactly."""
    if update.master is None:
        return []
    expected = rounded(update.master, update.model_dtype)
    return [("parameter (its master, rounded)", piece.parameters[step], expected, 0.0)]


def average_values(piece: PieceTrace, step: int, update: Update, decay: float) -> list[tuple]:
    """The moving average a ← d·a + (1 − d)·w, which starts as the initial weight."""
    if not piece.averages:
        return []
    return [(AVERAGE, piece.averages[step], average_of(piece, step, update, update.after, decay), allowed("fp32"))]


def average_of(piece: PieceTrace, step: int, update: Update, weight: np.ndarray, decay: float) -> np.ndarray:
    return decay * (piece.averages[step - 1] if step else update.before) + (1 - decay) * weight


def allowed(dtype: str) -> float:
    """The bound of a replay, relative to a tensor's largest element."""
    return STEPS[dtype] * 2.0 ** -BITS[dtype]


def narrower(*dtypes: str) -> str:
    return min((d for d in dtypes if d in BITS), key=lambda d: BITS[d])


@dataclass
class Memory:
    """State of the replayed optimizer for one tensor, and its rate of weight decay."""

    decay: float
    steps: int = 0
    first: np.ndarray | float = 0.0
    second: np.ndarray | float = 0.0


class ReplayedOptimizer:
    """The optimizer on one tensor, rounding after each operation where the tensor is of 16 bits."""

    def __init__(self, kind: str, settings: Optimizer, decays: bool) -> None:
        self.update, self.settings = OPTIMIZERS.part(kind, "replay"), settings
        has_decay = decays and "weight_decay" in OPTIMIZERS[kind].settings
        self.memory = Memory(settings.weight_decay if has_decay else 0.0)

    def step(self, value: np.ndarray, gradient: np.ndarray, rate: float, dtype: str) -> np.ndarray:
        def r(x: np.ndarray) -> np.ndarray:
            return x if dtype in ("fp32", "fp64") else rounded(x, dtype)

        self.memory.steps += 1
        wide = value.astype(np.float64), gradient.astype(np.float64)
        after: np.ndarray = self.update(self.memory, self.settings, *wide, rate, r)
        return after


Round = Callable[[Any], np.ndarray]


def replay_adam(memory: Memory, settings: Optimizer, w: np.ndarray, g: np.ndarray, rate: float, r: Round) -> np.ndarray:
    (b1, b2), t = settings.betas, memory.steps
    w = r(w * (1 - rate * memory.decay))
    memory.first = r(memory.first + (1 - b1) * (g - memory.first))
    memory.second = r(r(b2 * memory.second) + (1 - b2) * g * g)
    size = r(r(r(np.sqrt(memory.second)) / np.sqrt(1 - b2**t)) + settings.epsilon)
    return r(w - rate / (1 - b1**t) * memory.first / size)


def replay_momentum(
    memory: Memory, settings: Optimizer, w: np.ndarray, g: np.ndarray, rate: float, r: Round
) -> np.ndarray:
    memory.first = r(g if memory.steps == 1 else r(settings.momentum * memory.first) + g)
    return r(w - rate * memory.first)


def replay_sgd(memory: Memory, settings: Optimizer, w: np.ndarray, g: np.ndarray, rate: float, r: Round) -> np.ndarray:
    return r(w - rate * r(g))


OPTIMIZERS.provide("adamw", replay=replay_adam)
OPTIMIZERS.provide("adam", replay=replay_adam)
OPTIMIZERS.provide("muon", replay=replay_adam)  # of all but the matrices of layers: `replay_matrices`
OPTIMIZERS.provide("momentum", replay=replay_momentum)
OPTIMIZERS.provide("sgd", replay=replay_sgd)
