"""Search a space, rank its leaders, and try what the search leaves at its default: offload, and compression where it is allowed.

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

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.planner.search import bounds
from meshwright.planner.search.branch_and_bound import EFFORT, RUNG, Progress, Search, SearchOutcome, search
from meshwright.planner.search.leaders import TIE, Ranking, candidates, ranked, too_large
from meshwright.planner.search.space import Space
from meshwright.planner.search.stage_lengths import PART, lightened
from meshwright.planner.search.strategies import Candidate

OFFLOADS = {"states": ("states",), "activations": ("activations",), "both": ("states", "activations")}
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
    return outcome, [replace(c, shape=c.shape - MOST_SHAPES, proved=False) for c in lightened(space, large, limit)]


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
    return [kind for kind, parts in OFFLOADS.items() if set(parts) <= set(space.stack.offloads)]


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
