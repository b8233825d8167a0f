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
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.cost.advice import bucket_for
from meshwright.describe.cluster import DTYPE_BYTES
from meshwright.describe.framework_stages import framework_stages, in_framework
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import CP_KINDS, ORDERS, RECOMPUTES
from meshwright.describe.schedules import SCHEDULES
from meshwright.lower.batch import Batch, overlap_fields
from meshwright.planner.search.choices import DTYPES
from meshwright.planner.search.legal_options import LegalOptions
from meshwright.planner.search.table import Table, grid, grouped, join

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
        return Space(self.model, self.cluster, self.workload, self.stack, self.choices, base, self.bucket)

    @cached_property
    def frames(self) -> Table:
        """The first layer. A frame has the largest legal micro-batch, whose bound holds for all shapes of the frame."""
        parts = [part for row in self.degrees.T.tolist() if len(part := self._frames(*row))]
        if not parts:
            return Table(tp=np.zeros(0, int))
        rows = join(parts)
        return rows.take(rows.counted(self._sharding_keys(rows), self.shardings) > 0)

    def _frames(self, tp: int, cp: int, pp: int, dp: int) -> Table:
        kinds, experts = self.attentions.get((tp, cp), []), self.experts.get((tp, cp, dp), [])
        sizes = self.sizes(dp, pp).microbatch
        rows = grid(
            attention=range(len(kinds)),
            expert=range(len(experts)),
            recompute=self.recompute_codes,
            dtype=range(len(self.dtypes)),
            overlap_index=range(len(self.overlaps)),
        )
        if not len(rows) or not len(sizes):
            return rows.take(slice(0, 0))
        sp, kind = np.array(kinds)[rows.attention].T
        etp, ep = np.array(experts)[rows.expert].T
        same = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "microbatch": int(sizes.max())}
        return Table(
            **{name: np.full(len(rows), value) for name, value in same.items()},
            sp=sp.astype(bool),
            cp_kind=kind,
            etp=etp,
            ep=ep,
            recompute=rows.recompute,
            dtype=rows.dtype,
            overlap_index=rows.overlap_index,
        )

    @property
    def mixed(self) -> bool:
        """Whether the model has several kinds of layers."""
        return self.model.kind != "counts" and len(self.model.kinds) > 1

    @property
    def divides(self) -> bool:
        """Whether the planner may give the stages of a plan other numbers of layers (`stage_lengths`)."""
        return self.choices.uneven and not self.stack.can.own_stages and self.model.kind != "counts"

    def uneven(self, rows: Table) -> np.ndarray:
        """Which rows have stages with different numbers of layers."""
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

    def microbatches(self, rows: Table) -> np.ndarray:
        return self.workload.batch // (rows.microbatch * rows.dp)

    # Lower layers

    def shaped(self, rows: Table) -> Table:
        """Frames, each with every legal micro-batch."""
        return rows.crossed((rows.dp, rows.pp), self.sizes)

    def placed(self, rows: Table) -> Table:
        """Shapes, each with every distinct order of the axes."""
        return rows.crossed((rows.tp, rows.cp, rows.pp, rows.dp), self.orders)

    def sharded(self, rows: Table) -> Table:
        """Rows, each with every sharding of its data-parallel ranks."""
        return rows.crossed(self._sharding_keys(rows), self.shardings)

    def scheduled(self, rows: Table) -> Table:
        """Rows, each with every legal schedule of its pipeline."""
        return rows.crossed((rows.pp, self.microbatches(rows)), self.schedules)

    def _sharding_keys(self, rows: Table) -> tuple[np.ndarray, ...]:
        split = (rows.tp > 1) & bool(self.stack.can.zero_in_tensor)
        return rows.dp, rows.cp > 1, rows.pp > 1, split  # context-parallel ranks hold the same weights

    def __len__(self) -> int:
        """Number of legal plans, counted without enumerating them."""
        rows = self.frames
        if not len(rows):
            return 0
        per_frame = rows.counted(self._sharding_keys(rows), self.shardings)
        total = 0
        for (tp, cp, pp, dp), same in grouped((rows.tp, rows.cp, rows.pp, rows.dp)):
            steps = self.workload.batch // dp // self.sizes(dp, pp).microbatch
            total += (
                len(self.orders(tp, cp, pp, dp))
                * sum(len(self.schedules(pp, int(m))) for m in steps)
                * int(per_frame[same].sum())
            )
        return total

    def plans(self, size: int = 4096) -> Iterator[Table]:
        """The whole space, in tables of at most `size` rows."""
        for rows in self.frames.chunks(8):
            for part in self.placed(self.shaped(rows)).chunks(64):
                yield from self.scheduled(self.sharded(part)).chunks(size)

    # Conversion to batches and plans

    @cached_property
    def _unsearched(self) -> dict[str, np.ndarray]:
        """The fields of a batch, with the values of the base plan."""
        one = Batch.of([self.base], self.model, self.workload, self.stack)
        return {
            name: value for name, value in vars(one).items() if isinstance(value, np.ndarray) and value.shape == (1,)
        }

    def batch(self, rows: Table) -> Batch:
        """Rows as a batch to lower. Missing fields of lower layers take a neutral value: replicas, the naive schedule, every axis innermost."""
        n = len(rows)
        f: dict[str, Any] = {name: np.repeat(value, n) for name, value in self._unsearched.items()}
        f |= {name: rows.columns[name].astype(float) for name in ("tp", "cp", "pp", "ep", "etp", "microbatch")}
        neutral = {"replicate": rows.dp, "shard": np.ones(n), "zero": np.zeros(n), "virtual": np.ones(n)}
        f |= {name: rows.columns.get(name, default).astype(float) for name, default in neutral.items()}
        f |= {
            "sp": rows.sp,
            "recompute": rows.recompute,
            "cp_kind": rows.cp_kind,
            "order": rows.columns.get("order", np.zeros(n, int)),
        }
        f["reshard"] = rows.columns.get("reshard", np.ones(n, bool))
        f["reduce_each"] = rows.columns.get("reduce_each", np.zeros(n, bool))
        f["schedule"] = rows.columns.get("schedule", np.full(n, NAIVE))
        sizes = np.array([[DTYPE_BYTES[d or combination[1]] for d in combination] for combination in self.dtypes])  # type: ignore[index]
        f |= {
            name: sizes[rows.dtype, k]
            for k, name in enumerate(("param_bytes", "grad_bytes", "state_bytes", "comm_bytes"))
        }
        zero = rows.columns.get("zero", np.full(n, 3))  # a bound for all stages: the one that overlaps
        f |= overlap_fields(self.overlaps, rows.overlap_index, self.stack, rows.sp, zero, rows.cp_kind)
        f["bucket"] = np.full(n, self.bucket) if self.bucket else bucket_for(self.cluster, rows.dp * rows.cp)
        f["layers_per_stage"] = [self.stages(int(pp)) for pp in rows.pp] if self.framework_divides else ()
        return (Batch if "order" in rows else Innermost)(f, self.model, self.workload, self.stack)

    def plan(self, rows: Table, i: int) -> Plan:
        """One row as a plan; fields that equal the stack's or the default value are not set."""
        r = rows.row(i)
        order = ORDERS[r["order"]]
        fields: dict[str, Any] = {
            name: r[name] for name in ("replicate", "shard", "tp", "sp", "cp", "pp", "ep", "microbatch", "zero")
        }
        fields |= {
            "cp_kind": CP_KINDS[r["cp_kind"]],
            "recompute": RECOMPUTES[r["recompute"]],
            "overlap": self.overlaps[r["overlap_index"]],
        }
        fields |= {"schedule": SCHEDULES.names[r["schedule"]], "virtual": r["virtual"]} if r["pp"] > 1 else {}
        fields |= dict(zip(DTYPES, self.dtypes[r["dtype"]], strict=True))
        if r["zero"] == 3:
            fields |= {"reshard": r["reshard"], "reduce": "auto" if r["reduce_each"] else "step"}
        fields["bucket"] = self.bucket or float(bucket_for(self.cluster, r["dp"] * r["cp"]))
        if r["etp"] != r["tp"]:
            fields["expert_tp"] = r["etp"]
        if order != tuple(self.stack.order):
            fields["order"] = order
        return in_framework(self.base.but(**fields), self.model, self.stack)
