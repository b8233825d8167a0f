"""The fastest common plan of every pair of tensor- and pipeline-parallel degrees, or the reason why there is none: a map of the plans.

The search is that of `branch_and_bound`, restricted to common plans (`common_plans`), with other incumbents: the best time of every cell (tp, pp)
instead of every strategy. A row is opened only if its bound allows a plan that is faster than the best of its cell.

    seed        a few ordinary plans and the leanest plans of every cell: a first map, within a second at 1,024 GPUs
    descend     branch and bound, until no row may improve a cell

A cell without a legal plan names the first rule that its simplest plan breaks; a cell whose plans all need too much memory names the least that one
of them needs. The best plan of each cell is simulated at the end, as the leaders of `plan` are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.describe import legality
from meshwright.describe.plan import divisors
from meshwright.describe.plan_fields import PlanArrays
from meshwright.planner.search import bounds, strategies
from meshwright.planner.search.branch_and_bound import COSTED, PLAN, Incumbents, Search
from meshwright.planner.search.common_plans import HEADROOM, common_choices
from meshwright.planner.search.pipeline_walk import walk
from meshwright.planner.search.space import Space, join
from meshwright.planner.search.strategies import Candidate

LARGEST_DEGREE = 64
FEW = 4  # frames of each cell that are tried first
CLOSE = 0.01  # a row whose bound is within this share of the best of its cell is not opened
EFFORT = 12_000  # plans costed at most: with the full search, the map takes at most 1.5 times as long as `plan`


@dataclass(frozen=True)
class Cell:
    """One pair of degrees: its fastest common plan that fits, or its leanest plan and the reason why none fits, or the broken rule."""

    tp: int
    pp: int
    best: Candidate | None  # None: no plan is legal
    fits: bool
    code: str = ""  # of the rule that is broken; MEMORY where no plan fits
    reason: str = ""


MEMORY = "memory"


class CellIncumbents(Incumbents):
    """The best plan of every cell: of those that fit the fastest, and of all that were costed the leanest."""

    def __init__(self, limit: float, degrees: np.ndarray) -> None:
        super().__init__(limit)
        pairs = np.unique(degrees[[0, 2]], axis=1)
        self.index = np.full(pairs.max(axis=1) + 1, -1)
        self.index[pairs[0], pairs[1]] = np.arange(pairs.shape[1])
        self.cells = pairs.T.tolist()
        self.time = np.full(len(self.cells), np.inf)
        self.memory = np.full(len(self.cells), np.inf)
        self.fastest: dict[int, PlanArrays] = {}
        self.leanest: dict[int, PlanArrays] = {}

    def groups(self, rows: PlanArrays) -> np.ndarray:
        return np.asarray(self.index[rows.tp, rows.pp])

    def promising(self, rows: PlanArrays, given_up: set[int]) -> np.ndarray:
        """Rows whose bounds allow a plan that fits and is clearly faster than the best of its cell."""
        return (rows.memory <= self.limit) & (rows.time < self.time[self.groups(rows)] * (1 - CLOSE))

    def offer(self, rows: PlanArrays) -> None:
        rows = rows.select(*PLAN, *COSTED)
        if not len(rows):
            return
        self._take(rows, rows.memory, self.memory, self.leanest)
        fitting = rows.take(rows.memory <= self.limit)
        if len(fitting):
            self._take(fitting, fitting.estimate, self.time, self.fastest)
            self.front[0] = self.time.min()

    def _take(self, rows: PlanArrays, values: np.ndarray, best: np.ndarray, best_rows: dict[int, PlanArrays]) -> None:
        """Replace the best row of each cell by a row with a smaller value."""
        cell = self.groups(rows)
        order = np.lexsort((values, cell))
        first = order[np.flatnonzero(np.diff(cell[order], prepend=-1))]
        for k in first[values[first] < best[cell[first]]].tolist():
            best[cell[k]] = values[k]
            best_rows[int(cell[k])] = rows.take([k])


def cells(space: Space, headroom: float = HEADROOM) -> Iterator[list[Cell]]:
    """The map, twice: after the first plans of every cell, and complete. Cells are ordered by tp, then pp."""
    choices = common_choices(space.choices, space)
    few = Space(space.config, choices, space.bucket)
    if not len(few.frames):
        yield _all_cells(few, [])
        return
    search = Search(few, few.cluster.accelerator.memory * (1 - headroom))
    search.best = best = CellIncumbents(search.best.limit, few.degrees)
    search.effort = EFFORT
    frames = bounds.of_frames(few, few.frames)
    search.seed(frames, FEW)
    yield _all_cells(few, _found(few, best, simulate=False))
    promising = frames.take(search.promising(frames))
    if len(promising):
        search.descend(0, promising)
    groups = best.groups(frames)
    for cell in np.intersect1d(np.flatnonzero(np.isinf(best.time)), groups):  # prove that no plan of these cells fits
        search.least_memory(frames.take(groups == cell))
    yield _all_cells(few, _found(few, best, simulate=True))


def _found(space: Space, best: CellIncumbents, simulate: bool) -> list[Cell]:
    """The cells of which a plan was costed."""
    best_rows = {cell: best.fastest.get(cell, leanest) for cell, leanest in sorted(best.leanest.items())}
    if not best_rows:
        return []
    rows = join(list(best_rows.values()))
    closed, times, peaks = walk(space, rows) if simulate else (rows.closed, rows.estimate, rows.memory)
    cells = []
    for k, cell in enumerate(best_rows):
        tp, pp = best.cells[cell]
        fits, memory = cell in best.fastest, space.cluster.accelerator.memory
        reason = "" if fits else f"the leanest plan needs {peaks[k] / 2**30:.0f} GiB, a GPU has {memory / 2**30:.0f}"
        plan = space.plan(rows, k)
        one = Candidate(plan, strategies.name_of(plan), float(times[k]), float(closed[k]), float(peaks[k]), k, 0.0)
        cells.append(Cell(tp, pp, one, fits, "" if fits else MEMORY, reason))
    return cells


def _all_cells(space: Space, cells: list[Cell]) -> list[Cell]:
    """Every pair of degrees up to `LARGEST_DEGREE` that divides the GPUs: those found, and for the others the reason."""
    by_degrees = {(cell.tp, cell.pp): cell for cell in cells}
    sizes = [n for n in divisors(space.cluster.world) if n <= LARGEST_DEGREE]
    pairs = [(tp, pp) for tp in sizes for pp in sizes]
    return [by_degrees.get(pair) or _illegal(space, *pair) for pair in pairs]


def _illegal(space: Space, tp: int, pp: int) -> Cell:
    """A cell without a legal plan, with the first rule that its simplest plan breaks."""
    world = space.cluster.world
    if world % (tp * pp):
        words = f"tp {tp} × pp {pp} = {tp * pp:,} does not divide {world:,} GPUs"
        return Cell(tp, pp, None, False, "GPUs", words)
    experts = {"expert_tp": 1} if space.model.experts else {}
    schedules = space.choices.words["schedule"]
    schedule = "1f1b" if "1f1b" in schedules else schedules[0]
    plan = space.simplest.but(tp=tp, pp=pp, schedule=schedule, replicate=world // (tp * pp), **experts)
    case = legality.Case(plan, space.model, space.workload, space.cluster, space.stack, framework=True)
    error = legality.problem(case)
    if error is None:
        return Cell(tp, pp, None, False, "constraint", "excluded by the constraints of the question")
    return Cell(tp, pp, None, False, error.code, error.what)
