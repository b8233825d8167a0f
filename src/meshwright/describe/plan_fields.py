"""The fields of a plan, and the numbers that follow from them.

`describe.legality` reads these fields to decide whether a plan is legal; `describe.plan.Plan` adds that check.

Words (schedule, kind of context parallelism, recompute, …) have a position in the tuples below. Batches of plans hold these
positions in arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import permutations
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from meshwright.describe.base import Bytes, Described, Size, Whole
from meshwright.describe.schedules import ScheduleName, layers_of_stages
from meshwright.describe.stack import Axis, Stack
from meshwright.describe.variants import CompressionName, NameIn
from meshwright.describe.workload import Workload
from meshwright.units import Json

Recompute = Literal["none", "selective", "full", "auto"]
ContextKind = Literal["ring", "ulysses", "all-gather"]
Dtype = Literal["fp64", "fp32", "fp16", "bf16", "fp8"]
Offload = Literal["none", "states", "activations", "both"]
TensorForm = Literal["megatron", "all-gather"]
GatherDtype = Literal["same", "fp8"]

AXES = ("tp", "cp", "pp", "dp")
ORDERS = tuple(permutations(AXES))
RECOMPUTES: tuple[str, ...] = get_args(Recompute)
CP_KINDS: tuple[str, ...] = get_args(ContextKind)
DTYPES: tuple[str, ...] = get_args(Dtype)
TP_FORMS: tuple[str, ...] = get_args(TensorForm)
GATHER_DTYPES: tuple[str, ...] = get_args(GatherDtype)


class PlanFields(Described):
    """The fields of a plan, each validated separately."""

    replicate: Size = 1
    """data-parallel groups that each hold a full copy"""
    shard: Size = 1
    """data-parallel ranks that ZeRO shards over"""
    tp: Size = 1
    """tensor-parallel degree"""
    sp: bool = False
    """sequence parallel: with tp, shard the activations between the products"""
    tp_form: TensorForm = "megatron"
    """all-gather: column-parallel products whose outputs are gathered, without row-parallel ones"""
    cp: Size = 1
    """context-parallel degree"""
    cp_kind: ContextKind = "ring"
    """how attention sees the other ranks' tokens"""
    pp: Size = 1
    """pipeline-parallel degree"""
    virtual: Size = 1
    """pipeline stages per rank"""
    schedule: ScheduleName = "1f1b"
    """pipeline schedule"""
    layers_per_stage: tuple[Size, ...] = ()
    """layers of each stage, in order; empty: as even as possible"""
    ep: Size = 1
    """expert-parallel degree; adds no devices"""
    expert_tp: Whole = 0
    """tensor-parallel degree inside experts; 0: tp"""
    microbatch: Size = 1
    """sequences per micro-batch and data-parallel rank"""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage"""
    reshard: bool = True
    """ZeRO-3: free gathered weights after forward, gather them again in backward"""
    prefetch: bool | Literal["forward"] = True
    """ZeRO: gather parameters before they are needed: the next layer's during this one (ZeRO-3; forward: not in backward), the updated ones during
    the next forward (ZeRO-1 and 2)"""
    wrap: Whole = 1
    """ZeRO: layers gathered and reduced together; 0: all layers of a stage"""
    reduce: Literal["auto", "step", "microbatch"] = "auto"
    """when gradients are reduced; auto: each micro-batch under ZeRO-2 and 3, else once per step"""
    bucket: Bytes = Field(default=25e6, gt=0)
    """bytes of a gradient bucket"""
    average_every: Whole = 0
    """local SGD: replicas train independently and average weights every n steps; 0: reduce gradients each step"""
    recompute: Recompute = "none"
    """activations recomputed in backward"""
    recompute_every: Size = 1
    """with recompute=full: every n-th layer of a stage"""
    recompute_layers: Whole = 0
    """with recompute=full: at most n layers per stage; 0: all"""
    recompute_budget: Bytes = 0.0
    """with recompute=auto: bytes of activations a rank may keep for backward; 0: the device's free memory"""
    param_dtype: Dtype = "bf16"
    """dtype of the parameters used in forward and backward"""
    grad_dtype: Dtype = "fp32"
    """dtype gradients are accumulated in"""
    state_dtype: Dtype = "fp32"
    """dtype of optimizer states"""
    master: bool = True
    """keep an fp32 copy of 16-bit parameters"""
    comm_dtype: Dtype | None = None
    """dtype of gradient reduction; default: grad_dtype"""
    gather_dtype: GatherDtype = "same"
    """fp8: ZeRO-3 all-gathers the weights of fp8 products in fp8, and sequence parallelism, in stacks that can, their inputs"""
    overlap: tuple[Axis, ...] | None = None
    """axes whose communication overlaps with compute; default: the stack's, and cp for ring attention"""
    compression: CompressionName = "none"
    """compression of gradients"""
    compression_ratio: float = Field(default=0.01, gt=0, le=1)
    """top-k, random-k: share of elements sent; absolute-threshold: share that a prediction expects above the threshold"""
    compression_threshold: float = Field(default=2.0, gt=0)
    """threshold: values above this many times their root mean square are sent; absolute-threshold: values above this number"""
    compression_rank: Size = 4
    """PowerSGD: rank of the approximation"""
    offload: Offload = "none"
    """tensors kept in host memory"""
    offload_layers: Whole = 0
    """with offload of activations: those of the first n layers of each stage; 0: of all"""
    order: tuple[Literal["tp", "cp", "pp", "dp"], ...] = ()
    """axes, fastest first; empty: the stack's order"""

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def etp(self) -> int:
        """Tensor-parallel degree inside experts."""
        return self.expert_tp or self.tp

    def overlapped(self, stack: Stack, node_size: int) -> tuple[Axis, ...]:
        """The axes whose communication overlaps with compute: those the plan names, else those the stack can overlap in this plan."""
        if self.overlap is not None:
            return self.overlap
        named = dict.fromkeys((*stack.overlap, "cp"))
        axes = [axis for axis in named if stack.overlaps(axis, self.sp, self.zero, self.cp_kind == "ring")]
        return tuple(axis for axis in axes if axis != "tp" or self.tp <= node_size or not stack.overlap_in_pieces)

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced after every micro-batch: by default ZeRO-2 and 3 do, since they keep only shards."""
        return self.zero >= 2 if self.reduce == "auto" else self.reduce == "microbatch"

    @property
    def reduce_dtype(self) -> str:
        return self.comm_dtype or self.grad_dtype

    @property
    def wire(self) -> str:
        """Return how gradients are sent: a compression, a narrower dtype than they are accumulated in, or "none"."""
        narrow = self.comm_dtype in ("fp16", "bf16", "fp8") and self.comm_dtype != self.grad_dtype
        return str(self.comm_dtype) if self.compression == "none" and narrow else self.compression

    @property
    def gathers(self) -> bool:
        """Whether `gather_dtype` has an effect: sequence parallelism gathers activations, ZeRO-3 weights."""
        return (self.sp and self.tp > 1) or (self.zero == 3 and self.shard * self.cp > 1)

    @property
    def lossy(self) -> bool:
        """Whether the reduction of gradients rounds or drops values, so that one device must emulate it to compare.
        Copies of an expert may lie on tensor-parallel ranks too."""
        return self.wire != "none" and (self.dp * self.cp > 1 or self.tp > self.etp * self.ep)

    def microbatches(self, workload: Workload) -> int:
        """Micro-batches of one data-parallel rank in one step."""
        return workload.batch // (self.microbatch * self.dp)

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Number of layers of each stage, in model order."""
        return self.layers_per_stage or layers_of_stages(layers, self.stages)

    def recomputed_layers(self, stage: range) -> range:
        """The layers of one stage that full recompute recomputes in backward."""
        chosen = stage[:: self.recompute_every][: self.recompute_layers or None]
        return chosen if self.recompute == "full" else stage[:0]

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")

    def as_dict(self) -> Json:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in super().as_dict().items()}


