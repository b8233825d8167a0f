"""From what the search found to a ranking that rests on simulated steps.

The closed forms that rank a million plans treat the stages of a pipeline as equal. The **leaders** are walked instead: every stage gets its own
times, the schedule is built and simulated action by action (`cost.walked`), and what happens once a step is added. What one walk finds corrects
the estimate of all plans of the same schedule (name, ranks, stages, micro-batches), and the next leaders are chosen by the new estimates, in
waves, until those that lead have all been walked.

Of plans that look alike (same degrees, micro-batch, recompute and schedule; only placement and sharding differ) the fastest and the simplest
are walked. In the end

    winner = the simplest plan within 0.5% of the fastest walked

Half a percent is far below what any prediction can tell apart; a simpler plan is worth more than that. Before that each has tried other
gradient buckets (`buckets`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.lower.batch import ORDERS
from meshwright.planner.search import strategies
from meshwright.planner.search.branch_and_bound import RUNG, STEPS, Found, Progress, search
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.pipeline_walk import walk
from meshwright.planner.search.refine import rebucketed
from meshwright.planner.search.space import Space
from meshwright.planner.search.table import Table, codes

TIE = 0.005
MOST_WALKED = 12  # plans of each kind near the best that are walked
MOST_WAVES = 12
SHAPE = ("tp", "cp", "pp", "dp", "ep", "microbatch", "recompute")
LOOK = (*SHAPE, "etp", "sp", "cp_kind", "schedule", "virtual")


@dataclass(frozen=True)
class Ranking:
    best: Candidate
    leaders: list[
        Candidate
    ]  # the best of each shape (degrees, micro-batch, recompute), the fastest first after the winner
    strategies: dict[str, Candidate]
    front: list[Candidate]  # by rising headroom, each the fastest with at least that much


def solve(space: Space, headroom: float = 0.0, progress: Progress | None = None) -> tuple[Found, Ranking | None]:
    """Search and rank. No ranking: nothing fits."""
    found = search(space, headroom, progress)
    return found, rank(space, found) if len(found.rows) else None


def rank(space: Space, found: Found) -> Ranking | None:
    """Choose, walk and rank; what turns out not to fit, once all of its ranks are looked at, is left out. None: nothing is left."""
    rows = found.rows
    own = ORDERS.index(tuple(space.stack.order))
    rows = rows.but(
        look=codes([rows.columns[name] for name in LOOK]),
        shape=codes([rows.columns[name] for name in SHAPE]),
        flow=codes([rows.pp, rows.virtual, rows.schedule, space.microbatches(rows)]),
        complexity=strategies.complexity(rows, own),
    )
    first = rows.estimate
    rows = rows.but(estimate=first.copy())
    seen: dict[int, Candidate] = {}
    for _ in range(MOST_WAVES):
        wave = [i for i in wanted(rows, found) if i not in seen]
        if not wave:
            break
        for i, candidate in zip(wave, walked(space, rows.take(wave), found), strict=True):
            seen[i] = candidate
            same = rows.flow == rows.flow[i]
            rows.estimate[same] = first[same] * candidate.time / first[i]
        for i, candidate in seen.items():
            rows.estimate[i] = candidate.time if candidate.memory <= found.incumbents.limit else np.inf
    limit = found.incumbents.limit
    fitting = rebucketed(space, [c for c in seen.values() if c.memory <= limit], limit)
    return ranked(fitting, space.cluster.accelerator.memory) if fitting else None


def wanted(rows: Table, found: Found) -> list[int]:
    """The rows that lead by the present estimates."""
    order = np.argsort(rows.estimate, kind="stable")
    sorted_rows = rows.take(order)
    return sorted(
        {
            int(order[k])
            for k in (
                *near(sorted_rows, found.incumbents.margin),
                *strategy_bests(sorted_rows),
                *rungs(sorted_rows, found),
            )
        }
    )


def ranked(candidates: list[Candidate], memory: float) -> Ranking:
    order = sorted(candidates, key=lambda c: c.key)
    best = simplest(order)
    shapes = {c.shape: [x for x in order if x.shape == c.shape] for c in order if c.shape != best.shape}
    leaders = [best, *sorted((simplest(same) for same in shapes.values()), key=lambda c: c.key)]
    names = [strategies.NAMES[code] for code in strategies.ORDER]
    by_strategy = {name: simplest(mine) for name in names if (mine := [c for c in order if c.strategy == name])}
    return Ranking(best, leaders, by_strategy, pareto(order, memory))


def simplest(order: list[Candidate]) -> Candidate:
    """Of candidates, the fastest first, the simplest that ties with the first."""
    return min((c for c in order if c.time <= order[0].time * (1 + TIE)), key=lambda c: (c.complexity, c.time))


def near(rows: Table, margin: float) -> list[int]:
    """Rows near the best: the fastest of each shape and look, and of each look that ties with the best the simplest."""
    time = rows.estimate
    close = np.flatnonzero(time <= time[0] * (1 + margin))
    tied = np.flatnonzero(time <= time[0] * (1 + TIE))
    simplest_first = tied[np.lexsort((time[tied], rows.complexity[tied]))]
    out: list[int] = []
    for order, alike in ((simplest_first, rows.look), (close, rows.look), (close, rows.shape)):
        _, first = np.unique(alike[order], return_index=True)
        out += order[np.sort(first)][:MOST_WALKED].tolist()
    return out


def strategy_bests(rows: Table) -> list[int]:
    """Of each strategy the fastest row and the simplest that ties with it."""
    out = []
    for code in np.unique(rows.strategy):
        mine = np.flatnonzero(rows.strategy == code)
        tied = mine[rows.estimate[mine] <= rows.estimate[mine[0]] * (1 + TIE)]
        out += [int(mine[0]), int(tied[rows.complexity[tied].argmin()])]
    return out


def rungs(rows: Table, found: Found) -> list[int]:
    """The fastest row within each memory limit."""
    within = [np.flatnonzero(rows.memory <= limit) for limit in found.incumbents.limits]
    return [int(mine[0]) for mine in within if len(mine)]


def pareto(order: list[Candidate], memory: float) -> list[Candidate]:
    """Of candidates, the fastest first, those with more headroom than any faster one, a rung of the ladder apart."""
    out: list[Candidate] = []
    for c in order:
        if not out or c.memory <= out[-1].memory - 0.25 * RUNG * memory:
            out.append(c)
    return out[: 2 * STEPS]


def walked(space: Space, rows: Table, found: Found) -> list[Candidate]:
    """Walk rows and make candidates of them."""
    closed, times, peaks = walk(space, rows)
    out = []
    for k in range(len(rows)):
        code = int(rows.strategy[k])
        out.append(
            Candidate(
                space.plan(rows, k),
                strategies.NAMES[code],
                float(times[k]),
                float(closed[k]),
                float(peaks[k]),
                int(rows.shape[k]),
                float(rows.complexity[k]),
                code not in found.unproved,
            )
        )
    return out
