"""Whether the memory of a reading fits: the cost model's peak, where GPUs, hardware and shape are given.

With low-rank adapters only the adapters have gradients and optimizer states: those parts of the estimate are replaced by the adapters' own,
12 bytes for each of their parameters (16-bit weight and gradient, two fp32 moments).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.cost.estimate import estimate
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.interop.names import catalog_cluster
from meshwright.interop.problems import Problem
from meshwright.interop.reading import Reading

ADAPTER_BYTES = 12.0
GIB = 2.0**30
UNITS = ("gradients", "optimizer")


@dataclass(frozen=True)
class Fit:
    """Whether it fits (None: unknown fit), the peak memory, and what is to say about it."""

    fits: bool | None = None
    gib: float | None = None
    problems: list[Problem] = field(default_factory=list)


def fit(reading: Reading) -> Fit:
    """The memory of a reading against that of its hardware."""
    entry = catalog_cluster(reading.hardware)
    facts = reading.facts
    unknown = not reading.shape.complete or not reading.assembled.fit_is_known or facts.get("offload_parameters")
    if not reading.gpus or not entry or unknown or facts.get("quantised") or "seq" not in facts:
        return Fit()
    try:
        cluster: Cluster = catalog.load("clusters", entry)
        cluster = cluster.with_gpus(reading.gpus)
        result = estimate(reading.shape.model, cluster, reading.plan, reading.workload, reading.stack)
    except MeshwrightError as error:
        return Fit(problems=[Problem(error.code, error.what, error.why, error.fix, "note")])
    limit = result.prediction.memory_limit_gib
    peak = max(_stage(parts, facts.get("adapters"), reading) for parts in result.prediction.memory_by_stage)
    if peak <= limit:
        return Fit(True, peak)
    what = f"{peak:.1f} GiB on {cluster.accelerator.name} of {limit:.1f} GiB"
    return Fit(False, peak, [Problem("MW-LINT-013", what, why="It does not fit in memory")])


def _stage(parts: dict[str, float], adapters: object, reading: Reading) -> float:
    if not adapters:
        return sum(parts.values())
    rank = adapters if isinstance(adapters, int) and not isinstance(adapters, bool) else 16
    model, plan = reading.shape.model, reading.plan
    per_layer = rank * (8 * model.hidden + 3 * (model.ffn or model.expert_width))
    count = per_layer * model.layers / (plan.pp * plan.tp)
    return sum(size for part, size in parts.items() if part not in UNITS) + count * ADAPTER_BYTES / GIB
