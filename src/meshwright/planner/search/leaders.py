"""Rank what the search found by simulated steps, and choose the winner.

The closed forms that rank a million plans treat the stages of a pipeline as equal. The **leaders** are simulated instead: every stage gets its
own times, the schedule is built and walked action by action (`cost.walked`), and the costs paid once per step are added. The result of one walk
corrects the estimates of all plans with the same schedule (name, ranks, stages, micro-batches), and the next leaders are chosen by the new
estimates, in waves, until all plans that lead have been walked. Then the leaders try other gradient buckets and partial recompute (`refine`).

**The winner.** The cost model cannot tell plans apart that differ by less than 1%. So among plans within 1% of the fastest, the winner is

    1. the plan that leaves the most memory free; differences below 2.5% of the device do not count, and a third of it is enough
       (published runs used up to 1.5 times the predicted memory: with a third free even they fit),
    2. then the plan with the fewest parts to set up (`strategies.complexity`),
    3. then the fastest.

The fastest plan is kept in addition to the winner (`Ranking.fastest`), so that the output can show both.

`solve` searches a space, ranks its leaders, and tries what the search leaves at its default: offload, and compression where it is allowed.

**Offload** keeps optimizer states, saved activations or both in host memory. It changes nothing in the mathematics of training, but it copies
bytes over the host's link, and its rates are assumed, not measured. So it is searched only where it can pay: for plans that take at least 10%
less time than the best plan without it, or for any plan where nothing fits without it. It is not searched at all where memory is not what slows
plans down: the best plan recomputes no whole layers, and with 20% less memory there is still a plan less than 10% slower.

**Compression** of gradients rounds or drops values: it changes the numerics of training. It is searched only where the question allows it
(`--allow compression=int8`), for plans that take at least 1% less time than the best plan without it. Otherwise the explanation of the winner
offers it with its gain (`advice.reasons`).

**Unequal stages.** The search proves its winner among plans with equal stages. A plan that does not fit so may fit with fewer layers on its
fullest rank (`stage_lengths.lightened`). Where memory slows plans down, or nothing fits, the search goes on among plans that need up to a quarter
more memory than there is, and divides their layers otherwise.

Offload and compression are searched in the same space with another base plan. Most bounds of the first search hold there too: compression and
copies only add to the time of a frame, error feedback to its memory; offloaded bytes are taken from the memory, and the update on the host is added
to the time (`bounds.reused`). Where they cannot pay, these bounds exclude everything at once. Each base plan is searched for up to 15,000 costed
plans.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshwright.describe.plan_fields import ORDERS, PlanArrays
from meshwright.planner.search import bounds, strategies
from meshwright.planner.search.branch_and_bound import EFFORT, RUNG, STEPS, Progress, Search, SearchOutcome, search
from meshwright.planner.search.pipeline_walk import walk
from meshwright.planner.search.refine import refined
from meshwright.planner.search.space import Space, codes
from meshwright.planner.search.stage_lengths import PART, lightened
from meshwright.planner.search.strategies import Candidate

TIE = 0.01  # share of the step within which plans count as equally fast
MEMORY_TIE = 0.025  # share of a device's memory within which plans count as equally lean
ENOUGH_FREE = 1 / 3  # share of free memory beyond which more is not worth a slower or more complex plan
MOST_WALKED = 12  # plans of each kind near the best that are walked
MOST_DIVIDED = 4  # plans that only another division of their layers may bring near the best
MOST_TOO_LARGE = 8  # plans that only another division of their layers may make fit
MOST_WAVES = 12
SHAPE = ("tp", "cp", "pp", "dp", "ep", "microbatch", "recompute")
LOOK = (*SHAPE, "expert_tp", "sp", "cp_kind", "schedule", "virtual")


@dataclass(frozen=True)
class Ranking:
    """The simulated plans in order."""

    best: Candidate  # the winner
    fastest: Candidate  # often the winner itself
    leaders: list[Candidate]  # the winner, then the fastest of every other shape (degrees, micro-batch, recompute)
    strategies: dict[str, Candidate]  # the fastest of each strategy
    front: list[Candidate]  # Pareto front: each has more free memory than every faster plan


def rank(space: Space, outcome: SearchOutcome) -> Ranking | None:
    """Rank the plans that a search found; None if no plan is left."""
    fitting = candidates(space, outcome)
    return ranked(fitting, space.cluster.accelerator.memory) if fitting else None


def candidates(space: Space, outcome: SearchOutcome) -> list[Candidate]:
    """Walk the leaders in waves and refine them. Plans are dropped that exceed the memory limit once all ranks are checked, or that the
    question's framework cannot be told: the next wave takes others in their place."""
    rows = described(space, outcome.rows)
    first = rows.estimate
    rows = rows.but(estimate=first.copy(), gain=rows.balanced / first)
    limit, writable = outcome.incumbents.limit, space.choices.writable
    times: dict[int, float] = {}
    usable: list[Candidate] = []
    for _ in range(MOST_WAVES):
        wave = [i for i in leading_rows(rows, outcome, space.cluster.accelerator.memory) if i not in times]
        if not wave:
            break
        for i, candidate in zip(wave, walked(space, rows.take(wave), outcome), strict=True):
            times[i] = np.inf
            if candidate.memory <= limit and writable(candidate.plan):
                times[i] = candidate.time
                usable.append(candidate)
            same = rows.flow == rows.flow[i]
            rows.estimate[same] = first[same] * candidate.time / first[i]
        for i, time in times.items():
            rows.estimate[i] = time
    return [c for c in refined(space, usable, limit) if writable(c.plan)]


