"""The values that the page's inputs offer, from the one predicate of legality: of each plan field, of GPUs, of fields of the workload, and of
adapters, each with the changes of the plan that keep it legal; for each legal value of the plan, how the step time and the memory change."""

from typing import Any, get_args

from meshwright.describe.adapter import PACKINGS
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, lacking_precision, legal, problem
from meshwright.describe.legality.case import mended
from meshwright.describe.legality.choices import Choice
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.result import GIB
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Precision, Scaling, Workload
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import SizedPlan, costs, within_memory
from meshwright.planner.advice.changes import KNOBS, candidates, offers
from meshwright.planner.sizing import MOST_GPUS
from meshwright.units import Json

NEAR = 2  # sizes on each side of the present one
IMBALANCES, RANKS = (1.0, 1.25, 1.5, 2.0, 3.0), (8, 16, 64)
Effect = tuple[Json, Plan | SizedPlan]  # a choice, and the plan that it leads to


def choices(document: dict[str, Any]) -> Json:
    """For a plan file as JSON: {"fields": {field: [{"value", "legal", "reason", "changes", and "saves_s", "more_gib", "fits" of
    `planner.advice.changes` where the plan is legal, and "not_run", the stack's framework where it does not run it}]}, "sizes": the same for
    GPUs, the workload and adapters, "model": the fields of the model, and what `mend` says}.

    The plan itself may be illegal: the page then shows which choices mend it. A cluster without `gpus` takes the size of every plan.
    """
    config, plan, case = parts_of(document)
    offered, mending = offers(case, plan), mending_of(case)
    by_field = {field: [one.as_dict() for one in values] for field, values in offered.items()}
    mark_not_run(case, plan, by_field)
    legal_plan = Plan(**plan.model_dump()) if mending["problem"] is None and config.cluster.gpus else None
    by_size, effects = sizes(config, plan, legal_plan)
    if legal_plan:
        add_effects(config.but(plan=legal_plan), offered, by_field, effects)
    return {
        "fields": by_field,
        "sizes": by_size,
        "model": config.model.model_dump(mode="json"),
        "world": plan.world,
        **mending,
    }


def mark_not_run(case: Case, plan: PlanFields, fields: dict[str, list[Json]]) -> None:
    """Add `not_run`, the framework of the stack, to the legal choices with which it does not run the plan, where it runs the present one."""
    runner = Case(plan, case.model, case.workload, case.cluster, case.stack, framework=True)
    if not case.stack.can.framework or problem(runner):
        return
    for field, values in offers(runner, plan, KNOBS, explained=False).items():
        refused = {repr(one.value) for one in values if not one.legal}
        for choice in fields.get(field, ()):
            if choice["legal"] and repr(choice["value"]) in refused:
                choice["not_run"] = case.stack.can.framework


def mend(document: dict[str, Any]) -> Json:
    """For a plan file as JSON, {"problem": the plan's first broken rule or null, "mend": the changes of plan fields that make it legal, or null}."""
    return mending_of(parts_of(document)[2])


def mending_of(case: Case) -> Json:
    error = problem(case)
    return {"problem": error.as_dict() if error else None, "mend": mended(case, legal) if error else {}}


def parts_of(document: dict[str, Any]) -> tuple[Config, PlanFields, Case]:
    """The configuration without its plan, the plan, which may be illegal, and what the rules read."""
    config = Config.from_document({name: part for name, part in document.items() if name != "plan"})
    fields = document.get("plan")
    plan = PlanFields(**fields) if isinstance(fields, dict) else PlanFields()
    cluster = config.cluster if config.cluster.gpus else None
    return config, plan, Case(plan, config.model, config.workload, cluster, config.stack)


