"""The values that each field of a plan can take here: which are legal, what must change with them, and why the others are not.

A person who moves one slider keeps the number of GPUs in mind: halving tp should double the data-parallel degree, not break the plan. So a
value that is not legal alone is completed: by the data-parallel degree, sequence, experts and micro-batch (`fixes.completed`), and by the
changes that the broken rules propose. The first completed plan that breaks no rule makes the value a legal choice, with its `changes`. A
value without one is not legal, and its reason is the first rule that it breaks.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Any

import numpy as np

from meshwright.describe.legality import rules_for
from meshwright.describe.legality.case import Case, Flag, completed, divisors
from meshwright.describe.plan_fields import AXES, DTYPES, WORDS, PlanFields, encode
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.variants import COMPRESSIONS

# Rules read them
RULED_WORDS = ("schedule", "cp_kind", "recompute", "compression", "tp_form", "param_dtype", "gather_dtype")
MOST_VALUES = 48  # of one field
MOST_TRIED = 12  # completions of one value
MOST_VIRTUAL, MOST_MICROBATCH = 16, 64
DEGREES = ("replicate", "shard", "tp", "cp", "pp")
FREE_DEGREES = tuple(2**k for k in range(11))  # where the cluster has no size
BUCKETS = (1e6, 5e6, 25e6, 50e6, 100e6, 200e6, 400e6, 800e6)  # bytes
COMPRESSION_OPTIONS = {
    "compression_ratio": (0.001, 0.01, 0.05, 0.1, 0.25),
    "compression_rank": (1, 2, 4, 8, 16, 32),
    "compression_threshold": (1.0, 2.0, 3.0, 4.0),
}


@dataclass(frozen=True)
class Choice:
    """One value of a field. `changes` are other fields to set together with it; `reason` names them, or says why the value is not legal."""

    value: Any
    legal: bool
    reason: str = ""
    changes: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "legal": self.legal, "reason": self.reason, "changes": self.changes or {}}


def choices(
    case: Case, legal: Callable[[Case], Flag], fields: Collection[str] = (), explained: bool = True
) -> dict[str, list[Choice]]:
    """The choices of every field that is a number, a word or a flag, or of some `fields`. Finding the reason why a value is not legal takes time:
    without `explained` the reason is empty."""
    offered = {field: values for field, values in candidates(case).items() if not fields or field in fields}
    return {field: _choices(case, field, values, legal, explained) for field, values in offered.items()}


def candidates(case: Case) -> dict[str, list[Any]]:
    """The values to offer for each field, in order; the present value is always among them."""
    by_field: dict[str, list[Any]] = {name: list(WORDS[name]) for name in RULED_WORDS}
    world = case.cluster.world if "cluster" in case.given else 0
    degrees = divisors(world) if world else list(FREE_DEGREES)
    by_field |= dict.fromkeys(DEGREES, degrees)
    experts = case.model.experts if "model" in case.given else 0
    batch = case.workload.batch // case.dp if "workload" in case.given and case.workload.batch % case.dp == 0 else 0
    by_field |= {
        "virtual": list(range(1, MOST_VIRTUAL + 1)),
        "ep": divisors(experts) if experts else [1],
        "expert_tp": [0, *divisors(case.tp)] if experts else [0],
        "microbatch": [d for d in divisors(batch) if d <= MOST_MICROBATCH] if batch else list(FREE_DEGREES[:7]),
        "zero": [0, 1, 2, 3],
        "sp": [False, True],
        "master": [False, True],
    }
    return {name: _around(values, case.setting(f"plan.{name}")) for name, values in by_field.items()}


def _around(values: list[Any], present: Any) -> list[Any]:
    """Keep the present value and those near it, at most `MOST_VALUES`."""
    if isinstance(present, str | bool):
        return values
    present = int(present)
    near = sorted({*values, present}, key=lambda v: abs(math.log((v + 0.5) / (present + 0.5))))[:MOST_VALUES]
    return sorted(near)


def _choices(case: Case, field: str, values: list[Any], legal: Callable[[Case], Flag], explained: bool) -> list[Choice]:
    codes = np.array([encode(field, v) for v in values])
    alone = np.broadcast_to(np.asarray(legal(case.with_columns({field: codes}))), len(values))
    return [
        Choice(v, True) if good else _completed_choice(case, field, v, legal, explained)
        for v, good in zip(values, alone, strict=True)
    ]


def _completed_choice(case: Case, field: str, value: Any, legal: Callable[[Case], Flag], explained: bool) -> Choice:
    chosen = {f"plan.{field}": value}
    for settings in islice(_completions(case, field, value), MOST_TRIED):
        for trial in (settings, completed(case, settings) | chosen):
            if trial != chosen and case.allows(trial, legal):
                changes = {k.removeprefix("plan."): v for k, v in case.differing(trial).items() if k != f"plan.{field}"}
                return Choice(
                    value, True, "also sets " + ", ".join(f"{k} = {shown(v)}" for k, v in changes.items()), changes
                )
    if not explained:
        return Choice(value, False)
    best = case.with_settings(completed(case, chosen) | chosen)  # what stays broken when the other degrees follow
    broken = _first_broken(best)
    problem = broken.explain(best) if broken else None
    return Choice(value, False, ". ".join(filter(None, (problem.what, problem.why))) if problem else "")


def _completions(case: Case, field: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield settings with the chosen value, likeliest first: alone, with fields that usually change with it, with fixes of broken rules."""
    chosen = {f"plan.{field}": value}
    usual = {f"plan.{k}": v for k, v in _companions(case, field, value).items()}
    if usual:
        yield chosen | usual
    yield chosen
    for start in ({}, usual) if usual else ({},):
        settings = chosen | start
        broken = _first_broken(case.with_settings(settings))
        if broken is None:
            continue
        for fix in islice(broken.explain(case.with_settings(settings)).fixes, MOST_TRIED):
            if f"plan.{field}" not in fix and not any(path.startswith("workload.") for path in fix):
                yield settings | dict(fix)


