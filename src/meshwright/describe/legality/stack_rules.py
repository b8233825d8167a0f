"""Rules of a training framework: what the stack's `can` says it cannot run.

`needs = ("stack", "framework")`: they apply where the plan is meant to run in that framework (the planner's answer, `lint`). A plan that breaks one
can still be estimated: what would it cost if the framework had it?
"""

from collections.abc import Sequence

import numpy as np

from meshwright.describe.legality.case import Case, Flag, LegalityRule, Problem, divisors, values
from meshwright.describe.plan_fields import CP_KINDS, RECOMPUTES
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.variants import ATTENTIONS

NEEDS = ("stack", "framework")
CODE = "MW-PLAN-023"


def outside(code: Flag, words: Sequence[str], allowed: Sequence[str]) -> Flag:
    """Whether the word of a code is not among the allowed ones."""
    if not allowed:
        return False
    table = np.array([word not in allowed for word in words])
    return table[code] if isinstance(code, np.ndarray) else bool(table[code])


def refusal(p: Case, what: str, field: str, allowed: Sequence[object]) -> Problem:
    can = p.stack.can
    return Problem(
        f"{can.framework or p.stack.name} does not run {what}",
        why=can.source,
        valid=[f"{field}={value}" for value in allowed],
        fixes=[{f"plan.{field}": value} for value in allowed],
    )


class StackHasAxis(LegalityRule, code=CODE, needs=NEEDS):
    def broken(self, p: Case) -> Flag:
        out: Flag = False
        for axis in p.stack.can.without:
            if axis in ("tp", "cp", "pp", "ep"):
                out = out | (getattr(p, axis) > 1)
            elif axis == "sp":
                out = out | (p.sp & (p.tp > 1))
            elif axis == "expert_tp" and "model" in p.given:
                out = out | ((p.model.experts > 0) & (p.etp > 1))
            elif axis == "hsdp":
                out = out | ((p.replicate > 1) & (p.zero > 0))
            elif axis == "recompute_layers":
                out = out | (p.recompute_layers > 0)
            elif axis == "tp_with_cp":
                out = out | ((p.tp > 1) & (p.cp > 1))
        return out

    def explain(self, p: Case) -> Problem:
        present = {
            "tp": p.tp > 1,
            "cp": p.cp > 1,
            "pp": p.pp > 1,
            "ep": p.ep > 1,
            "sp": p.sp and p.tp > 1,
            "expert_tp": p.etp > 1,
            "hsdp": p.replicate > 1 and p.zero > 0,
            "recompute_layers": p.recompute_layers > 0,
            "tp_with_cp": p.tp > 1 and p.cp > 1,
        }
        axis = next(name for name in p.stack.can.without if present.get(name))
        if axis == "hsdp":
            fixes = [{"plan.replicate": 1, "plan.shard": p.dp}]
            return Problem(
                f"{p.stack.can.framework} does not run replicas of sharded groups", p.stack.can.source, [], fixes
            )
        if axis == "tp_with_cp":
            return refusal(p, f"tp={p.tp} together with cp={p.cp}", "tp", [1])
        off = {"sp": False, "recompute_layers": 0}.get(axis, 1)
        return refusal(p, f"{axis}={p.setting(f'plan.{axis}')}", axis, [off])


class StackHasSchedule(LegalityRule, code=CODE, needs=NEEDS):
    def broken(self, p: Case) -> Flag:
        return (p.pp > 1) & outside(p.schedule, SCHEDULES.names, p.stack.can.schedules)

    def explain(self, p: Case) -> Problem:
        problem = refusal(p, f"the schedule {p.word('schedule')}", "schedule", p.stack.can.schedules)
        plain = {"plan.schedule": "1f1b", "plan.virtual": 1}
        return Problem(problem.what, problem.why, problem.valid, [*problem.fixes, plain])


class StackHasZero(LegalityRule, code=CODE, needs=NEEDS):
    def broken(self, p: Case) -> Flag:
        can = p.stack.can
        out: Flag = False
        for stage in (0, 1, 2, 3):
            if can.zero and stage not in can.zero:
                out = out | ((p.zero == stage) & (p.dp * p.cp > 1))
            if can.zero_in_pipeline and stage not in can.zero_in_pipeline:
                out = out | ((p.zero == stage) & (p.pp > 1) & ((p.dp > 1) | (stage > 0)))
            if can.zero_in_split and stage not in can.zero_in_split:
                out = out | ((p.zero == stage) & ((p.tp > 1) | (p.ep > 1)) & ((p.dp > 1) | (stage > 0)))
        return out

    def explain(self, p: Case) -> Problem:
        can = p.stack.can
        stages, where = can.zero, ""
        if p.zero in (can.zero or (0, 1, 2, 3)):  # alone it can run
            in_pipeline = p.pp > 1 and can.zero_in_pipeline and p.zero not in can.zero_in_pipeline
            stages = can.zero_in_pipeline if in_pipeline else can.zero_in_split
            where = " in a pipeline" if in_pipeline else " with tensor or expert parallelism"
        problem = refusal(p, f"ZeRO-{p.zero}{where}", "zero", stages)
        replicas = {"plan.zero": 0, "plan.shard": 1, "plan.replicate": p.dp}
        return Problem(problem.what, problem.why, problem.valid, [*problem.fixes, replicas])