def described(space: Space, rows: PlanArrays) -> PlanArrays:
    """Add codes of what rows share (look, shape, flow of the schedule), and how much each takes to set up."""
    return rows.but(
        look=codes([rows.columns[name] for name in LOOK]),
        shape=codes([rows.columns[name] for name in SHAPE]),
        flow=codes([rows.pp, rows.virtual, rows.schedule, space.microbatches(rows)]),
        complexity=strategies.complexity(rows, ORDERS.index(tuple(space.stack.order))),
    )


def too_large(space: Space, outcome: SearchOutcome, limit: float, enough: float) -> list[Candidate]:
    """Return the fastest of each look among plans with one stage per rank that do not fit, but may with balanced stages, in `enough` seconds."""
    rows = outcome.rows
    rows = rows.take((rows.pp > 1) & (rows.virtual == 1) & (rows.memory > limit) & (rows.balanced <= enough))
    if not len(rows):
        return []
    rows = described(space, rows)
    _, first = np.unique(rows.look, return_index=True)  # rows come with the fastest first
    return walked(space, rows.take(np.sort(first)[:MOST_TOO_LARGE]), outcome)


def leading_rows(rows: PlanArrays, outcome: SearchOutcome, memory: float) -> list[int]:
    """Rows that lead by the current estimates."""
    order = np.argsort(rows.estimate, kind="stable")
    sorted_rows = rows.take(order)
    margin = outcome.incumbents.margin
    leading = near(sorted_rows, margin, memory) + divisible(sorted_rows, margin)
    leading += strategy_bests(sorted_rows) + rungs(sorted_rows, outcome)
    return sorted({int(order[k]) for k in leading})


def ranked(candidates: list[Candidate], memory: float) -> Ranking:
    """The winner, the leaders and the Pareto front of some candidates on devices of `memory` bytes."""
    order = sorted(candidates, key=lambda c: c.key)
    best, fastest = preferred(order, memory), order[0]
    by_shape = {c.shape: c for c in reversed(order)}  # the fastest of each shape
    others = [c for c in by_shape.values() if c.shape != best.shape or (c is fastest and c is not best)]
    names = [strategies.NAMES[code] for code in strategies.ORDER]
    by_strategy = {name: mine[0] for name in names if (mine := [c for c in order if c.strategy == name])}
    leaders = [best, *sorted(others, key=lambda c: c.key)]
    return Ranking(best, fastest, leaders, by_strategy, pareto(order, memory))


