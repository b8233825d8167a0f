"""Every legal plan, as arrays, in layers.

    frame      tp, cp and its kind, pp, dp, sp, expert tp, ep, recompute, dtypes, overlap
    shape      its micro-batch
    placed     the order of the axes over the levels of the cluster
    sharded    the data-parallel ranks as replicate × shard, ZeRO stage, reshard, when gradients are reduced
    scheduled  the pipeline's schedule and virtual stages: a whole plan

What a layer offers depends on few numbers of the ones above, so the space is counted without being written down: GPT-3 on 512 GPUs
has over a hundred million plans in some ten thousand frames. `search` goes down the layers only where it can pay.

**Legal** is what `Plan.check` and the schedule's own rules accept: degrees that multiply to the world, heads, KV heads, FFN, sequence,
layers and experts that divide, batch = micro-batch × accumulation × dp. Stages may have unequal numbers of layers; unequal *virtual* stages are
offered where no equal ones exist (or where a constraint speaks of `virtual`), since ranks then wait for each other.

**Twins**, plans that are the same plan written twice, are enumerated once: schedules of one stage, sp of one tensor-parallel rank,
the kind of one context-parallel rank, ZeRO that shards nothing or whose gradients stay whole (ZeRO-2 that reduces once a step is
ZeRO-1), looped schedules with one stage a rank, and orders of the axes that put the same number of every group's members into every
unit of the cluster. One choice is left out since it is dominated: reducing every micro-batch under ZeRO-0 or 1 sends more and saves nothing.
Gradient buckets are not searched: their size follows from the group that reduces them (`bucket_for`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import numpy as np

from meshwright.cost.advice import minimum_bucket
from meshwright.describe.cluster import DTYPE_BYTES, Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan, divisors
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.batch import CP_KINDS, ORDERS, OVERLAP_AXES, RECOMPUTE, SCHEDULES, Batch
from meshwright.planner.search.choices import DTYPES, Choices, free
from meshwright.planner.search.table import Table, grid, grouped, join
from meshwright.programs.pipelines.rules import RULES, refusal

NAIVE = SCHEDULES.index("naive")
BUCKETS = (25e6, 4e9)  # bytes: from PyTorch's to what a ring of thousands needs
BUCKET_MARGIN = 4  # buckets this many times P·α/β: latency a quarter of the time at most
MOST_UNEVEN = 8  # virtual stages that do not divide the layers, where none does


def bucket_for(cluster: Cluster, ranks: int | np.ndarray) -> np.ndarray:
    """A gradient bucket for groups of `ranks`: a few times P·α/β of the widest level, in whole megabytes."""
    top = cluster.level_of_span(cluster.world)
    least = minimum_bucket(cluster.levels[top].link.alpha, 1 / cluster.device_bandwidth(top))
    return np.clip(1e6 * np.ceil(BUCKET_MARGIN * least * np.asarray(ranks, float) / 1e6), *BUCKETS)


class Innermost(Batch):
    """Plans of which no order is known: every axis is placed as if it alone came first. No order does better by any axis."""

    def _lay_out(self) -> dict[str, np.ndarray]:
        return {axis: np.ones(self.n) for axis in ("tp", "cp", "pp", "shard", "replicate")}

    def _count_members(self, axis: str, unit: float) -> np.ndarray:
        if axis in ("expert_tp", "ep"):
            return np.minimum(self.size(axis), unit)
        return super()._count_members(axis, unit)


class Space:
    """The legal plans of one problem. `frames` is a table; `shaped`, `placed`, `sharded` and `scheduled` add the lower layers to its rows."""

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
        self.choices = choices or free(self.base)
        self.overlaps = list(self.choices.words["overlap"])
        self.dtypes = self.choices.dtypes
        self.units = tuple(cluster.spans[:-1])

    # Frames and shapes

    @cached_property
    def frames(self) -> Table:
        """The first layer; its `microbatch` is the largest one, so that a frame stands for all of its shapes."""
        parts = [part for degrees in self.degrees() if len(part := self._frames(*degrees))]
        return join(parts) if parts else Table(tp=np.zeros(0, int))

    def degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """(tp, cp, pp, dp) that multiply to the world and divide the model and the batch."""
        c, model, world = self.choices, self.model, self.cluster.world
        for tp in c.numbers("tp", [t for t in divisors(world) if self.splits_heads(t)]):
            for pp in c.numbers(
                "pp", [p for p in divisors(world // tp) if p == 1 or (model.kind != "counts" and p <= model.layers)]
            ):
                if pp == 1 and not c.allows("virtual", 1):
                    continue
                for cp in c.numbers(
                    "cp", [k for k in divisors(world // (tp * pp)) if k == 1 or model.kind == "transformer"]
                ):
                    dp = world // (tp * pp * cp)
                    if self.workload.batch % dp == 0 and c.allows("dp", dp):
                        yield tp, cp, pp, dp

    def splits_heads(self, tp: int) -> bool:
        """Whether tensor parallelism may cut the model's layers into tp parts."""
        m = self.model
        if m.kind != "transformer":
            return tp == 1 or (m.kind == "mlp" and m.hidden % tp == 0)
        whole_heads = m.heads % tp == 0 and (m.kv_groups % tp == 0 or tp % m.kv_groups == 0)
        return whole_heads and (bool(m.experts) or m.ffn % tp == 0)

    def context_kinds(self, tp: int, cp: int) -> list[int]:
        """Codes of the legal kinds of context parallelism."""
        m, seq = self.model, self.workload.seq
        if cp == 1:
            return [0]
        local_kv = max(m.kv_groups // tp, 1)
        legal = {
            "ring": seq % (cp * (2 if m.causal else 1)) == 0,
            "ulysses": seq % cp == 0 and m.heads // tp % cp == 0 and (local_kv % cp == 0 or cp % local_kv == 0),
            "all-gather": seq % cp == 0,
        }
        return [CP_KINDS.index(kind) for kind in self.choices.words["cp_kind"] if legal[kind]]

    def sequence_parallel(self, tp: int, cp: int) -> list[bool]:
        if tp == 1:
            return [False]
        legal = {False: True, True: self.model.kind == "transformer" and self.workload.seq % (tp * cp) == 0}
        return [sp for sp in self.choices.words["sp"] if legal[sp]]

    def experts(self, tp: int, cp: int, dp: int) -> list[tuple[int, int]]:
        """(expert tp, ep): both re-factorise the ranks of one stage."""
        m, c = self.model, self.choices
        if not m.experts:
            return [(tp, 1)] if c.allows("ep", 1) else []
        return [
            (etp, ep)
            for etp in c.numbers("expert_tp", divisors(tp))
            for ep in c.numbers("ep", divisors(m.experts))
            if (tp // etp * cp * dp) % ep == 0
        ]

    def recomputes(self) -> list[int]:
        """Counts alone do not say what could be recomputed."""
        legal = RECOMPUTE[:1] if self.model.kind == "counts" else RECOMPUTE
        return [RECOMPUTE.index(word) for word in self.choices.words["recompute"] if word in legal]

    @cache  # noqa: B019  (a space lives as long as its search)
    def sizes(self, dp: int, pp: int) -> Table:
        """Micro-batches that divide a data-parallel rank's share of the batch into as many as some schedule can run."""
        share = self.workload.batch // dp
        legal = [d for d in self.choices.numbers("microbatch", divisors(share)) if len(self.schedules(pp, share // d))]
        return Table(microbatch=np.array(legal, np.int64))

    @cache  # noqa: B019
    def orders(self, tp: int, cp: int, pp: int, dp: int) -> Table:
        """One order (its code) for each way to place the groups: members of a tp, cp, pp and dp group in each unit."""
        size = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        found: dict[tuple[tuple[int, ...], ...], int] = {}
        for order in (tuple(self.stack.order), *ORDERS):
            if order not in self.choices.words["order"]:
                continue
            inside, stride = {}, 1
            for axis in order:
                inside[axis] = tuple(min(size[axis], max(1, unit // stride)) for unit in self.units)
                stride *= size[axis]
            found.setdefault(tuple(inside[axis] for axis in size), ORDERS.index(order))
        return Table(order=np.array(list(found.values()), np.int64))

    def _frames(self, tp: int, cp: int, pp: int, dp: int) -> Table:
        kinds = [(sp, kind) for sp in self.sequence_parallel(tp, cp) for kind in self.context_kinds(tp, cp)]
        experts = self.experts(tp, cp, dp)
        sizes = self.sizes(dp, pp).microbatch
        rows = grid(
            attention=range(len(kinds)),
            expert=range(len(experts)),
            recompute=self.recomputes(),
            dtype=range(len(self.dtypes)),
            lap=range(len(self.overlaps)),
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
            lap=rows.lap,
        )
        return found.take(found.counted(self._sharding_keys(found), self.shardings) > 0)

    @property
    def mixed(self) -> bool:
        """Whether layers are of two kinds."""
        return self.model.kind != "counts" and len(set(self.model.layer_kinds)) > 1

    def uneven(self, rows: Table) -> np.ndarray:
        """Where stages have different numbers of layers."""
        return self.model.layers % (rows.pp * rows.virtual) != 0

    def microbatches(self, rows: Table) -> np.ndarray:
        return self.workload.batch // (rows.microbatch * rows.dp)

    # Lower layers

    def shaped(self, rows: Table) -> Table:
        """Frames with every micro-batch."""
        return rows.crossed((rows.dp, rows.pp), self.sizes)

    def placed(self, rows: Table) -> Table:
        """Shapes with every order of the axes."""
        return rows.crossed((rows.tp, rows.cp, rows.pp, rows.dp), self.orders)

    def sharded(self, rows: Table) -> Table:
        """Rows with every sharding of their data-parallel ranks."""
        return rows.crossed(self._sharding_keys(rows), self.shardings)

    def scheduled(self, rows: Table) -> Table:
        """Rows with every schedule of their pipeline."""
        return rows.crossed((rows.pp, self.microbatches(rows)), self.schedules)

    def _sharding_keys(self, rows: Table) -> tuple[np.ndarray, np.ndarray]:
        return rows.dp, rows.cp > 1  # context-parallel ranks hold the same weights

    @cache  # noqa: B019
    def shardings(self, dp: int, repeated: int) -> Table:
        """replicate, shard, zero, reshard, reduce_each of `dp` ranks; `repeated`: ZeRO has something to shard besides them."""
        c = self.choices
        found = []
        for zero in c.numbers("zero", c.words["zero"]):
            for shard in c.numbers("shard", divisors(dp) if zero else [1]):
                replicate = dp // shard
                shards_nothing = zero and shard == 1 and not repeated
                if shards_nothing or not c.allows("replicate", replicate) or (not c.hybrid and zero and 1 < shard < dp):
                    continue
                for reshard in c.words["reshard"] if zero == 3 else (True,):
                    for reduce in c.words["reduce"] if zero == 3 else ("auto",):
                        each = zero >= 2 and reduce != "step"
                        found.append((replicate, shard, zero, reshard, each))
        columns = np.array(found, np.int64).reshape(-1, 5).T
        return Table(
            replicate=columns[0], shard=columns[1], zero=columns[2], reshard=columns[3] > 0, reduce_each=columns[4] > 0
        )

    @cache  # noqa: B019
    def virtuals(self, pp: int) -> list[int]:
        """Stages a looped rank may have, two and more: those that divide the layers evenly. Where none does, or where a person speaks of
        virtual stages, uneven ones too: they are slower than even ones, since ranks wait for each other's longer stages."""
        legal = self.choices.numbers("virtual", range(2, self.model.layers // pp + 1))
        if any(c.field == "virtual" for c in self.choices.constraints):
            return legal
        even = [v for v in legal if self.model.layers % (pp * v) == 0]
        return even or [v for v in legal if v <= MOST_UNEVEN]

    @cache  # noqa: B019
    def schedules(self, pp: int, microbatches: int) -> Table:
        """schedule (its code) and virtual stages of `pp` ranks."""
        c, layers = self.choices, self.model.layers
        found = [(SCHEDULES.index("1f1b"), 1)] if pp == 1 else []
        for name in c.words["schedule"] if pp > 1 else ():
            rule = RULES[name]
            for virtual in self.virtuals(pp) if rule.most_virtual > 2 else c.numbers("virtual", [rule.virtual]):
                uneven = layers % (pp * virtual) != 0
                if pp * virtual > layers or (uneven and not c.uneven) or refusal(name, pp, microbatches, virtual):
                    continue
                if name in ("interleaved", "interleaved-zb") and microbatches % pp:
                    continue
                found.append((SCHEDULES.index(name), virtual))
        columns = np.array(found, np.int64).reshape(-1, 2).T
        return Table(schedule=columns[0], virtual=columns[1])

    def __len__(self) -> int:
        """Legal plans, counted without writing them down."""
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
        """The whole space, some rows at a time."""
        for rows in self.frames.chunks(8):
            for part in self.placed(self.shaped(rows)).chunks(64):
                yield from self.scheduled(self.sharded(part)).chunks(size)

    # To what is costed, and to what is written

    @cached_property
    def _unsearched(self) -> dict[str, np.ndarray]:
        """Fields of a batch as the base plan has them."""
        one = Batch.of([self.base], self.model, self.workload, self.stack)
        return {
            name: value for name, value in vars(one).items() if isinstance(value, np.ndarray) and value.shape == (1,)
        }

    def batch(self, rows: Table) -> Batch:
        """Rows as a batch to lower. What lower layers would say is plain: data-parallel copies, naive schedule, every axis innermost."""
        n = len(rows)
        f: dict[str, Any] = {name: np.repeat(value, n) for name, value in self._unsearched.items()}
        f |= {name: rows.columns[name].astype(float) for name in ("tp", "cp", "pp", "ep", "etp", "microbatch")}
        unsaid = {"replicate": rows.dp, "shard": np.ones(n), "zero": np.zeros(n), "virtual": np.ones(n)}
        f |= {name: rows.columns.get(name, default).astype(float) for name, default in unsaid.items()}
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
        laps = [self.stack.overlap if o is None else o for o in self.overlaps]
        f["overlap"] = {axis: np.array([float(axis in o) for o in laps])[rows.lap] for axis in OVERLAP_AXES}
        f["bucket"] = np.full(n, self.bucket) if self.bucket else bucket_for(self.cluster, rows.dp * rows.cp)
        f["layers_per_stage"] = ()  # as even as can be
        return (Batch if "order" in rows else Innermost)(f, self.model, self.workload, self.stack)

    def plan(self, rows: Table, i: int) -> Plan:
        """One row as a plan; what is as the stack or as the default stays unsaid."""
        r = rows.row(i)
        order = ORDERS[r["order"]]
        said: dict[str, Any] = {
            name: r[name] for name in ("replicate", "shard", "tp", "sp", "cp", "pp", "ep", "microbatch", "zero")
        }
        said |= {
            "cp_kind": CP_KINDS[r["cp_kind"]],
            "recompute": RECOMPUTE[r["recompute"]],
            "overlap": self.overlaps[r["lap"]],
        }
        said |= {"schedule": SCHEDULES[r["schedule"]], "virtual": r["virtual"]} if r["pp"] > 1 else {}
        said |= dict(zip(DTYPES, self.dtypes[r["dtype"]], strict=True))
        if r["zero"] == 3:
            said |= {"reshard": r["reshard"], "reduce": "auto" if r["reduce_each"] else "step"}
        said["bucket"] = self.bucket or float(bucket_for(self.cluster, r["dp"] * r["cp"]))
        if r["etp"] != r["tp"]:
            said["expert_tp"] = r["etp"]
        if order != tuple(self.stack.order):
            said["order"] = order
        return self.base.but(**said)
