"""The space of legal plans: arrays of plans, built in five layers.

    frame      tp, cp and its kind, pp, dp, sp, expert tp, ep, recompute, dtypes, overlap
    shape      + micro-batch
    placed     + the order of the axes over the levels of the cluster
    sharded    + the data-parallel ranks as replicate × shard, ZeRO stage, reshard, when gradients are reduced
    scheduled  + pipeline schedule and virtual stages: a complete plan

The options of a layer depend on only a few fields of the layers above it, so the plans can be counted without enumerating them: GPT-3 on
512 GPUs has about fifty million plans in about ten thousand frames. The search expands a row into the next layer only if its bound allows
a better plan.

`legal_options` has the options of each layer and says which plans are legal and which are duplicates. Gradient buckets are not searched:
their size follows from the group that reduces them (`cost.advice.bucket_for`).

The plans are tables: one column a field, one row a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.cost.advice import bucket_for
from meshwright.describe.plan import Plan, framework_stages, in_framework
from meshwright.describe.plan_fields import FIELDS, NUMBERS, Column, PlanArrays, encode
from meshwright.describe.schedules import SCHEDULES
from meshwright.lower.batch import Batch
from meshwright.planner.search.choices import DTYPES
from meshwright.planner.search.legal_options import LegalOptions
from meshwright.predict.estimate import Estimate, estimate

LARGEST_TABLE = 1 << 16  # entries of a table of distinct values
Options = Callable[..., PlanArrays]


def crossed(plans: PlanArrays, keys: Sequence[Column], options: Options) -> PlanArrays:
    """Every row with each of its options, which depend only on the row's keys."""
    tables = [options(*(1 for _ in keys)).take(slice(0, 0))]
    rows_of, options_of, total = [np.zeros(0, int)], [np.zeros(0, int)], 0
    for key, rows in grouped(keys):
        several = options(*key)
        tables.append(several)
        rows_of.append(np.repeat(rows, len(several)))
        options_of.append(np.tile(np.arange(total, total + len(several)), len(rows)))
        total += len(several)
    return plans.take(np.concatenate(rows_of)).but(**join(tables).take(np.concatenate(options_of)).columns)


def counted(plans: PlanArrays, keys: Sequence[Column], options: Options) -> Column:
    """Count the options of each row."""
    out = np.zeros(len(plans), np.int64)
    for key, rows in grouped(keys):
        out[rows] = len(options(*key))
    return out


def grouped(keys: Sequence[Column]) -> Iterator[tuple[tuple[int, ...], Column]]:
    """The distinct tuples of some whole-number columns, and the rows of each."""
    if not len(keys[0]):
        return
    code = codes(keys)
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        yield tuple(int(key[rows[0]]) for key in keys), rows


def codes(keys: Sequence[Column]) -> Column:
    """One integer per row, equal exactly where all keys are equal."""
    code = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        place, count = places(key)
        code = code * count + place
    return code


def places(key: Column) -> tuple[Column, int]:
    """Rank of each value among the sorted distinct values, and their number. A lookup table is faster than sorting while it is small."""
    if not len(key) or key.max() >= LARGEST_TABLE:
        distinct, place = np.unique(key, return_inverse=True)
        return place, len(distinct)
    key = key.astype(np.int64)
    seen = np.bincount(key) > 0
    return (np.cumsum(seen) - 1)[key], int(np.count_nonzero(seen))


def join(tables: Sequence[PlanArrays]) -> PlanArrays:
    """Concatenate tables with the same columns."""
    return PlanArrays(**{name: np.concatenate([t.columns[name] for t in tables]) for name in tables[0].columns})


def grid(**columns: Sequence[Any]) -> PlanArrays:
    """Every combination of some values, the first column slowest."""
    places = np.indices([len(values) for values in columns.values()]).reshape(len(columns), -1)
    return PlanArrays(
        **{name: np.asarray(values)[place] for (name, values), place in zip(columns.items(), places, strict=True)}
    )


NAIVE = SCHEDULES.names.index("naive")


class Innermost(Batch):
    """Plans without an order of the axes: each axis is placed as if it were the innermost. No order is better for any axis."""

    def _axis_strides(self) -> dict[str, np.ndarray]:
        return {axis: np.ones(self.n) for axis in ("tp", "cp", "pp", "shard", "replicate")}

    def _count_members(self, axis: str, unit: float) -> np.ndarray:
        if axis in ("expert_tp", "ep"):
            return np.minimum(self.size(axis), unit)
        return super()._count_members(axis, unit)