def _companions(case: Case, field: str, value: Any) -> dict[str, Any]:
    """Fields that people change together with this one."""
    match field:
        case "zero" if value == 0:
            return {"replicate": case.dp, "shard": 1}
        case "zero" if case.zero == 0:
            return {"replicate": 1, "shard": case.dp}
        case "shard" | "replicate" if case.dp % value == 0:
            other = {"shard": "replicate", "replicate": "shard"}[field]
            companion = {other: case.dp // value}
            shard = value if field == "shard" else case.dp // value
            return companion | ({"zero": 1} if shard > 1 and case.zero == 0 else {})
        case "schedule":
            rule = SCHEDULES[value]
            return {"virtual": min(max(case.virtual, rule.virtual), rule.most_virtual)}
        case "virtual":
            one = SCHEDULES[case.word("schedule")].most_virtual == 1
            return {"schedule": "interleaved"} if value > 1 and one else {"schedule": "1f1b"} if value == 1 else {}
        case "pp" if value == 1:
            return {"virtual": 1, "schedule": "1f1b"}
        case "recompute":
            reset = {"recompute_every": 1, "recompute_layers": 0} if value != "full" else {}
            return reset | ({"recompute_budget": 0.0} if value != "auto" else {})
        case "offload" if value in ("none", "states"):
            return {"offload_layers": 0}
    return {}


def _first_broken(case: Case) -> Any:
    return next((rule for rule in rules_for(case.given) if rule.broken(case)), None)


def shown(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else str(list(value)) if isinstance(value, tuple) else str(value)
    )


def free_values(plan: PlanFields, layers: int, flat_shards: bool = False) -> dict[str, list[Any]]:
    """The values of the fields of which no rule refuses one. A field that has no effect in this plan is left out: the rank of PowerSGD
    without PowerSGD, buckets without data parallelism. ZeRO reduces unit by unit instead, except stages 1 and 2 of a stack with
    `flat_shards`. The present value is always among the values of a field."""
    reduces = plan.dp * plan.cp > 1
    longest = max(plan.layers_per_stage, default=-(-layers // plan.stages))
    units = [n for n in FREE_DEGREES if n <= max(1, longest)]
    # Wider than gradients: no effect
    dtypes = [d for d in DTYPES if d != "fp64" or d in (plan.grad_dtype, plan.comm_dtype)]
    by_field: dict[str, tuple[Any, ...] | list[Any]] = {"comm_dtype": [None, *dtypes]} if reduces else {}
    by_unit = plan.zero == 3 or (plan.zero > 0 and not flat_shards)
    if reduces:
        by_field |= {"wrap": [*units, 0]} if by_unit else {"bucket": BUCKETS}
    by_field |= {name: COMPRESSION_OPTIONS[name] for name in COMPRESSIONS[plan.compression].options}
    out = {name: list(values) for name, values in by_field.items()}
    for name, values in out.items():
        if getattr(plan, name) not in values:
            out[name] = sorted([*values, getattr(plan, name)])
    orders = order_values(plan)
    return word_values() | out | ({"order": orders} if len(orders) > 2 else {})


def order_values(plan: PlanFields) -> list[list[str]]:
    """The orders of the axes that place ranks differently: the position of axes of one rank does not matter. Empty: the stack's order."""
    used = [axis for axis in AXES if getattr(plan, axis) > 1]
    orders = {order: [*order, *(axis for axis in AXES if axis not in order)] for order in permutations(used)}
    if sorted(plan.order) == sorted(AXES):
        orders[tuple(axis for axis in plan.order if axis in used)] = list(plan.order)
    return [[], *orders.values()]


def word_values() -> dict[str, list[Any]]:
    """Values of the fields that no rule reads: all are legal everywhere."""
    free = {name: list(words) for name, words in WORDS.items() if name not in RULED_WORDS}
    return {name: words for name, words in free.items() if all(isinstance(word, str) for word in words)}
