"""Search a space, rank its leaders, and try offload where memory is what slows a plan down.

**Offload** keeps optimizer states, saved activations or both in host memory. It changes nothing in the mathematics of training, but it copies
bytes over the host's link, and its rates are assumed, not measured. So it is searched only where it can pay: the same space with

    base.offload = states | activations | both

is searched for plans that take at least 10% less time than the best plan without offload (all plans, where nothing fits without it). The bounds
of the first search hold here too, with the offloaded bytes taken from memory and the update on the host added to the time (`bounds.offloaded`):
where memory is not short they exclude everything at once. Each kind is searched for up to 15,000 costed plans.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.planner.search import bounds
from meshwright.planner.search.branch_and_bound import EFFORT, Found, Progress, Search, search
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.leaders import Ranking, candidates, ranked
from meshwright.planner.search.space import Space
from meshwright.planner.search.stage_lengths import PART

KINDS = {"states": ("states",), "activations": ("activations",), "both": ("states", "activations")}
WORTH = 0.1  # share of the step that offload must save
MOST_SHAPES = 1_000_000  # shapes are numbered in each space separately


def solve(space: Space, headroom: float = 0.0, progress: Progress | None = None) -> tuple[Found, Ranking | None]:
    """Search and rank. The ranking is None where no plan fits."""
    found = search(space, headroom, progress)
    fitting = candidates(space, found) if len(found.rows) else []
    found, more = with_offload(space, found, fitting)
    fitting += more
    return found, ranked(fitting, space.cluster.accelerator.memory) if fitting else None


def with_offload(space: Space, found: Found, fitting: list[Candidate]) -> tuple[Found, list[Candidate]]:
    """Candidates that offload and take less time than every plan that does not; `found` with the plans costed for them."""
    enough = min((c.time for c in fitting), default=np.inf) / (1 + WORTH)
    out: list[Candidate] = []
    for number, kind in enumerate(kinds(space), 1):
        other = Space(
            space.model,
            space.cluster,
            space.workload,
            space.stack,
            space.choices,
            space.base.but(offload=kind),
            space.bucket,
        )
        there = search_offloaded(other, found, min((enough, *(c.time for c in out))))
        found = replace(found, costed=found.costed + there.costed)
        faster = [c for c in candidates(other, there) if c.time <= enough] if len(there.rows) else []
        out += [
            replace(c, shape=c.shape + number * MOST_SHAPES, complexity=c.complexity + PART, proved=False)
            for c in faster
        ]
    return found, out


def kinds(space: Space) -> list[str]:
    """The kinds of offload to search: those that the stack can run, where the question leaves it open."""
    if space.base.offload != "none" or not space.choices.offload:
        return []
    return [kind for kind, parts in KINDS.items() if set(parts) <= set(space.stack.offloads)]


def search_offloaded(space: Space, without: Found, enough: float) -> Found:
    """Search the space of one kind of offload for plans that take at most `enough` seconds."""
    limit = without.incumbents.limit
    if not np.isfinite(enough):
        return Search(space, limit).run()
    assert without.frames is not None
    return Search(space, limit).run_below(bounds.offloaded(space, without.frames, enough), enough, EFFORT)
