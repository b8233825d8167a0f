"""One device against plain formulas: a hook that repeats each step of the reference in float64, without the code that `train` runs.

Before a step it copies the weights and the batch. From them come loss, norm and gradients (`network`), and from these the next weights:

    clip       g ← g · min(1, c / (‖g‖ + 10⁻⁶))
    rate       the closed formula of warm-up and decay (`emulation.update`), times the factor of a parameter's role under µP
    update     the formulas of AdamW, momentum and SGD (`emulation.update`), Muon by a singular value decomposition (`emulation.orthogonal`)
    balance    b_e ← b_e + γ·sign(mean load − load_e)
    initial    mean and deviation of each tensor, within six deviations of what a draw of its size gives; no two tensors alike

The steps start from the weights of the reference, so a difference is reported in the step in which it begins.
"""

from collections.abc import Iterator
from math import sqrt
from typing import Any

import numpy as np
import torch

from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload
from meshwright.proof.compare import INITIAL, Break
from meshwright.proof.emulation.orthogonal import next_update
from meshwright.proof.emulation.update import ReplayedOptimizer, decays, learning_rate, role_of
from meshwright.proof.oracle.network import missing, plain_step
from meshwright.proof.records import Activations, PieceTrace, Trace
from meshwright.training.hooks import Hook

RATE_BOUND = 1e-12
SCATTER = 0.1  # what proofs add to the constants that norms, biases and sinks start with
MOST_DEVIATIONS = 6.0


class Oracle(Hook):
    """Repeats the steps of a trainer on one device; `trace` has what the formulas give."""

    def __init__(
        self, model: Model, workload: Workload, settings: Optimizer, seed: int, size: int, noted: int = -1
    ) -> None:
        self.model, self.workload, self.settings, self.seed, self.size = model, workload, settings, seed, size
        self.noted = noted  # the step whose parts are recorded
        self.trace = Trace(0, "fp64", {})
        self.optimizers: dict[str, ReplayedOptimizer] = {}
        self.momentum: dict[str, np.ndarray] = {}

    def before_step(self, trainer: Any) -> None:
        weights = {piece.name: piece.numbers.detach().cpu().double().clone() for piece in trainer.parallel.pieces}
        frozen = {piece.name for piece in trainer.parallel.pieces if not piece.parameter.requires_grad}
        inputs, targets, documents_BS = trainer.loader.batch(trainer.step, trainer.indices)
        documents = None if documents_BS is None else documents_BS.cpu()
        batch, step = (inputs.cpu(), targets.cpu(), documents), trainer.step
        if step == self.noted:
            self.trace.activations = Activations(self.workload.seq)
        noted = self.trace.activations if step == self.noted else None
        plain = plain_step(self.model, weights, batch, list(trainer.indices), self.size, self.seed, step, noted)
        gradients = {name: g.numpy() for name, g in plain.gradients.items() if name not in frozen}
        norm = sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        factor = min(1.0, self.settings.clip / (norm + 1e-6)) if self.workload.clip else 1.0
        self.trace.losses.append(plain.loss)
        self.trace.norms.append(norm)
        if not self.trace.pieces:
            self.trace.pieces = [PieceTrace(name, (0,) * weight.ndim) for name, weight in weights.items()]
        for piece, (name, weight) in zip(self.trace.pieces, weights.items(), strict=True):
            if name in gradients:
                after = self.updated(name, weight.numpy(), gradients[name] * factor, step)
            else:
                after = self.balanced(weight, plain.loads.get(name)).numpy()
            piece.gradients.append(gradients.get(name, np.zeros(weight.shape)))
            piece.parameters.append(after)

    def updated(self, name: str, weight: np.ndarray, gradient: np.ndarray, step: int) -> np.ndarray:
        """The weight after the update with this clipped gradient."""
        settings, kind, role = self.settings, self.workload.optimizer, role_of(name, weight.ndim)
        rate = learning_rate(settings, self.workload, step, role, self.model.hidden)
        has_decay = decays(role, settings)
        if kind == "muon" and role == "matrix":
            self.momentum[name], moved = next_update(self.momentum.get(name), gradient, settings.momentum)
            decayed = weight * (1 - rate * settings.weight_decay)
            return np.asarray(decayed - rate * 0.2 * sqrt(max(weight.shape[-2:])) * moved)
        if name not in self.optimizers:
            self.optimizers[name] = ReplayedOptimizer(kind, settings, has_decay)
        return self.optimizers[name].step(weight, gradient, rate, "fp64")

    def balanced(self, bias_E: torch.Tensor, load_E: torch.Tensor | None) -> torch.Tensor:
        """A weight without a gradient: the bias of a router moves by its load, others stay."""
        if load_E is None:
            return bias_E
        return bias_E + self.model.router.balance_rate * torch.sign(load_E.mean() - load_E)


