"""The verdict on a plan: whether it fits, what bounds it, and what to change when the pipeline is less than 80% efficient."""

from bisect import bisect_left
from typing import Any

from meshwright.cost.advice import microbatches_for, stages_for
from meshwright.describe.legality import Case, legal
from meshwright.describe.legality.case import completed
from meshwright.describe.result import COMMUNICATION, part_name, values_of
from meshwright.predict.estimate import Estimate, estimate
from meshwright.programs import pipelines
from meshwright.programs.pipelines.formulas import bubble_fraction
from meshwright.units import format_seconds
from meshwright.view.page.subject import Subject

PIPELINE_TARGET = 0.80
MOST_ACTIONS = 20_000  # forwards of a schedule that is walked for advice
GOOD_MFU, FAIR_MFU = 0.40, 0.25
AVOIDABLE = (
    *COMMUNICATION,
    "offload",
    "bubble",
    "recompute",
    "interference",
    "host",
)  # parts that another plan may lack
SMALL = 0.03  # share of the step


def data(subject: Subject) -> dict[str, Any]:
    """The numbers of the bar above every view, one sentence, the targets, and advice for an inefficient pipeline."""
    e = subject.estimate
    p = e.prediction
    pipeline = pipeline_verdict(e) if e.plan.pp > 1 else None
    return {
        "subject": {
            "model": e.model.name,
            "parameters": e.model.total,
            "gpus": e.plan.world,
            "accelerator": e.cluster.accelerator.name,
            "cluster": e.cluster.name,
            "stack": e.stack.name,
            "plan": e.plan.title(),
            "microbatches": e.plan.microbatches(e.workload),
        },
        "tone": "bad" if not p.fits else "good" if (p.mfu or 0) >= GOOD_MFU and p.fit_word != "may not fit" else "warn",
        "headline": headline(e),
        "sentence": sentence(e),
        **values_of(p, "fits", "bound_by", "step_time_s", "step_time_low_s", "step_time_high_s", "mfu"),
        "mfu_tone": "good" if (p.mfu or 0) >= GOOD_MFU else "warn" if (p.mfu or 0) >= FAIR_MFU else "bad",
        **values_of(p, "memory_gib", "memory_limit_gib", "tokens_per_s"),
        "unit": e.model.unit,
        "own_trainer": e.own_trainer.sentence if e.own_trainer else "",
        "targets": [{"name": v.name, "share": v.value, "target": v.target, "good": v.good} for v in e.verdicts],
        "training": training(e),
        "pipeline": pipeline,
        "assumed": list(p.assumed),
        "calibrated": p.calibrated,
        "formulas": formulas(e),
    }


def headline(e: Estimate) -> str:
    """Whether the plan fits; where it does not, by how much and what fills the fullest stage."""
    p = e.prediction
    spare = p.memory_limit_gib - (p.memory_gib or 0)
    words = f"{p.memory_fit[0].upper()}{p.memory_fit[1:]}"
    if p.fits:
        return f"{words}, {spare:.1f} GiB free."
    stage = max(range(len(p.memory_by_stage)), key=lambda s: sum(p.memory_by_stage[s].values()))
    part, gib = max(p.memory_by_stage[stage].items(), key=lambda one: one[1])
    return f"{words}: {-spare:.1f} GiB over the limit on stage {stage}, where {part} take {gib:.1f} GiB."


def sentence(e: Estimate) -> str:
    """The largest part of the step that another plan could avoid; compute where all of them are small."""
    p = e.prediction
    part = max(AVOIDABLE, key=lambda name: p.exposed_s.get(name, 0.0))
    seconds = p.exposed_s.get(part, 0.0)
    share = seconds / p.step_time_s
    if share < SMALL:
        return f"Bound by compute: every part that another plan could avoid is below {SMALL:.0%} of the step."
    name = {"recompute": "recomputed forward", "interference": "compute slowed by overlap"}.get(part, part_name(part))
    return f"{format_seconds(seconds)} ({share:.0%}) of the step is {name}, the largest part that another plan could avoid."


def pipeline_verdict(e: Estimate) -> dict[str, Any]:
    """Pipeline efficiency as walked; below the target, the micro-batches or stages that reach it, and the changes of inputs that
    apply each."""
    efficiency = 1.0 - e.bubble_fraction
    m, plan = e.plan.microbatches(e.workload), e.plan
    out: dict[str, Any] = {"efficiency_share": efficiency, "target_share": PIPELINE_TARGET, "microbatches": m}
    out |= {"stages": plan.pp, "advice": "", "raise_to": None, "cut_to": None}
    if efficiency >= PIPELINE_TARGET:
        return out
    more, fewer = enough_microbatches(e), fewer_stages(e)
    words = []
    if more:
        batch = more * plan.microbatch * plan.dp
        words.append(f"raise micro-batches from {m} to {more} (batch {batch:,})")
        out["raise_to"] = {"microbatches": more, "batch": batch}
    if fewer:
        words.append(f"cut stages from {plan.pp} to {fewer['stages']}")
        out["cut_to"] = fewer
    out["advice"] = (
        f"pipeline efficiency is {efficiency:.1%}, below {PIPELINE_TARGET:.0%}: {' or '.join(words)}" if words else ""
    )
    return out


