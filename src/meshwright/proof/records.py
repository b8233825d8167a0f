"""Jobs for the ranks of a proof and the traces they return: plain data, so that the parent process needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.proof.parts import INITIAL_VALUE
from meshwright.training.hooks import Observed

Amount = tuple[float, float]  # count, bytes
# A plan whose gradients are not finite must be compared, not stopped.
SETTINGS = Optimizer(on_nan="skip", most_skips=10**9)


@dataclass(frozen=True)
class Phases:
    """What happens between the steps of a training: evaluations, a save, and a resume (`interruption`)."""

    folder: Path  # of the run: its checkpoints
    config: Config  # its [data], and the batch and sequence length of its samples
    save_after: int  # steps; 0: no save
    evaluate_every: int = 0  # steps; 0: no evaluation
    trains_on_data: bool = False  # the steps read the token files of [data]; false: random samples
    resumes: bool = False  # a second trainer resumes from the save, and trains the remaining steps once more
    start: Path | None = None  # a run that was saved after as many steps: this one begins with its checkpoint


@dataclass(frozen=True)
class Job:
    """A training to run: configuration and number of steps. `prepare` names a function that each rank calls first, to inject a fault."""

    model: Model
    plan: Plan
    workload: Workload
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp")
    steps: int = 5
    seed: int = 0
    dtypes: tuple[str, ...] = ("fp64", "fp32")
    watch: bool = False
    prepare: str = ""
    emulated: Plan | None = None  # the plan whose data-parallel ranks one device emulates, lossy sums included
    summed: dict[str, list[Any]] = field(default_factory=dict)  # by dtype: the lossy sums that the ranks reported
    backwards: bool = False  # those sums in the other order
    kv_copies: int = 1  # how often one device computes each KV head: as often as ranks do, where parts are rounded
    reference: bool = False  # one device, the reference of the ranks: it emulates fp8 with separate code
    updates: bool = False  # record every update of the last dtype, for its replay
    perturbed: bool = False  # start with every weight moved by one unit in its last place
    oracle: bool = False  # repeat the float64 steps with plain formulas (`oracle`)
    optimizer: Optimizer = SETTINGS  # that the copy trains with
    schedule: Optimizer = SETTINGS  # of the run, whose learning rates are compared with their closed formula
    backend: str = "auto"  # of torch.distributed
    compile: str = "off"  # how layers are compiled (`parallel.compile`)
    documents: bool = False  # sequences are packed from documents, and attention does not cross them
    phases: Phases | None = None  # of the float64 run, or of the only dtype
    activations_of: int = -1  # the step whose outputs of modules are recorded; −1: none
    skipped: tuple[int, ...] = ()  # steps without an update


@dataclass
class Update:
    """The update of one piece in one step: the value that the optimizer updates (the master, if there is one) before and after, the given
    gradient, and the master at the end of the step; `dtype` is that of the value, `model_dtype` that of the parameter in the model."""

    dtype: str
    model_dtype: str
    before: np.ndarray
    gradient: np.ndarray
    after: np.ndarray
    master: np.ndarray | None = None


@dataclass
class PieceTrace:
    """One piece on one rank: where it starts in the full tensor, its gradient and its value after each step."""

    name: str
    start: tuple[int, ...]
    gradients: list[np.ndarray] = field(default_factory=list)
    parameters: list[np.ndarray] = field(default_factory=list)
    role: str = "matrix"  # how an optimizer treats it (`emulation.update`)
    orthogonal: bool = False  # Muon updates it: a matrix of a layer
    epsilon: float = 0.0  # of Adam, where it updates this tensor
    averages: list[np.ndarray] = field(default_factory=list)  # its moving average after each step, if there is one
    updates: list[Update | None] = field(default_factory=list)  # None: frozen, or a step that was skipped
    initial: np.ndarray | None = None
    partial: str = ""  # the axis over which its gradient is a partial sum after backward

    def value(self, kind: str, step: int) -> np.ndarray | None:
        """Its gradient or its parameter after a step, or the initial parameter where that was recorded."""
        if kind == INITIAL_VALUE:
            return self.initial
        return (self.gradients if kind == "gradient" else self.parameters)[step]


@dataclass
class Row:
    """One (axis, operation) on one rank: the lowered and the observed amount."""

    axis: str
    operation: str
    lowered: Amount
    observed: Amount
    # Reasons in the step's data why it is not what the plan alone gives.
    explained: list[str] = field(default_factory=list)
    unexplained: bool = False  # the two differ

    @property
    def equal(self) -> bool:
        return not self.unexplained


@dataclass
class Activations:
    """One step of one rank: the outputs of modules, by name and sample, in the order of computation, and the gradients of the loss in them."""

    seq: int = 1
    positions: list[int] | None = None  # of this rank's tokens; None: the whole sequence
    outputs: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    gradients: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    by_sample: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)  # gradients of parameters, on one device
    losses: dict[tuple[int, ...], float] = field(default_factory=dict)  # of micro-batches, by their samples
    recomputed: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # that differ: before, after
    calls: Counter[tuple] = field(default_factory=Counter, repr=False)

    def note(self, name: str, samples: Sequence[int], tensor: Any, recomputing: bool = False) -> None:
        """Record a tensor of torch whose first dimension is the samples, and its gradient when there is one. A module that is called
        twice has two names. A parameter that is only expanded is no output: its gradient is summed elsewhere."""
        if tensor.ndim == 0 or len(tensor) != len(samples) or 0 in tensor.stride():
            return
        call = (name, tuple(samples), recomputing)
        self.calls[call] += 1
        name = name if self.calls[call] == 1 else f"{name} (call {self.calls[call]})"
        rows = rows_of(samples, tensor)
        known = self.outputs.setdefault(name, {}) if not recomputing else self.outputs.get(name, {})
        if not recomputing:
            known.update({s: row for s, row in rows.items() if s not in known})
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.note_gradient(name, samples, gradient))
        elif all(s in known for s in samples):
            before, after = (np.stack([r[s] for s in samples]) for r in (known, rows))
            if np.abs(before - after).max(initial=0.0) > 1e-9 * np.abs(before).max(initial=0.0):
                self.recomputed.setdefault(name, (before, after))

    def note_gradient(self, name: str, samples: Sequence[int], gradient: Any) -> None:
        self.gradients[name] = rows_of(samples, gradient) | self.gradients.get(name, {})


def rows_of(samples: Sequence[int], tensor: Any) -> dict[int, np.ndarray]:
    """The rows of a tensor of torch, which stays free to be resized: NumPy gets a copy of its memory."""
    return dict(zip(samples, tensor.detach().cpu().double().clone().numpy(), strict=True))


@dataclass
class Trace:
    """One rank's training in one dtype."""

    rank: int
    dtype: str
    coordinates: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    pieces: list[PieceTrace] = field(default_factory=list)
    observed: Observed | None = None
    traffic: list[Row] = field(default_factory=list)
    predicted_bytes: float = 0.0
    # What this rank's groups sum with loss (`emulation.lossy_sum.Summed`).
    summed: list[Any] = field(default_factory=list)
    tied: int | None = None  # of one device: the first step in which rounding decided what a lossy sum sent
    compiled: str = "off"  # what `compile` became under this plan
    graphs: int = 0  # compiled graphs of this process until now
    graph_breaks: int = 0  # places until now at which a function fell into several graphs
    narrow: list[str] = field(default_factory=list)  # operations with 16-bit results that should be wide
    oracle: Trace | None = None  # the same steps by plain formulas
    plug_in: str = ""  # the part of the model without a formula, if there is one
    wrong_weights: list[Any] = field(default_factory=list)  # a `Break` for each tensor that starts with other values
    wrong_rates: list[Any] = field(default_factory=list)  # and for each learning rate that is not its closed formula's
    first_step: int = 0  # of the lists above: not 0 after a resume
    evaluations: dict[int, float] = field(default_factory=dict)  # validation losses by the steps that were done
    # Samples by part (training, validation), step and index: inputs, targets and documents.
    reads: dict[tuple[str, int, int], np.ndarray] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)  # when it was saved; of a resumed training: after the resume
    end_state: dict[str, Any] = field(default_factory=dict)  # after the last step
    resumed: Trace | None = None  # the steps after the save, by a trainer that resumed from it
    redrawn: bool = True  # a recomputed forward drew the random numbers of the original
    activations: Activations | None = None  # of the step that a job asks for
    replicas: list[Trace] = field(default_factory=list)  # of one device that emulates local SGD: one for each replica
