"""The legal options of each layer of the space of plans (`space`): degrees, kinds of attention, experts, micro-batches, orders of the axes,
shardings and schedules.

**Legal** plans are those that `describe.legality` accepts. Each layer calls this one predicate, with the fields of lower layers at their least
demanding values. Stages may have unequal numbers of layers. Unequal *virtual* stages are enumerated only if no equal ones exist or if a
constraint names `virtual`, because ranks then wait for each other.

**Duplicates**, different fields for the same plan, are enumerated once: schedules of a one-stage pipeline, sp with tp = 1, cp_kind with cp = 1,
ZeRO that shards nothing or keeps whole gradients (ZeRO-2 that reduces once per step, as in a pipeline, is ZeRO-1), reshard and reduce in a
pipeline, whose stages gather weights and reduce gradients once per step, looped schedules with one stage per rank, and
orders of the axes that put the same number of members of every group into every unit of the cluster. One dominated choice is excluded: reducing
after every micro-batch under ZeRO-0 or 1 sends more bytes and saves no memory.
"""

from collections.abc import Mapping
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshwright.describe import legality
from meshwright.describe.axes import members_in_unit
from meshwright.describe.config import Config, Configured
from meshwright.describe.legality import Case
from meshwright.describe.plan import AXES, Plan, divisors
from meshwright.describe.plan_fields import CP_KINDS, ORDERS, RECOMPUTES, PlanArrays, encode
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.variants import ATTENTIONS
from meshwright.planner.search.choices import Choices, free, limited

# [order, axis, other]: whether the other axis varies faster than the axis.
FASTER = np.array([[[o.index(b) < o.index(a) for b in AXES] for a in AXES] for o in ORDERS])
LEAST = ("replicate", "shard", "zero", "tp", "sp", "cp", "pp", "virtual", "ep", "expert_tp", "microbatch", "recompute")
MOST_UNEVEN = 8  # most virtual stages per rank if no number divides the layers evenly


