"""The verdict on a plan: whether it fits, what bounds it, and its main numbers."""

from typing import Any

from meshwright.describe.result import COMMUNICATION, part_name, values_of
from meshwright.planner.advice.explain import training as training_cost
from meshwright.planner.goodput import DAY
from meshwright.predict.estimate import Estimate
from meshwright.units import counted, format_count, format_seconds
from meshwright.view.page.subject import Subject

PIPELINE_TARGET = 0.80
GOOD_MFU, FAIR_MFU = 0.40, 0.25
# Parts that another plan may lack.
AVOIDABLE = (*COMMUNICATION, "offload", "bubble", "recompute", "interference", "host")
SMALL = 0.03  # share of the step


def data(subject: Subject) -> dict[str, Any]:
    """The numbers of the bar above every view, one sentence, and the targets."""
    e, p = subject.estimate, subject.estimate.prediction
    pipeline = {"efficiency_share": 1.0 - e.bubble_fraction, "target_share": PIPELINE_TARGET}
    return {
        "subject": [e.model.name, f"on {e.plan.world:,} × {e.cluster.accelerator.name} · {e.plan.title()}"],
        "gpus": e.plan.world,
        "about": about(e),
        "tone": "bad" if not p.fits else "good" if (p.mfu or 0) >= GOOD_MFU and p.fit_word != "may not fit" else "warn",
        "headline": headline(e),
        "sentence": sentence(e),
        **values_of(p, "fits", "step_time_s", "step_time_low_s", "step_time_high_s", "mfu"),
        "mfu_tone": "good" if (p.mfu or 0) >= GOOD_MFU else "warn" if (p.mfu or 0) >= FAIR_MFU else "bad",
        **values_of(p, "memory_gib", "memory_limit_gib", "tokens_per_s"),
        "unit": e.model.unit,
        "pipeline": pipeline if e.plan.pp > 1 else None,
        "formulas": formulas(e),
    }


def headline(e: Estimate) -> str:
    """Whether the plan fits; where it does not, by how much and what fills the fullest stage."""
    p = e.prediction
    spare = p.memory_limit_gib - (p.memory_gib or 0)
    words = f"{p.memory_fit[0].upper()}{p.memory_fit[1:]}"
    if p.fits:
        return f"{words}, {spare:,.1f} GiB free."
    part, gib = max(p.memory_by_stage[p.fullest_stage].items(), key=lambda one: one[1])
    return f"{words}: {-spare:,.1f} GiB over the limit on stage {p.fullest_stage}, where {part} take {gib:,.1f} GiB."


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


def about(e: Estimate) -> list[list[str]]:
    """What the numbers are of, and the targets: names and words."""
    p, cost = e.prediction, training_cost(e)
    step, low, high = (format_seconds(s) for s in (p.step_time_s, p.step_time_low_s, p.step_time_high_s))
    words = {
        "model": f"{e.model.name}, {format_count(e.model.total)} parameters",
        "cluster": f"{e.plan.world:,} × {e.cluster.accelerator.name}, {e.cluster.name}; stack {e.stack.name}",
        "plan": f"{e.plan.title()}; {counted(e.plan.microbatches(e.workload), 'micro-batch')} per step",
        "step time": "; ".join([f"{step}, likely {low} to {high}", *([e.own_trainer.sentence] if e.own_trainer else [])]),
        "targets": "; ".join(f"{'✓' if v.good else '✗'} {v.name} {v.value:.1%} ({v.target})" for v in e.verdicts),
        "training": cost and f"{format_count(cost.tokens)} {e.model.unit} in {format_seconds(cost.days * DAY)}, {cost.gpu_hours:,.0f} GPU-hours"
        + (f", ${cost.dollars:,.0f}" if cost.dollars else ""),
        "constants": p.calibrated,
        "assumed": "; ".join(p.assumed),
    }  # fmt: skip
    return [[name, text] for name, text in words.items() if text]


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
        out["step"] += (
            f", in closed form\nsimulated, as the timeline and the best plans show it: {format_seconds(e.walked.time)}"
        )
        out["pipeline"] = (
            f"efficiency = 1 − bubble fraction, as simulated: {1 - e.bubble_fraction:.1%}\n"
            f"1F1B on equal stages: V·M / (V·M + P − 1) = {v * m} / {v * m + pp - 1} = {v * m / (v * m + pp - 1):.1%}"
        )
    return out