def add_effects(
    config: Config, offered: dict[str, list[Choice]], fields: dict[str, list[Json]], sized: list[Effect]
) -> None:
    """Add to each choice what it would do to the step time and the memory, as `estimate` says; all are costed together."""
    rows = list(sized)
    by_value = {(name, repr(plain(c["value"]))): c for name, choices_ in fields.items() for c in choices_}
    for change in candidates(config, config.plan, offered):
        if change.plan:
            name, value = change.fields[0]
            rows.append((by_value[name, repr(plain(value))], change.plan))
    present, *resolved = within_memory(config, [config.plan, *(plan for _, plan in rows)])
    if present is None:  # `recompute = auto` without a number of layers that fits: no seconds to compare with
        return
    fitting = [
        (choice, trial._replace(plan=plan) if isinstance(trial, SizedPlan) else plan)
        for (choice, trial), plan in zip(rows, resolved, strict=True)
        if plan
    ]
    seconds, gib = (x.tolist() for x in costs(config, [present, *(plan for _, plan in fitting)]))
    limit = config.cluster.accelerator.memory / GIB
    for (choice, _), time, size in zip(fitting, seconds[1:], gib[1:], strict=True):
        choice |= {"saves_s": seconds[0] - time, "more_gib": size - gib[0], "fits": size <= limit}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def sizes(config: Config, plan: PlanFields, legal_plan: Plan | None) -> tuple[dict[str, list[Json]], list[Effect]]:
    """For the number of GPUs and fields of the workload and of adapters: values near the present one, each with the changes that keep the plan
    legal; and what they lead to, where there is a legal plan to compare with."""
    w, cluster, fixed = config.workload, config.cluster, config.cluster if config.cluster.gpus else None
    model, adapter = config.model, config.adapter
    effects: list[Effect] = []

    def choice(
        value: Any, workload: Workload = w, sized: Cluster | None = fixed, is_knob: bool = True, model: Model = model
    ) -> Json:
        case = Case(plan, model, workload, sized, config.stack)
        error = lacking_precision(workload, sized) if sized else None  # which no change of the plan mends
        changes = None if error else mended(case, legal)
        if changes is None:
            error = error or problem(case)
            return {"value": value, "legal": False, "reason": error.what if error else "", "changes": {}}
        out = {"value": value, "legal": True, "reason": "", "changes": changes}
        if legal_plan and sized and is_knob and (workload, sized, model.adapter) != (w, cluster, adapter):
            parts: dict[str, Json] = {"plan": {}, "workload": {}}
            for path, x in changes.items():
                parts[path.partition(".")[0]][path.partition(".")[2]] = x
            trial = config.but(
                plan=legal_plan.but(**parts["plan"]),
                workload=workload.but(**parts["workload"]),
                cluster=sized,
                model=model,
            )
            effects.append((out, SizedPlan(trial.plan, trial.workload, sized, model)))
        return out

    def doubled(value: int) -> list[int]:
        return sorted({max(1, round(value * 2.0**k)) for k in range(-NEAR, NEAR + 1)})

    offered: dict[str, list[Any]] = {
        "batch": doubled(w.batch),
        "seq": doubled(w.seq),
        "precision": list(get_args(Precision)),
        "optimizer": list(OPTIMIZERS),
        "scaling": list(get_args(Scaling)),
    }
    if model.unit != "tokens":  # the page shows no field for a sequence
        offered.pop("seq")
    if model.experts and model.router.choice == "token" and not w.loads:
        offered["imbalance"] = sorted({*IMBALANCES, w.imbalance})
    out = {"cluster.gpus": [choice(gpus, w, sized) for gpus, sized in near_clusters(cluster)]}
    for field, values in offered.items():
        is_knob = field not in ("optimizer", "scaling")
        out[f"workload.{field}"] = [choice(v, w.but(**{field: v}), is_knob=is_knob) for v in values]
    if adapter.rank:
        targets = list(dict.fromkeys(((), ("all-linear",), tuple(adapter.targets))))
        fields: dict[str, list[Any]] = {
            "rank": sorted({*RANKS, adapter.rank}),
            "base": ["plain", *PACKINGS],
            "targets": targets,
        }
        for field, values in fields.items():
            out[f"adapter.{field}"] = [
                choice(plain(v), model=model.but(adapter=adapter.but(**{field: v}))) for v in values
            ]
    return out, effects


def near_clusters(cluster: Cluster) -> list[tuple[int, Cluster]]:
    """Numbers of GPUs on each side of the present one: parts of a node, then whole nodes up to what the levels reach."""
    node, now = cluster.node_size, cluster.world
    counts = {2**k for k in range(18) if 2**k < node} | {node * 2**k for k in range(18)}
    below, above = sorted(c for c in counts if c < now), sorted(c for c in counts if now < c <= max(MOST_GPUS, now))
    out = []
    for count in [*below[-NEAR:], now, *above[:NEAR]]:
        try:
            out.append((count, cluster.with_gpus(count)))
        except MeshwrightError:
            continue
    return out
