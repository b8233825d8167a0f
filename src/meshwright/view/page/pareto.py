"""The Pareto scatter: step time against memory of many plans, and the front on which less memory costs the least time."""

from typing import Any

from meshwright.describe.result import GIB
from meshwright.planner.search.strategies import Candidate, name_of
from meshwright.units import format_seconds
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> dict[str, Any]:
    """The plans that the search looked at closely, the front, the winner, and this plan."""
    e = subject.estimate
    mine = {
        "step_time_s": e.prediction.step_time_s,
        "memory_bytes": float(e.cost.peak_memory[0]),
        "title": e.plan.title(),
        "strategy": name_of(e.plan),
        "fits": e.prediction.fits,
        "formula": f"this plan: {e.plan.title()}\n{format_seconds(e.prediction.step_time_s)}, {e.prediction.memory_gib:.1f} GiB",
    }
    candidates, front, best = list[Candidate](), list[Candidate](), None
    if not subject.is_provisional and subject.shared.feasible:
        ranking = subject.result.ranking
        front, best = ranking.front, ranking.best
        candidates = [*ranking.leaders, *ranking.strategies.values(), *front]
    cells = subject.shared.first_cells if subject.is_provisional else subject.shared.cells
    candidates += [cell.best for cell in cells if cell.best is not None]
    winner, leading, limit = best and best.plan, [one.plan for one in front], subject.cluster.accelerator.memory
    unique = list({one.plan: one for one in sorted(candidates, key=lambda c: -c.time)}.values())
    return {
        "limit_bytes": limit,
        "points": [point(one, one.plan == winner, one.plan in leading, limit) for one in unique],
        "front": [{"step_time_s": one.time, "memory_bytes": one.memory} for one in front],
        "mine": mine,
        "note": note(front, best),
    }


def point(one: Candidate, best: bool, on_front: bool, limit: float) -> dict[str, Any]:
    return {
        "step_time_s": one.time,
        "memory_bytes": one.memory,
        "title": one.plan.title(),
        "strategy": one.strategy,
        "plan": one.plan.as_dict(),
        "best": best,
        "front": on_front,
        "fits": one.memory <= limit,
        "formula": f"{one.strategy}: {one.plan.title()}\n{format_seconds(one.time)}, {one.memory / GIB:.1f} of {limit / GIB:.0f} GiB",
    }


def note(front: list[Candidate], best: Candidate | None) -> str:
    if best is None:
        return "First plans of every tp and pp; the search for the front is running."
    lean = front[-1]
    if lean is front[0]:
        return f"The fastest plan ({format_seconds(front[0].time)}) is also the leanest of the front: {front[0].memory / GIB:.1f} GiB."
    slower, less = lean.time / front[0].time - 1, 1 - lean.memory / front[0].memory
    return f"The leanest plan of the front needs {less:.0%} less memory than the fastest and takes {slower:.0%} longer."
