"""Neighbours of a plan and their estimates: the effect of one change.

A neighbour differs from the plan in a few fields and is legal for the same model, workload and cluster (`describe.legality`). When one degree
changes, another changes with it, so that the product stays the number of devices:

    tp · cp · pp · dp = devices       tp ÷ f  ⇒  pp · f  or  dp · f

If the batch no longer divides, the micro-batch shrinks to the largest legal size. `PlanTrials` estimates each neighbour once. The rules of `lint` and
the guides of `textbook` use it to give costs in seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.step import step_cost
from meshwright.describe import legality
from meshwright.describe.base import Described
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config, Configured
from meshwright.describe.legality import Case
from meshwright.describe.legality.case import data_parallel as data_parallel_sizes
from meshwright.describe.model import Model
from meshwright.describe.plan import AXES, Plan, divisors, in_framework
from meshwright.describe.result import GIB
from meshwright.describe.result import USABLE_MEMORY as USABLE_MEMORY
from meshwright.describe.schedules import SCHEDULES
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.stages import bounding_ranks, has_unlike_ranks
from meshwright.lower.step import step_program
from meshwright.predict.estimate import Estimate, estimate
from meshwright.predict.prediction import fewest_recomputed, recomputing, resolve_recompute


@dataclass
class PlanTrials(Configured):
    """Estimates of other plans for one configuration; each plan is estimated once."""

    config: Config
    _seen: dict[str, Estimate | None] = field(default_factory=dict, repr=False)

    def of(self, plan: Plan | None) -> Estimate | None:
        """Estimate a plan; None if `plan` is None or not legal."""
        if plan is None:
            return None
        key = repr(plan)
        if key not in self._seen:
            try:
                self._seen[key] = estimate(self.config.but(plan=plan))
            except MeshwrightError:
                self._seen[key] = None
        return self._seen[key]

    def runs(self, plan: Plan | None) -> bool:
        """Whether the framework of the stack can run a plan."""
        if plan is None or not self.stack.can.framework:
            return plan is not None
        return bool(legality.legal(Case(plan, self.model, stack=self.stack, framework=True)))

    def with_changes(self, plan: Plan, **changes: Described) -> Estimate | None:
        """The plan on another cluster, workload, model or stack."""
        return PlanTrials(self.config.but(**changes)).of(plan)

    def fastest(self, plans: Iterable[Plan | None], spare: float = 1.0) -> Estimate | None:
        """Return the fastest legal plan that the stack's framework runs within the share `spare` of memory; the first of equals.

        All plans are costed in one batch, which takes little longer than one of them."""
        legal = [runnable for plan in plans if (runnable := self._runnable(plan)) is not None]
        if not legal:
            return None
        seconds, sizes = costs(self.config, [runnable for _, runnable in legal])
        limit = spare * self.cluster.accelerator.memory / GIB
        fitting = [
            (time, number) for number, (time, size) in enumerate(zip(seconds, sizes, strict=True)) if size <= limit
        ]
        return self.of(legal[min(fitting)[1]][0]) if fitting else None

    def _runnable(self, plan: Plan | None) -> tuple[Plan, Plan] | None:
        """A plan, and the same as it runs: with the framework's stages and its recompute resolved; None if it is not legal."""
        c = self.config
        if plan is None or not self.runs(plan):
            return None
        try:
            c.but(plan=plan).check()
            asked = in_framework(plan, c.model, c.stack)
            return plan, resolve_recompute(c.model, asked, c.workload, c.stack, c.cluster.accelerator.memory)
        except MeshwrightError:
            return None


class SizedPlan(NamedTuple):
    """A plan, and the workload, the cluster and the model that it runs with."""

    plan: Plan
    workload: Workload
    cluster: Cluster
    model: Model

    @property
    def shared(self) -> Any:
        """What trials must have in common to be costed in one batch: batch, sequence, imbalance and GPUs may differ where only the plan sees them."""
        w, c = self.workload, self.cluster
        bandwidths = tuple(map(c.device_bandwidth, range(len(c.levels))))
        return id(self.model), w.but(batch=1, imbalance=1, seq=w.seq if w.lengths else 1), bandwidths


def costs(config: Config, plans: Sequence[Plan | SizedPlan]) -> tuple[np.ndarray, np.ndarray]:
    """Step time in seconds and memory of the fullest GPU in GiB of several plans, or trials of other workloads, sizes of the cluster and
    adapters of the model.

    Of equal layers that are divided evenly, the ranks that can be the slowest or the fullest are known; the others only count in the mean time."""
    c, out = config, np.zeros((2, len(plans)))
    for trials in batches(config, plans):
        plans_, workloads, clusters, (model, *_) = zip(*trials.values(), strict=True)
        every = c.cluster.sharing > 1 or has_unlike_ranks(model, plans_)
        program = step_program(model, plans_, workloads[0], c.stack, every_rank=every, workloads=workloads)
        program.averaged = [] if every else bounding_ranks(program.batch, every_rank=True)
        cost = step_cost(program, max(clusters, key=lambda cluster: cluster.world))
        out[:, list(trials)] = cost.time, cost.peak_memory / GIB
    return out[0], out[1]


def batches(config: Config, plans: Sequence[Plan | SizedPlan]) -> Iterable[dict[int, SizedPlan]]:
    """The plans and trials that can be computed in one batch, by their positions."""
    out: dict[Any, dict[int, SizedPlan]] = {}
    here = SizedPlan(config.plan, config.workload, config.cluster, config.model)
    shared_here = here.shared
    for k, plan in enumerate(plans):
        trial = plan if isinstance(plan, SizedPlan) else here._replace(plan=plan)
        out.setdefault(trial.shared if isinstance(plan, SizedPlan) else shared_here, {})[k] = trial
    return out.values()


