"""Why this plan won: what bounds it, what training costs, and how much slower each other strategy is, in figures.

Every number comes from the parts of the cost model, which sum exactly to the step, so a difference between two plans can be itemised:
"12% slower: +1.9 s recompute, +0.6 s data-parallel communication, −0.3 s bubble".

Times have the band of the prediction. Memory has another band: the 10th and 90th percentile of measured over predicted peaks in published
runs, with equal weight per source.
"""

from dataclasses import dataclass, replace

from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, GROUPED_PARTS, MEMORY_BAND, Prediction, part_name
from meshwright.planner.advice.guides.textbook import differences
from meshwright.planner.advice.sensitivity import Scaling, Sensitivity
from meshwright.planner.search import strategies
from meshwright.planner.search.branch_and_bound import SearchOutcome
from meshwright.planner.search.space import Space
from meshwright.planner.search.strategies import Candidate
from meshwright.predict.estimate import Estimate
from meshwright.units import format_bytes, format_seconds


@dataclass(frozen=True)
class TrainingCost:
    """A full training run: days with their band, GPU-hours, dollars (0: the cluster has no price)."""

    tokens: float
    days: float
    days_low: float
    days_high: float
    gpu_hours: float
    price: float
    dollars: float


@dataclass(frozen=True)
class WhyNot:
    """A strategy that lost: its best plan and how much slower that is, or that no plan of it fits."""

    strategy: str
    plan: Plan
    fits: bool
    slower: float  # share of the winner's step; infinite where no plan fits
    words: str
    proved: bool = True


@dataclass(frozen=True)
class Explanation:
    """The reasons behind the winner, ready to show."""

    estimate: Estimate
    batch: str
    bound: str
    reasons: dict[str, str]  # plan field → why it has its value
    training: TrainingCost | None
    scaling: Scaling
    sensitivities: list[Sensitivity]
    why_not: list[WhyNot]
    memory_band: tuple[float, float]
    critical: str
    calibrated: str
    assumed: list[str]


def walked_estimate(space: Space, plan: Plan, time: float) -> Estimate:
    """Estimate a plan with its simulated step time; the bubble takes the difference to the closed form."""
    e = space.estimate(plan)
    return replace(e, prediction=as_walked(e.prediction, time))


def as_walked(p: Prediction, time: float) -> Prediction:
    """Replace the step time of a prediction by a simulated one; the band keeps its ratios."""
    exposed = dict(p.exposed_s)
    if "bubble" in exposed:  # without a pipeline the two differ by rounding
        exposed["bubble"] = max(0.0, exposed["bubble"] + time - p.step_time_s)
    exposed = {part: seconds for part, seconds in exposed.items() if seconds}
    total = sum(exposed.values())
    by = p.step_time_s / total
    return replace(
        p,
        step_time_s=total,
        step_time_low_s=p.step_time_low_s / by,
        step_time_high_s=p.step_time_high_s / by,
        exposed_s=exposed,
        mfu=(p.mfu or 0) * by,
        hfu=(p.hfu or 0) * by,
        tokens_per_s=(p.tokens_per_s or 0) * by,
    )


# Differences


def grouped(p: Prediction) -> dict[str, float]:
    """Add up all compute parts of the exposed seconds."""
    out: dict[str, float] = {}
    for part, seconds in p.exposed_s.items():
        name = part_name(part) if part in GROUPED_PARTS else "compute"
        out[name] = out.get(name, 0.0) + seconds
    return out


def difference(other: Prediction, best: Prediction) -> list[tuple[str, float]]:
    """Return the extra seconds of each part of `other`, largest change first; they sum to the difference of the steps."""
    a, b = grouped(other), grouped(best)
    parts = [(name, a.get(name, 0.0) - b.get(name, 0.0)) for name in {**a, **b}]
    return sorted(parts, key=lambda item: -abs(item[1]))


def itemised(parts: list[tuple[str, float]], step: float, most: int = 3) -> str:
    """Format parts of at least half a percent of the step: `+1.9 s recompute, −0.3 s bubble`."""
    shown = [part for part in parts if abs(part[1]) >= 0.005 * step][:most] or parts[:1]
    return ", ".join(f"{'+' if seconds >= 0 else '−'}{format_seconds(abs(seconds))} {name}" for name, seconds in shown)


