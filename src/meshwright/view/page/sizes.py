"""The values that the page offers for GPUs, batch, sequence and precision, each with the changes of the plan that keep it legal."""

from __future__ import annotations

from typing import Any, get_args

from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.legality import Case, legal, problem
from meshwright.describe.legality.case import mended
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Precision, Scaling
from meshwright.errors import MeshwrightError
from meshwright.planner.sizing import MOST_GPUS

BATCHES = sorted({2**k for k in range(17)} | {3 * 2**k for k in range(4, 15)})
SEQUENCES = [2**k for k in range(7, 21)]


def sizes(config: Config, plan: PlanFields) -> dict[str, list[dict[str, Any]]]:
    """For the number of GPUs and the fields of the workload: the values, and for each the changes of plan fields that keep the plan legal."""
    model, workload, stack, cluster = config.model, config.workload, config.stack, config.cluster
    out = {
        "cluster.gpus": [
            _choice(Case.of(plan, model, workload, found, stack), gpus) for gpus, found in _clusters(cluster)
        ]
    }
    fixed = cluster if cluster.gpus else None
    offered: dict[str, list[Any]] = {
        "batch": sorted({*BATCHES, workload.batch}),
        "seq": sorted({*SEQUENCES, workload.seq}),
        "precision": list(get_args(Precision)),
        "optimizer": list(OPTIMIZERS),
        "scaling": list(get_args(Scaling)),
    }
    for field, values in offered.items():
        cases = ((v, Case.of(plan, model, workload.but(**{field: v}), fixed, stack)) for v in values)
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


def mend(config: Config, plan: PlanFields) -> dict[str, Any] | None:
    """The changes of plan fields that make the plan legal here; None where none was found."""
    fixed = config.cluster if config.cluster.gpus else None
    return mended(Case.of(plan, config.model, config.workload, fixed, config.stack), legal)