def preferred(order: list[Candidate], memory: float) -> Candidate:
    """Choose among the candidates that tie with the first; candidates are sorted by time."""
    tied = [c for c in order if c.time <= order[0].time * (1 + TIE)]
    lean = leanest(np.array([c.memory for c in tied]), memory)
    return min((c for c, is_lean in zip(tied, lean, strict=True) if is_lean), key=lambda c: (c.complexity, c.time))


def leanest(used: np.ndarray, memory: float) -> np.ndarray:
    """Mark the plans that leave the most memory free, within `MEMORY_TIE`; plans with `ENOUGH_FREE` or more count as equal."""
    needed = np.maximum(used, (1 - ENOUGH_FREE) * memory)
    return needed <= needed.min() + MEMORY_TIE * memory


def near(rows: PlanArrays, margin: float, memory: float) -> list[int]:
    """Rows near the best: the preferred and the fastest of each look, and the fastest of each shape."""
    time = rows.estimate
    close = np.flatnonzero(time <= time[0] * (1 + margin))
    tied = np.flatnonzero(time <= time[0] * (1 + TIE))
    preferred_first = tied[np.lexsort((time[tied], rows.complexity[tied], ~leanest(rows.memory[tied], memory)))]
    out: list[int] = []
    for order, key in ((preferred_first, rows.look), (close, rows.look), (close, rows.shape)):
        _, first = np.unique(key[order], return_index=True)
        out += order[np.sort(first)][:MOST_WALKED].tolist()
    return out


def divisible(rows: PlanArrays, margin: float) -> list[int]:
    """Return rows that may come near the best once `stage_lengths` balances their stages: the fastest of each look."""
    time, enough = rows.estimate * rows.gain, rows.estimate[0] * (1 + margin)
    close = np.flatnonzero((time <= enough) & (rows.estimate > enough))
    close = close[np.argsort(time[close], kind="stable")]
    _, first = np.unique(rows.look[close], return_index=True)
    return close[np.sort(first)][:MOST_DIVIDED].tolist()


def strategy_bests(rows: PlanArrays) -> list[int]:
    """The fastest row of each strategy."""
    _, first = np.unique(rows.strategy, return_index=True)
    return first.tolist()


def rungs(rows: PlanArrays, outcome: SearchOutcome) -> list[int]:
    """The fastest row within each memory limit."""
    within = [np.flatnonzero(rows.memory <= limit) for limit in outcome.incumbents.limits]
    return [int(mine[0]) for mine in within if len(mine)]


def pareto(order: list[Candidate], memory: float) -> list[Candidate]:
    """Keep candidates that need clearly less memory than every faster one; candidates are sorted by time."""
    out: list[Candidate] = []
    for c in order:
        if not out or c.memory <= out[-1].memory - 0.25 * RUNG * memory:
            out.append(c)
    return out[: 2 * STEPS]


def walked(space: Space, rows: PlanArrays, outcome: SearchOutcome) -> list[Candidate]:
    """Rows as candidates, their pipelines walked."""
    closed, times, peaks = walk(space, rows)
    out = []
    for k, code in enumerate(rows.strategy.tolist()):
        seconds_and_bytes = float(times[k]), float(closed[k]), float(peaks[k])
        shape, complexity, proved = int(rows.shape[k]), float(rows.complexity[k]), code not in outcome.unproved
        name, plan = strategies.NAMES[code], space.plan(rows, k)
        out.append(Candidate(plan, name, *seconds_and_bytes, shape, complexity, proved))
    return out


OFFLOAD_WORTH = 0.1  # share of the step that offload must save
TOO_LARGE = 0.25  # share of the memory by which a plan with equal stages may exceed it
DIVISION_WORTH = 0.01  # share of the step that unequal stages must save to be searched for
DIVISION_EFFORT = 1_000  # plans costed for them
FIFTH_LESS = round(0.2 / RUNG)  # the place of 20% less memory on the front
MOST_SHAPES = 1_000_000  # shapes are numbered in each space separately


