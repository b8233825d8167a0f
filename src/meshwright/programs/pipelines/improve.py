"""Local search: swap neighbours on the longest path until no swap helps.

The makespan is the longest path through a program. Only a swap of two neighbouring actions of a rank that are both on
this path can shorten it (the classic neighbourhood of job-shop scheduling). A W on the path can also be delayed,
because no other rank waits for it: to just before the next idle time of its rank, or to the end of the list. Every
change is simulated with `walk`. The search accepts the first improvement and continues from there. It uses no random
numbers: the same input gives the same schedule.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.programs.pipelines.check import needs_and_order
from meshwright.programs.pipelines.program import PipelineProgram, W
from meshwright.programs.pipelines.walk import Walked

Key = tuple[float, ...]


def improve(
    best: Walked,
    rate: Callable[[PipelineProgram], tuple[Key, Walked] | None],
    key: Key,
    tries: int,
    bound: float = 0.0,
) -> tuple[Walked, Key, int]:
    """Hill-climb with at most `tries` walks, down to `bound`; `rate` returns None if the memory limit is exceeded."""
    used = 0
    moved = True
    while moved and used < tries and key[0] > bound:
        moved = False
        for order in _moves(best):
            if used >= tries:
                break
            used += 1
            try:
                rated = rate(best.program.replace(order))
            except MeshwrightError:  # the new order deadlocks
                continue
            if rated is not None and rated[0] < key:
                key, best = rated
                moved = True
                break
    return best, key, used


def longest_path(walked: Walked) -> list[int]:
    """Return the actions of one longest path, last first: each starts when the next in the list, or its transfer, ends."""
    program = walked.program
    needs, _ = needs_and_order(program)
    start, end, first = walked.start, walked.end, set(program.first[:-1].tolist())
    at = int(end.argmax())
    path = [at]
    while start[at] > 0:
        before = at - 1 if at not in first else -1
        waits_for_rank = before >= 0 and end[before] >= start[at] * (1 - 1e-12)
        at = before if waits_for_rank or needs[at] < 0 else int(needs[at])
        if at < 0:
            break
        path.append(at)
    return path


def _moves(walked: Walked) -> Iterator[np.ndarray]:
    """Yield new orders of the program, the most promising first."""
    program = walked.program
    path = longest_path(walked)
    for later, earlier in pairwise(path):
        if later == earlier + 1 and program.rank[later] == program.rank[earlier]:
            if program.kind[earlier] == W:
                yield from _delay_weights(walked, earlier)
            if _may_swap(program, earlier):
                order = np.arange(len(program))
                order[[earlier, later]] = later, earlier
                yield order


def _may_swap(program: PipelineProgram, i: int) -> bool:
    """Whether actions i and i+1 may be swapped: not if they have the same stage and micro-batch, or belong to a joined pair."""
    if program.joined[max(i - 1, 0) : i + 2].any():
        return False
    a, b = program.action(i), program.action(i + 1)
    return a.stage != b.stage or a.microbatch != b.microbatch


def _delay_weights(walked: Walked, i: int) -> Iterator[np.ndarray]:
    """Yield orders in which the W at i runs later: before the next idle time of its rank, or at the end of the list."""
    program = walked.program
    stop = int(program.first[program.rank[i] + 1])
    gap = walked.start[i + 1 : stop] - walked.end[i : stop - 1] > 1e-12 * walked.makespan
    places = [i + int(gap.argmax())] if gap.any() else []
    for place in dict.fromkeys([*places, stop - 1]):
        if place > i:
            order = np.arange(len(program))
            order[i : place + 1] = np.append(np.arange(i + 1, place + 1), i)
            yield order
