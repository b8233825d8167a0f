"""A batch of plans as arrays: one numpy array per field, one entry per plan.

`estimate` lowers a batch of one, the planner a batch of a hundred thousand; the code that lowers them is the same. Words
(schedules, kinds of context parallelism, recompute) become small integers, dtypes become bytes.

The placement of an axis is described by two numbers per level: its group's size and how many members share one unit of the level
(`describe.axes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from meshwright.describe.axes import BASE, axis_size, members_in_unit, strides
from meshwright.describe.cluster import DTYPE_BYTES
from meshwright.describe.compressions import COMPRESSIONS
from meshwright.describe.framework_stages import in_framework
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import CP_KINDS, ORDERS, RECOMPUTES
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.sharding import DATA_AXES
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload

RECOMPUTE = tuple(word for word in RECOMPUTES if word != "auto")  # auto is resolved before a plan is lowered
OVERLAP_AXES = ("dp", "tp", "cp", "pp", "ep")
INTEGERS = (
    "replicate",
    "shard",
    "tp",
    "cp",
    "pp",
    "virtual",
    "ep",
    "microbatch",
    "zero",
    "compression_rank",
    "average_every",
)
SCALE_BYTES, MX_BLOCK = 4.0, 32.0  # a scale of fp8 is a float32; one of mxfp8 is a byte for 32 elements
FLAGS = ("sp", "reshard", "prefetch", "master")


def repeated(value: Any, at: np.ndarray) -> Any:
    """The entries of a field at some indices."""
    if isinstance(value, dict):
        return {key: part[at] for key, part in value.items()}
    return tuple(value[i] for i in at) if isinstance(value, tuple) else value[at]


def distinct_codes(values: np.ndarray) -> list[int]:
    """The distinct small whole numbers of an array, in order."""
    return np.flatnonzero(np.bincount(values)).tolist()


def overlap_fields(
    overlaps: Sequence[tuple[str, ...] | None],
    index: np.ndarray,
    stack: Stack,
    sp: np.ndarray,
    zero: np.ndarray,
    cp_kind: np.ndarray,
) -> dict[str, Any]:
    """Which axes overlap in the plans with the overlaps `index`, by axis, and which plans leave it to the stack."""
    ring = np.equal(cp_kind, CP_KINDS.index("ring"))
    by_stack = np.array([axes is None for axes in overlaps])[index]
    stated = {axis: np.array([axis in (axes or ()) for axes in overlaps])[index] for axis in OVERLAP_AXES}
    overlap = {
        axis: np.where(by_stack, stack.overlaps(axis, sp, zero, ring), on).astype(float) for axis, on in stated.items()
    }
    return {"overlap": overlap, "stack_overlap": by_stack}


class Pipelines(NamedTuple):
    """The plans of one schedule: their indices in the batch, and their whole numbers."""

    schedule: str
    at: np.ndarray
    pp: np.ndarray
    microbatches: np.ndarray
    virtual: np.ndarray


class PartlyRecomputed(NamedTuple):
    """The layers of each stage of plans that recompute some of their layers, by kind: (distinct plans, stages + 1). The last column, which index −1
    reads, is zero: no stage."""

    plans: np.ndarray  # indices in the batch
    row: np.ndarray  # of each of these plans in the tables
    recomputed: dict[str, np.ndarray]
    kept: dict[str, np.ndarray]


class Batch:
    """Plans as arrays. Build with `Batch.of(plans, ...)` or, for a search, straight from arrays."""

    def __init__(self, fields: dict[str, np.ndarray], model: Model, workload: Workload, stack: Stack) -> None:
        self.model, self.workload, self.stack = model, workload, stack
        self.some_recomputed: dict[int, Plan] = {}  # plans that recompute some of their layers, by index
        self.average_every: np.ndarray | float = 0.0
        self.compression_threshold: np.ndarray | float = 2.0
        self.wrap: Any = 1.0  # layers of a ZeRO unit, at most those of a stage
        self.one_unit: Any = False  # a stage is one ZeRO unit, with the embedding and the head
        self.gather_fp8: Any = False  # plans with `gather_dtype = "fp8"`
        self.__dict__.update(fields)
        self.gathers_fp8 = bool(np.count_nonzero(self.gather_fp8))
        self.n = len(fields["tp"])
        self.async_linears = stack.async_linears != "none"
        self.dp = self.replicate * self.shard
        self.world = self.dp * self.tp * self.cp * self.pp
        self.microbatches = workload.batch / (self.microbatch * self.dp)
        # Tokens of one micro-batch on one rank; a model without a sequence has one "token" per sample.
        self.tokens = self.microbatch * (workload.seq if model.kind == "transformer" else 1.0) / self.cp
        self.seq_split = np.where(self.sp, self.tp, 1.0)  # what shards the regions between the products
        self.expert_dp = self.tp * self.cp * self.dp / (self.etp * self.ep)
        # Pipeline stages keep their weights gathered from their first action to their last, and reduce after it: otherwise they
        # would be gathered for every micro-batch of every stage, and a split backward could not free them.
        self.reshard = self.reshard & (self.pp == 1)
        # Gradients that ZeRO does not shard stay whole: each micro-batch reduces them only if the plan says `reduce = microbatch`.
        self.reduce_whole = self.reduce_each & (fields.get("reduce_said", False) | (self.zero == 0))
        self.reduce_each = self.reduce_each & ((self.pp == 1) | (self.zero == 0))
        self.uneven: dict[tuple[int, ...], list[int]] = {}  # stage lengths that plans state → their indices
        for i, given in enumerate(self.layers_per_stage):
            if given:
                self.uneven.setdefault(given, []).append(i)
        self.rounds = np.maximum(1, np.round(self.microbatches)).astype(int)  # micro-batches as whole numbers
        self.schedules = self._pipelines()
        # Plans whose backward has all tensors of one layer in memory while it recomputes some of them.
        self.reruns_layers = (self.recompute == 2) | ((self.recompute == 1) & (stack.selective == "operators"))
        self.splits = SCHEDULES.column("splits")[self.schedule] & (self.pp > 1)  # backward is split into I and W
        # The head computes the loss with its projection: not where ranks split the vocabulary, or backward is split.
        self.fuses_loss = (self.tp == 1) & ~self.splits if stack.logits_chunk else False
        # Ranks agree on the scales of fp8 products, and in a split backward once more for the gradients of the weights.
        self.scales = workload.precision == "fp8" and stack.shared_scales
        self.splits_twice = bool(np.count_nonzero(self.splits & (self.tp > 1) & self.sp)) or bool(
            self.scales and np.count_nonzero(self.splits)
        )
        # Bytes of the parameter that the optimizer updates: the fp32 master, if there is one.
        self.kept_bytes = np.where(self.master, np.maximum(self.param_bytes, 4.0), self.param_bytes)
        # Where gradients are sent narrower than they are accumulated.
        self.lossy = (self.compression > 0) | (self.comm_bytes < self.grad_bytes)
        self.compresses = bool(np.count_nonzero(self.lossy))
        self.compressions = [(code, COMPRESSIONS.names[code]) for code in distinct_codes(self.compression)]
        self.wires = self._wires()
        self.units = not stack.flat_shards and model.kind != "counts"  # ZeRO works in units of layers
        # ZeRO pads the rows of a tensor to a multiple of the ranks.
        self.pads = bool(np.count_nonzero((self.zero >= 1) & (self.shard * self.cp > 1))) and self.units
        # Bytes of a gradient where it is summed exactly under ZeRO.
        self.summed_bytes = np.where(self.lossy, self.grad_bytes, self.comm_bytes)
        self.wraps = bool(np.count_nonzero(self.one_unit) or np.count_nonzero(np.not_equal(self.wrap, 1.0)))
        self._sizes: dict[str, np.ndarray] = {}
        self._members: dict[tuple[str, float], np.ndarray] = {}
        self._strides = self._axis_strides()

    # These are set from `fields`; named here for readers and type checkers.
    replicate: np.ndarray
    shard: np.ndarray
    tp: np.ndarray
    cp: np.ndarray
    pp: np.ndarray
    virtual: np.ndarray
    ep: np.ndarray
    etp: np.ndarray
    microbatch: np.ndarray
    zero: np.ndarray
    sp: np.ndarray
    reshard: np.ndarray
    prefetch: np.ndarray
    prefetches_backward: np.ndarray
    master: np.ndarray
    compression_rank: np.ndarray
    compression_ratio: np.ndarray
    schedule: np.ndarray
    recompute: np.ndarray
    cp_kind: np.ndarray
    compression: np.ndarray
    gather_form: np.ndarray
    reduce_each: np.ndarray
    bucket: np.ndarray
    param_bytes: np.ndarray
    grad_bytes: np.ndarray
    state_bytes: np.ndarray
    comm_bytes: np.ndarray
    offload_states: np.ndarray
    offload_activations: np.ndarray
    order: np.ndarray
    overlap: dict[str, np.ndarray]  # 1 where the communication of an axis overlaps with compute
    stack_overlap: np.ndarray  # plans that leave `overlap` to the stack
    layers_per_stage: tuple[tuple[int, ...], ...]
    fuses_loss: Any

    @classmethod
    def of(cls, plans: Sequence[Plan], model: Model, workload: Workload, stack: Stack) -> Batch:
        """The batch of some plans. A plan that is there several times (with other numbers of the stack) is read once."""
        first = {id(plan): in_framework(plan, model, stack) for plan in plans}
        fields = cls._fields(list(first.values()), model, stack)
        if len(first) < len(plans):
            index = {key: k for k, key in enumerate(first)}
            at = np.array([index[id(plan)] for plan in plans])
            fields = {name: repeated(value, at) for name, value in fields.items()}
        fields["some_recomputed"] = {
            i: first[id(p)] for i, p in enumerate(plans) if p.recompute_every > 1 or p.recompute_layers
        }
        return cls(fields, model, workload, stack)

    @staticmethod
    def _fields(plans: Sequence[Plan], model: Model, stack: Stack) -> dict[str, Any]:
        """The fields of plans as arrays."""
        fields: dict[str, Any] = {name: np.array([getattr(p, name) for p in plans], dtype=float) for name in INTEGERS}
        fields |= {name: np.array([getattr(p, name) for p in plans], dtype=bool) for name in FLAGS}
        fields["etp"] = np.array([p.etp for p in plans], dtype=float)
        fields["compression_ratio"] = np.array([p.compression_ratio for p in plans])
        fields["bucket"] = np.array([p.bucket for p in plans])
        fields["schedule"] = np.array([SCHEDULES.names.index(p.schedule) for p in plans])
        fields["recompute"] = np.array([RECOMPUTE.index(p.recompute) for p in plans])
        fields["cp_kind"] = np.array([CP_KINDS.index(p.cp_kind) for p in plans])
        # 16 bits on the wire are a dtype; 8 bits are a compression with scales and more exchanges.
        eight = ["fp8" if p.wire == "fp8" else p.compression for p in plans]
        fields["compression"] = np.array([COMPRESSIONS.names.index(name) for name in eight])
        fields["compression_threshold"] = np.array([p.compression_threshold for p in plans])
        fields["gather_form"] = np.array([p.tp_form == "all-gather" for p in plans])
        fields["gather_fp8"] = np.array([p.gather_dtype == "fp8" for p in plans])
        fields["reduce_each"] = np.array([p.reduces_each for p in plans])
        fields["reduce_said"] = np.array([p.reduce == "microbatch" for p in plans])
        fields["param_bytes"] = np.array([DTYPE_BYTES[p.param_dtype] for p in plans])
        fields["grad_bytes"] = np.array([DTYPE_BYTES[p.grad_dtype] for p in plans])
        fields["state_bytes"] = np.array([DTYPE_BYTES[p.state_dtype] for p in plans])
        fields["comm_bytes"] = np.array(
            [DTYPE_BYTES[p.grad_dtype if p.wire == "fp8" else p.reduce_dtype] for p in plans]
        )
        fields["offload_states"] = np.array([p.offload in ("states", "both") for p in plans])
        fields["offload_activations"] = np.array([p.offload in ("activations", "both") for p in plans])
        orders = [p.order or stack.order for p in plans]
        fields["order"] = np.array([ORDERS.index(tuple(o)) for o in orders])
        overlaps = [p.overlap for p in plans]
        fields |= overlap_fields(
            overlaps, np.arange(len(plans)), stack, fields["sp"], fields["zero"], fields["cp_kind"]
        )
        fields["prefetches_backward"] = np.array([p.prefetch is True for p in plans])
        fields["layers_per_stage"] = tuple(p.layers_per_stage for p in plans)
        wraps = [(p.wrap, p.wrap != 1 and model.kind != "counts" and max(p.stage_layers(model.layers))) for p in plans]
        fields["wrap"] = np.array([float(min(wrap or n, n)) if n else 1.0 for wrap, n in wraps])
        fields["one_unit"] = np.array([p.wrap == 0 for p in plans])
        return fields

    def _pipelines(self) -> list[Pipelines]:
        """The plans with a pipeline, by schedule."""
        piped = self.pp > 1
        found = []
        for code in distinct_codes(self.schedule[piped]):
            at = np.flatnonzero((self.schedule == code) & piped)
            pp, virtual = (x[at].astype(int) for x in (self.pp, self.virtual))
            found.append(Pipelines(SCHEDULES.names[code], at, pp, self.rounds[at], virtual))
        return found

    @cached_property
    def partly_recomputed(self) -> PartlyRecomputed:
        """The layers that some plans of the batch recompute. A plan that is there several times is read once."""
        distinct = {id(plan): plan for plan in self.some_recomputed.values()}
        places = {key: k for k, key in enumerate(distinct)}
        row = np.array([places[id(plan)] for plan in self.some_recomputed.values()])
        shape = len(distinct), max(plan.stages for plan in distinct.values()) + 1
        recomputed, kept = ({kind: np.zeros(shape) for kind in self.model.kinds} for _ in range(2))
        for k, plan in enumerate(distinct.values()):
            edges = [0, *accumulate(plan.stage_layers(self.model.layers))]
            for stage, layers in enumerate(starmap(range, pairwise(edges))):
                chosen = plan.recomputed_layers(layers)
                for layer in layers:
                    (recomputed if layer in chosen else kept)[self.model.layer_kinds[layer]][k, stage] += 1
        return PartlyRecomputed(np.array(list(self.some_recomputed)), row, recomputed, kept)

    def _wires(self) -> list[tuple[str, Any]]:
        """Map each way to send gradients to the plans that use it: a compression, or 16 bits where messages are narrower than gradients."""
        if not self.compresses:
            return [("none", np.True_)]
        found = [(name, self.compression == code) for code, name in self.compressions if name != "none"]
        narrow = self.lossy & (self.compression == 0)
        return [(name, on) for name, on in (("none", ~self.lossy), ("bf16", narrow), *found) if on.any()]

    @property
    def sends_factors(self) -> Any:
        """Where factors of each matrix are sent instead of its gradient (PowerSGD)."""
        return sum((on for name, on in self.wires if COMPRESSIONS[name].by_matrix), np.False_)

    def fp8_gather_bytes(self, elements: Any, axis: str = "") -> Any:
        """Bytes of the full buffer of an all-gather in fp8: one per element, and the scales. `mxfp8` has a scale of 1 byte for each 32 elements
        (3% more), `fp8` one of 4 bytes for each rank's part of the buffer; without an axis the ranks have agreed on it before."""
        if self.workload.precision == "mxfp8":
            return elements * (1 + 1 / MX_BLOCK)
        return elements + (SCALE_BYTES * self.size(axis) if axis else 0.0)

    def gathers_fp8_weights(self, group: str) -> Any:
        """Where ZeRO-3 gathers the weights of fp8 products of a group in fp8. With a scale per row a dense weight has other units forward and
        backward, and is gathered in 16 bits; an expert has one scale in both."""
        shards = self.size(DATA_AXES[group].shard) > 1
        by_row = self.workload.scaling == "row" and group == "dense"
        return np.asarray(self.gather_fp8) & (self.zero == 3) & shards & (not by_row)

    @property
    def experts_scaled_forward(self) -> Any:
        """Experts of a rank whose weights get their scales in each forward: weights that ZeRO-3 gathers in fp8 have them already."""
        return np.where(self.gathers_fp8_weights("expert"), 0.0, self.model.experts / self.ep)

    def full(self, values: Any) -> np.ndarray:
        """Broadcast a number to all plans; an array over the plans stays as it is."""
        is_full = isinstance(values, np.ndarray) and values.shape == (self.n,)
        return values if is_full else np.broadcast_to(values, self.n)

    def size(self, axis: str) -> np.ndarray:
        """Ranks in one group of an axis."""
        if axis not in self._sizes:
            self._sizes[axis] = self._count(axis)
        return self._sizes[axis]

    def _count(self, axis: str) -> np.ndarray:
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
            total += self.model.layer_count(kind) * (len(matrices) + with_bias + vectors)
        return total / self.model.layers

    @property
    def parameter_tensors(self) -> Any:
        """Parameter tensors on a rank: what an unfused optimizer launches kernels for."""
        return 160.0 if self.model.kind == "counts" else self.model.layers * self.layer_tensors / self.pp + 4

    def members(self, axis: str, unit: float) -> np.ndarray:
        """Members of one group of the axis inside one unit of `unit` consecutive devices."""
        key = (axis, unit)
        if key not in self._members:
            self._members[key] = self._count_members(axis, unit)
        return self._members[key]

    def _count_members(self, axis: str, unit: float) -> np.ndarray:
        if axis == "kv_copies":
            return np.minimum(self.size("kv_copies"), self.members("tp", unit))
        return members_in_unit(self, self._strides, axis, unit, lambda other: self.members(other, unit))

    def _axis_strides(self) -> dict[str, np.ndarray]:
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
