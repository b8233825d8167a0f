"""The values that the page's inputs offer, from the one predicate of legality: of each plan field, and of GPUs, batch, sequence and precision,
each with the changes of the plan that keep it legal; for each legal value of the plan, how the step time and the memory change."""

from typing import Any, get_args

from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal, problem
from meshwright.describe.legality.case import mended
from meshwright.describe.legality.choices import choices as legal_choices
from meshwright.describe.legality.choices import free_values
from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.result import values_of
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Precision, Scaling
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.changes import single_changes
from meshwright.planner.sizing import MOST_GPUS

BATCHES = sorted({2**k for k in range(17)} | {3 * 2**k for k in range(4, 15)})
SEQUENCES = [2**k for k in range(7, 21)]


def choices(document: dict[str, Any]) -> dict[str, Any]:
    """For a plan file as JSON: {"fields": {field: [{"value", "legal", "reason", "changes", and "saves_s", "more_gib", "fits" of
    `planner.advice.changes` where the plan is legal}]}, "sizes": the same for GPUs, batch and sequence, without effects,
    "problem": the plan's first broken rule or null, "mend": the changes of plan fields that make it legal, or null}.

    The plan itself may be illegal: the page then shows which choices mend it. A cluster without `gpus` takes the size of every plan.
    """
    config = Config.from_document({name: part for name, part in document.items() if name != "plan"})
    fields = document.get("plan")
    plan = PlanFields(**fields) if isinstance(fields, dict) else PlanFields()
    cluster = config.cluster if config.cluster.gpus else None
    case = Case(plan, config.model, config.workload, cluster, config.stack)
    by_field = {field: [one.as_dict() for one in values] for field, values in legal_choices(case, legal).items()}
    free = {
        field: [{"value": v, "legal": True, "reason": "", "changes": {}} for v in values]
        for field, values in free_values(plan, config.model.layers, config.stack.flat_shards).items()
    }
    error = problem(case)
    if error is None and cluster:
        add_effects(config.but(plan=Plan(**plan.model_dump())), by_field | free)
    return {
        "fields": by_field | free,
        "sizes": sizes(config, plan),
        "world": plan.world,
        "problem": error.as_dict() if error else None,
        "mend": mended(case, legal) if error else {},
    }


def add_effects(config: Config, fields: dict[str, list[dict[str, Any]]]) -> None:
    """Tell of each value what it would do to the step time and the memory, as `estimate` says."""
    for name, changes in single_changes(config, framework=False).items():
        by_value = {repr(plain(change.fields[0][1])): change for change in changes if change.plan}
        for choice in fields.get(name, ()):
            if change := by_value.get(repr(choice["value"])):
                choice.update(values_of(change, "saves_s", "more_gib", "fits"))


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def sizes(config: Config, plan: PlanFields) -> dict[str, list[dict[str, Any]]]:
    """For the number of GPUs and the fields of the workload: the values, and for each the changes of plan fields that keep the plan legal."""
    model, workload, stack, cluster = config.model, config.workload, config.stack, config.cluster
    cases = ((gpus, Case(plan, model, workload, sized, stack)) for gpus, sized in _clusters(cluster))
    out = {"cluster.gpus": [_choice(case, gpus) for gpus, case in cases]}
    fixed = cluster if cluster.gpus else None
    offered: dict[str, list[Any]] = {
        "batch": sorted({*BATCHES, workload.batch}),
        "seq": sorted({*SEQUENCES, workload.seq}),
        "precision": list(get_args(Precision)),
        "optimizer": list(OPTIMIZERS),
        "scaling": list(get_args(Scaling)),
    }
    if model.unit != "tokens":  # the page shows no field for a sequence
        offered.pop("seq")
    for field, values in offered.items():
        cases = ((v, Case(plan, model, workload.but(**{field: v}), fixed, stack)) for v in values)
        out[f"workload.{field}"] = [_choice(case, value) for value, case in cases]
    return out


def _clusters(cluster: Cluster) -> list[tuple[int, Cluster]]:
    """Parts of a node, then whole nodes up to what the levels reach."""
    node = cluster.node_size
    counts = {2**k for k in range(18) if 2**k < node} | {node * 2**k for k in range(18)} | {cluster.world}
    out = []
    for count in sorted(c for c in counts if c <= max(MOST_GPUS, cluster.world)):
        try:
            out.append((count, cluster.with_gpus(count)))
        except MeshwrightError:
            continue
    return out


def _choice(case: Case, value: Any) -> dict[str, Any]:
    changes = mended(case, legal)
    if changes is not None:
        return {"value": value, "legal": True, "reason": "", "changes": changes}
    error = problem(case)
    return {"value": value, "legal": False, "reason": error.what if error else "", "changes": {}}
