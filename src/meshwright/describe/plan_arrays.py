"""Plans as arrays: one column per field of a plan, one entry per plan. This is the only form of a plan besides `Plan` itself.

`legality.Case`, `lower.Batch` and the tables of the search are all `PlanArrays`, with the columns that `PlanFields` names. A column is an array,
or a number where all plans have the same value. Columns hold numbers only, from 0:

    words               their position in `WORDS`: schedule, cp_kind, dtypes, …
    order               its position in `ORDERS`; `STACK_ORDER` where the plan leaves it to the stack; `NO_ORDER` where it is no order
    overlap             a bit for each axis of `OVERLAP_AXES`; `STACK_OVERLAP` where the plan leaves it to the stack
    layers_per_stage    as they are: a tuple per plan

A search adds more columns, such as bounds of time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from meshwright.describe.plan_fields import ORDERS, PlanFields
from meshwright.describe.stack import Axis
from meshwright.describe.variants import NameIn

Column = NDArray[Any]  # a number for each plan
Array = float | Column  # a column, or one number for all plans
Number = Any  # an int or a float, or an array of them
Flag = Any  # a bool, or an array of them

FIELDS = tuple(PlanFields.model_fields)
OVERLAP_AXES: tuple[str, ...] = get_args(Axis)
STACK_ORDER, NO_ORDER, STACK_OVERLAP = len(ORDERS), len(ORDERS) + 1, 1 << len(OVERLAP_AXES)


def _words(annotation: Any) -> tuple[Any, ...]:
    """The words that a type of a field lists."""
    if annotation is bool or annotation is NoneType:
        return (False, True) if annotation is bool else (None,)
    options = get_args(annotation)
    if get_origin(annotation) is Literal:
        return options
    return tuple(word for option in options for word in _words(option))


def _word_fields() -> dict[str, Sequence[Any]]:
    """The fields of words, and their words in the order of their codes. The words of a registry grow when a variant is registered."""
    out: dict[str, Sequence[Any]] = {}
    for name, field in PlanFields.model_fields.items():
        registered = [m.registry.names for m in field.metadata if isinstance(m, NameIn)]
        words = registered[0] if registered else _words(field.annotation)
        if name not in ("order", "overlap") and any(isinstance(word, str) for word in words):
            out[name] = words
    return out


WORDS = _word_fields()
FLAGS = tuple(name for name, field in PlanFields.model_fields.items() if field.annotation is bool)
NUMBERS = tuple(name for name, field in PlanFields.model_fields.items() if field.annotation in (int, float))


def encode(name: str, value: Any) -> Any:
    """The value of a field as a number."""
    if name in WORDS:
        return WORDS[name].index(value)
    if name == "order":
        return ORDERS.index(tuple(value)) if tuple(value) in ORDERS else NO_ORDER if value else STACK_ORDER
    if name == "overlap":
        return STACK_OVERLAP if value is None else sum(1 << OVERLAP_AXES.index(axis) for axis in set(value))
    return value


def decode(name: str, code: Any) -> Any:
    """The value of a field that has this number."""
    if name in WORDS:
        return WORDS[name][int(code)]
    if name == "order":
        return ORDERS[code] if code < STACK_ORDER else ()
    if name == "overlap":
        bits = enumerate(OVERLAP_AXES)
        return None if code == STACK_OVERLAP else tuple(axis for k, axis in bits if int(code) >> k & 1)
    return code


def encoded(plan: PlanFields) -> dict[str, Any]:
    """All fields of one plan as numbers."""
    return {name: encode(name, getattr(plan, name)) for name in FIELDS}


class PlanArrays:
    """Plans as columns: `plans.tp` is a column, `plans.take(rows)` has fewer plans."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.__dict__.update(columns)

    @classmethod
    def of_plans(cls, plans: Sequence[PlanFields]) -> PlanArrays:
        """One row per plan. A plan that is there several times is read once."""
        distinct = {id(plan): plan for plan in plans}
        rows = [encoded(plan) for plan in distinct.values()]
        columns = {name: np.array([row[name] for row in rows]) for name in FIELDS if name != "layers_per_stage"}
        columns["layers_per_stage"] = np.fromiter((row["layers_per_stage"] for row in rows), object, len(rows))
        index = {key: k for k, key in enumerate(distinct)}
        once = PlanArrays(**columns)
        return once if len(distinct) == len(plans) else once.take([index[id(plan)] for plan in plans])

    def __getattr__(self, name: str) -> Column:
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def take(self, rows: Any) -> PlanArrays:
        """The rows at some positions, or where a mask is true."""
        return PlanArrays(**{name: column[rows] for name, column in self.columns.items()})

    def but(self, **columns: Any) -> PlanArrays:
        """With some columns added or replaced."""
        return PlanArrays(**{**self.columns, **columns})

    def select(self, *names: str) -> PlanArrays:
        """Some of the columns, those that there are."""
        return PlanArrays(**{name: self.columns[name] for name in names if name in self.columns})

    def chunks(self, size: int) -> Iterator[PlanArrays]:
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def values(self, i: int) -> dict[str, Any]:
        """The fields of a plan that have a column, as `PlanFields` takes them."""
        return {name: decode(name, self.columns[name][i].item()) for name in FIELDS if name in self.columns}

    @cached_property
    def dp(self) -> Number:
        return self.replicate * self.shard

    @cached_property
    def stages(self) -> Number:
        return self.pp * self.virtual

    @cached_property
    def etp(self) -> Number:
        """Tensor-parallel degree inside experts."""
        return self.expert_tp + (self.expert_tp == 0) * self.tp

    @cached_property
    def reduces_each(self) -> Flag:
        """Whether gradients are reduced after every micro-batch (`PlanFields.reduces_each`)."""
        auto, each = (self.reduce == encode("reduce", word) for word in ("auto", "microbatch"))
        return auto & (self.zero >= 2) | each
