"""Everything `meshwright estimate` tells of one configuration: prediction, verdicts against the seeds' targets, roofline, inference.

Targets (the seeds'): MFU above 40% is good and above 50% excellent, the bubble below 10%, at least 80% of communication hidden, and
exposed communication below 20% of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost import advice, roofline
from meshwright.cost.predict import COMMUNICATION, prediction
from meshwright.cost.recompute import SPARE, resolve_recompute
from meshwright.cost.step import StepCost, step_cost
from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.result import Prediction
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower.op import StepProgram
from meshwright.lower.step import step_program


@dataclass(frozen=True)
class Verdict:
    """One target: what it is, what we get, whether that is good."""

    name: str
    value: float
    target: str
    good: bool


@dataclass(frozen=True)
class Latency:
    """Seconds per generated token at batch 1 under a degree of tensor parallelism."""

    tp: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    model: Model
    cluster: Cluster
    plan: Plan
    workload: Workload
    stack: Stack
    program: StepProgram
    cost: StepCost
    prediction: Prediction
    verdicts: tuple[Verdict, ...]
    roofline: roofline.Position
    levels: dict[str, str]
    inference: tuple[Latency, ...]

    def as_dict(self) -> dict[str, Any]:
        place = self.roofline
        return {
            **self.prediction.as_dict(),
            "parameters": self.model.total,
            "active_parameters": self.model.active,
            "parameters_by_part": self.model.parameters(),
            "plan": self.plan.as_dict(),
            "world": self.plan.world,
            "verdicts": {v.name: {"value": v.value, "target": v.target, "good": v.good} for v in self.verdicts},
            "roofline": {
                "ccr": place.ccr,
                "ridge": place.ridge,
                "efficiency": place.efficiency,
                "regime": place.regime,
                "critical_batch": place.critical_batch,
                "batch_for_90": place.batch_for_90,
                "advice": list(place.advice),
                "ceilings": [c.__dict__ for c in place.ceilings],
            },
            "inference_latency_s": {f"tp={x.tp}": x.seconds for x in self.inference},
        }


def estimate(
    model: Model, cluster: Cluster, plan: Plan, workload: Workload, stack: Stack, assumed: list[str] | None = None
) -> Estimate:
    """Check, lower, cost and judge one configuration."""
    plan.check(model, workload, cluster, stack)
    plan = resolve_recompute(model, plan, workload, stack, cluster.accelerator.memory)
    program = step_program(model, plan, workload, stack)
    cost = step_cost(program, cluster, every_rank=True)
    result = prediction(cost, model, cluster, plan, workload, stack, assumed)
    levels = axis_levels(program, cluster)
    return Estimate(
        model,
        cluster,
        plan,
        workload,
        stack,
        program,
        cost,
        result,
        verdicts(cost, result, plan),
        place(result, cost, cluster, workload, plan),
        levels,
        inference(model, cluster),
    )


def communication(cost: StepCost) -> tuple[float, float]:
    """Seconds of all communication of the slowest rank, and how many of them are exposed."""
    total = sum(float(np.broadcast_to(v, 1)[0]) for k, v in cost.busy.items() if k.startswith("comm:"))
    total += float(np.broadcast_to(cost.reduce, 1)[0])
    exposed = sum(float(np.broadcast_to(cost.exposed.get(axis, 0.0), 1)[0]) for axis in COMMUNICATION)
    return max(total, exposed), exposed


def verdicts(cost: StepCost, result: Prediction, plan: Plan) -> tuple[Verdict, ...]:
    step = result.step_time_s
    total, exposed = communication(cost)
    out = [Verdict("MFU", result.mfu or 0.0, "above 40%, excellent above 50%", (result.mfu or 0) > 0.40)]
    if plan.pp > 1:
        bubble = result.exposed_s.get("bubble", 0.0) / step
        out.append(Verdict("bubble fraction", bubble, "below 10%", bubble < 0.10))
    if total > 0:
        hidden = 1 - exposed / total
        out.append(Verdict("communication hidden", hidden, "above 80%", hidden > 0.80))
        out.append(Verdict("communication exposed", exposed / step, "below 20% of the step", exposed / step < 0.20))
    out.append(
        Verdict(
            "memory",
            (result.memory_gib or 0) / result.memory_limit_gib,
            "fits, with 5% to spare",
            (result.memory_gib or 0) <= SPARE * result.memory_limit_gib,
        )
    )
    return tuple(out)


def axis_levels(program: StepProgram, cluster: Cluster) -> dict[str, str]:
    """The level each axis's groups span."""
    b = program.batch
    out = {}
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        size = float(b.size(axis)[0])
        if size > 1:
            inside = [k for k, span in enumerate(cluster.spans) if float(b.members(axis, span)[0]) >= size]
            out[axis] = cluster.levels[inside[0] if inside else -1].name
    return out


def place(result: Prediction, cost: StepCost, cluster: Cluster, workload: Workload, plan: Plan) -> roofline.Position:
    """The roofline of the level that carries most of the traffic that leaves the innermost one, else of the innermost."""
    peak = cluster.accelerator.peak_for(workload.precision)
    flops = float(np.broadcast_to(cost.flops, 1)[0])
    moved = sum(result.traffic_bytes.values())
    level = 0 if plan.world <= cluster.node_size else min(1, len(cluster.levels) - 1)
    ccr = flops / moved if moved else float("inf")
    return roofline.position(
        flops, moved, workload.batch, peak, cluster.device_bandwidth(level), roofline.ceilings(cluster, peak, ccr)
    )


def inference(model: Model, cluster: Cluster) -> tuple[Latency, ...]:
    """What tensor parallelism does to the time of one generated token."""
    if model.kind != "transformer":
        return ()
    link = cluster.levels[0].link
    degrees = [tp for tp in (1, 2, 4, 8) if tp <= cluster.node_size and model.heads % tp == 0]
    return tuple(
        Latency(
            tp,
            advice.inference_latency(
                model.active,
                model.layers,
                model.hidden,
                tp,
                cluster.accelerator.memory_bandwidth,
                link.alpha,
                link.beta,
            ),
        )
        for tp in degrees
    )
