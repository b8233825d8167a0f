"""The values that the page's inputs offer, from the one predicate of legality: of each plan field, and of GPUs, batch, sequence and precision,
each with the changes of the plan that keep it legal; for each legal value of the plan, how the step time and the memory change."""

from typing import Any, get_args

from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal, problem
from meshwright.describe.legality.case import mended
from meshwright.describe.legality.choices import Choice
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.result import GIB, values_of
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Precision, Scaling, Workload
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.changes import costs, offers, single_changes, within_memory
from meshwright.planner.sizing import MOST_GPUS
from meshwright.units import Json

NEAR = 2  # sizes on each side of the present one


def choices(document: dict[str, Any]) -> Json:
    """For a plan file as JSON: {"fields": {field: [{"value", "legal", "reason", "changes", and "saves_s", "more_gib", "fits" of
    `planner.advice.changes` where the plan is legal}]}, "sizes": the same for GPUs and the fields of the workload, "model": the fields of
    the model, "problem": the plan's first broken rule or null, "mend": the changes of plan fields that make it legal, or null}.

    The plan itself may be illegal: the page then shows which choices mend it. A cluster without `gpus` takes the size of every plan.
    """
    config = Config.from_document({name: part for name, part in document.items() if name != "plan"})
    fields = document.get("plan")
    plan = PlanFields(**fields) if isinstance(fields, dict) else PlanFields()
    cluster = config.cluster if config.cluster.gpus else None
    case = Case(plan, config.model, config.workload, cluster, config.stack)
    offered, error = offers(case, plan), problem(case)
    by_field = {field: [one.as_dict() for one in values] for field, values in offered.items()}
    legal_config = config.but(plan=Plan(**plan.model_dump())) if error is None and cluster else None
    if legal_config:
        add_effects(legal_config, offered, by_field)
    return {
        "fields": by_field,
        "sizes": sizes(config, plan, legal_config),
        "model": config.model.model_dump(mode="json"),
        "world": plan.world,
        "problem": error.as_dict() if error else None,
        "mend": mended(case, legal) if error else {},
    }


def add_effects(config: Config, offered: dict[str, list[Choice]], fields: dict[str, list[Json]]) -> None:
    """Add to each value what it would do to the step time and the memory, as `estimate` says."""
    for name, changes in single_changes(config, offered).items():
        by_value = {repr(plain(change.fields[0][1])): change for change in changes if change.plan}
        for choice in fields[name]:
            if change := by_value.get(repr(plain(choice["value"]))):
                choice.update(values_of(change, "saves_s", "more_gib", "fits"))


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def sizes(config: Config, plan: PlanFields, legal_config: Config | None) -> dict[str, list[Json]]:
    """For the number of GPUs and the fields of the workload: values near the present one, each with the changes of plan fields that keep the
    plan legal, and with its effect where there is a legal plan to compare with."""
    w, cluster, fixed = config.workload, config.cluster, config.cluster if config.cluster.gpus else None
    now = tuple(float(x[0]) for x in costs(legal_config, [legal_config.plan])) if legal_config else None

    def choice(value: Any, workload: Workload, sized: Cluster | None, is_knob: bool = True) -> Json:
        case = Case(plan, config.model, workload, sized, config.stack)
        changes = mended(case, legal)
        if changes is None:
            error = problem(case)
            return {"value": value, "legal": False, "reason": error.what if error else "", "changes": {}}
        out = {"value": value, "legal": True, "reason": "", "changes": changes}
        if now and sized and is_knob and (workload, sized) != (w, cluster):
            fields = {name.removeprefix("plan."): x for name, x in changes.items() if name.startswith("plan.")}
            batch = {name.removeprefix("workload."): x for name, x in changes.items() if name.startswith("workload.")}
            out |= effect(config.but(workload=workload.but(**batch), cluster=sized), plan.but(**fields), now)
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
    if config.model.unit != "tokens":  # the page shows no field for a sequence
        offered.pop("seq")
    out = {"cluster.gpus": [choice(gpus, w, sized) for gpus, sized in near_clusters(cluster)]}
    for field, values in offered.items():
        is_knob = field not in ("optimizer", "scaling")
        out[f"workload.{field}"] = [choice(v, w.but(**{field: v}), fixed, is_knob) for v in values]
    return out


def effect(config: Config, fields: PlanFields, now: tuple[float, ...]) -> Json:
    """What another size or precision does to the step time and the memory; {} where its plan cannot be costed."""
    try:
        plan = within_memory(config, Plan(**fields.model_dump()))
        if plan is None:
            return {}
        time, gib = costs(config, [plan])
    except MeshwrightError:
        return {}
    limit = config.cluster.accelerator.memory / GIB
    return {"saves_s": now[0] - float(time[0]), "more_gib": float(gib[0]) - now[1], "fits": float(gib[0]) <= limit}


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
