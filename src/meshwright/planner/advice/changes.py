"""What one change of a plan would give: every legal value of every field with its step time and memory, and what to change first.

Each alternative value is completed to a legal plan (`describe.legality.choices`: the other degrees follow), and all plans are costed in one
batch, so a whole table of chips takes a fraction of a second. `first_changes` sorts those that fit by the seconds they save, together with
pairs whose first change is faster but does not fit alone and whose second change makes room: tp 4 instead of 8 with recompute = full. Where
the plan itself does not fit, the first change of a pair makes room, whether it fits alone or not.

Only fields that leave the arithmetic of the training as it is are offered: no other dtype, no lossy compression, no local SGD.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal
from meshwright.describe.legality.choices import Choice, choices, free_values, shown
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.result import GIB, USABLE_MEMORY, values_of
from meshwright.planner.advice.alternatives import changed, costs, settings, within_memory
from meshwright.planner.advice.lint.finding import SHOWN
from meshwright.units import Json, format_decimal_bytes

KNOBS = (
    "tp", "sp", "pp", "virtual", "schedule", "cp", "cp_kind", "ep", "expert_tp", "replicate", "shard", "zero", "microbatch", "recompute",
    "bucket", "wrap", "reduce", "order", "offload",
)  # fmt: skip
MOST_FIRST = 12  # first changes of which a second one is tried
WORTH = 0.005  # share of the step that a second change must save beyond the best single one


@dataclass(frozen=True)
class Change:
    """One or two chosen values, and the plan that they lead to: None where it is not legal. `reason` says why, or which other fields follow."""

    fields: tuple[tuple[str, Any], ...]
    reason: str = ""
    plan: Plan | None = None
    step_time_s: float | None = None
    saves_s: float | None = None
    memory_gib: float | None = None
    more_gib: float | None = None
    fits: bool = False
    fix: str = ""  # `--set` options

    @property
    def saved(self) -> float:
        return self.saves_s or 0.0

    @property
    def title(self) -> str:
        words = (
            (name, format_decimal_bytes(value) if name == "bucket" else shown(value)) for name, value in self.fields
        )
        return " and ".join(f"{name} = {value}" for name, value in words)

    def as_dict(self) -> Json:
        values = values_of(self, "reason", "step_time_s", "saves_s", "memory_gib", "more_gib", "fits", "fix")
        return {"fields": dict(self.fields), "legal": self.plan is not None, **values}


def first_changes(config: Config, most: int = 5) -> list[Change]:
    """The changes that save most, the best first and one for each field; where the plan itself does not fit, those that cost least.

    They leave 5% of the memory free, as the search demands of its winner, or as much as the plan does."""
    now, *singles = priced(config, [Change((), plan=config.plan), *candidates(config, config.plan)])
    if now.plan is None:  # `recompute = auto` without a number of layers that fits: no seconds to compare with
        return []
    limit = config.cluster.accelerator.memory / GIB
    room = max(USABLE_MEMORY * limit, now.memory_gib or 0.0) if now.fits else limit

    def has_room(change: Change) -> bool:
        return change.fits and (change.memory_gib or 0.0) <= room

    fitting = [change for change in singles if has_room(change)]
    target = max((change.saved for change in fitting), default=0.0) if now.fits else -math.inf
    faster = (change for change in singles if change.plan and not has_room(change) and change.saved > target)
    firsts = faster if now.fits else (change for change in singles if (change.more_gib or 0.0) < 0)
    drafts = [
        both(first, second, config.plan)
        for first in sorted(firsts, key=lambda c: -c.saved)[:MOST_FIRST]
        for second in candidates(config, first.plan, seconds_of(config, first))
        if second.plan
    ]
    alone = {change.fields: change.saved for change in fitting}

    def beats_singles(pair: Change) -> bool:
        best = max(target, *(alone.get((chosen,), -math.inf) for chosen in pair.fields))
        return pair.saved > best + WORTH * (now.step_time_s or 0.0)

    pairs = [change for change in priced(config, drafts) if has_room(change) and beats_singles(change)]
    useful = [c for c in (*fitting, *pairs) if c.saved > SHOWN * (now.step_time_s or 0.0) or not now.fits]
    best: dict[tuple[str, ...], Change] = {}
    for change in sorted(useful, key=lambda c: (-c.saved, len(c.fields))):
        if all(change.plan != other.plan for other in best.values()):
            best.setdefault(tuple(name for name, _ in change.fields), change)
    return list(best.values())[:most]


def both(first: Change, second: Change, now: Plan) -> Change:
    """Two changes as one. What follows from the second may overwrite a value of the first: the title then has the value of the plan."""
    fields = []
    for name, value in first.fields:
        planned = getattr(second.plan, name)
        if planned == getattr(first.plan, name):
            fields.append((name, value))
        elif planned != getattr(now, name):
            fields.append((name, planned))
    return replace(second, fields=(*fields, *second.fields))


def offers(
    case: Case, plan: PlanFields, fields: Collection[str] = (), explained: bool = True
) -> dict[str, list[Choice]]:
    """The values of every field, or of some: those that a rule decides on, and those that are always legal."""
    free = free_values(plan, case.model.layers, case.stack.flat_shards)
    always = {name: values for name, values in free.items() if not fields or name in fields}
    ruled = choices(case, legal, fields, explained)
    return ruled | {name: [Choice(value, True) for value in values] for name, values in always.items()}


def seconds_of(config: Config, first: Change) -> dict[str, list[Choice]]:
    """The values of the fields that a second change may take after a first one."""
    assert first.plan is not None
    others = [name for name in KNOBS if name != first.fields[0][0]]
    return offers(_case(config, first.plan), first.plan, others, explained=False)


def _case(config: Config, plan: Plan) -> Case:
    c = config
    return Case(plan, c.model, c.workload, c.cluster, c.stack, framework=bool(c.stack.can.framework))


def candidates(
    config: Config, plan: Plan | None, offered: Mapping[str, Sequence[Choice]] | None = None
) -> list[Change]:
    """Every other value of the fields of `KNOBS`, completed to a legal plan or with the reason why there is none. `offered` has the values of
    each field; default: those that the stack's framework runs."""
    c = config
    assert plan is not None
    if offered is None:
        offered = offers(_case(c, plan), plan, KNOBS)
    found = []
    for name in KNOBS:
        for choice in offered.get(name, ()):
            value = tuple(choice.value) if isinstance(choice.value, list) else choice.value
            if value == getattr(plan, name):
                continue
            if name == "offload" and value not in ("none", *c.stack.offload_kinds):
                found.append(Change(((name, value),), f"the stack {c.stack.name} does not offload {value}"))
                continue
            other = changed(plan, **{name: value}, **(choice.changes or {})) if choice.legal else None
            found.append(Change(((name, value),), choice.reason, other))
    return found


def priced(config: Config, drafts: Iterable[Change]) -> list[Change]:
    """The changes with their step time and memory, all costed in one batch beside the plan that they change; without a plan where
    `recompute = auto` finds no number of layers that fits."""
    drafts = list(drafts)
    present, *resolved = within_memory(config, [config.plan, *(draft.plan for draft in drafts if draft.plan)])
    if present is None:
        return [replace(draft, plan=None) for draft in drafts]
    plans = iter(resolved)
    drafts = [replace(draft, plan=next(plans)) if draft.plan else draft for draft in drafts]
    seconds, gib = costs(config, [present, *(draft.plan for draft in drafts if draft.plan)])
    limit = config.cluster.accelerator.memory / GIB
    numbers = iter(zip(seconds[1:].tolist(), gib[1:].tolist(), strict=True))

    def with_numbers(draft: Change) -> Change:
        if draft.plan is None:
            return draft
        time, memory = next(numbers)
        return replace(
            draft,
            step_time_s=time,
            saves_s=float(seconds[0]) - time,
            memory_gib=memory,
            more_gib=memory - float(gib[0]),
            fits=memory <= limit,
            fix=settings(config.plan, draft.plan),
        )

    return [with_numbers(draft) for draft in drafts]