def lacks_oracle(model: Model, workload: Workload) -> str:
    """What was added by a plug-in without a second formula; empty if nothing was."""
    lacks_replay = OPTIMIZERS[workload.optimizer].replay is None
    return missing(model) or (f"optimizer {workload.optimizer}" if lacks_replay else "")


def schedules(settings: Optimizer) -> list[Optimizer]:
    """The schedule of the run, and a short one of each kind."""
    start = {"wsd": {"decay_start": 9}}
    kinds = [
        Optimizer(schedule=kind, warmup=4, decay_steps=16, **start.get(kind, {}))
        for kind in ("cosine", "linear", "wsd")
    ]
    return [settings, Optimizer(), *kinds]


def schedule_steps(settings: Optimizer) -> list[int]:
    """Steps at which a schedule is compared: around its corners, and some between them."""
    begin = settings.decay_start if settings.schedule == "wsd" else settings.warmup
    between = (begin + settings.decay_steps * i // 8 for i in range(9))
    return sorted({max(0, step + i) for step in (0, settings.warmup, *between) for i in (-1, 0, 1)})


def wrong_rates(trainer: Any, run: Optimizer) -> Iterator[Break]:
    """The steps at which the learning rate of the trainer is not that of the closed formula: of the schedule of the run and of every other kind."""
    step_now, settings_now, workload = trainer.step, trainer.settings, trainer.parallel.workload
    for settings in schedules(run):
        for step in schedule_steps(settings):
            trainer.step, trainer.settings = step, settings
            got, expected = trainer.learning_rate, learning_rate(settings, workload, step)
            error, ratio = abs(got - expected) / max(expected, 1e-300), got / max(expected, 1e-300)
            if not error <= RATE_BOUND:
                yield Break(step, "learning rate", settings.schedule, 0, error, RATE_BOUND, "fp64", ratio)
    trainer.step, trainer.settings = step_now, settings_now


def initial_moments(model: Model, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of the initial values of a tensor in a proof."""
    if name.endswith("lora_a.weight"):
        return 0.0, 1 / sqrt(3 * shape[-1])
    if len(shape) == 1 or name.endswith(("bias", "lora_b.weight")):
        return 0.0 if name.endswith(("bias", "sinks.weight", "lora_b.weight")) else 1.0 - model.norm_offset, SCATTER
    if model.resnet.stages:
        return 0.0, 0.01 if len(shape) == 2 else sqrt(2 / (shape[0] * shape[2] * shape[3]))
    if model.kind == "mlp":
        return 0.0, sqrt(2 / model.hidden)
    ends_block = name.endswith(("attention.o.weight", "heads.o.weight", "down.weight"))
    return 0.0, sqrt(2 / (5 * model.hidden)) / (sqrt(2 * model.layers) if ends_block else 1.0)


def wrong_weights(pieces: list[PieceTrace], model: Model) -> Iterator[Break]:
    """The tensors of one device whose initial values are not draws of their distribution, or those of another tensor."""
    seen: dict[bytes, str] = {}
    for piece in pieces:
        values = np.asarray(piece.initial, np.float64)
        mean, deviation = initial_moments(model, piece.name, values.shape)
        unit, n = (values - mean) / deviation, values.size
        cubic = (unit**2).mean() ** (1 / 3)  # nearly normal, with mean 1 − 2/9n and variance 2/9n (Wilson & Hilferty)
        error = max(abs(unit.mean()) * sqrt(n), abs(cubic - 1 + 2 / (9 * n)) / sqrt(2 / (9 * n)))
        alike = n > 4 and seen.setdefault(unit.tobytes(), piece.name) != piece.name
        if not error <= MOST_DEVIATIONS or alike:
            ratio = float("nan") if alike else float(values.std() / deviation)
            yield Break(0, INITIAL, piece.name, 0, float(error), MOST_DEVIATIONS, "fp64", ratio)