def distinct(degrees: np.ndarray, *columns: int) -> list[list[int]]:
    """One row (tp, cp, pp, dp) for each distinct combination of some of its columns."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row in degrees.T.tolist():
        rows.setdefault(tuple(row[k] for k in columns), row)
    return list(rows.values())


class LegalOptions(Configured):
    """The legal options of one problem, layer by layer. The plan of the configuration has the values of fields that are not searched."""

    def __init__(self, config: Config, choices: Choices | None = None, bucket: float = 0.0) -> None:
        self.bucket = bucket  # bytes of a gradient bucket; 0: what the plan's data-parallel group needs
        self.config, self.base = config, config.plan
        self.choices = limited(choices or free(self.base), self.stack)
        self.overlaps = list(self.choices.words["overlap"])
        self.dtypes = self.choices.dtypes
        self.units = tuple(self.cluster.spans[:-1])

    def legal(self, columns: Mapping[str, Any]) -> np.ndarray:
        """Mark legal rows. Fields missing from `columns` belong to lower layers and take their least demanding value: micro-batch 1,
        replicated data parallelism, no sequence parallelism, the naive schedule."""
        rows = len(next(iter(columns.values())))
        return np.broadcast_to(legality.legal(self.least.with_columns(columns)), rows)

    @cached_property
    def least(self) -> Case:
        """The simplest plan with the problem that it is checked against."""
        return Case(self.simplest, self.model, self.workload, self.cluster, self.stack)

    @cached_property
    def simplest(self) -> Plan:
        """The base plan with the least demanding value of every searched field."""
        words = {"cp_kind": "all-gather", "schedule": "naive"}
        return self.base.but(**{name: Plan.model_fields[name].default for name in LEAST}, **words)

    @cached_property
    def degrees(self) -> np.ndarray:
        """[4, n]: every (tp, cp, pp, dp) that is legal with some choice of the lower layers."""
        c, world = self.choices, self.cluster.world
        splits = self._splits(np.array(c.numbers("tp", divisors(world)), np.int64))
        degrees = [
            (tp, cp, pp, dp)
            for tp in splits
            for pp in c.numbers("pp", divisors(world // tp))
            if pp > 1 or c.allows("virtual", 1)
            for cp in c.numbers("cp", divisors(world // (tp * pp)))
            if tp == 1 or cp == 1 or "tp_with_cp" not in self.stack.can.without
            if c.allows("dp", dp := world // (tp * pp * cp))
        ]
        rows = np.array(degrees, np.int64).reshape(-1, 4).T
        tps, cps, pps, dps = rows
        known = {"tp": tps, "cp": cps, "pp": pps, "replicate": dps, "expert_tp": self._least_expert_tp(tps)}
        return rows[:, self.legal(known)]

    def _splits(self, tp: np.ndarray) -> list[int]:
        """Tensor-parallel degrees that the model accepts."""
        case = Case(self.base.but(tp=1), self.model).with_columns({"tp": tp, "expert_tp": self._least_expert_tp(tp)})
        legal_tp = [int(t) for t in tp[np.broadcast_to(legality.legal(case), len(tp))]]
        grouped = self.model.kind == "transformer" and ATTENTIONS[self.model.attention].reads("kv_heads")
        if grouped and self.stack.can.tensor_divides_kv:
            return [t for t in legal_tp if self.model.kv_groups % t == 0]
        return legal_tp

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
        by_degrees: dict[tuple[int, int], list[tuple[bool, int]]] = {}
        for t, c, s, k in zip(tp[legal], cp[legal], sp[legal], kind[legal], strict=True):
            by_degrees.setdefault((int(t), int(c)), []).append((bool(s), int(k)))
        return by_degrees

    @cached_property
    def experts(self) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
        """Legal (expert tp, ep) of every (tp, cp, dp): both re-factorise the ranks of one stage."""
        c = self.choices
        by_degrees: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        if not self.model.experts:
            for tp, cp, _, dp in self.degrees.T.tolist():
                by_degrees[tp, cp, dp] = [(tp, 1)] if c.allows("ep", 1) else []
            return by_degrees
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
            by_degrees.setdefault((t, k, d), []).append((e, n))
        return by_degrees

    @cached_property
    def recompute_codes(self) -> list[int]:
        """Codes of the legal kinds of recompute."""
        codes = np.array([RECOMPUTES.index(word) for word in self.choices.words["recompute"]])
        case = Case(self.base, self.model).with_columns({"recompute": codes})
        return [int(code) for code in codes[np.broadcast_to(legality.legal(case), len(codes))]]

    @cache  # noqa: B019  (a space lives as long as its search)
    def sizes(self, dp: int, pp: int) -> PlanArrays:
        """Micro-batch sizes that divide a data-parallel rank's share of the batch and that some schedule can run."""
        share = self.workload.batch // dp
        legal = [d for d in self.choices.numbers("microbatch", divisors(share)) if len(self.schedules(pp, share // d))]
        return PlanArrays(microbatch=np.array(legal, np.int64))

    @cache  # noqa: B019
    def orders(self, tp: int, cp: int, pp: int, dp: int) -> PlanArrays:
        """One order (its code) for each distinct placement: numbers of members of a tp, cp, pp and dp group in each unit."""
        codes = [ORDERS.index(o) for o in (tuple(self.stack.order), *ORDERS) if o in self.choices.words["order"]]
        sizes = np.array([tp, cp, pp, dp])
        stride = np.where(FASTER[codes], sizes, 1).prod(axis=2)  # [order, axis]: product of the axes before it
        plan = SimpleNamespace(tp=tp, cp=cp, pp=pp, replicate=dp, shard=1)
        strides = dict(zip(("tp", "cp", "pp", "replicate"), stride.T, strict=True)) | {"shard": stride[:, 3]}
        inside = [members_in_unit(plan, strides, axis, unit) for axis in AXES for unit in self.units]
        by_members: dict[tuple[int, ...], int] = {}
        for row, code in zip(np.array(inside).reshape(-1, len(codes)).T.tolist(), codes, strict=True):
            by_members.setdefault(tuple(row), code)
        return PlanArrays(order=np.array(list(by_members.values()), np.int64))

    @cache  # noqa: B019
    def shardings(self, dp: int, repeated: int, piped: int, split: int = 0) -> PlanArrays:
        """replicate, shard, zero, reshard, reduce of `dp` ranks; `repeated`: context-parallel ranks
        repeat the weights, so ZeRO can shard over them even if shard = 1. `piped`: the stages of a pipeline gather weights and reduce
        gradients once per step, so reshard and reduce have no effect and ZeRO-2 is ZeRO-1. `split`: tp or ep limits the stages."""
        c, can = self.choices, self.stack.can
        stages = c.numbers("zero", c.words["zero"])
        if piped and can.zero_in_pipeline:
            stages = [z for z in stages if z in can.zero_in_pipeline or (z == 0 and dp == 1)]
        if split:
            stages = [z for z in stages if z in can.zero_in_split or (z == 0 and dp == 1)]
        if repeated and can.shards_context:
            stages = [z for z in stages if z == 3]
        options = []
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
                    for reduce in reduces if zero == 3 else (self.base.reduce,):
                        options.append((replicate, shard, zero, reshard, encode("reduce", reduce)))
        columns = np.array(options, np.int64).reshape(-1, 5).T
        return PlanArrays(
            replicate=columns[0], shard=columns[1], zero=columns[2], reshard=columns[3] > 0, reduce=columns[4]
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
    def schedules(self, pp: int, microbatches: int) -> PlanArrays:
        """Legal schedules (codes) and numbers of virtual stages for `pp` ranks."""
        c, layers = self.choices, self.model.layers
        if pp == 1:
            return PlanArrays(schedule=np.array([SCHEDULES.names.index("1f1b")]), virtual=np.array([1]))
        options = [
            (SCHEDULES.names.index(name), virtual)
            for name in c.words["schedule"]
            for virtual in (
                self.virtuals(pp)
                if SCHEDULES[name].takes_any_virtual
                else c.numbers("virtual", [SCHEDULES[name].virtual])
            )
            if c.uneven or layers % (pp * virtual) == 0
        ]
        schedule, virtual = np.array(options, np.int64).reshape(-1, 2).T
        workload = self.workload.model_copy(update={"batch": microbatches})  # the batch of one rank, with micro-batch 1
        case = Case(self.least.columns, self.model, workload, stack=self.stack)
        legal = legality.legal(case.with_columns({"pp": pp, "schedule": schedule, "virtual": virtual}))
        legal = np.broadcast_to(legal, len(schedule))
        return PlanArrays(schedule=schedule[legal], virtual=virtual[legal])
