"""What a proof is asked and what its ranks answer: plain data, so that the asking process needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.training.records import Observed

Amount = tuple[float, float]  # count, bytes


@dataclass(frozen=True)
class Job:
    """What to train, and how often. `prepare` names a function each rank calls first: a place to inject a fault."""

    model: Model
    plan: Plan
    workload: Workload
    order: tuple[str, ...] = ("tp", "cp", "pp", "dp")
    steps: int = 5
    seed: int = 0
    dtypes: tuple[str, ...] = ("fp64", "fp32")
    watch: bool = False
    prepare: str = ""
    emulated: Plan | None = None  # one device in the place of this plan's data-parallel ranks, lossy sums included
    summed: dict[str, list[Any]] = field(default_factory=dict)  # by dtype: what the ranks told of those sums
    backwards: bool = False  # those sums in the other order
    kv_copies: int = 1  # how often it makes each KV head, as many ranks of the plan do, where parts are rounded
    updates: bool = False  # record every update, for its replay


@dataclass
class Update:
    """One step's update of one piece: the value the optimizer works on (the master where there is one) before and after, the
    gradient it was given, and the master at the end of the step; `dtype` is the value's, `model_dtype` the model's parameter's."""

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
    decays: bool = True  # whether weight decay applies: to matrices that are not biases
    updates: list[Update | None] = field(default_factory=list)  # None: frozen, or a step that was skipped


@dataclass
class Row:
    """One (axis, operation) on one rank: what is lowered for it and what the witness saw."""

    axis: str
    operation: str
    lowered: Amount
    observed: Amount
    explained: list[str] = field(default_factory=list)  # by what of the step's data it is not what the plan alone says
    unexplained: bool = False  # the two differ

    @property
    def equal(self) -> bool:
        return not self.unexplained


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
    summed: list[Any] = field(default_factory=list)  # what this rank sums lossily with others (`emulation.Summed`)
    replicas: list[Trace] = field(default_factory=list)  # of one device in the place of several that train alone