def enough_microbatches(e: Estimate) -> int | None:
    """The smallest number of micro-batches at which the schedule, walked with the times of these stages, reaches the target; None: stages
    are too unequal, or it would take too many. The search starts at what equal stages need."""
    plan, walked = e.plan, e.walked.walk
    least = microbatches_for(plan.schedule, plan.pp, plan.virtual, PIPELINE_TARGET) or 1
    unit = plan.pp if e.stack.interleaved_rounds and plan.virtual > 1 else 1
    p2p, overlaps = float(e.cost.boundary[0]), not e.stack.blocking_p2p

    def reached(count: int) -> bool:
        if plan.schedule == "auto":
            return bool(1 - bubble_fraction("zb-h2", plan.pp, count) >= PIPELINE_TARGET)
        program = pipelines.build(plan.schedule, plan.pp, count, virtual=plan.virtual)
        bubble = pipelines.walk(program, walked.durations, p2p=p2p, overlap=overlaps).bubble_fraction
        return bubble <= 1 - PIPELINE_TARGET + 1e-9

    low = -(-max(least, plan.microbatches(e.workload) + 1) // unit)
    high = low
    while not reached(high * unit):
        high *= 2
        if high * unit * plan.stages > MOST_ACTIONS:
            return None
    fewest = bisect_left(range(high + 1), True, lo=max(low, high // 2), key=lambda n: reached(n * unit))
    return fewest * unit


def fewer_stages(e: Estimate) -> dict[str, Any] | None:
    """The largest smaller number of stages with which the estimate reaches the target, and the changes of plan fields that apply it."""
    m = e.plan.microbatches(e.workload)
    most = min(e.plan.pp - 1, stages_for(e.plan.schedule, e.plan.pp, m, e.plan.virtual, PIPELINE_TARGET))
    for stages in range(most, 0, -1):
        changes = stage_changes(e, stages)
        if changes:
            plan = e.plan.but(**{path.removeprefix("plan."): value for path, value in changes.items()})
            other = estimate(e.config.but(plan=plan))
            if 1 - other.bubble_fraction >= PIPELINE_TARGET:
                return {"stages": stages, "set": changes}
    return None


def stage_changes(e: Estimate, stages: int) -> dict[str, Any]:
    """The changes of plan fields for another number of stages, with what must follow; {}: no such plan is legal."""
    case = Case(e.plan, e.model, e.workload, e.cluster, e.stack)
    one = {"plan.virtual": 1, "plan.schedule": "1f1b"} if stages == 1 else {}
    changes = completed(case, {"plan.pp": stages} | one)
    return changes if legal(case.with_settings(changes)) else {}


def training(e: Estimate) -> dict[str, Any] | None:
    """Days, GPU-hours and price of the token budget; None without one."""
    if not e.workload.tokens:
        return None
    seconds = e.workload.tokens / (e.prediction.tokens_per_s or 1.0)
    hours = seconds / 3600 * e.plan.world
    price = hours * e.cluster.price if e.cluster.price else None
    return {"tokens": e.workload.tokens, "total_s": seconds, "gpu_hours": hours, "price_usd": price}


def formulas(e: Estimate) -> dict[str, str]:
    """Return the formula of each number of the bar."""
    p, w = e.prediction, e.workload
    m, pp, v = e.plan.microbatches(w), e.plan.pp, e.plan.virtual
    rate = f"{p.tokens_per_s:,.0f}"
    step, low, high = (format_seconds(s) for s in (p.step_time_s, p.step_time_low_s, p.step_time_high_s))
    out = {
        "step": f"step = {step}, likely {low} to {high}\nthe sum of the exposed parts of the busiest rank",
        "mfu": f"MFU = FLOPs per {e.model.unit[:-1]} × {e.model.unit}/s / (GPUs × peak)\n"
        f"= {e.model.model_flops(w.seq):.4g} × {rate} / ({p.mfu_denominator})",
        "memory": f"peak of the fullest stage: {p.memory_gib:.2f} GiB\nlimit: {p.memory_limit_gib:.1f} GiB of the device",
        "throughput": f"tokens/s = batch × sequence / step\n= {w.batch:,} × {w.seq:,} / {step} = {rate}",
    }
    if e.model.kind != "transformer":
        out["throughput"] = f"samples/s = batch / step\n= {w.batch:,} / {step} = {rate}"
    if pp > 1:
        out["pipeline"] = (
            f"efficiency = 1 − bubble fraction, as simulated: {1 - e.bubble_fraction:.1%}\n"
            f"1F1B on equal stages: V·M / (V·M + P − 1) = {v * m} / {v * m + pp - 1} = {v * m / (v * m + pp - 1):.1%}"
        )
    return out