def why_not(
    space: Space, outcome: SearchOutcome, best: Candidate, e: Estimate, lost: dict[str, Candidate]
) -> list[WhyNot]:
    """List the strategies that lost, the closest first."""
    out = []
    for name, candidate in lost.items():
        if name == best.strategy:
            continue
        alternative = walked_estimate(space, candidate.plan, candidate.time)
        slower = candidate.time / e.prediction.step_time_s - 1
        words = itemised(difference(alternative.prediction, e.prediction), e.prediction.step_time_s)
        tight = candidate.plan.recompute != "none" and best.plan.recompute == "none"
        words += "; the same without recompute does not fit" if tight else ""
        out.append(WhyNot(name, candidate.plan, True, slower, words, candidate.proved))
    limit = outcome.incumbents.limit
    for code, rows in outcome.misfits.items():
        over = float(rows.memory[0]) - limit
        words = f"does not fit: at least {format_bytes(float(rows.memory[0]))}, {format_bytes(over)} too much"
        out.append(WhyNot(strategies.NAMES[code], space.plan(rows, 0), False, float("inf"), words))
    return sorted(out, key=lambda w: w.slower)


# The winner


def choice(best: Candidate, fastest: Candidate) -> str:
    """Say why the winner was preferred to a plan that is up to 1% faster; empty if the winner is the fastest."""
    if best.plan == fastest.plan:
        return ""
    ahead, memory = best.time / fastest.time - 1, fastest.memory - best.memory
    gains = [f"leaves {format_bytes(memory)} more memory free"] if memory > 0 else []
    gains += ["has fewer parts to set up"] if best.complexity < fastest.complexity else []
    other = fastest.plan.title()
    if other == best.plan.title():
        other = f"the same but for {differences(best.plan, fastest.plan)}"
    rival = f"{format_seconds(fastest.time, 4)}, {gib(fastest.memory):.1f} GiB, {other}"
    return f"{100 * ahead:.2f}% slower than the fastest ({rival}), within the accuracy of the model; it {' and '.join(gains)}"


def worst_case_choice(best: Candidate, fastest: Candidate) -> str:
    """Say what the plan with the best worst case costs; empty if it is also the fastest."""
    if best.plan == fastest.plan:
        return ""
    ahead, rival = best.time / fastest.time - 1, f"{format_seconds(fastest.time, 4)}, {fastest.plan.title()}"
    return f"{100 * ahead:.1f}% slower than the fastest ({rival}) if the model is right"


def bound(p: Prediction) -> str:
    """Name what bounds the step, and its largest shares."""
    parts = sorted(grouped(p).items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * s / p.step_time_s:.0f}%" for name, s in parts[:4] if s >= 0.01 * p.step_time_s)
    return f"{p.bound_by} ({shares})"


def training(e: Estimate) -> TrainingCost | None:
    """Days, GPU-hours and dollars for the token budget; the days have the step's band."""
    tokens, rate = e.workload.tokens, e.prediction.tokens_per_s or 0.0
    if not tokens:
        return None
    days = tokens / rate / 86400
    p = e.prediction
    low, high = p.step_time_low_s / p.step_time_s, p.step_time_high_s / p.step_time_s
    hours = 24 * days * e.plan.world
    return TrainingCost(tokens, days, days * low, days * high, hours, e.cluster.price, hours * e.cluster.price)


def memory_words(p: Prediction) -> str:
    """Peak memory with its band, and the free share."""
    peak = p.memory_gib or 0.0
    spare = 1 - peak / p.memory_limit_gib
    band = f"{peak * MEMORY_BAND[0]:.0f} to {peak * MEMORY_BAND[1]:.0f}"
    return f"{peak:.1f} of {p.memory_limit_gib:.1f} GiB ({band} in published runs), {100 * spare:.0f}% free: {p.memory_fit}"


def gib(size: float) -> float:
    return size / GIB
