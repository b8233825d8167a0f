"""Rules of a training framework: what the stack's `can` says it cannot run.

`needs = ("stack", "framework")`: they apply where the plan is meant to run in that framework (the planner's answer, `lint`). A plan that breaks one
can still be estimated: what would it cost if the framework had it?
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

import numpy as np

from meshwright.describe.legality.case import Case, Flag, Problem, Reading, divisors, rule, values
from meshwright.describe.plan_fields import CP_KINDS, RECOMPUTES
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.variants import ATTENTIONS

NEEDS = ("stack", "framework")
CODE = "MW-PLAN-023"


def outside(code: Flag, words: Sequence[object], allowed: Sequence[object]) -> Flag:
    """Whether the word of a code is not among the allowed ones."""
    if not allowed:
        return False
    table = np.array([word not in allowed for word in words])
    return table[code] if isinstance(code, np.ndarray) else bool(table[code])


def refusal(p: Case, what: str, field: str, allowed: Sequence[object], *fixes: Mapping[str, object]) -> Problem:
    """The problem of a plan with a value of a field that the framework does not run; `fixes` follow those of the field."""
    can = p.stack.can
    return Problem(
        f"{can.framework or p.stack.name} does not run {what}",
        why=can.source,
        valid=[f"{field}={value}" for value in allowed],
        fixes=[*({f"plan.{field}": value} for value in allowed), *fixes],
    )


@rule(CODE, *NEEDS)
def stack_has_axis(p: Case) -> Reading:
    present = {
        **{axis: getattr(p, axis) > 1 for axis in ("tp", "cp", "pp", "ep")},
        "sp": p.sp & (p.tp > 1),
        "expert_tp": (p.etp > 1) & ("model" in p.given and p.model.experts > 0),
        "hsdp": (p.replicate > 1) & (p.zero > 0),
        "recompute_layers": p.recompute_layers > 0,
        "tp_with_cp": (p.tp > 1) & (p.cp > 1),
    }
    lacking = [axis for axis in p.stack.can.without if axis in present]
    yield reduce(or_, (present[axis] for axis in lacking), False)
    axis = next(axis for axis in lacking if present[axis])
    if axis == "hsdp":
        what = f"{p.stack.can.framework} does not run replicas of sharded groups"
        yield Problem(what, p.stack.can.source, fixes=[{"plan.replicate": 1, "plan.shard": p.dp}])
    if axis == "tp_with_cp":
        yield refusal(p, f"tp={p.tp} together with cp={p.cp}", "tp", [1])
    off = {"sp": False, "recompute_layers": 0}.get(axis, 1)
    yield refusal(p, f"{axis}={p.setting(f'plan.{axis}')}", axis, [off])


@rule(CODE, *NEEDS)
def stack_has_schedule(p: Case) -> Reading:
    yield (p.pp > 1) & outside(p.schedule, SCHEDULES.names, p.stack.can.schedules)
    plain = {"plan.schedule": "1f1b", "plan.virtual": 1}
    yield refusal(p, f"the schedule {p.word('schedule')}", "schedule", p.stack.can.schedules, plain)


@rule(CODE, *NEEDS)
def stack_has_zero(p: Case) -> Reading:
    can = p.stack.can
    some = (p.dp > 1) | (p.zero > 0)
    limits = (
        (can.zero, p.dp * p.cp > 1, ""),
        (can.zero_in_pipeline, some & (p.pp > 1), " in a pipeline"),
        (can.zero_in_split, some & ((p.tp > 1) | (p.ep > 1)), " with tensor or expert parallelism"),
    )
    broken = [applies & outside(p.zero, range(4), stages) for stages, applies, _ in limits]
    yield broken[0] | broken[1] | broken[2]
    stages, _, where = limits[next(k for k in range(3) if broken[k])]
    replicas = {"plan.zero": 0, "plan.shard": 1, "plan.replicate": p.dp}
    yield refusal(p, f"ZeRO-{p.zero}{where}", "zero", stages, replicas)


@rule(CODE, *NEEDS)
def stack_has_context_kind(p: Case) -> Reading:
    yield (p.cp > 1) & outside(p.cp_kind, CP_KINDS, p.stack.can.cp_kinds)
    yield refusal(p, f"{p.word('cp_kind')} context parallelism", "cp_kind", p.stack.can.cp_kinds)


@rule(CODE, *NEEDS)
def stack_has_recompute(p: Case) -> Reading:
    yield outside(p.recompute, RECOMPUTES, p.stack.can.recomputes)
    yield refusal(p, f"recompute={p.word('recompute')}", "recompute", p.stack.can.recomputes)


@rule(CODE, "model", *NEEDS)
def stack_divides_kv_heads(p: Case) -> Reading:
    m = p.model
    grouped = m.kind == "transformer" and ATTENTIONS[m.attention].reads("kv_heads")
    yield p.stack.can.tensor_divides_kv & grouped & (m.kv_groups % p.tp != 0)
    legal = [d for d in divisors(m.kv_groups) if m.heads % d == 0]
    yield Problem(
        f"tp={p.tp} does not divide the {m.kv_groups} KV heads of {m.name}",
        why=f"{p.stack.can.framework} gives every rank whole KV heads",
        valid=legal,
        fixes=values("plan.tp", legal, p.tp),
    )


@rule(CODE, "model", *NEEDS)
def stack_has_even_stages(p: Case) -> Reading:
    if not p.stack.can.even_stages or p.model.kind == "counts":
        return
    yield (p.pp > 1) & (p.stage_entries == 0) & (p.model.layers % p.stages != 0)
    layers = p.model.layers
    fitting = [v for v in divisors(layers) if layers % (p.pp * v) == 0]
    yield Problem(
        f"{layers} layers of {p.model.name} do not divide over pp × virtual = {p.pp} × {p.virtual} stages",
        why=f"{p.stack.can.framework} gives every stage the same number of layers",
        valid=[f"virtual={v}" for v in fitting] or [f"pp={d}" for d in divisors(layers)],
        fixes=[
            *values("plan.virtual", [v for v in fitting if v > 1], p.virtual),
            {"plan.virtual": 1, "plan.schedule": "1f1b"},
            *values("plan.pp", divisors(layers), p.pp),
        ],
    )


@rule(CODE, "model", *NEEDS)
def stack_states_stages(p: Case) -> Reading:
    """torchtitan: `n` layers per stage make ceil(L / n) stages, or ceil((L + 2) / n) with embedding and head: not every number can be stated."""
    if not p.stack.can.stages_by_size or p.model.kind == "counts":
        return
    out: Flag = (p.pp > 1) & (p.virtual > 2)
    for parts in (p.model.layers + 2, p.model.layers):
        size = -(-parts // p.stages)
        out = out & (-(-parts // size) != p.stages)
    yield out
    what = f"{p.stages} stages of {p.model.layers} layers, which no number of layers per stage gives"
    yield refusal(p, what, "virtual", [2])


@rule(CODE, *NEEDS)
def stack_shards_over_context(p: Case) -> Reading:
    yield p.stack.can.shards_context & (p.cp > 1) & (p.zero != 3)
    yield refusal(p, f"cp={p.cp} with ZeRO-{p.zero}: context-parallel ranks shard the weights", "zero", [3])
