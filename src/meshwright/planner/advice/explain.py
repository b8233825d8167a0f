"""Why this plan: what bounds it, what it costs, and what each strategy that lost would have cost, in figures.

Every number comes from the cost model's own parts, which sum exactly to the step, so that a difference between two plans can be told part by
part: "12% slower: +1.9 s recompute, +0.6 s data-parallel communication, −0.3 s bubble". Nothing is said that is not computed.

Times carry the band of `cost.predict`; memory has its own: 10th and 90th percentile of measured over predicted peaks in published runs, each source
weighing the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost import roofline
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.predict import BAND, COMMUNICATION
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, Prediction
from meshwright.planner.advice.sensitivity import Scaling, Sensitivity
from meshwright.planner.search import strategies
from meshwright.planner.search.branch_and_bound import Found
from meshwright.planner.search.leaders import Candidate
from meshwright.planner.search.space import Space
from meshwright.units import format_bytes, format_decimal_bytes, format_seconds

MEMORY_BAND = (0.90, 1.50)
NAMES = {
    **COMMUNICATION,
    "bubble": "bubble",
    "host": "waiting for the host",
    "optimizer": "optimizer",
    "overhead": "step overhead",
    "recompute": "recompute",
    "interference": "compute slowed by overlap",
}


@dataclass(frozen=True)
class Training:
    """A whole training run: days with their band, device-hours, dollars (0: no price is known)."""

    tokens: float
    days: float
    days_low: float
    days_high: float
    gpu_hours: float
    price: float
    dollars: float


@dataclass(frozen=True)
class WhyNot:
    """A strategy that lost: its best plan and what that costs more, or that it does not fit."""

    strategy: str
    plan: Plan
    fits: bool
    slower: float  # share of the winner's step; infinite where nothing fits
    words: str
    proved: bool = True


@dataclass(frozen=True)
class Explanation:
    estimate: Estimate
    batch: str
    bound: str
    reasons: dict[str, str]  # plan field → why it has its value
    training: Training | None
    scaling: Scaling
    sensitivities: list[Sensitivity]
    why_not: list[WhyNot]
    memory_band: tuple[float, float]
    critical: str
    calibrated: str
    assumed: list[str]


def walked_estimate(space: Space, plan: Plan, time: float, assumed: list[str] | None = None) -> Estimate:
    """The estimate of a plan with its step as walked: the difference to the closed form is bubble."""
    e = estimate(space.model, space.cluster, plan, space.workload, space.stack, assumed)
    return replace(e, prediction=as_walked(e.prediction, time))


def as_walked(p: Prediction, time: float) -> Prediction:
    exposed = dict(p.exposed_s)
    exposed["bubble"] = max(0.0, exposed.get("bubble", 0.0) + time - p.step_time_s)
    exposed = {part: seconds for part, seconds in exposed.items() if seconds}
    total = sum(exposed.values())
    by = p.step_time_s / total
    return replace(
        p,
        step_time_s=total,
        step_time_low_s=total * BAND[0],
        step_time_high_s=total * BAND[1],
        exposed_s=exposed,
        mfu=(p.mfu or 0) * by,
        hfu=(p.hfu or 0) * by,
        tokens_per_s=(p.tokens_per_s or 0) * by,
    )


# Differences


def grouped(p: Prediction) -> dict[str, float]:
    """Exposed seconds with all arithmetic as one part."""
    out: dict[str, float] = {}
    for part, seconds in p.exposed_s.items():
        name = NAMES.get(part, "compute")
        out[name] = out.get(name, 0.0) + seconds
    return out


def difference(mine: Prediction, best: Prediction) -> list[tuple[str, float]]:
    """Parts by how many seconds more they take in `mine`, the largest change first; they sum to the difference."""
    a, b = grouped(mine), grouped(best)
    parts = [(name, a.get(name, 0.0) - b.get(name, 0.0)) for name in {**a, **b}]
    return sorted(parts, key=lambda item: -abs(item[1]))


def told(parts: list[tuple[str, float]], step: float, most: int = 3) -> str:
    """`+1.9 s recompute, −0.3 s bubble`: what is at least half a percent of the step."""
    shown = [part for part in parts if abs(part[1]) >= 0.005 * step][:most] or parts[:1]
    return ", ".join(f"{'+' if seconds >= 0 else '−'}{format_seconds(abs(seconds))} {name}" for name, seconds in shown)


def why_not(space: Space, found: Found, best: Candidate, e: Estimate, lost: dict[str, Candidate]) -> list[WhyNot]:
    """Each strategy that lost, the closest first."""
    out = []
    for name, candidate in lost.items():
        if name == best.strategy:
            continue
        theirs = walked_estimate(space, candidate.plan, candidate.time)
        slower = candidate.time / e.prediction.step_time_s - 1
        words = told(difference(theirs.prediction, e.prediction), e.prediction.step_time_s)
        tight = candidate.plan.recompute != "none" and best.plan.recompute == "none"
        words += "; the same without recompute does not fit" if tight else ""
        out.append(WhyNot(name, candidate.plan, True, slower, words, candidate.proved))
    limit = found.incumbents.limit
    for code, rows in found.misfits.items():
        over = float(rows.memory[0]) - limit
        words = f"does not fit: at least {format_bytes(float(rows.memory[0]))}, {format_bytes(over)} too much"
        out.append(WhyNot(strategies.NAMES[code], space.plan(rows, 0), False, float("inf"), words))
    return sorted(out, key=lambda w: w.slower)


# The winner


def pieces(model: Model) -> str:
    """What a batch is made of."""
    return "sequences" if model.kind == "transformer" else "samples"


def batch_arithmetic(e: Estimate) -> str:
    """batch = micro-batch × accumulation × dp, with the numbers."""
    plan, workload = e.plan, e.workload
    m = plan.microbatches(workload)
    return f"{workload.batch:,} {pieces(e.model)} = micro-batch {plan.microbatch} × {m} accumulated × dp {plan.dp}"


def bound(p: Prediction) -> str:
    """What the step goes into, by share."""
    parts = sorted(grouped(p).items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * s / p.step_time_s:.0f}%" for name, s in parts[:4] if s >= 0.01 * p.step_time_s)
    return f"{p.bound_by} ({shares})"


def training(e: Estimate) -> Training | None:
    """Days, device-hours and dollars for the token budget."""
    tokens, rate = e.workload.tokens, e.prediction.tokens_per_s or 0.0
    if not tokens or e.model.kind != "transformer":
        return None
    days = tokens / rate / 86400
    hours = 24 * days * e.plan.world
    return Training(tokens, days, days * BAND[0], days * BAND[1], hours, e.cluster.price, hours * e.cluster.price)


def reasons(e: Estimate) -> dict[str, str]:
    """For each field of the plan that says something, why it has its value."""
    plan, p, levels = e.plan, e.prediction, e.levels
    step = p.step_time_s

    def exposed(axis: str) -> str:
        seconds = p.exposed_s.get(axis, 0.0)
        if seconds < 5e-4 * step:
            return "its communication hides behind compute"
        return f"{format_seconds(seconds)} of the step exposed ({100 * seconds / step:.1f}%)"

    out = {}
    if plan.tp > 1:
        out["tp"] = f"every layer split over {plan.tp} GPUs, within the {levels.get('tp', 'node')}; {exposed('tp')}"
        out["sp"] = (
            "norms and their activations split as well: the same bytes, less memory"
            if plan.sp
            else "not split: fewer collectives"
        )
    if plan.cp > 1:
        out["cp"] = (
            f"each sequence of {e.workload.seq:,} over {plan.cp} GPUs, within the {levels.get('cp', 'node')}; {exposed('cp')}"
        )
    if plan.pp > 1:
        m = plan.microbatches(e.workload)
        bubble = p.exposed_s.get("bubble", 0.0)
        stages = plan.stage_layers(e.model.layers)
        layers = f"{min(stages)}" if min(stages) == max(stages) else f"{min(stages)} to {max(stages)}"
        out["pp"] = f"{plan.stages} stages of {layers} layers over {plan.pp} ranks"
        out["schedule"] = (
            f"{m} micro-batches a step; bubble {format_seconds(bubble)} ({100 * bubble / step:.1f}%), walked"
        )
    if plan.ep > 1:
        out["ep"] = (
            f"{e.model.experts} experts over {plan.ep} groups, within the {levels.get('ep', 'node')}; {exposed('ep')}"
        )
    if plan.dp > 1:
        what = {
            0: "gradients all-reduced",
            1: "optimizer states sharded",
            2: "gradients and states sharded",
            3: "parameters, gradients and states sharded",
        }
        over = f" over {plan.shard} of {plan.dp}" if plan.zero and plan.replicate > 1 else ""
        out["zero" if plan.zero else "replicate"] = f"{what[plan.zero]}{over}; {exposed('dp')}"
    if plan.dp * plan.cp > 1 and plan.bucket != Plan().bucket:
        out["bucket"] = (
            f"gradients in {format_decimal_bytes(plan.bucket)}: small ones cost latency, the last one is never hidden"
        )
    out["microbatch"] = batch_arithmetic(e)
    if plan.recompute != "none":
        out["recompute"] = (
            f"{format_seconds(p.exposed_s.get('recompute', 0.0))} more arithmetic, so that activations fit"
        )
    if plan.order:
        out["order"] = "axes from the nearest neighbours to the farthest: " + ", ".join(
            f"{a} in the {levels[a]}" for a in plan.order if a in levels
        )
    return out


def critical_batch(e: Estimate) -> tuple[float, str]:
    """Sequences at which arithmetic outlasts the data-parallel communication of a step, by the roofline of its level, and in words.

    Gradients are reduced once a step however large the batch, so their share falls with it. Where every micro-batch gathers or reduces, the
    micro-batch decides instead.
    """
    moved, level = e.prediction.traffic_bytes.get("dp", 0.0), e.levels.get("dp", "")
    if not moved or not level:
        return 0.0, "none: no data-parallel communication"
    bandwidth = e.cluster.device_bandwidth([x.name for x in e.cluster.levels].index(level))
    flops = float(np.broadcast_to(e.cost.flops, 1)[0])
    needed = roofline.ridge(e.cluster.accelerator.peak_for(e.workload.precision), bandwidth) / (flops / moved)
    if e.plan.reduces_each:
        size = needed * e.plan.microbatch
        return (
            size,
            f"a micro-batch of {size:.2g} {pieces(e.model)} a rank: below it data-parallel communication outlasts compute",
        )
    size = needed * e.workload.batch
    return size, f"{size:,.0f} {pieces(e.model)}: below it data-parallel communication outlasts compute"


def memory_words(p: Prediction) -> str:
    """Peak with its band and what is left."""
    peak = p.memory_gib or 0.0
    spare = 1 - peak / p.memory_limit_gib
    band = f"{peak * MEMORY_BAND[0]:.0f} to {peak * MEMORY_BAND[1]:.0f}"
    return f"{peak:.1f} of {p.memory_limit_gib:.1f} GiB ({band} in published runs), {100 * spare:.0f}% to spare"


def gib(size: float) -> float:
    return size / GIB