class Space(LegalOptions):
    """The legal plans of one problem. `frames` is a table; `shaped`, `placed`, `sharded` and `scheduled` each expand rows by one layer."""

    def with_base(self, base: Plan) -> Space:
        """The same problem and choices with another base plan."""
        return Space(self.config.but(plan=base), self.choices, self.bucket)

    def estimate(self, plan: Plan) -> Estimate:
        """Estimate a plan; each is estimated once."""
        if plan not in self.estimates:
            self.estimates[plan] = estimate(self.config.but(plan=plan))
        return self.estimates[plan]

    @cached_property
    def estimates(self) -> dict[Plan, Estimate]:
        return {}

    @cached_property
    def frames(self) -> PlanArrays:
        """The first layer. A frame has the largest legal micro-batch, whose bound holds for all shapes of the frame."""
        parts = [part for row in self.degrees.T.tolist() if len(part := self._frames(*row))]
        if not parts:
            return PlanArrays(tp=np.zeros(0, int))
        rows = join(parts)
        return rows.take(counted(rows, self._sharding_keys(rows), self.shardings) > 0)

    def _frames(self, tp: int, cp: int, pp: int, dp: int) -> PlanArrays:
        kinds, experts = self.attentions.get((tp, cp), []), self.experts.get((tp, cp, dp), [])
        sizes = self.sizes(dp, pp).microbatch
        rows = grid(
            attention=range(len(kinds)),
            expert=range(len(experts)),
            recompute=self.recompute_codes,
            dtypes=range(len(self.dtypes)),
            overlap=range(len(self.overlaps)),
        )
        if not len(rows) or not len(sizes):
            return rows.take(slice(0, 0))
        sp, kind = np.array(kinds)[rows.attention].T
        expert_tp, ep = np.array(experts)[rows.expert].T
        same = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "microbatch": int(sizes.max())}
        return PlanArrays(
            **{name: np.full(len(rows), value) for name, value in same.items()},
            sp=sp.astype(bool),
            cp_kind=kind,
            expert_tp=expert_tp,
            ep=ep,
            recompute=rows.recompute,
            overlap=np.array([encode("overlap", axes) for axes in self.overlaps])[rows.overlap],
            **dict(zip(DTYPES, self._dtype_codes[rows.dtypes].T, strict=True)),
        )

    @cached_property
    def _dtype_codes(self) -> Column:
        """[combinations, DTYPES]: the dtypes of every combination that may be chosen."""
        return np.array([[encode(n, d) for n, d in zip(DTYPES, c, strict=True)] for c in self.dtypes])

    @property
    def mixed(self) -> bool:
        """Whether the model has several kinds of layers."""
        return self.model.kind != "counts" and len(self.model.kinds) > 1

    @property
    def divides(self) -> bool:
        """Whether the planner may give the stages of a plan other numbers of layers (`stage_lengths`)."""
        return self.choices.uneven and not self.stack.can.own_stages and self.model.kind != "counts"

    def uneven(self, rows: PlanArrays) -> np.ndarray:
        """Mark rows whose stages have different numbers of layers."""
        if self.framework_divides:
            return np.array([len(set(self.stages(int(pp)))) > 1 for pp in rows.pp], dtype=bool)
        return self.model.layers % (rows.pp * rows.virtual) != 0

    @property
    def framework_divides(self) -> bool:
        """Whether the framework makes another division into stages than the even one; a rank has one stage then."""
        return self.stack.can.stages_by != "layers"

    def stages(self, pp: int) -> tuple[int, ...]:
        """Layers of each stage where the framework divides them, empty if evenly."""
        return framework_stages(self.model, self.stack, pp)

    def fewest_layers(self, pp: np.ndarray, virtual: np.ndarray) -> np.ndarray:
        """Layers that every rank has at least."""
        if self.framework_divides:
            return np.array([min(self.stages(int(p)) or (self.model.layers // int(p),)) for p in pp], dtype=np.int64)
        return virtual * (self.model.layers // (pp * virtual))

    def microbatches(self, rows: PlanArrays) -> np.ndarray:
        return self.workload.batch // (rows.microbatch * rows.dp)

    # Lower layers

    def shaped(self, rows: PlanArrays) -> PlanArrays:
        """Frames, each with every legal micro-batch."""
        return crossed(rows, (rows.dp, rows.pp), self.sizes)

    def placed(self, rows: PlanArrays) -> PlanArrays:
        """Shapes, each with every distinct order of the axes."""
        return crossed(rows, (rows.tp, rows.cp, rows.pp, rows.dp), self.orders)

    def sharded(self, rows: PlanArrays) -> PlanArrays:
        """Rows, each with every sharding of its data-parallel ranks."""
        return crossed(rows, self._sharding_keys(rows), self.shardings)

    def scheduled(self, rows: PlanArrays) -> PlanArrays:
        """Rows, each with every legal schedule of its pipeline."""
        return crossed(rows, (rows.pp, self.microbatches(rows)), self.schedules)

    def _sharding_keys(self, rows: PlanArrays) -> tuple[np.ndarray, ...]:
        split = ((rows.tp > 1) | (rows.ep > 1)) & bool(self.stack.can.zero_in_split)
        return rows.dp, rows.cp > 1, rows.pp > 1, split  # context-parallel ranks hold the same weights

    def __len__(self) -> int:
        """Number of legal plans, counted without enumerating them."""
        rows = self.frames
        if not len(rows):
            return 0
        per_frame = counted(rows, self._sharding_keys(rows), self.shardings)
        total = 0
        for (tp, cp, pp, dp), same in grouped((rows.tp, rows.cp, rows.pp, rows.dp)):
            steps = self.workload.batch // dp // self.sizes(dp, pp).microbatch
            total += (
                len(self.orders(tp, cp, pp, dp))
                * sum(len(self.schedules(pp, int(m))) for m in steps)
                * int(per_frame[same].sum())
            )
        return total

    def plans(self, size: int = 4096) -> Iterator[PlanArrays]:
        """The whole space, in tables of at most `size` rows."""
        for rows in self.frames.chunks(8):
            for part in self.placed(self.shaped(rows)).chunks(64):
                yield from self.scheduled(self.sharded(part)).chunks(size)

    # Conversion to batches and plans

    @cached_property
    def _base_columns(self) -> dict[str, Column]:
        """The columns of the base plan."""
        columns = PlanArrays.of_plans([self.base]).columns
        return columns | {name: columns[name].astype(float) for name in NUMBERS}

    def batch(self, rows: PlanArrays) -> Batch:
        """Rows as a batch to lower. Missing fields of lower layers take a neutral value: replicas, the naive schedule, every axis innermost."""
        n = len(rows)
        columns: dict[str, Any] = {
            name: np.broadcast_to(value, n) for name, value in self._base_columns.items() if name not in rows
        }
        neutral = {"replicate": rows.dp, "shard": 1, "zero": 0, "virtual": 1, "reshard": True, "schedule": NAIVE}
        columns |= {name: np.broadcast_to(value, n) for name, value in neutral.items()}
        columns |= {name: column for name, column in rows.columns.items() if name in FIELDS}
        columns["bucket"] = np.full(n, self.bucket) if self.bucket else bucket_for(self.cluster, rows.dp * rows.cp)
        columns["layers_per_stage"] = [self.stages(int(pp)) for pp in rows.pp] if self.framework_divides else ()
        kind = Batch if "order" in rows else Innermost
        batch = kind(PlanArrays(**columns), self.model, self.workload, self.stack)
        if "zero" not in rows:  # a bound for all stages: overlap as of ZeRO-3, and no sum of whole gradients
            batch.overlap["dp"] = batch.overlap_of("dp", 3)
            batch.sums_whole = self.sums_whole(rows)
        return batch

    def sums_whole(self, rows: PlanArrays) -> Column:
        """Mark rows whose plans all keep whole gradients of a micro-batch: in a pipeline ZeRO reduces them after its last action."""
        stages = self.choices.numbers("zero", self.choices.words["zero"])
        return (rows.pp > 1) | (rows.dp * rows.cp == 1) | np.bool_(max(stages, default=0) < 2)

    def plan(self, rows: PlanArrays, i: int) -> Plan:
        """One row as a plan; fields that equal the stack's or the default value are not set."""
        fields = rows.values(i)
        fields["overlap"] = next(o for o in self.overlaps if encode("overlap", o) == rows.overlap[i])
        fields["bucket"] = self.bucket or float(bucket_for(self.cluster, int(rows.dp[i] * rows.cp[i])))
        unset = ["schedule", "virtual"] * (fields["pp"] == 1) + ["reshard", "reduce"] * (fields["zero"] < 3)
        unset += ["expert_tp"] * (fields["expert_tp"] == fields["tp"])
        unset += ["order"] * (fields["order"] == tuple(self.stack.order))
        fields = {name: value for name, value in fields.items() if name not in unset}
        return in_framework(self.base.but(**fields), self.model, self.stack)
