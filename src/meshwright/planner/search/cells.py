"""The fastest common plan of every pair of tensor- and pipeline-parallel degrees, or the reason why there is none: a map of the plans.

The search is that of `branch_and_bound`, restricted to common plans (`common_plans`), with other incumbents: the best time of every cell (tp, pp)
instead of every strategy. A row is opened only if its bound allows a plan that is faster than the best of its cell.

    seed        a few ordinary plans and the leanest plans of every cell, then branch and bound in the fastest cells: a first map, within a second
    descend     branch and bound in all cells, until no row may improve one

A cell without a legal plan names the first rule that its simplest plan breaks; a cell whose plans all need too much memory names the least that one
of them needs. The best plan of each cell is simulated at the end, as the leaders of `plan` are; of the first map only the fastest are.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.describe import legality
from meshwright.describe.plan import divisors
from meshwright.describe.plan_fields import PlanArrays
from meshwright.planner.search import bounds, strategies
from meshwright.planner.search.branch_and_bound import COSTED, PLAN, Incumbents, Search, SearchOutcome
from meshwright.planner.search.common_plans import HEADROOM, common_choices
from meshwright.planner.search.leaders import Ranking, ranked
from meshwright.planner.search.pipeline_walk import walk
from meshwright.planner.search.space import Space, join
from meshwright.planner.search.strategies import Candidate

LARGEST_DEGREE = 64
FEW = 4  # frames of each cell that are tried first
CLOSE = 0.01  # a row whose bound is within this share of the best of its cell is not opened
NEAREST = 6  # fastest cells that are searched and simulated for the first map …
FIRST_EFFORT = 1_000  # … and plans costed in them
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
        self.index = np.full(pairs.max(axis=1, initial=0) + 1, -1)
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


class CellMap:
    """The map of a space: first from a few plans, then complete. Cells are ordered by tp, then pp."""

    def __init__(self, space: Space, headroom: float = HEADROOM) -> None:
        self.space = Space(space.config, common_choices(space.choices, space), space.bucket)
        self.space.estimates = space.estimates
        self.frames = self.space.frames
        self.search = Search(self.space, space.cluster.accelerator.memory * (1 - headroom))
        self.search.best = self.best = CellIncumbents(self.search.best.limit, self.space.degrees)

    @cached_property
    def first(self) -> list[Cell]:
        """The map after a few plans of every cell, and a short search of the fastest cells."""
        if len(self.frames):
            self.frames = bounds.of_frames(self.space, self.frames)
            self.search.seed(self.frames, FEW)
            self._descend(np.argsort(self.best.time)[:NEAREST], self.search.costed + FIRST_EFFORT)
        return self._all_cells(NEAREST)

    @cached_property
    def complete(self) -> list[Cell]:
        """The map after the search of all cells."""
        first = self.first
        if not len(self.frames):
            return first
        every = np.arange(len(self.best.time))
        self._descend(every, EFFORT)
        groups = self.best.groups(self.frames)
        without_plan = np.intersect1d(np.flatnonzero(np.isinf(self.best.time)), groups)
        for cell in without_plan:  # prove that no plan fits
            self.search.least_memory(self.frames.take(groups == cell))
        return self._all_cells(len(every))

    @cached_property
    def leaders(self) -> tuple[SearchOutcome, Ranking] | None:
        """The fastest plans of the first map as the outcome of a search, and their ranking; None where none of them fits."""
        fitting = [cell.best for cell in self.first if cell.fits and cell.best is not None]
        if not fitting:
            return None
        rows = join(list(self.best.fastest.values()))
        outcome = SearchOutcome(rows, self.best, {}, set(), len(self.space), self.search.costed)
        return outcome, ranked(fitting, self.space.cluster.accelerator.memory)

    def _descend(self, cells: np.ndarray, effort: int) -> None:
        """Branch and bound in some cells, until about `effort` plans were costed."""
        self.search.effort = effort
        rows = self.frames.take(np.isin(self.best.groups(self.frames), cells))
        rows = rows.take(self.search.promising(rows))
        if len(rows):
            self.search.descend(0, rows)

    def _all_cells(self, simulated: int) -> list[Cell]:
        """Every pair of degrees up to `LARGEST_DEGREE` that divides the GPUs, with its best plan or the reason why there is none; the plans of
        the fastest cells are simulated."""
        found = self._found(simulated)
        sizes = [n for n in divisors(self.space.cluster.world) if n <= LARGEST_DEGREE]
        pairs = [(tp, pp) for tp in sizes for pp in sizes]
        return [found.get(pair) or _illegal(self.space, *pair) for pair in pairs]

    def _found(self, simulated: int) -> dict[tuple[int, int], Cell]:
        """The cells of which a plan was costed, by their degrees."""
        space, best = self.space, self.best
        best_rows = {cell: best.fastest.get(cell, leanest) for cell, leanest in sorted(best.leanest.items())}
        if not best_rows:
            return {}
        rows = join(list(best_rows.values()))
        times, closed, peaks = rows.estimate.copy(), rows.closed.copy(), rows.memory.copy()
        nearest = np.argsort(best.time[list(best_rows)], kind="stable")[:simulated]
        closed[nearest], times[nearest], peaks[nearest] = walk(space, rows.take(nearest))
        limit, cells = space.cluster.accelerator.memory, {}
        for k, cell in enumerate(best_rows):
            tp, pp = best.cells[cell]
            fits = cell in best.fastest
            reason = "" if fits else f"the leanest plan needs {peaks[k] / 2**30:.0f} GiB, a GPU has {limit / 2**30:.0f}"
            plan = space.plan(rows, k)
            one = Candidate(plan, strategies.name_of(plan), float(times[k]), float(closed[k]), float(peaks[k]), k, 0.0)
            cells[tp, pp] = Cell(tp, pp, one, fits, "" if fits else MEMORY, reason)
        return cells


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
