"""The choices of each plan field for the page's inputs, from the one predicate of legality."""

from __future__ import annotations

from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal, problem
from meshwright.describe.legality.choices import choices as legal_choices
from meshwright.describe.legality.choices import free_values
from meshwright.describe.plan_fields import PlanFields
from meshwright.view.page.sizes import mend, sizes


def choices(document: dict[str, Any]) -> dict[str, Any]:
    """For a plan file as JSON: {"fields": {field: [{"value", "legal", "reason", "changes"}]}, "sizes": the same for GPUs, batch and sequence,
    "problem": the plan's first broken rule or null, "mend": the changes of plan fields that make it legal, or null}.

    The plan itself may be illegal: the page then shows which choices mend it. A cluster without `gpus` takes the size of every plan.
    """
    config = Config.from_document({name: part for name, part in document.items() if name != "plan"})
    fields = document.get("plan")
    plan = PlanFields(**fields) if isinstance(fields, dict) else PlanFields()
    cluster = config.cluster if config.cluster.gpus else None
    case = Case.of(plan, config.model, config.workload, cluster, config.stack)
    found = {field: [one.as_dict() for one in values] for field, values in legal_choices(case, legal).items()}
    free = {
        field: [{"value": v, "legal": True, "reason": "", "changes": {}} for v in values]
        for field, values in free_values(plan, config.model.layers, config.stack.flat_shards).items()
    }
    error = problem(case)
    return {
        "fields": found | free,
        "sizes": sizes(config, plan),
        "world": plan.world,
        "problem": error.as_dict() if error else None,
        "mend": mend(config, plan) if error else {},
    }
