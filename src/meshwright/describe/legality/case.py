"""What the rules read: the fields of one plan as integers, or of a batch of plans as arrays, and what it is checked against.

Words are positions in the tuples of `plan_fields` and `schedules`: `schedule == SCHEDULES.names.index("1f1b")`. A field that a batch does not
vary may stay an integer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.describe.compressions import COMPRESSIONS
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import (
    CP_KINDS,
    DTYPES,
    GATHER_DTYPES,
    ORDERS,
    RECOMPUTES,
    TP_FORMS,
    PlanFields,
)
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload

Number = Any  # an int, or an array of them
Flag = Any  # a bool, or an array of them

NUMBERS = (
    "replicate",
    "shard",
    "tp",
    "sp",
    "cp",
    "pp",
    "virtual",
    "ep",
    "expert_tp",
    "microbatch",
    "zero",
    "average_every",
    "recompute_every",
    "recompute_layers",
    "recompute_budget",
    "master",
)
WORDS: dict[str, Sequence[str]] = {
    "schedule": SCHEDULES.names,
    "cp_kind": CP_KINDS,
    "recompute": RECOMPUTES,
    "compression": COMPRESSIONS.names,
    "tp_form": TP_FORMS,
    "param_dtype": DTYPES,
    "gather_dtype": GATHER_DTYPES,
}


class Case:
    """Plan fields, the numbers that follow from them, and the objects the plan is checked against."""

    replicate: Number
    shard: Number
    tp: Number
    sp: Flag
    cp: Number
    pp: Number
    virtual: Number
    ep: Number
    expert_tp: Number
    microbatch: Number
    zero: Number
    average_every: Number
    recompute_every: Number
    recompute_layers: Number
    recompute_budget: Number
    master: Flag
    schedule: Number
    cp_kind: Number
    recompute: Number
    compression: Number
    tp_form: Number
    param_dtype: Number
    gather_dtype: Number
    order: Number  # position in ORDERS; −1: not a permutation of the axes
    stage_entries: Number  # entries of layers_per_stage
    stage_sum: Number  # their sum

    def __init__(
        self,
        fields: Mapping[str, Number],
        model: Model | None = None,
        workload: Workload | None = None,
        cluster: Cluster | None = None,
        stack: Stack | None = None,
        trainer: bool = False,
        dtypes: bool = False,
        framework: bool = False,
    ) -> None:
        self.fields = dict(fields)
        self.__dict__.update(self.fields)
        self._model, self._workload, self._cluster, self._stack = model, workload, cluster, stack
        self.trainer, self.dtypes, self.framework = trainer, dtypes, framework
        # What the plan is checked against: rules that need more do not apply.
        self.given = _given(
            model is not None, workload is not None, cluster is not None, stack is not None, trainer, dtypes, framework
        )
        self.dp = self.replicate * self.shard
        self.rest = self.tp * self.cp * self.pp  # devices of one data-parallel rank
        self.world = self.dp * self.rest
        self.stages = self.pp * self.virtual
        self.etp = self.expert_tp + (self.expert_tp == 0) * self.tp
        # Ranks over which experts are spread: those of one stage, without the tensor parallelism inside experts.
        self.expert_ranks = self.tp // self.etp * self.cp * self.dp
        self.unit = self.microbatch * self.dp  # sequences of one micro-batch over all data-parallel ranks
        self.microbatches = workload.batch // self.unit if workload is not None else 1

    @classmethod
    def of(
        cls,
        plan: PlanFields,
        model: Model | None = None,
        workload: Workload | None = None,
        cluster: Cluster | None = None,
        stack: Stack | None = None,
        trainer: bool = False,
        dtypes: bool = False,
        framework: bool = False,
    ) -> Case:
        """One plan."""
        fields: dict[str, Any] = {name: getattr(plan, name) for name in NUMBERS}
        fields |= {name: words.index(getattr(plan, name)) for name, words in WORDS.items()}
        fields |= _order(plan.order) | _stages(plan.layers_per_stage)
        return cls(fields, model, workload, cluster, stack, trainer, dtypes, framework)

    def but(self, settings: Mapping[str, Any]) -> Case:
        """The case with some settings changed, named as `--set` names them: {"plan.tp": 8, "workload.batch": 64}."""
        fields, workload = dict(self.fields), self._workload
        for path, value in settings.items():
            section, _, name = path.partition(".")
            if section == "workload" and workload is not None:
                workload = workload.but(**{name: value})
            elif name in WORDS:
                fields[name] = WORDS[name].index(value)
            elif name == "order":
                fields |= _order(value)
            elif name == "layers_per_stage":
                fields |= _stages(value)
            else:
                fields[name] = value
        return Case(
            fields, self._model, workload, self._cluster, self._stack, self.trainer, self.dtypes, self.framework
        )

    def with_columns(self, columns: Mapping[str, Number]) -> Case:
        """The case with some fields as arrays: a batch of plans."""
        return Case(
            {**self.fields, **columns},
            self._model,
            self._workload,
            self._cluster,
            self._stack,
            self.trainer,
            self.dtypes,
            self.framework,
        )

    def setting(self, path: str) -> Any:
        """The value of a setting now, as a person writes it."""
        section, _, name = path.partition(".")
        if section == "workload":
            return getattr(self.workload, name)
        return self.word(name) if name in WORDS else self.fields.get(name)

    def word(self, name: str) -> str:
        """The word of a field of one plan."""
        return WORDS[name][int(self.fields[name])]

    @property
    def is_one_plan(self) -> bool:
        """Whether no field is an array: the case is one plan, not a batch of them."""
        return np.ndarray not in map(type, self.fields.values())

    @property
    def model(self) -> Model:
        assert self._model is not None
        return self._model

    @property
    def workload(self) -> Workload:
        assert self._workload is not None
        return self._workload

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def stack(self) -> Stack:
        assert self._stack is not None
        return self._stack


@cache
def _given(*flags: bool) -> frozenset[str]:
    return frozenset(compress(("model", "workload", "cluster", "stack", "trainer", "dtypes", "framework"), flags))


def lookup(table: np.ndarray, codes: Number) -> Number:
    """Entries of a table by code: a Python value for one plan, so that integers stay exact."""
    return table[codes] if isinstance(codes, np.ndarray) else table[codes].item()


def _order(order: tuple[str, ...]) -> dict[str, int]:
    if not order:
        return {"order": 0}
    return {"order": ORDERS.index(tuple(order)) if tuple(order) in ORDERS else -1}


def _stages(layers_per_stage: tuple[int, ...]) -> dict[str, int]:
    return {"stage_entries": len(layers_per_stage), "stage_sum": sum(layers_per_stage)}