class StackHasContextKind(LegalityRule, code=CODE, needs=NEEDS):
    def broken(self, p: Case) -> Flag:
        return (p.cp > 1) & outside(p.cp_kind, CP_KINDS, p.stack.can.cp_kinds)

    def explain(self, p: Case) -> Problem:
        return refusal(p, f"{p.word('cp_kind')} context parallelism", "cp_kind", p.stack.can.cp_kinds)


class StackHasRecompute(LegalityRule, code=CODE, needs=NEEDS):
    def broken(self, p: Case) -> Flag:
        return outside(p.recompute, RECOMPUTES, p.stack.can.recomputes)

    def explain(self, p: Case) -> Problem:
        return refusal(p, f"recompute={p.word('recompute')}", "recompute", p.stack.can.recomputes)


class StackDividesKvHeads(LegalityRule, code=CODE, needs=("model", *NEEDS)):
    def broken(self, p: Case) -> Flag:
        m = p.model
        return (
            p.stack.can.tensor_divides_kv
            & (m.kind == "transformer" and ATTENTIONS[m.attention].reads("kv_heads"))
            & (m.kv_groups % p.tp != 0)
        )

    def explain(self, p: Case) -> Problem:
        legal = [d for d in divisors(p.model.kv_groups) if p.model.heads % d == 0]
        return Problem(
            f"tp={p.tp} does not divide the {p.model.kv_groups} KV heads of {p.model.name}",
            why=f"{p.stack.can.framework} gives every rank whole KV heads",
            valid=legal,
            fixes=values("plan.tp", legal, p.tp),
        )


class StackHasEvenStages(LegalityRule, code=CODE, needs=("model", *NEEDS)):
    def broken(self, p: Case) -> Flag:
        if not p.stack.can.even_stages or p.model.kind == "counts":
            return False
        return (p.pp > 1) & (p.stage_entries == 0) & (p.model.layers % p.stages != 0)

    def explain(self, p: Case) -> Problem:
        layers = p.model.layers
        fitting = [v for v in divisors(layers) if layers % (p.pp * v) == 0]
        return Problem(
            f"{layers} layers of {p.model.name} do not divide over pp × virtual = {p.pp} × {p.virtual} stages",
            why=f"{p.stack.can.framework} gives every stage the same number of layers",
            valid=[f"virtual={v}" for v in fitting] or [f"pp={d}" for d in divisors(layers)],
            fixes=[
                *values("plan.virtual", [v for v in fitting if v > 1], p.virtual),
                {"plan.virtual": 1, "plan.schedule": "1f1b"},
                *values("plan.pp", divisors(layers), p.pp),
            ],
        )


class StackStatesStages(LegalityRule, code=CODE, needs=("model", *NEEDS)):
    """torchtitan: `n` layers per stage make ceil(L / n) stages, or ceil((L + 2) / n) with embedding and head: not every number can be stated."""

    def broken(self, p: Case) -> Flag:
        if not p.stack.can.stages_by_size or p.model.kind == "counts":
            return False
        out: Flag = (p.pp > 1) & (p.virtual > 2)
        for parts in (p.model.layers + 2, p.model.layers):
            size = -(-parts // p.stages)
            out = out & (-(-parts // size) != p.stages)
        return out

    def explain(self, p: Case) -> Problem:
        return refusal(
            p,
            f"{p.stages} stages of {p.model.layers} layers, which no number of layers per stage gives",
            "virtual",
            [2],
        )


class StackShardsOverContext(LegalityRule, code=CODE, needs=NEEDS):
    def broken(self, p: Case) -> Flag:
        return p.stack.can.shards_context & (p.cp > 1) & (p.zero != 3)

    def explain(self, p: Case) -> Problem:
        return refusal(p, f"cp={p.cp} with ZeRO-{p.zero}: context-parallel ranks shard the weights", "zero", [3])
