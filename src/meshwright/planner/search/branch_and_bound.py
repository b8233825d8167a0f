"""The fastest plan that fits, proved without costing every plan.

Branch and bound, best first. `space` is a tree of layers; `bounds` gives the time and memory that no plan below a row can beat. First the search
looks for a plan of each strategy that fits in memory; where there is none, that is proved, and the plan with the least memory is kept. Then the
search keeps **incumbents**: the best time found for a ladder of memory limits (10% steps: the Pareto front of time against free memory) and for
every strategy. A row is expanded only if its bound allows a plan below it to

- come within 1% of the best;
- or be the best of its strategy, or improve the front. This work has a limit: a strategy that lost, or a front, that reaches it is marked as
  not proved.

    frames → shapes → placed → sharded → plans, each layer costed in chunks that stay in cache

The closed form of a pipeline with unequal stages is not exact, so a plan has an interval (`intervals`): it is kept while its low end may still
win, and it excludes other plans by its high end, or by its simulated time. So every plan that may come within 1% of the best has been costed
exactly; all others are proved slower or too large. Then the leaders are simulated (`leaders`) and ranked by that. Nothing here is random: the
same question has the same answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.describe.plan_fields import PlanArrays
from meshwright.describe.schedules import SCHEDULES
from meshwright.lower.batch import distinct_codes
from meshwright.lower.step import lower
from meshwright.planner.search import bounds, intervals, strategies
from meshwright.planner.search.choices import DTYPES
from meshwright.planner.search.pipeline_walk import fullest, walk
from meshwright.planner.search.space import NAIVE, Space, codes, crossed, join

MARGIN = 0.01  # plans this close to the best are all costed …
STRATEGY_MARGIN = 0.002  # … and those this close to the best of their strategy
EFFORT = 15_000  # plans costed for one strategy that lost
FRONT_EFFORT = 30_000  # plans costed that are slower than the best, for strategies and the front together
FRONT = -1  # the front's place among what was given up
STEPS = 5  # rungs of the ladder of memory limits, each 10% of the limit lower
RUNG = 0.1
SIZES = ((16, 1024), (32, 1024), (32, 1024), (256, 4096), (512, 4096))  # rows opened at once, by layer: few at first
MOST_WALKS = 24  # plans simulated during the search
FEW, FEW_SIZES = 24, 4  # frames of each strategy, and micro-batches of theirs, that are tried first
DEGREES = ("tp", "cp", "pp", "dp")
PLAN = (
    *DEGREES,
    "ep",
    "expert_tp",
    "microbatch",
    "recompute",
    "sp",
    "cp_kind",
    "zero",
    "shard",
    "replicate",
    "schedule",
    "virtual",
    "reshard",
    "reduce",
    "order",
    *DTYPES,
    "overlap",
)
COSTED = ("time", "memory", "low", "closed", "high", "estimate", "balanced")
BOUNDED = (
    "time",
    "memory",
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "replicate",
)  # columns that decide whether a row is expanded
Progress = Callable[[float], None]


@dataclass
class Incumbents:
    """The best times found, by strategy and by memory limit, and the plans that hold them or come close."""

    limit: float
    margin: float = MARGIN
    strategy: np.ndarray = field(default_factory=lambda: np.full(max(strategies.NAMES) + 1, np.inf))
    front: np.ndarray = field(default_factory=lambda: np.full(STEPS, np.inf))
    kept: list[PlanArrays] = field(default_factory=list)

    @property
    def limits(self) -> np.ndarray:
        return self.limit * (1 - RUNG * np.arange(STEPS))

    def rung(self, memory: np.ndarray) -> np.ndarray:
        """The lowest limit a plan keeps to; −1: none."""
        return (memory[:, None] <= self.limits).sum(axis=1) - 1

    def groups(self, rows: PlanArrays) -> np.ndarray:
        """The group of each row, a whole number from 0: the search opens rows near the best of their group first."""
        return strategies.axes(rows)

    def promising(self, rows: PlanArrays, given_up: set[int]) -> np.ndarray:
        """Mark rows whose bounds allow a plan close to the best, on the front, or the best of a strategy that is still searched."""
        axes = strategies.axes(rows)
        close = self.strategy * (1 + STRATEGY_MARGIN)
        close[[code for code in given_up if code != FRONT]] = -np.inf
        # Before sharding, a pure data-parallel row may become any of four strategies: there are few such rows, all are kept.
        enough = close[strategies.strategy(rows)] if "zero" in rows else np.where(axes == 0, np.inf, close[axes])
        rung = self.rung(rows.memory)
        enough = np.maximum(enough, self.front[0] * (1 + self.margin))
        if FRONT not in given_up:
            enough = np.maximum(enough, self.front[rung])
        return (rung >= 0) & (rows.time <= enough)

    def offer(self, rows: PlanArrays) -> None:
        """Remember costed plans that fit and are close to the best of their strategy, or on the front."""
        rows = rows.select(*PLAN, *COSTED).take(rows.memory <= self.limit)
        if not len(rows):
            return
        rows = rows.but(strategy=strategies.strategy(rows))
        self.count(rows)
        self.kept.append(rows.take(self._good(rows)))
        if len(self.kept) > 64:
            self.kept = [self.found()]

    def count(self, rows: PlanArrays) -> None:
        """Use upper bounds of plans as incumbents."""
        np.minimum.at(self.strategy, rows.strategy, rows.high)
        rung = self.rung(rows.memory)
        for k in range(STEPS):
            self.front[k] = min(self.front[k], rows.high[rung >= k].min(initial=np.inf))

    def _good(self, rows: PlanArrays) -> np.ndarray:
        close = np.maximum(self.strategy * (1 + STRATEGY_MARGIN), self.front[0] * (1 + self.margin))[rows.strategy]
        return (rows.time <= close) | (rows.time <= self.front[self.rung(rows.memory)])

    def found(self) -> PlanArrays:
        """Return plans still close to the best or on the front, each once, the fastest first; ties in a fixed order."""
        rows = join(self.kept)
        rows = rows.take(self._good(rows))
        keys = [rows.columns[name] for name in PLAN]
        _, first = np.unique(codes(keys), return_index=True)
        rows = rows.take(first)
        return rows.take(np.lexsort((*(key[first] for key in reversed(keys)), rows.memory, rows.time)))


@dataclass
class SearchOutcome:
    """The result of a search. `rows` are plans near the best, the best of a strategy or on the front, the fastest first."""

    rows: PlanArrays
    incumbents: Incumbents
    misfits: dict[int, PlanArrays]  # for each strategy of which no plan fits: its plan with the least memory
    unproved: set[int]  # strategies whose best was not proved
    legal: int
    costed: int
    frames: PlanArrays | None = None  # all frames with their bounds


class Search:
    """One search: counts what it costs, keeps its incumbents."""

    def __init__(self, space: Space, limit: float, progress: Progress | None = None, margin: float = MARGIN) -> None:
        self.space, self.progress = space, progress
        self.best = Incumbents(limit, margin)
        self.costed = self.walks = self.spent_on_front = 0
        self.effort: float = np.inf  # plans costed at most
        self.spent = np.zeros(max(strategies.NAMES) + 1, np.int64)  # plans costed by strategy
        self.layers: list[Callable[[PlanArrays], PlanArrays]] = [self.shaped, self.placed, self.sharded, self.scheduled]

    def run(self) -> SearchOutcome:
        frames = bounds.of_frames(self.space, self.space.frames)
        self.costed += len(frames)
        axes = strategies.axes(frames)
        self.seed(frames)
        least = {code: self.least_memory(frames.take(axes == code)) for code in self.missing(distinct_codes(axes))}
        misfits = {code: rows for code, rows in least.items() if rows.memory[0] > self.best.limit}
        fitting = frames.take(~np.isin(axes, list(misfits)))
        if len(fitting):
            self.descend(0, fitting)
        misfits = {code: rows for code, rows in misfits.items() if code} | self.data_misfits(frames.take(axes == 0))
        rows = self.best.found() if self.best.kept else PlanArrays(time=np.zeros(0))
        return SearchOutcome(rows, self.best, misfits, self.given_up, len(self.space), self.costed, frames)

    def run_below(self, frames: PlanArrays, enough: float, effort: int) -> SearchOutcome:
        """Search bounded frames for plans of any strategy below `enough` seconds; cost about `effort` plans at most."""
        self.best.front[:], self.best.strategy[:] = enough, -np.inf
        self.spent[:], self.spent_on_front, self.effort = EFFORT + 1, FRONT_EFFORT + 1, effort
        frames = frames.take(self.promising(frames.select(*BOUNDED)))
        if len(frames):
            self.descend(0, frames)
        rows = self.best.found() if self.best.kept else PlanArrays(time=np.zeros(0))
        return SearchOutcome(rows, self.best, {}, set(), 0, self.costed)

    @property
    def given_up(self) -> set[int]:
        """Mark strategies, and the front, that used up their budget of costed plans."""
        front = {FRONT} if self.spent_on_front > FRONT_EFFORT else set()
        return set(np.flatnonzero(self.spent > EFFORT).tolist()) | front

    def promising(self, rows: PlanArrays) -> np.ndarray:
        return self.best.promising(rows, self.given_up)

    def cost(self, rows: PlanArrays) -> PlanArrays:
        """Whole plans with their exact seconds and bytes."""
        cost = step_cost(lower(self.space.batch(rows)), self.space.cluster)
        self.costed += len(rows)
        memory = np.array(np.broadcast_to(cost.peak_memory, len(rows)))
        # Where layers of two kinds fall on unequal stages, a rank that a batch does not look at may be the fullest.
        hidden = (memory <= self.best.limit) & self.space.mixed & (rows.virtual > 1) & self.space.uneven(rows)
        if hidden.any():
            memory[hidden] = fullest(lower(self.space.batch(rows.take(hidden)), every_rank=True))
        bounds = intervals.of(self.space, cost)
        return rows.select(*PLAN).but(memory=memory, **bounds.columns)

    # Down the layers

    def descend(self, depth: int, rows: PlanArrays) -> None:
        """Open rows of a layer, those nearest to the best of their group first."""
        groups = self.best.groups(rows)
        nearest = np.full(int(groups.max()) + 1, np.inf)
        np.minimum.at(nearest, groups, rows.time)
        left = np.argsort(rows.time / nearest[groups], kind="stable")
        known = rows.select(*BOUNDED)
        for size in chain(SIZES[depth], repeat(SIZES[depth][-1])):
            if depth == 0 and self.progress:
                self.progress(1 - len(left) / len(rows))
            if not len(left) or self.costed > self.effort:
                return
            self.open(depth, rows.take(left[:size]))
            left = left[size:]
            left = left[self.promising(known.take(left))]

    def open(self, depth: int, rows: PlanArrays) -> None:
        """Expand rows into the next layer where its bounds are promising; below the last layer, cost the plans."""
        if depth == len(self.layers):
            self.spend(rows)
            self.best.offer(self.cost(rows))
            self.confirm()
            return
        below = self.layers[depth](rows)
        below = below.take(self.promising(below.select(*BOUNDED)))
        if len(below):
            self.descend(depth + 1, below)

    def spend(self, rows: PlanArrays) -> None:
        self.spent += np.bincount(strategies.strategy(rows), minlength=len(self.spent))
        self.spent_on_front += int((rows.time > self.best.front[0] * (1 + self.best.margin)).sum())

    def shaped(self, rows: PlanArrays) -> PlanArrays:
        return bounds.of_shapes(self.space, self.space.shaped(rows), self.best.limit)

    def placed(self, rows: PlanArrays) -> PlanArrays:
        below = self.space.placed(rows)
        # With one order each the bounds do not change.
        return bounds.of_shapes(self.space, below, self.best.limit) if len(below) > len(rows) else below

    def sharded(self, rows: PlanArrays) -> PlanArrays:
        """Drop rows that the remaining memory rules out before they are costed."""
        below = self.space.sharded(rows)
        below = below.but(memory=bounds.least_memory(self.space, below))
        below = below.take(self.promising(below.select(*BOUNDED)))
        below = bounds.of_kernels(self.space, below, self.best.limit)
        below = below.take(self.promising(below.select(*BOUNDED)))
        self.costed += len(below)
        self.spend(below)
        parts = [bounds.of_sharded(self.space, part, self.best.limit) for part in below.chunks(bounds.CHUNK)]
        return join(parts) if parts else below

    def scheduled(self, rows: PlanArrays) -> PlanArrays:
        """Take plans with exact bounds (no pipeline, and most looped schedules) as costed; pass the others on."""
        alone = rows.pp == 1
        if alone.any():
            exact = self.space.scheduled(rows.take(alone))
            self.best.offer(exact.but(**dict.fromkeys(("low", "closed", "high", "estimate", "balanced"), exact.time)))
        rows = rows.take(~alone)
        light = rows.select(*BOUNDED, *bounds.SCHEDULED).but(place=np.arange(len(rows)))
        plans = bounds.of_schedules(self.space, self.space.scheduled(light))
        plans = plans.take(self.promising(plans.select(*BOUNDED)))
        exact, rest = (
            rows.take(some.place).but(**some.select("schedule", "virtual", *COSTED).columns)
            for some in (plans.take(plans.exact), plans.take(~plans.exact))
        )
        self.costed += len(exact)
        self.best.offer(exact)
        return rest

    def confirm(self) -> None:
        """Simulate the most promising plan whose interval is wide: its simulated time tightens the incumbents. They are compared with low ends, and
        unequal stages may end below theirs: the low end counts then, or the plan would exclude itself and all like it."""
        if self.walks >= MOST_WALKS or not self.best.kept:
            return
        rows = self.best.kept[-1]
        margin, best = self.best.margin, self.best.front[0]
        rows = rows.take((rows.high > rows.low * (1 + margin)) & (rows.estimate < best * (1 - margin)))
        if len(rows):
            first = rows.take([int(rows.estimate.argmin())])
            self.walks += 1
            self.best.count(first.but(high=np.maximum(walk(self.space, first)[1], first.low)))

    # Least memory

    def leanest(self) -> PlanArrays:
        """Any plan of the space that fits; where there is none, the one with the least memory."""
        return self.least_memory(bounds.of_frames(self.space, self.space.frames))

    def seed(self, frames: PlanArrays, few: int = FEW) -> None:
        """Cost first incumbents: the plans of each group that should need the least memory, and some ordinary ones.

        Without them the first rows that are opened, those with the best bounds, are mostly too large, and nothing is there to stop at.
        """
        groups = self.best.groups(frames)
        by_memory, by_time = (np.lexsort((column, groups)) for column in (frames.memory, frames.time))
        place, size = (
            np.arange(len(groups)) - np.searchsorted(groups[by_time], groups[by_time]),
            np.bincount(groups)[groups[by_time]],
        )
        spread = by_time[(place % np.maximum(1, size // (2 * few)) == 0) & (place < size / 2)]
        self.best.offer(self.cost(self.tightest(frames.take(by_memory[place < few]))))
        rows = self.ordinary(frames.take(spread))
        rows = rows.take(bounds.least_memory(self.space, rows) <= self.best.limit)
        for part in rows.chunks(bounds.CHUNK):
            self.best.offer(self.cost(part))

    def ordinary(self, frames: PlanArrays) -> PlanArrays:
        """Usual plans: small micro-batches, the stack's order, each ZeRO stage over all ranks, 1F1B."""
        space = self.space
        shapes = crossed(frames, (frames.dp, frames.pp), lambda dp, pp: space.sizes(dp, pp).take(slice(0, FEW_SIZES)))
        rows = space.sharded(self.first_order(bounds.kernels(space, shapes)))
        rows = rows.take(
            ((rows.shard == rows.dp) | (rows.zero == 0)) & rows.reshard & (rows.reduces_each | (rows.zero < 2))
        )
        usual = SCHEDULES.names.index("1f1b")

        def plain(pp: int, microbatches: int) -> PlanArrays:
            options = space.schedules(pp, microbatches)
            one = options.take(options.schedule == usual)
            return one if len(one) else options.take(slice(0, 1))

        return crossed(rows, (rows.pp, space.microbatches(rows)), plain)

    def first_order(self, shapes: PlanArrays) -> PlanArrays:
        return crossed(
            shapes,
            tuple(shapes.columns[a] for a in DEGREES),
            lambda *degrees: self.space.orders(*degrees).take(slice(0, 1)),
        )

    def missing(self, axes: list[int]) -> list[int]:
        """Axes in use with which no plan that fits was found yet."""
        data = np.isfinite(self.best.strategy[list(strategies.DATA)]).any()
        return [code for code in axes if not (np.isfinite(self.best.strategy[code]) if code else data)]

    def data_misfits(self, frames: PlanArrays) -> dict[int, PlanArrays]:
        """For each pure data-parallel strategy of which no plan fits, its plan with the least memory."""
        absent = [code for code in strategies.DATA if not np.isfinite(self.best.strategy[code])]
        if not len(frames) or not absent:
            return {}
        shapes = crossed(frames, (frames.dp, frames.pp), lambda dp, pp: self.space.sizes(dp, pp).take(slice(0, 1)))
        rows = self.cost(self.space.scheduled(self.space.sharded(self.space.placed(shapes))))
        strategy = strategies.strategy(rows)
        misfits = {code: rows.take(strategy == code) for code in absent if (strategy == code).any()}
        return {code: mine.take([int(mine.memory.argmin())]) for code, mine in misfits.items()}

    def least_memory(self, frames: PlanArrays) -> PlanArrays:
        """A plan of some frames that fits; where there is none, the one with the least memory."""
        frames = frames.take(np.argsort(frames.memory, kind="stable"))
        best: PlanArrays | None = None
        for part in frames.chunks(256):
            if best is not None and (best.memory[0] <= self.best.limit or part.memory[0] >= best.memory[0]):
                break
            rows = self.cost(self.tightest(part))
            self.best.offer(rows)
            k = int(rows.memory.argmin())
            if best is None or rows.memory[k] < best.memory[0]:
                best = rows.take([k])
        assert best is not None
        return best

    def tightest(self, frames: PlanArrays) -> PlanArrays:
        """For each frame the plans that can have the least memory: smallest micro-batch, widest sharding, fewest in flight."""
        space = self.space
        shapes = crossed(frames, (frames.dp, frames.pp), lambda dp, pp: space.sizes(dp, pp).take(slice(0, 1)))
        rows = space.sharded(self.first_order(shapes))
        widest = np.zeros(int(rows.dp.max(initial=0)) + 1, np.int64)
        np.maximum.at(widest, rows.dp, rows.shard)
        rows = space.scheduled(rows.take(rows.shard == widest[rows.dp]))
        naive = (rows.schedule == NAIVE) | (rows.pp == 1)
        return rows.take(naive) if "naive" in space.choices.words["schedule"] else rows


def search(
    space: Space, headroom: float = 0.0, progress: Progress | None = None, margin: float = MARGIN
) -> SearchOutcome:
    """Search a space for plans that leave `headroom` (a share) of the memory free; all plans within `margin` of the best are costed."""
    return Search(space, space.cluster.accelerator.memory * (1 - headroom), progress, margin).run()
