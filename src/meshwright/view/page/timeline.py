"""The pipeline timeline: this plan's schedule, and other schedules at the same time scale, with one card for each stage.

Every schedule is built and walked with the times of the plan's own stages (`cost.walked`), as `meshwright simulate` does. A start is a whole
number of ticks, a millionth of the schedule: the page zooms until an action fills the screen, and the text stays small. All actions of one kind
and stage take the same time, so their durations are in one table.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.describe.plan import Plan
from meshwright.describe.result import values_of
from meshwright.describe.schedules import SCHEDULES
from meshwright.errors import MeshwrightError
from meshwright.lower.program import scalar
from meshwright.planner.advice.alternatives import PlanTrials, changed
from meshwright.predict.estimate import Estimate
from meshwright.programs.pipelines import KINDS, Walked
from meshwright.programs.pipelines.program import KIND_NAMES
from meshwright.units import Json, format_decimal_bytes, format_seconds
from meshwright.view.page.bundle import written_view
from meshwright.view.page.subject import Subject

TICKS = 1_000_000
COMPARED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")  # shown with the plan's schedule if nothing is chosen
MOST_SHOWN = 4
MOST_ACTIONS = 20_000  # of the plan's schedule; above, others are shown only where they are chosen


def data(subject: Subject) -> Json:
    """The timelines of this plan's schedule and of the chosen ones, and the cards of its stages."""
    e = subject.estimate
    chosen = [str(name) for name in subject.option("schedules", [])][:MOST_SHOWN]
    names = chosen or ([] if subject.is_provisional or len(e.walked.walk.program) > MOST_ACTIONS else list(COMPARED))
    others = [other for name in names if name != e.plan.schedule and (other := with_schedule(e, name)) is not None]
    panels = [panel(one) for one in ([e, *others][:MOST_SHOWN] if e.plan.pp > 1 else [e])]
    return content(panels, note(e), e.plan.pp > 1, stages=stage_cards(e), choices=choices(e))


def schedules_html(several: Sequence[Walked], heading: str = "") -> str:
    """Simulated schedules that belong to no plan as one HTML file, as `show SCHEDULE --html` draws them; times are in units."""
    first, names = several[0].program, [walked.program.schedule for walked in several]
    what = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    title = heading or f"{what} on {first.ranks} ranks, {first.microbatches} micro-batches"
    about = SCHEDULES[first.schedule].about if len(several) == 1 and first.schedule in SCHEDULES else ""
    words = f"{first.ranks} ranks, {first.microbatches} micro-batches, equal stages."
    note = f"{about.capitalize()}. {words}" if about else words
    return written_view("timeline", title, content([walk_panel(walked) for walked in several], note, unit="units"))


def content(panels: list[Json], note: str, pipeline: bool = True, unit: str = "", **of_plan: Any) -> Json:
    """The data of the view: one panel for each schedule; of a plan also the cards of its stages and the schedules to choose."""
    out: Json = {"pipeline": pipeline, "unit": unit, "kinds": {kind: KIND_NAMES[kind] for kind in KINDS}, "note": note}
    return out | {"ticks": TICKS, "panels": panels, "stages": [], "choices": []} | of_plan


def with_schedule(e: Estimate, name: str) -> Estimate | None:
    """The same plan with another schedule; None where it is not legal."""
    return PlanTrials(e.config).of(rescheduled(e.plan, name))


def rescheduled(plan: Plan, name: str) -> Plan | None:
    rule = SCHEDULES.get(name)
    if rule is None or plan.pp == 1:
        return None
    virtual = min(max(plan.virtual, rule.least_virtual), rule.most_virtual)
    return changed(plan, schedule=name, virtual=virtual, layers_per_stage=())


def choices(e: Estimate) -> list[Json]:
    """Every schedule, and why this plan cannot run it."""
    out = []
    for name, rule in SCHEDULES.items():
        plan, reason = rescheduled(e.plan, name), ""
        try:
            if plan is not None and name != e.plan.schedule:
                plan.check(e.model, e.workload, e.cluster, e.stack)
        except MeshwrightError as error:
            reason = error.what
        out.append({"name": name, "about": rule.about, "legal": plan is not None and not reason, "reason": reason})
    return out


def panel(e: Estimate) -> Json:
    """The timeline of a plan: its schedule, and what runs once per step after it."""
    walked = e.walked
    return {
        **walk_panel(walked.walk),
        "schedule": e.plan.schedule if e.plan.pp > 1 else "one stage",
        "step_time_s": walked.time,
        "closing": [{"part": part, "seconds": seconds} for part, seconds in walked.closing.items() if seconds > 0],
        "memory_bytes": float(e.cost.peak_memory[0]),
        "fits": e.prediction.fits,
        "formulas": formulas(e),
    }


