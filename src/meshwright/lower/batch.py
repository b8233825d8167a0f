"""A batch of plans as arrays: one numpy array per field, one entry per plan.

`estimate` lowers a batch of one, the planner a batch of a hundred thousand; the code that lowers them is the same. Words
(schedules, kinds of context parallelism, recompute) become small integers, dtypes become bytes.

The placement of an axis is described by two numbers per level: its group's size and how many members share one unit of the level
(`describe.axes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import numpy as np

from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.axes import BASE, axis_size, members_in_unit, strides
from meshwright.describe.model import Model
from meshwright.describe.packing import packed, slowest
from meshwright.describe.plan import Plan, in_framework
from meshwright.describe.plan_fields import (
    DTYPES,
    NUMBERS,
    ORDERS,
    OVERLAP_AXES,
    RECOMPUTES,
    STACK_ORDER,
    STACK_OVERLAP,
    Column,
    Offload,
    PlanArrays,
    encode,
)
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.stack import Stack
from meshwright.describe.variants import COMPRESSIONS
from meshwright.describe.workload import Workload

RECOMPUTE = tuple(word for word in RECOMPUTES if word != "auto")  # auto is resolved before a plan is lowered
SCALE_BYTES, MX_BLOCK = 4.0, 32.0  # a scale of fp8 is a float32; one of mxfp8 is a byte for 32 elements
BYTES = np.array([DTYPE_BYTES[name] for name in DTYPES])
FP8_WIRE = COMPRESSIONS.names.index("fp8")


def present(values: Any) -> bool:
    """Whether any plan of the batch has a nonzero value. `count_nonzero` takes a third of the time of `any`."""
    return bool(np.count_nonzero(values)) if isinstance(values, np.ndarray) else bool(values)


def distinct_codes(values: np.ndarray) -> list[int]:
    """The distinct small whole numbers of an array, in order."""
    return np.flatnonzero(np.bincount(values)).tolist()


class Pipelines(NamedTuple):
    """The plans of one schedule: their indices in the batch, and their whole numbers."""

    schedule: str
    at: Column
    pp: Column
    microbatches: Column
    virtual: Column


class PartlyRecomputed(NamedTuple):
    """The layers of each stage of plans that recompute some of their layers, by kind: (distinct plans, stages + 1). The last column, which index −1
    reads, is zero: no stage."""

    plans: Column  # indices in the batch
    row: Column  # of each of these plans in the tables
    recomputed: dict[str, Column]
    kept: dict[str, Column]


def _column(workloads: Sequence[Workload], name: str) -> Any:
    """A field of the workloads: a number, or a column if it differs. A single workload may have a column in the place of the number."""
    first, *others = (1.0 * getattr(workload, name) for workload in workloads)
    return np.array([first, *others]) if any(value != first for value in others) else first


class Batch(PlanArrays):
    """Plans as arrays of numbers that multiply, and what follows from them for a model, a workload and a stack."""

    overlap: dict[str, Column]  # 1 where the communication of an axis overlaps with compute
    reshard: Column
    wrap: Column  # layers of a ZeRO unit
    sums_whole: Column | np.bool = np.True_  # False in bounds of plans of which some have no whole sum of gradients

    def __init__(
        self,
        plans: PlanArrays,
        model: Model,
        workload: Workload,
        stack: Stack,
        some_recomputed: dict[int, Plan] | None = None,
        workloads: Sequence[Workload] = (),
    ) -> None:
        numbers = {name: plans.columns[name].astype(float, copy=False) for name in NUMBERS}
        super().__init__(**{**plans.columns, **numbers})
        self.model, self.workload, self.stack = model, workload, stack
        self.some_recomputed = some_recomputed or {}  # plans that recompute some of their layers, by index
        self.n = len(self.tp)
        self.async_linears = stack.async_linears != "none"
        self.world = self.dp * self.tp * self.cp * self.pp
        # Samples of a step, tokens of one, and the load of experts: columns where the workloads of the plans differ.
        self.samples, self.seq, imbalance = (_column(workloads or [workload], x) for x in ("batch", "seq", "imbalance"))
        self.microbatches = self.samples / (self.microbatch * self.dp)
        # Tokens of one micro-batch on one rank; a model without a sequence has one "token" per sample.
        self.tokens = self.microbatch * (self.seq if model.kind == "transformer" else 1.0) / self.cp
        # Attention of the slowest data-parallel rank over the mean, where documents have different lengths.
        deviation = packed(workload.lengths, workload.seq).deviation
        self.slowest = slowest(deviation, self.dp, self.samples / self.dp) if deviation else np.ones(self.n)
        self.busiest = model.router.busiest(imbalance, workload.loads, self.ep)  # load of an expert rank
        self.seq_split = np.where(self.sp, self.tp, 1.0)  # what shards the regions between the products
        self.order = np.where(plans.order == STACK_ORDER, ORDERS.index(tuple(stack.order)), plans.order)
        self._set_dtypes(plans)
        self._set_switches(plans)
        self._set_reductions()
        self._set_stages(plans)
        # Plans whose backward has all tensors of one layer in memory while it recomputes some of them.
        self.reruns_layers = (self.recompute == 2) | ((self.recompute == 1) & (stack.selective == "operators"))
        self.splits = SCHEDULES.column("splits")[self.schedule] & (self.pp > 1)  # backward is split into I and W
        # The head computes the loss with its projection: not where ranks split the vocabulary, or backward is split.
        self.fuses_loss = (self.tp == 1) & ~self.splits if stack.logits_chunk else np.False_
        # Ranks agree on the scales of fp8 products, and in a split backward once more for the gradients of the weights.
        self.scales = workload.precision == "fp8" and stack.shared_scales
        repeated = self.splits if self.scales or model.sinks else self.splits & (self.tp > 1) & self.sp
        self.splits_twice = bool(np.count_nonzero(repeated))
        # ZeRO pads the rows of a tensor to a multiple of the ranks.
        self.pads = bool(np.count_nonzero((self.zero >= 1) & (self.shard * self.cp > 1))) and self.units
        self._sizes: dict[str, Column] = {}
        self._members: dict[tuple[str, float], Column] = {}
        self._strides = self._axis_strides()

    @classmethod
    def of(
        cls, plans: Sequence[Plan], model: Model, workload: Workload, stack: Stack, workloads: Sequence[Workload] = ()
    ) -> Batch:
        """The batch of some plans. A plan that is there several times (with other numbers of the stack) is read once. `workloads`: one of each
        plan, where they differ in the samples of a step, the length of a sequence and the imbalance of experts."""
        first = {id(plan): in_framework(plan, model, stack) for plan in plans}
        plans = [first[id(plan)] for plan in plans]
        partly = {i: p for i, p in enumerate(plans) if p.recompute_every > 1 or p.recompute_layers}
        return cls(PlanArrays.of_plans(plans), model, workload, stack, partly, workloads)

    def by_length(self, function: Callable[[float], float]) -> Any:
        """A function of the length of a sequence without masks between documents, for each plan."""
        if isinstance(self.seq, float):
            return function(self.workload.attended)
        distinct, rows = np.unique(self.seq, return_inverse=True)
        return np.array([function(length) for length in distinct.tolist()])[rows]

    def _set_dtypes(self, plans: PlanArrays) -> None:
        """Bytes of an element of what the plan names dtypes of, and how gradients are sent: 16 bits on the wire are a dtype; 8 bits are a
        compression with scales and more exchanges."""
        wire = np.where(plans.comm_dtype == encode("comm_dtype", None), plans.grad_dtype, plans.comm_dtype)
        fp8 = encode("grad_dtype", "fp8")
        in_fp8 = (plans.compression == 0) & (plans.comm_dtype == fp8) & (plans.grad_dtype != fp8)
        self.param_bytes, self.grad_bytes = BYTES[plans.param_dtype], BYTES[plans.grad_dtype]
        self.state_bytes = BYTES[plans.state_dtype]
        self.compression = np.where(in_fp8, FP8_WIRE, plans.compression)
        self.comm_bytes = np.where(self.compression == FP8_WIRE, self.grad_bytes, BYTES[wire])
        # Bytes of the parameter that the optimizer updates: the fp32 master, if there is one.
        self.kept_bytes = np.where(self.master, np.maximum(self.param_bytes, 4.0), self.param_bytes)
        # Where gradients are sent narrower than they are accumulated.
        self.lossy = (self.compression > 0) | (self.comm_bytes < self.grad_bytes)
        self.compresses = bool(np.count_nonzero(self.lossy))
        self.compressions = [(code, COMPRESSIONS.names[code]) for code in distinct_codes(self.compression)]
        self.wires = self._wires()
        # Bytes of a gradient where it is summed exactly under ZeRO.
        self.summed_bytes = np.where(self.lossy, self.grad_bytes, self.comm_bytes)

    def _set_switches(self, plans: PlanArrays) -> None:
        """Columns of offload, prefetch, gathers, and the axes that overlap with compute."""
        states, activations, both = (plans.offload == encode("offload", word) for word in get_args(Offload)[1:])
        self.offload_states, self.offload_activations = states | both, activations | both
        layers = np.minimum(self.offload_layers * self.stages / max(self.model.layers, 1), 1.0)
        self.offloaded_share = self.offload_activations * np.where(self.offload_layers > 0, layers, 1.0)
        self.prefetch, self.prefetches_backward = plans.prefetch > 0, plans.prefetch == 1
        self.gather_form = plans.tp_form == encode("tp_form", "all-gather")
        self.gather_fp8 = plans.gather_dtype == encode("gather_dtype", "fp8")
        self.gathers_fp8 = bool(np.count_nonzero(self.gather_fp8))
        self.stack_overlap = plans.overlap == STACK_OVERLAP
        self.overlap = {axis: self.overlap_of(axis, self.zero) for axis in OVERLAP_AXES}

    def overlap_of(self, axis: str, zero: Any) -> Column:
        """1 where the communication of an axis overlaps with compute, at a ZeRO stage."""
        by_stack = self.stack.overlaps(axis, self.sp, zero, self.cp_kind == encode("cp_kind", "ring"))
        by_plan = self.columns["overlap"] >> OVERLAP_AXES.index(axis) & 1
        return np.where(self.stack_overlap, by_stack, by_plan).astype(float)

    def _set_reductions(self) -> None:
        """Return when weights are gathered again and gradients reduced. Pipeline stages keep their weights gathered from their first action to their
        last, and reduce after it: otherwise they would be gathered for every micro-batch of every stage, and a split backward could not free
        them. Gradients that ZeRO does not shard stay whole: each micro-batch reduces them only if the plan says `reduce = microbatch`."""
        self.reshard = self.reshard & (self.pp == 1)
        each = self.reduce == encode("reduce", "microbatch")
        self.reduce_whole = self.reduces_each & (each | (self.zero == 0))
        self.reduce_each = self.reduces_each & ((self.pp == 1) | (self.zero == 0))

    def _set_stages(self, plans: PlanArrays) -> None:
        """Schedules, the stage lengths that plans state, and the layers of a ZeRO unit, at most those of a stage."""
        self.rounds = np.maximum(1, np.round(self.microbatches)).astype(int)  # micro-batches as whole numbers
        self.schedules = self._pipelines()
        self.uneven: dict[tuple[int, ...], list[int]] = {}  # stage lengths → indices of plans
        for i, lengths in enumerate(plans.layers_per_stage):
            if lengths:
                self.uneven.setdefault(lengths, []).append(i)
        self.units = not self.stack.flat_shards and self.model.kind != "counts"  # ZeRO works in units of layers
        self.one_unit = self.wrap == 0  # a stage is one ZeRO unit, with the embedding and the head
        if present(self.wrap != 1):
            longest = np.ones(self.n) if self.model.kind == "counts" else self.longest_stage()
            self.wrap = np.where(self.wrap == 1, 1.0, np.minimum(np.where(self.one_unit, longest, self.wrap), longest))
        self.wraps = present(self.one_unit) or present(self.wrap != 1.0)

    def longest_stage(self) -> Column:
        """Layers of the longest stage."""
        longest = np.ceil(self.model.layers / self.stages)
        for lengths, at in self.uneven.items():
            longest[at] = max(lengths)
        return longest

    def _pipelines(self) -> list[Pipelines]:
        """The plans with a pipeline, by schedule."""
        piped = self.pp > 1
        pipelines = []
        for code in distinct_codes(self.schedule[piped]):
            at = np.flatnonzero((self.schedule == code) & piped)
            pp, virtual = (x[at].astype(int) for x in (self.pp, self.virtual))
            pipelines.append(Pipelines(SCHEDULES.names[code], at, pp, self.rounds[at], virtual))
        return pipelines

    @cached_property
    def partly_recomputed(self) -> PartlyRecomputed:
        """The layers that some plans of the batch recompute. Plans with the same stages that recompute the same layers are read once."""
        keys = [
            (p.stages, p.layers_per_stage, p.recompute_every, p.recompute_layers) for p in self.some_recomputed.values()
        ]
        distinct = dict(zip(keys, self.some_recomputed.values(), strict=True))
        places = {key: k for k, key in enumerate(distinct)}
        row = np.array([places[key] for key in keys])
        shape = len(distinct), max(plan.stages for plan in distinct.values()) + 1
        recomputed, saved = ({kind: np.zeros(shape) for kind in self.model.kinds} for _ in range(2))
        for k, plan in enumerate(distinct.values()):
            edges = [0, *accumulate(plan.stage_layers(self.model.layers))]
            for stage, layers in enumerate(starmap(range, pairwise(edges))):
                chosen = plan.recomputed_layers(layers)
                for layer in layers:
                    (recomputed if layer in chosen else saved)[self.model.layer_kinds[layer]][k, stage] += 1
        return PartlyRecomputed(np.array(list(self.some_recomputed)), row, recomputed, saved)

    def _wires(self) -> list[tuple[str, Any]]:
        """Map each way to send gradients to the plans that use it: a compression, or 16 bits where messages are narrower than gradients."""
        if not self.compresses:
            return [("none", np.True_)]
        wires = [(name, self.compression == code) for code, name in self.compressions if name != "none"]
        narrow = self.lossy & (self.compression == 0)
        return [(name, on) for name, on in (("none", ~self.lossy), ("bf16", narrow), *wires) if on.any()]

    @property
    def sends_factors(self) -> Any:
        """Mark plans in which factors of each matrix are sent instead of its gradient (PowerSGD)."""
        return sum((on for name, on in self.wires if COMPRESSIONS[name].by_matrix), np.False_)

    def fp8_gather_bytes(self, elements: Any, axis: str = "") -> Any:
        """Bytes of the full buffer of an all-gather in fp8: one per element, and the scales. `mxfp8` has a scale of 1 byte for each 32 elements
        (3% more), `fp8` one of 4 bytes for each rank's part of the buffer; without an axis the ranks have agreed on it before."""
        if self.workload.precision == "mxfp8":
            return elements * (1 + 1 / MX_BLOCK)
        return elements + (SCALE_BYTES * self.size(axis) if axis else 0.0)

    def gathers_fp8_weights(self, group: str) -> Any:
        """Mark plans whose ZeRO-3 gathers weights of fp8 products of a group in fp8. With a scale per row a dense weight has other units forward and
        backward, and is gathered in 16 bits; an expert has one scale in both."""
        shards = self.size(DATA_AXES[group].shard) > 1
        by_row = self.workload.scaling == "row" and group == "dense"
        return np.asarray(self.gather_fp8) & (self.zero == 3) & shards & (not by_row)

    def sharded(self, group: str) -> Column:
        """Mark plans in which ZeRO shards parameters of a group: experts only where a shard group holds several copies of one."""
        return (self.zero >= 1) & (self.size(DATA_AXES[group].shard) > 1)

    @property
    def copies_units(self) -> bool:
        """Whether a unit of ZeRO-3 is copied between its parameters and the buffers of its collectives (`lower.gradients`)."""
        return self.units and self.stack.asynchronous and self.stack.gathers == "layer"

    def gradient_passes(self, group: str) -> tuple[Column, Column]:
        """Mark plans that add the gradients of each micro-batch to a whole sum, and plans that copy them to the buffer of their reduction instead: a
        micro-batch that reduces its gradients to shards adds to the shards only (torch: _fsdp_param_group.py, post_backward). The copies of units
        of ZeRO-3 are counted with their collectives."""
        to_shards = (self.zero >= 2) & self.reduce_each & self.sharded(group) | ~self.sums_whole
        return ~to_shards, to_shards & ~(self.copies_units & (self.zero == 3))

    @property
    def all_reduced(self) -> Column | np.bool:
        """Mark plans in which ZeRO-1 and 2 all-reduce the gradients, as the stack does it."""
        return (self.zero >= 1) & (self.zero < 3) if self.stack.zero_reduction != "buckets" else np.False_

    @property
    def reduced_whole(self) -> Column | np.bool:
        """Mark plans in which they do so in one call after backward."""
        return self.all_reduced if self.stack.zero_reduction == "whole" else np.False_

    @property
    def average_bytes(self) -> Column:
        """Bytes of an element of the moving average of the weights: at least fp32."""
        return np.maximum(self.kept_bytes, 4.0)

    @property
    def experts_scaled_forward(self) -> Any:
        """Experts of a rank whose weights get their scales in each forward: weights that ZeRO-3 gathers in fp8 have them already."""
        return np.where(self.gathers_fp8_weights("expert"), 0.0, self.model.experts / self.ep)

    def full(self, values: Any) -> Column:
        """Broadcast a number to all plans; an array over the plans stays as it is."""
        is_full = isinstance(values, np.ndarray) and values.shape == (self.n,)
        return values if is_full else np.broadcast_to(values, self.n)

    def size(self, axis: str) -> Column:
        """Ranks in one group of an axis."""
        if axis not in self._sizes:
            self._sizes[axis] = self._count(axis)
        return self._sizes[axis]

    def _count(self, axis: str) -> Column:
        if axis == "kv_copies":  # neighbours on tp that hold the same KV head
            return np.maximum(self.tp / self.model.kv_groups, 1.0)
        return axis_size(self, axis)

    @property
    def layer_tensors(self) -> float:
        """Parameter tensors of the mean layer: matrices, those that multiply one input as one where the stack fuses their products; their biases;
        and weights of norms, each with a bias in LayerNorm."""
        total, norms = 0, len(self.model.norm_affine)
        for kind in self.model.kinds:
            block = self.model.blocks[kind]
            separate = [[linear] for linear in block.linears]
            matrices = separate if self.stack.separate_projections else block.fused_matrices()
            with_bias = sum(any(linear.bias for linear in fused) for fused in matrices)
            vectors = sum(norms if vector.part == "norm" else 1 for vector in block.vectors)
            adapters = 2 * sum(linear.rank > 0 for linear in block.linears)
            total += self.model.layer_count(kind) * (len(matrices) + with_bias + vectors + adapters)
        return total / self.model.layers

    @property
    def parameter_tensors(self) -> Any:
        """Parameter tensors on a rank: what an unfused optimizer launches kernels for."""
        return 160.0 if self.model.kind == "counts" else self.model.layers * self.layer_tensors / self.pp + 4

    @property
    def trained_tensors(self) -> Any:
        """Those of them that the optimizer updates."""
        if not self.model.adapter.on:
            return self.parameter_tensors
        ends, total = ("embedding", "head"), 0
        for kind, block in self.model.blocks.items():
            times = 1 if kind in ends else self.model.layer_count(kind)
            own = sum(linear.learns for linear in block.linears) + sum(vector.learns for vector in block.vectors)
            total += times * (own + 2 * sum(linear.rank > 0 for linear in block.linears))
        return total / self.pp

    def members(self, axis: str, unit: float) -> Column:
        """Members of one group of the axis inside one unit of `unit` consecutive devices."""
        key = (axis, unit)
        if key not in self._members:
            self._members[key] = self._count_members(axis, unit)
        return self._members[key]

    def _count_members(self, axis: str, unit: float) -> Column:
        if axis == "kv_copies":
            return np.minimum(self.size("kv_copies"), self.members("tp", unit))
        return members_in_unit(self, self._strides, axis, unit, lambda other: self.members(other, unit))

    def _axis_strides(self) -> dict[str, Column]:
        """Distance between neighbours on every axis, under each plan's order."""
        codes = distinct_codes(self.order)
        if len(codes) == 1:
            return strides(self, ORDERS[codes[0]])
        out = {axis: np.ones(self.n) for axis in BASE}
        for code in codes:
            at = self.order == code
            some = SimpleNamespace(**{axis: getattr(self, axis)[at] for axis in BASE})
            for axis, stride in strides(some, ORDERS[code]).items():
                out[axis][at] = stride
        return out
