"""`auto`: search for a schedule for given stage times and a memory limit. It is never worse than a handmade schedule.

The handmade schedules assume equal stages and F = I = W. Real stages differ (embedding, loss, uneven layers), attention
makes I longer than W, transfers take time, and the memory limit varies. The search has three parts:

1. simulate every handmade schedule that is legal for P, M and V and fits the memory limit;
2. run the list scheduler (`greedy`) with a grid of policies: how far forwards run ahead, whether backwards are split,
   how long to wait for a backward, when a W may fill a gap; on looped and, with an even V, on V-shaped placement;
3. improve the best few by swapping neighbours on their longest path (`improve`).

The result is the best schedule found, so no handmade schedule beats it under the same limit. `effort` limits the work,
counted in simulated actions. No clock and no random numbers are involved: the same request gives the same schedule. A
limit of P micro-batches is what Qi et al. call ZB-1p; 2P is ZB-2p.

`bound` is a lower bound on the makespan: a rank cannot start before the first activation reaches it, and then has all
its work to do; and one micro-batch must pass all stages forward and backward. The search ends when a schedule reaches
the bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from meshwright.describe.schedules import SCHEDULES
from meshwright.errors import MeshwrightError, unknown
from meshwright.programs.pipelines.greedy import Policy, ScheduleProblem, list_schedule
from meshwright.programs.pipelines.improve import Key, improve
from meshwright.programs.pipelines.program import PipelineProgram, looped, v_shaped
from meshwright.programs.pipelines.rules import refusal, require
from meshwright.programs.pipelines.walk import Durations, Times, Walked, by_stage, walk

EFFORT = 600_000  # simulated actions: about one second
OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True, eq=False)
class BestSchedule:
    """The best schedule, how it was found, the lower bound, and the results of the handmade schedules."""

    walked: Walked
    origin: str
    bound: float
    handmade: dict[str, float | None] = field(default_factory=dict)  # objective of each; None: exceeds the memory limit

    @property
    def program(self) -> PipelineProgram:
        return self.walked.program


def auto(ranks: int, microbatches: int, virtual: int = 1, **options: Any) -> PipelineProgram:
    """Return the program that `search` finds; `options` are those of `search`."""
    return search(ranks, microbatches, virtual, **options).program


def search(
    ranks: int,
    microbatches: int,
    virtual: int = 1,
    *,
    durations: Durations | None = None,
    p2p: Times = 0.0,
    overlap: bool = True,
    hidden: float | None = None,
    limit: Times | None = None,
    activation: Times | None = None,
    released_at_input: Times = 0.0,
    objective: str = "makespan",
    effort: int = EFFORT,
) -> BestSchedule:
    """Search a schedule for P ranks, M micro-batches, V stages per rank.

    `limit` is the memory limit of a rank, in the unit of `activation` (default: micro-batches through all stages of a
    rank). The `objective` "span" is for steps that follow each other without a barrier.
    """
    require("auto", ranks, microbatches, virtual)
    if objective not in OBJECTIVES:
        raise unknown("MW-PIPE-031", "objective", objective, OBJECTIVES)
    stages = ranks * virtual
    setting = ScheduleProblem(
        microbatches,
        looped(ranks, virtual),
        durations or Durations.of(stages),
        by_stage(p2p, stages - 1, "p2p"),
        by_stage(1.0 / virtual if activation is None else activation, stages, "activation"),
        by_stage(released_at_input, stages, "released_at_input"),
        np.full(ranks, np.inf) if limit is None else by_stage(limit, ranks, "limit"),
    )
    options = {
        "p2p": setting.p2p,
        "overlap": overlap,
        "hidden": hidden,
        "activation": setting.activation,
        "released_at_input": setting.released_at_input,
    }
    return _Search(setting, virtual, options, objective, effort).run()


class _Search:
    """The state of the search: the schedules found so far and the remaining effort."""

    def __init__(
        self, setting: ScheduleProblem, virtual: int, options: dict[str, Any], objective: str, effort: int
    ) -> None:
        self.setting, self.virtual, self.options, self.objective = setting, virtual, options, objective
        self.left = effort
        ranks = setting.ranks
        self.placements = [looped(ranks, virtual)] + ([v_shaped(ranks, virtual)] if virtual % 2 == 0 else [])
        self.bound = min(lower_bound(setting, rank_of, objective) for rank_of in self.placements)
        self.pool: list[tuple[Key, int, str, Walked]] = []

    def run(self) -> BestSchedule:
        ranks, microbatches, virtual = self.setting.ranks, self.setting.microbatches, self.virtual
        handmade: dict[str, float | None] = {}
        for name, schedule in SCHEDULES.items():
            build = schedule.build
            if build is not None and build is not auto and refusal(name, ranks, microbatches, virtual) is None:
                handmade[name] = self.consider(name, build(ranks, microbatches, virtual))
        self.run_list_scheduler()
        if not self.pool:
            self.refuse()
        self.polish()
        _, _, origin, walked = min(self.pool, key=lambda entry: entry[:2])
        program = walked.program.replace(np.arange(len(walked.program)), schedule="auto")
        return BestSchedule(walk(program, walked.durations, **self.options), origin, self.bound, handmade)

    def rate(self, program: PipelineProgram) -> tuple[Key, Walked] | None:
        """Return the sort key (objective, peak memory, sum of spans) and the walk; None if the memory limit is exceeded."""
        walked = walk(program, self.setting.durations, **self.options)
        if (walked.peak_memory > self.setting.limit * (1 + 1e-9)).any():
            return None
        goal = walked.makespan if self.objective == "makespan" else walked.longest_span
        key = (goal, float(walked.peak_memory.max()), float(walked.span.sum()))
        return tuple(float(f"{k:.12g}") for k in key), walked

    def consider(self, origin: str, program: PipelineProgram) -> float | None:
        self.left -= len(program)
        rated = self.rate(program)
        if rated is None:
            return None
        self.pool.append((rated[0], len(self.pool), origin, rated[1]))
        return rated[0][0]

    def at_bound(self) -> bool:
        return any(key[0] <= self.bound * (1 + 1e-11) for key, *_ in self.pool)

    def run_list_scheduler(self) -> None:
        """Run the list scheduler with the grid of policies, with half of the effort."""
        candidates = [
            (index, policy, rank_of)
            for rank_of in self.placements
            for index, policy in enumerate(_policies(self.setting, self.virtual, rank_of))
        ]
        reserve = self.left // 2
        for _, policy, rank_of in sorted(candidates, key=lambda candidate: candidate[0]):
            if self.at_bound() or (self.left <= reserve and self.pool):
                return
            program = list_schedule(replace(self.setting, rank_of=rank_of), policy)
            if program is not None:
                self.consider("list scheduling", program)

    def polish(self) -> None:
        """Improve the three best different schedules; they share the remaining effort."""
        self.pool.sort(key=lambda entry: entry[:2])
        seeds = list({entry[0]: entry for entry in reversed(self.pool)}.values())[::-1][:3]
        for k, (key, _, origin, walked) in enumerate(seeds):
            if self.at_bound():
                return
            tries = self.left // (len(walked.program) * (len(seeds) - k))
            better, better_key, used = improve(walked, self.rate, key, tries, self.bound * (1 + 1e-11))
            self.left -= used * len(walked.program)
            if better_key < key:
                self.pool.append((better_key, len(self.pool), f"{origin}, improved", better))

    def refuse(self) -> NoReturn:
        setting = self.setting
        needed = np.bincount(setting.rank_of, setting.activation, minlength=setting.ranks)
        rank = int(np.argmin(setting.limit - needed))
        what = f"no schedule fits the memory limit of rank {rank}: {setting.limit[rank]:g}"
        why = f"One micro-batch needs {needed[rank]:g} there"
        raise MeshwrightError("MW-PIPE-030", what, why=why, valid=[f"{needed[rank]:g} or more"], exit_code=3)


def lower_bound(setting: ScheduleProblem, rank_of: np.ndarray, objective: str = "makespan") -> float:
    """Return a lower bound, in seconds, of the objective of any schedule on this placement."""
    d = setting.durations
    hop = np.where(rank_of[1:] != rank_of[:-1], setting.p2p, 0.0)
    full_backward = np.minimum(d.backward, d.input + d.weight)
    work = np.bincount(rank_of, (d.forward + full_backward) * setting.microbatches, minlength=setting.ranks)
    if objective == "span":
        return float(work.max())
    reached = np.concatenate([[0.0], np.cumsum(d.forward[:-1] + hop)])  # earliest start of each stage's first forward
    first = np.array([reached[rank_of == r].min() for r in range(setting.ranks)])
    round_trip = reached[-1] + d.forward[-1] + np.minimum(d.input, d.backward).sum() + hop.sum()
    return float(max((first + work).max(), round_trip))


def _policies(setting: ScheduleProblem, virtual: int, rank_of: np.ndarray) -> Iterator[Policy]:
    """Yield the policies, the most promising first. `ahead` is `reach` times the activations of the handmade schedules."""
    ranks = setting.ranks
    on_v = virtual > 1 and ranks > 1 and rank_of[ranks] == ranks - 1
    looping = 0 if on_v else (virtual - 1) * min(ranks, setting.microbatches)
    most = virtual * ranks if on_v else ranks
    for split in (True, False):
        # Delayed Ws: all ranks hold equally many activations
        limits = np.full(ranks, most) if split or on_v else np.arange(ranks, 0, -1)
        for patience, least_gap in ((0.0, 0.0), (0.25, 0.75), (0.5, 0.5), (0.0, 1.0), (1.0, 1.0)):
            for breadth_first in (False, True) if virtual > 1 else (False,):
                for reach in (np.inf, 1.0, 1.5, 2.0, 1.25):
                    ahead = np.maximum(looping + reach * limits, virtual)
                    yield Policy(split, ahead, patience, least_gap, breadth_first)