def walk_panel(walk: Walked) -> Json:
    """One simulated schedule: its numbers, its durations by kind and stage, and one lane per rank."""
    program, tick = walk.program, TICKS / walk.makespan
    lanes = []
    for rank in range(program.ranks):
        own = slice(int(program.first[rank]), int(program.first[rank + 1]))
        lanes.append(
            {
                "kind": "".join(KINDS[k] for k in program.kind[own].tolist()),
                "stage": program.stage[own].tolist() if program.virtual > 1 else [],
                "microbatch": program.microbatch[own].tolist(),
                "start": np.rint(walk.start[own] * tick).astype(int).tolist(),
            }
        )
    durations = np.rint(walk.durations.table * tick).astype(int).tolist()
    return {
        **values_of(program, "schedule", "virtual", "ranks", "microbatches"),
        "makespan_s": walk.makespan,
        "step_time_s": walk.makespan,
        "closing": [],
        "bubble_fraction": walk.bubble_fraction,
        "in_flight": walk.peak_memory.tolist(),
        "memory_bytes": None,
        "fits": True,
        "durations": dict(zip(KINDS, durations, strict=True)),
        "chunk_of": program.chunk_of.tolist(),
        "lanes": lanes,
        "formulas": {
            "bubble_fraction": f"bubble = mean idle time of a rank / schedule = {walk.bubble_fraction:.1%}",
            "step_time_s": f"makespan {walk.makespan:g}; without a barrier between steps one step every {walk.longest_span:g}",
        },
    }


def formulas(e: Estimate) -> dict[str, str]:
    """The bubble and the step time with their numbers."""
    walk = e.walked.walk
    p, m, v = walk.program.ranks, walk.program.microbatches, walk.program.virtual
    idle = float(walk.idle.mean())
    bubble = f"bubble = mean idle time of a rank / schedule = {format_seconds(idle)} / {format_seconds(walk.makespan)} = {walk.bubble_fraction:.1%}"
    if e.plan.schedule in ("1f1b", "gpipe", "interleaved"):
        equal = (p - 1) / (v * m + p - 1)
        bubble += f"\non equal stages (P − 1) / (V·M + P − 1) = {p - 1} / {v * m + p - 1} = {equal:.1%}"
    closing = " + ".join(f"{part} {format_seconds(s)}" for part, s in e.walked.closing.items() if s > 0)
    step = f"step = schedule {format_seconds(walk.makespan)}{' + ' + closing if closing else ''} = {format_seconds(e.walked.time)}"
    return {"bubble_fraction": bubble, "step_time_s": step}


def stage_cards(e: Estimate) -> list[Json]:
    """Layers, parameters, times, memory and bytes per micro-batch of every stage."""
    walked = e.walked
    layers = e.plan.stage_layers(e.model.layers) if e.model.layers else [0]
    sends = e.program.sync.get("boundary-F", [])
    size = scalar(sends[0].message_bytes) if sends and e.plan.pp > 1 else 0.0
    out = []
    for stage, times in enumerate(walked.stages):
        rank = int(walked.walk.program.rank_of[stage])
        blocks = e.program.stages[stage]
        ends = [name for name in ("embedding", "head") if scalar(blocks.counts.get(name, 0.0)) > 0]
        f, i, w = (scalar(x) for x in (times.f, times.i, times.w))
        memory = e.prediction.memory_by_stage[min(rank, len(e.prediction.memory_by_stage) - 1)]
        parameters = sum(scalar(x) for x in e.program.elements(blocks).values())
        held = {"memory_gib": sum(memory.values()), "in_flight": float(walked.walk.peak_memory[rank])}
        backward = f"backward {format_seconds(i)} inputs + {format_seconds(w)} weights"
        sent = f"sends {format_decimal_bytes(size)} per micro-batch and direction"
        card = {"stage": stage, "rank": rank, "layers": layers[stage], "ends": ends, "parameters": parameters}
        card |= {"forward_s": f, "backward_s": i + w, "message_bytes": size, **held}
        out.append(card | {"formula": f"stage {stage}: forward {format_seconds(f)}, {backward}; {sent}"})
    return out


def note(e: Estimate) -> str:
    if e.plan.pp == 1:
        return "This plan has no pipeline: one rank runs its micro-batches one after the other. Set pp to 2 or more to see stages."
    p, m = e.plan.pp, e.plan.microbatches(e.workload)
    return f"{e.plan.schedule}: {p} ranks, {m} micro-batches, {e.bubble_fraction:.1%} of the schedule is idle."
