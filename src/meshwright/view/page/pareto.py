"""The Pareto scatter: step time against memory of many plans, and the front on which less memory costs the least time."""

from meshwright.describe.result import GIB
from meshwright.planner.search.strategies import Candidate
from meshwright.units import Json, format_seconds
from meshwright.view.page.subject import Subject


def data(subject: Subject) -> Json:
    """The plans that the search looked at closely, the front, the winner, and this plan; all times are simulated."""
    e = subject.estimate
    words = f"this plan: {e.plan.title()}\n{format_seconds(e.walked.time)}, {e.prediction.memory_gib:.1f} GiB"
    place = {"step_time_s": e.walked.time, "gib": float(e.cost.peak_memory[0]) / GIB}
    mine = place | {"fits": e.prediction.fits, "formula": words}
    candidates, best = list[Candidate](), None
    if not subject.is_provisional and subject.shared.feasible:
        ranking = subject.result.ranking
        best = ranking.best
        candidates = [*ranking.leaders, *ranking.strategies.values(), *ranking.front]
    cells = subject.shared.map.first if subject.is_provisional else subject.shared.map.complete
    candidates += [cell.best for cell in cells if cell.best is not None]
    winner, limit = best and best.plan, subject.cluster.accelerator.memory
    points = [point(one, one.plan == winner, limit) for one in {one.plan: one for one in candidates}.values()]
    front = front_of([p for p in [*points, mine] if p["fits"]])
    for one in points:
        one["front"] = one in front
    return {
        "limit_gib": limit / GIB,
        "points": sorted(points, key=lambda one: -one["step_time_s"]),
        "front": [{key: one[key] for key in ("step_time_s", "gib")} for one in front],
        "mine": mine,
        "note": note(front) if best else "First plans of every tp and pp; the search for the front is running.",
    }


def front_of(points: list[Json]) -> list[Json]:
    """The points than which no other is faster with as much memory, the leanest first."""
    front: list[Json] = []
    for one in sorted(points, key=lambda p: (p["gib"], p["step_time_s"])):
        if not front or one["step_time_s"] < front[-1]["step_time_s"]:
            front.append(one)
    return front


def point(one: Candidate, best: bool, limit: float) -> Json:
    place = {"step_time_s": one.time, "gib": one.memory / GIB, "fits": one.memory <= limit, "best": best}
    plan = {"title": one.plan.title(), "strategy": one.strategy, "plan": one.plan.as_dict()}
    size = f"{one.memory / GIB:.1f} of {limit / GIB:.0f} GiB"
    return place | plan | {"formula": f"{one.strategy}: {plan['title']}\n{format_seconds(one.time)}, {size}"}


def note(front: list[Json]) -> str:
    lean, fast = front[0], front[-1]
    if lean is fast:
        return f"The fastest plan ({format_seconds(fast['step_time_s'])}) is also the leanest: {fast['gib']:.1f} GiB."
    slower, less = lean["step_time_s"] / fast["step_time_s"] - 1, 1 - lean["gib"] / fast["gib"]
    return f"The leanest plan of the front needs {less:.0%} less memory than the fastest and takes {slower:.0%} longer."
