"""The space of legal plans: arrays of plans, built in five layers.

    frame      tp, cp and its kind, pp, dp, sp, expert tp, ep, recompute, dtypes, overlap
    shape      + micro-batch
    placed     + the order of the axes over the levels of the cluster
    sharded    + the data-parallel ranks as replicate × shard, ZeRO stage, reshard, when gradients are reduced
    scheduled  + pipeline schedule and virtual stages: a complete plan

The options of a layer depend on only a few fields of the layers above it, so the plans can be counted without enumerating them: GPT-3 on
512 GPUs has about fifty million plans in about ten thousand frames. The search expands a row into the next layer only if its bound allows
a better plan.

**Legal** plans are those that `describe.legality` accepts. Each layer calls this one predicate, with the fields of lower layers at their least
demanding values. Stages may have unequal numbers of layers. Unequal *virtual* stages are enumerated only if no equal ones exist or if a
constraint names `virtual`, because ranks then wait for each other.

**Duplicates**, different fields for the same plan, are enumerated once: schedules of a one-stage pipeline, sp with tp = 1, cp_kind with cp = 1,
ZeRO that shards nothing or keeps whole gradients (ZeRO-2 that reduces once per step, as in a pipeline, is ZeRO-1), reshard and reduce in a
pipeline, whose stages gather weights and reduce gradients once per step, looped schedules with one stage per rank, and
orders of the axes that put the same number of members of every group into every unit of the cluster. One dominated choice is excluded: reducing
after every micro-batch under ZeRO-0 or 1 sends more bytes and saves no memory. Gradient buckets are not searched: their size follows from the
group that reduces them (`cost.advice.bucket_for`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshwright.cost.advice import bucket_for
from meshwright.describe import legality
from meshwright.describe.axes import members_in_unit
from meshwright.describe.cluster import DTYPE_BYTES, Cluster
from meshwright.describe.legality import Case
from meshwright.describe.model import Model
from meshwright.describe.plan import AXES, Plan, divisors
from meshwright.describe.plan_fields import CP_KINDS, ORDERS, RECOMPUTES
from meshwright.describe.schedules import RULES, SCHEDULES
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.batch import OVERLAP_AXES, Batch
from meshwright.planner.search.choices import DTYPES, Choices, free
from meshwright.planner.search.limits import limited
from meshwright.planner.search.table import Table, grid, grouped, join

NAIVE = SCHEDULES.index("naive")
# [order, axis, other]: whether the other axis varies faster than the axis.
FASTER = np.array([[[o.index(b) < o.index(a) for b in AXES] for a in AXES] for o in ORDERS])
LOOPED = tuple(name for name, rule in RULES.items() if rule.most_virtual > 2)  # any number of stages per rank
LEAST = ("replicate", "shard", "zero", "tp", "sp", "cp", "pp", "virtual", "ep", "expert_tp", "microbatch", "recompute")
MOST_UNEVEN = 8  # most virtual stages per rank if no number divides the layers evenly


class Innermost(Batch):
    """Plans without an order of the axes: each axis is placed as if it were the innermost. No order is better for any axis."""

    def _axis_strides(self) -> dict[str, np.ndarray]:
        return {axis: np.ones(self.n) for axis in ("tp", "cp", "pp", "shard", "replicate")}

    def _count_members(self, axis: str, unit: float) -> np.ndarray:
        if axis in ("expert_tp", "ep"):
            return np.minimum(self.size(axis), unit)
        return super()._count_members(axis, unit)


def distinct(degrees: np.ndarray, *columns: int) -> list[list[int]]:
    """One row (tp, cp, pp, dp) for each distinct combination of some of its columns."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row in degrees.T.tolist():
        rows.setdefault(tuple(row[k] for k in columns), row)
    return list(rows.values())