def solve(
    space: Space, headroom: float = 0.0, progress: Progress | None = None
) -> tuple[SearchOutcome, Ranking | None]:
    """Search and rank. The ranking is None where no plan fits."""
    outcome = search(space, headroom, progress)
    fitting = candidates(space, outcome) if len(outcome.rows) else []
    outcome, more = unequal_stages(space, outcome, fitting)
    fitting += more
    outcome, more = other_bases(space, outcome, fitting)
    fitting += more
    return outcome, ranked(fitting, space.cluster.accelerator.memory) if fitting else None


def unequal_stages(
    space: Space, outcome: SearchOutcome, fitting: list[Candidate]
) -> tuple[SearchOutcome, list[Candidate]]:
    """Return candidates that fit only with unequal stages and are clearly faster than every plan found; and `outcome` with the plans
    costed for them."""
    limit = outcome.incumbents.limit
    least = min((float(rows.memory[0]) for rows in outcome.misfits.values()), default=np.inf)
    more = limit * (1 + TOO_LARGE)
    if not space.divides or not (memory_slows(outcome, fitting) if fitting else least <= more):
        return outcome, []
    enough = min((c.time for c in fitting), default=np.inf) * (1 - DIVISION_WORTH)
    wider = Search(space, more)
    assert outcome.frames is not None
    there = wider.run_below(outcome.frames, enough, DIVISION_EFFORT) if fitting else wider.run()
    outcome = replace(outcome, costed=outcome.costed + there.costed)
    large = too_large(space, there, limit, enough) if len(there.rows) else []
    large = [replace(c, time=enough) for c in large]  # what another division has to beat
    return outcome, [
        replace(c, shape=c.shape - MOST_SHAPES, proved=False)
        for c in lightened(space, large, limit)
        if space.choices.writable(c.plan)
    ]


def other_bases(
    space: Space, outcome: SearchOutcome, fitting: list[Candidate]
) -> tuple[SearchOutcome, list[Candidate]]:
    """Return candidates with offload or compression that are clearly faster than all without; and `outcome` with the plans costed for them."""
    best = min((c.time for c in fitting), default=np.inf)
    tried = [({"offload": kind}, OFFLOAD_WORTH) for kind in offloads(space) if memory_slows(outcome, fitting)]
    tried += [({"compression": name}, TIE) for name in compressions(space) if fitting]
    out: list[Candidate] = []
    for number, (changes, worth) in enumerate(tried, 1):
        enough = best / (1 + worth)
        other = space.with_base(space.base.but(**changes))
        there = search_base(other, outcome, min((enough, *(c.time for c in out))))
        outcome = replace(outcome, costed=outcome.costed + there.costed)
        faster = [c for c in candidates(other, there) if c.time <= enough] if len(there.rows) else []
        out += [
            replace(c, shape=c.shape + number * MOST_SHAPES, complexity=c.complexity + PART, proved=False)
            for c in faster
        ]
    return outcome, out


def memory_slows(outcome: SearchOutcome, fitting: list[Candidate]) -> bool:
    """Whether more memory may help: nothing fits, the best plan recomputes whole layers, or less memory makes plans slower."""
    if not fitting or min(fitting, key=lambda c: c.time).plan.recompute == "full":
        return True
    front = outcome.incumbents.front  # best times, for the whole limit and in steps of 10% less
    return bool(front[FIFTH_LESS] > (1 + OFFLOAD_WORTH) * front[0])


def offloads(space: Space) -> list[str]:
    """The kinds of offload to search: those that the stack can run, where the question leaves it open."""
    if space.base.offload != "none" or not space.choices.offload:
        return []
    return space.stack.offload_kinds


def compressions(space: Space) -> list[str]:
    """The compressions that the question allows besides the base plan's."""
    return [name for name in space.choices.words["compression"] if name != space.base.compression]


def search_base(space: Space, first: SearchOutcome, enough: float) -> SearchOutcome:
    """Search a space with another base plan for plans that take at most `enough` seconds."""
    limit = first.incumbents.limit
    if not np.isfinite(enough):
        return Search(space, limit).run()
    assert first.frames is not None
    return Search(space, limit).run_below(bounds.reused(space, first.frames, enough), enough, EFFORT)