# --- Plans as arrays: one column per field of a plan, one entry per plan. This is the only form of a plan besides `Plan` itself.
#
# `legality.Case`, `lower.Batch` and the tables of the search are all `PlanArrays`, with the columns that `PlanFields` names. A column is an array,
# or a number where all plans have the same value. Columns hold numbers only, from 0:
#
#     words               their position in `WORDS`: schedule, cp_kind, dtypes, …
#     order               its position in `ORDERS`; `STACK_ORDER` where the plan leaves it to the stack; `NO_ORDER` where it is no order
#     overlap             a bit for each axis of `OVERLAP_AXES`; `STACK_OVERLAP` where the plan leaves it to the stack
#     layers_per_stage    as they are: a tuple per plan
#
# A search adds more columns, such as bounds of time and memory.

Column = NDArray[Any]  # a number for each plan
Array = float | Column  # a column, or one number for all plans
Number = Any  # an int or a float, or an array of them
Flag = bool | np.ndarray  # of one plan, or for each of many

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


def encoded(plan: PlanFields) -> Json:
    """All fields of one plan as numbers."""
    return {name: encode(name, getattr(plan, name)) for name in FIELDS}


def encoded_column(name: str, values: Sequence[Any]) -> Column:
    """The values of a field in several plans as numbers; each distinct value is encoded once."""
    if name == "layers_per_stage":
        return np.fromiter(values, object, len(values))
    if name not in NUMBERS:
        codes = {value: encode(name, value) for value in dict.fromkeys(values)}
        values = [codes[value] for value in values]
    return np.array(values)


class PlanArrays:
    """Plans as columns: `plans.tp` is a column, `plans.take(rows)` has fewer plans."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.__dict__.update(columns)

    @classmethod
    def of_plans(cls, plans: Sequence[PlanFields]) -> PlanArrays:
        """One row per plan. A plan that is there several times is read once."""
        distinct = {id(plan): plan for plan in plans}
        columns = {name: encoded_column(name, [getattr(plan, name) for plan in distinct.values()]) for name in FIELDS}
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

    def values(self, i: int) -> Json:
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