class Space:
    """The legal plans of one problem. `frames` is a table; `shaped`, `placed`, `sharded` and `scheduled` each expand rows by one layer."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        workload: Workload,
        stack: Stack,
        choices: Choices | None = None,
        base: Plan | None = None,
        bucket: float = 0.0,
    ) -> None:
        self.bucket = bucket  # bytes of a gradient bucket; 0: what the plan's data-parallel group needs
        self.model, self.cluster, self.workload, self.stack = model, cluster, workload, stack
        self.base = base or Plan()
        self.choices = limited(choices or free(self.base), stack)
        self.overlaps = list(self.choices.words["overlap"])
        self.dtypes = self.choices.dtypes
        self.units = tuple(cluster.spans[:-1])

    def with_base(self, base: Plan) -> Space:
        """The same problem and choices with another base plan."""
        return Space(self.model, self.cluster, self.workload, self.stack, self.choices, base, self.bucket)

    # Legality

    def legal(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Which rows are legal. Fields missing from `columns` belong to lower layers and take their least demanding value: micro-batch 1,
        replicated data parallelism, no sequence parallelism, the naive schedule."""
        rows = len(next(iter(columns.values())))
        return np.broadcast_to(legality.legal(self.least.varied(columns)), rows)

    @cached_property
    def least(self) -> Case:
        """The simplest plan with the problem that it is checked against."""
        return Case.of(self.simplest, self.model, self.workload, self.cluster, self.stack)

    @cached_property
    def simplest(self) -> Plan:
        """The base plan with the least demanding value of every searched field."""
        words = {"cp_kind": "all-gather", "schedule": "naive"}
        return self.base.but(**{name: Plan.model_fields[name].default for name in LEAST}, **words)

    # Frames and shapes

    @cached_property
    def frames(self) -> Table:
        """The first layer. A frame has the largest legal micro-batch, whose bound holds for all shapes of the frame."""
        parts = [part for row in self.degrees.T.tolist() if len(part := self._frames(*row))]
        return join(parts) if parts else Table(tp=np.zeros(0, int))

    @cached_property
    def degrees(self) -> np.ndarray:
        """[4, n]: every (tp, cp, pp, dp) that is legal with some choice of the lower layers."""
        c, world = self.choices, self.cluster.world
        splits = self._splits(np.array(c.numbers("tp", divisors(world)), np.int64))
        found = [
            (tp, cp, pp, dp)
            for tp in splits
            for pp in c.numbers("pp", divisors(world // tp))
            if pp > 1 or c.allows("virtual", 1)
            for cp in c.numbers("cp", divisors(world // (tp * pp)))
            if c.allows("dp", dp := world // (tp * pp * cp))
        ]
        rows = np.array(found, np.int64).reshape(-1, 4).T
        tps, cps, pps, dps = rows
        known = {"tp": tps, "cp": cps, "pp": pps, "replicate": dps, "expert_tp": self._least_expert_tp(tps)}
        return rows[:, self.legal(known)]

    def _splits(self, tp: np.ndarray) -> list[int]:
        """Tensor-parallel degrees that the model accepts."""
        case = Case.of(self.base.but(tp=1), self.model).varied({"tp": tp, "expert_tp": self._least_expert_tp(tp)})
        found = [int(t) for t in tp[np.broadcast_to(legality.legal(case), len(tp))]]
        if self.stack.can.tensor_divides_kv and self.model.kind == "transformer" and self.model.attention == "gqa":
            return [t for t in found if self.model.kv_groups % t == 0]
        return found

    def _least_expert_tp(self, tp: np.ndarray) -> np.ndarray:
        """The least demanding expert_tp: 1, or 0 for a model without experts."""
        return np.full(len(tp), 1 if self.model.experts else 0)

    @cached_property
    def attentions(self) -> dict[tuple[int, int], list[tuple[bool, int]]]:
        """Legal (sp, code of the kind of context parallelism) of every (tp, cp)."""
        words = self.choices.words
        options = [
            (tp, cp, pp, dp, sp, CP_KINDS.index(kind))
            for tp, cp, pp, dp in distinct(self.degrees, 0, 1)
            for sp in (words["sp"] if tp > 1 else (False,))
            for kind in (words["cp_kind"] if cp > 1 else CP_KINDS[:1])
        ]
        tp, cp, pp, dp, sp, kind = np.array(options, np.int64).reshape(-1, 6).T
        known = {"tp": tp, "cp": cp, "pp": pp, "replicate": dp, "expert_tp": self._least_expert_tp(tp)}
        legal = self.legal({**known, "sp": sp > 0, "cp_kind": kind})
        found: dict[tuple[int, int], list[tuple[bool, int]]] = {}
        for t, c, s, k in zip(tp[legal], cp[legal], sp[legal], kind[legal], strict=True):
            found.setdefault((int(t), int(c)), []).append((bool(s), int(k)))
        return found

    @cached_property
    def experts(self) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
        """Legal (expert tp, ep) of every (tp, cp, dp): both re-factorise the ranks of one stage."""
        c = self.choices
        found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        if not self.model.experts:
            for tp, cp, _, dp in self.degrees.T.tolist():
                found[tp, cp, dp] = [(tp, 1)] if c.allows("ep", 1) else []
            return found
        eps = c.numbers("ep", divisors(self.model.experts))
        options = [
            (*row, etp, ep)
            for row in distinct(self.degrees, 0, 1, 3)
            for etp in c.numbers("expert_tp", divisors(row[0]))
            for ep in eps
        ]
        tp, cp, pp, dp, etp, ep = np.array(options, np.int64).reshape(-1, 6).T
        legal = self.legal({"tp": tp, "cp": cp, "pp": pp, "replicate": dp, "expert_tp": etp, "ep": ep})
        for t, k, d, e, n in zip(*(x[legal].tolist() for x in (tp, cp, dp, etp, ep)), strict=True):
            found.setdefault((t, k, d), []).append((e, n))
        return found

    @cached_property
    def recompute_codes(self) -> list[int]:
        """Codes of the legal kinds of recompute."""
        codes = np.array([RECOMPUTES.index(word) for word in self.choices.words["recompute"]])
        case = Case.of(self.base, self.model).varied({"recompute": codes})
        return [int(code) for code in codes[np.broadcast_to(legality.legal(case), len(codes))]]

    @cache  # noqa: B019  (a space lives as long as its search)
    def sizes(self, dp: int, pp: int) -> Table:
        """Micro-batch sizes that divide a data-parallel rank's share of the batch and that some schedule can run."""
        share = self.workload.batch // dp
        legal = [d for d in self.choices.numbers("microbatch", divisors(share)) if len(self.schedules(pp, share // d))]
        return Table(microbatch=np.array(legal, np.int64))

    @cache  # noqa: B019
    def orders(self, tp: int, cp: int, pp: int, dp: int) -> Table:
        """One order (its code) for each distinct placement: numbers of members of a tp, cp, pp and dp group in each unit."""
        codes = [ORDERS.index(o) for o in (tuple(self.stack.order), *ORDERS) if o in self.choices.words["order"]]
        sizes = np.array([tp, cp, pp, dp])
        stride = np.where(FASTER[codes], sizes, 1).prod(axis=2)  # [order, axis]: product of the axes before it
        plan = SimpleNamespace(tp=tp, cp=cp, pp=pp, replicate=dp, shard=1)
        strides = dict(zip(("tp", "cp", "pp", "replicate"), stride.T, strict=True)) | {"shard": stride[:, 3]}
        inside = [members_in_unit(plan, strides, axis, unit) for axis in AXES for unit in self.units]
        found: dict[tuple[int, ...], int] = {}
        for row, code in zip(np.array(inside).reshape(-1, len(codes)).T.tolist(), codes, strict=True):
            found.setdefault(tuple(row), code)
        return Table(order=np.array(list(found.values()), np.int64))

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
        found = Table(
            **{name: np.full(len(rows), value) for name, value in same.items()},
            sp=sp.astype(bool),
            cp_kind=kind,
            etp=etp,
            ep=ep,
            recompute=rows.recompute,
            dtype=rows.dtype,
            overlap_index=rows.overlap_index,
        )
        return found.take(found.counted(self._sharding_keys(found), self.shardings) > 0)

    @property
    def mixed(self) -> bool:
        """Whether the model has several kinds of layers."""
        return self.model.kind != "counts" and len(self.model.kinds) > 1

    def uneven(self, rows: Table) -> np.ndarray:
        """Which rows have stages with different numbers of layers."""
        return self.model.layers % (rows.pp * rows.virtual) != 0

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

    @cache  # noqa: B019
    def shardings(self, dp: int, repeated: int, piped: int, split: int = 0) -> Table:
        """replicate, shard, zero, reshard, reduce_each of `dp` ranks; `repeated`: context-parallel ranks
        repeat the weights, so ZeRO can shard over them even if shard = 1. `piped`: the stages of a pipeline gather weights and reduce
        gradients once per step, so reshard and reduce have no effect and ZeRO-2 is ZeRO-1. `split`: tensor parallelism limits the stages."""
        c, can = self.choices, self.stack.can
        stages = c.numbers("zero", c.words["zero"])
        if piped and can.zero_in_pipeline:
            stages = [z for z in stages if z in can.zero_in_pipeline]
        if split:
            stages = [z for z in stages if z in can.zero_in_tensor]
        if repeated and can.shards_context:
            stages = [z for z in stages if z == 3]
        found = []
        for zero in [z for z in stages if z != 2 or not piped or 1 not in stages]:
            for shard in c.numbers("shard", divisors(dp) if zero else [1]):
                replicate = dp // shard
                if zero and replicate > 1 and "hsdp" in can.without:
                    continue
                shards_nothing = zero and shard == 1 and not repeated
                if shards_nothing or not c.allows("replicate", replicate) or (not c.hybrid and zero and 1 < shard < dp):
                    continue
                reshards, reduces = (c.words[name][: 1 if piped else None] for name in ("reshard", "reduce"))
                for reshard in reshards if zero == 3 else (True,):
                    for reduce in reduces if zero == 3 else ("auto",):
                        each = zero >= 2 and reduce != "step"
                        found.append((replicate, shard, zero, reshard, each))
        columns = np.array(found, np.int64).reshape(-1, 5).T
        return Table(
            replicate=columns[0], shard=columns[1], zero=columns[2], reshard=columns[3] > 0, reduce_each=columns[4] > 0
        )

    @cache  # noqa: B019
    def virtuals(self, pp: int) -> list[int]:
        """Numbers of virtual stages, two or more, of a looped schedule: those that divide the layers evenly. Uneven numbers are added only if
        no even one exists or a constraint names `virtual`: they are slower, because ranks wait for each other's longer stages."""
        legal = self.choices.numbers("virtual", range(2, self.model.layers // pp + 1))
        if any(c.field == "virtual" for c in self.choices.constraints):
            return legal
        even = [v for v in legal if self.model.layers % (pp * v) == 0]
        return even or [v for v in legal if v <= MOST_UNEVEN]

    @cache  # noqa: B019
    def schedules(self, pp: int, microbatches: int) -> Table:
        """Legal schedules (codes) and numbers of virtual stages for `pp` ranks."""
        c, layers = self.choices, self.model.layers
        if pp == 1:
            return Table(schedule=np.array([SCHEDULES.index("1f1b")]), virtual=np.array([1]))
        found = [
            (SCHEDULES.index(name), virtual)
            for name in c.words["schedule"]
            for virtual in (self.virtuals(pp) if name in LOOPED else c.numbers("virtual", [RULES[name].virtual]))
            if c.uneven or layers % (pp * virtual) == 0
        ]
        schedule, virtual = np.array(found, np.int64).reshape(-1, 2).T
        workload = self.workload.model_copy(update={"batch": microbatches})  # the batch of one rank, with micro-batch 1
        case = Case(self.least.fields, self.model, workload, stack=self.stack)
        legal = legality.legal(case.varied({"pp": pp, "schedule": schedule, "virtual": virtual}))
        legal = np.broadcast_to(legal, len(schedule))
        return Table(schedule=schedule[legal], virtual=virtual[legal])

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
        overlaps = [self.stack.overlap if o is None else o for o in self.overlaps]
        f["overlap"] = {
            axis: np.array([float(axis in o) for o in overlaps])[rows.overlap_index] for axis in OVERLAP_AXES
        }
        f["bucket"] = np.full(n, self.bucket) if self.bucket else bucket_for(self.cluster, rows.dp * rows.cp)
        f["layers_per_stage"] = ()  # as equal as possible
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
        fields |= {"schedule": SCHEDULES[r["schedule"]], "virtual": r["virtual"]} if r["pp"] > 1 else {}
        fields |= dict(zip(DTYPES, self.dtypes[r["dtype"]], strict=True))
        if r["zero"] == 3:
            fields |= {"reshard": r["reshard"], "reduce": "auto" if r["reduce_each"] else "step"}
        fields["bucket"] = self.bucket or float(bucket_for(self.cluster, r["dp"] * r["cp"]))
        if r["etp"] != r["tp"]:
            fields["expert_tp"] = r["etp"]
        if order != tuple(self.stack.order):
            fields["order"] = order
        return self.base.but(**fields)