def within_memory(config: Config, plans: Sequence[Plan | SizedPlan]) -> list[Plan | None]:
    """The plan of each trial with `recompute = auto` replaced by the fewest layers that fit, all found together; None where none do."""
    stack, memory = config.stack, config.cluster.accelerator.memory
    out: list[Plan | None] = [None] * len(plans)
    for trials in batches(config, plans):
        searched = {k: t for k, t in trials.items() if t.plan.recompute == "auto" and not t.plan.recompute_budget}
        for k, trial in trials.items():
            if k not in searched:
                with suppress(MeshwrightError):
                    out[k] = resolve_recompute(trial.model, trial.plan, trial.workload, stack, memory)
        if searched:
            plans_, works, _, (model, *_) = zip(*searched.values(), strict=True)
            counts = fewest_recomputed(model, plans_, works[0], stack, USABLE_MEMORY * memory, works)
            for k, plan, count in zip(searched, plans_, counts, strict=True):
                out[k] = None if count is None else recomputing(plan, count)
    return out


def step(e: Estimate) -> float:
    return e.prediction.step_time_s


def exposed(e: Estimate, part: str) -> float:
    return e.prediction.exposed_s.get(part, 0.0)


def fits(e: Estimate, spare: float = 1.0) -> bool:
    return (e.prediction.memory_gib or 0.0) <= spare * e.prediction.memory_limit_gib


def changed(plan: Plan, **changes: Any) -> Plan | None:
    """The plan with some fields changed; None if the fields contradict each other."""
    try:
        return plan.but(**changes)
    except MeshwrightError:
        return None


def data_parallel(plan: Plan, dp: int) -> dict[str, int]:
    """Return `replicate` and `shard` of another data-parallel degree: replicated, sharded or hybrid like the plan."""
    return data_parallel_sizes(plan.zero, plan.replicate, plan.shard, dp)


def rebatched(plan: Plan | None, workload: Workload, stack: Stack | None = None) -> Plan | None:
    """Lower the micro-batch to the largest legal one; None if no micro-batch is legal."""
    if plan is None or workload.batch % plan.dp:
        return None
    sizes = np.array([d for d in divisors(workload.batch // plan.dp) if d <= plan.microbatch])
    legal = legality.legal(Case(plan, workload=workload, stack=stack).with_columns({"microbatch": sizes}))
    legal_sizes = sizes[np.broadcast_to(legal, len(sizes))]
    return changed(plan, microbatch=int(legal_sizes[-1])) if len(legal_sizes) else None


def moved(
    plan: Plan, source: str, target: str, factor: int, workload: Workload, stack: Stack | None = None
) -> Plan | None:
    """Divide one axis by `factor` and multiply another by it; axes are tp, cp, pp, dp."""
    degrees = {axis: getattr(plan, axis) for axis in AXES}
    if factor < 2 or degrees[source] % factor:
        return None
    degrees[source] //= factor
    degrees[target] *= factor
    changes: dict[str, Any] = {**{a: degrees[a] for a in ("tp", "cp", "pp")}, **data_parallel(plan, degrees["dp"])}
    if degrees["pp"] == 1 and plan.virtual > 1:
        changes |= {"virtual": 1, "schedule": "1f1b"}
    if plan.layers_per_stage:
        changes["layers_per_stage"] = ()
    if degrees["tp"] == 1:
        changes["sp"] = False
    if plan.expert_tp and degrees["tp"] % plan.expert_tp:
        changes["expert_tp"] = 0
    return rebatched(changed(plan, **changes), workload, stack)


def moves(
    plan: Plan, source: str, workload: Workload, stack: Stack | None = None, targets: Iterable[str] = AXES
) -> Iterator[Plan | None]:
    """All plans that divide one axis by a factor and multiply another by it."""
    for factor in divisors(getattr(plan, source))[1:]:
        for target in targets:
            if target != source:
                yield moved(plan, source, target, factor, workload, stack)


def orders(plan: Plan) -> Iterator[Plan | None]:
    """Yield the plan with each axis order that places ranks differently."""
    used = [axis for axis in AXES if getattr(plan, axis) > 1]
    idle = [axis for axis in AXES if axis not in used]
    for order in permutations(used):
        yield changed(plan, order=(*order, *idle))


def microbatches(plan: Plan, workload: Workload) -> Iterator[Plan | None]:
    """The plan with every other micro-batch that divides the batch, smallest first."""
    if workload.batch % plan.dp == 0:
        for size in divisors(workload.batch // plan.dp):
            if size != plan.microbatch:
                yield changed(plan, microbatch=size)


def interleavings(plan: Plan, model: Model) -> Iterator[Plan | None]:
    """The plan with other numbers of interleaved virtual stages."""
    if plan.pp > 1:
        for virtual in (2, 3, 4, 6, 8):
            if plan.pp * virtual <= model.layers and virtual != plan.virtual:
                schedule = plan.schedule if SCHEDULES[plan.schedule].most_virtual > 1 else "interleaved"
                yield changed(plan, virtual=virtual, schedule=schedule, layers_per_stage=())


def settings(old: Plan, new: Plan) -> str:
    """The `--set` options that turn one plan into another."""
    words = []
    for name, value in new.model_dump().items():
        if value == getattr(old, name):
            continue
        if isinstance(value, tuple):
            inner = ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in value)
            words.append(f"--set 'plan.{name}=[{inner}]'")
        else:
            words.append(f"--set plan.{name}={written(value)}")
    return " ".join(words)


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
