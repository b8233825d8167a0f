"""What the rules read: the fields of one plan as integers, or of a batch of plans as arrays, and what it is checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import compress
from typing import Any

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan_arrays import Flag, Number, PlanArrays, decode, encode, encoded
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload

__all__ = ["Case", "Flag", "lookup"]


class Case(PlanArrays):
    """Plan fields, the numbers that follow from them, and the objects the plan is checked against."""

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
        super().__init__(**fields)
        self._model, self._workload, self._cluster, self._stack = model, workload, cluster, stack
        self.trainer, self.dtypes, self.framework = trainer, dtypes, framework
        # What the plan is checked against: rules that need more do not apply.
        self.given = _given(
            model is not None, workload is not None, cluster is not None, stack is not None, trainer, dtypes, framework
        )
        self.rest = self.tp * self.cp * self.pp  # devices of one data-parallel rank
        self.world = self.dp * self.rest
        self.stage_entries, self.stage_sum = (per_plan(count, self.layers_per_stage) for count in (len, sum))
        # Ranks over which experts are spread: those of one stage, without the tensor parallelism inside experts.
        self.expert_ranks = self.tp // self.etp * self.cp * self.dp
        self.unit = self.microbatch * self.dp  # sequences of one micro-batch over all data-parallel ranks
        self.microbatches = workload.batch // self.unit if workload is not None else 1

    def __getattr__(self, name: str) -> Number:
        """For type checkers: a field is an integer in a case of one plan, an array in a batch."""
        raise AttributeError(name)

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
        return cls(encoded(plan), model, workload, cluster, stack, trainer, dtypes, framework)

    def with_settings(self, settings: Mapping[str, Any]) -> Case:
        """The case with some settings changed, named as `--set` names them: {"plan.tp": 8, "workload.batch": 64}."""
        columns, workload = dict[str, Any](), self._workload
        for path, value in settings.items():
            section, _, name = path.partition(".")
            if section == "workload" and workload is not None:
                workload = workload.but(**{name: value})
            else:
                columns[name] = encode(name, value)
        return self.with_columns(columns, workload)

    def with_columns(self, columns: Mapping[str, Number], workload: Workload | None = None) -> Case:
        """The case with some fields as arrays: a batch of plans."""
        fields, flags = {**self.columns, **columns}, (self.trainer, self.dtypes, self.framework)
        return Case(fields, self._model, workload or self._workload, self._cluster, self._stack, *flags)

    def setting(self, path: str) -> Any:
        """The value of a setting now, as a person writes it."""
        section, _, name = path.partition(".")
        return getattr(self.workload, name) if section == "workload" else self.word(name)

    def word(self, name: str) -> Any:
        """The value of a field of one plan, as a person writes it."""
        return decode(name, self.columns[name])

    @property
    def is_one_plan(self) -> bool:
        """Whether no field is an array: the case is one plan, not a batch of them."""
        return np.ndarray not in map(type, self.columns.values())

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


def per_plan(function: Callable[[tuple[int, ...]], int], values: Any) -> Number:
    """A function of a tuple, of one plan or of each plan of a batch."""
    return np.array([function(x) for x in values], int) if isinstance(values, np.ndarray) else function(values)


def lookup(table: np.ndarray, codes: Number) -> Number:
    """Entries of a table by code: a Python value for one plan, so that integers stay exact."""
    return table[codes] if isinstance(codes, np.ndarray) else table[codes].item()
