"""The input of a decision guide (model, cluster, workload), and the legal plan nearest to its recommendation.

A guide recommends, for example, "TP=8, PP=8–16, DP for all other ranks". `GuideProblem.shaped` finds the nearest legal plan: the largest legal
degree up to the recommended one, data parallelism over all other devices, and a batch that divides. Fields that the guides do not mention follow
their other rules: buckets above P·α/β, the least recompute that fits, and with it the largest micro-batch that fits and keeps M ≥ 4·P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from math import gcd
from typing import Any, NamedTuple

from meshwright.cost.advice import bucket_for
from meshwright.cost.memory import rank_peaks
from meshwright.describe.config import Config, Configured
from meshwright.describe.plan import Plan, divisors
from meshwright.errors import MeshwrightError
from meshwright.lower.step import step_program
from meshwright.planner.advice.alternatives import USABLE_MEMORY, PlanTrials, changed, fits
from meshwright.units import Json

STATE_BYTES = 16.0  # parameters 2, gradients 2, master copy and Adam's moments 12
FAST_INSIDE = 100e9  # bytes/s per device: NVLink and similar links, not PCIe
SLOW_RIDGE = 1e5  # FLOP/byte: InfiniBand is near 20,000 and cloud Ethernet above 200,000
MOST_MICROBATCH = 64


class GuideProblem(Configured):
    """The problem of a guide, and legal plans for its recommendations."""

    def __init__(self, config: Config) -> None:
        self.config, cluster = config, config.cluster
        self.trial = PlanTrials(config)
        self.world = cluster.world
        self.node = min(cluster.node_size, cluster.world)
        self.nodes = cluster.nodes
        self._shaped: dict[tuple[Any, ...], Plan | None] = {}

    @property
    def state(self) -> float:
        """Bytes of all parameters, gradients and optimizer states, unsharded; a frozen parameter has two."""
        return STATE_BYTES * self.model.trained + 2.0 * (self.model.total - self.model.trained)

    @property
    def memory(self) -> float:
        return self.cluster.accelerator.memory

    @property
    def fast_inside(self) -> bool:
        return self.cluster.device_bandwidth(0) >= FAST_INSIDE

    @property
    def between(self) -> float:
        """Bytes/s a device has between nodes."""
        return self.cluster.device_bandwidth(min(1, len(self.cluster.levels) - 1))

    @property
    def slow_between(self) -> bool:
        """Whether the network is as slow as cloud Ethernet: FLOPs per byte are above `SLOW_RIDGE`, so only large batches hide it."""
        return self.nodes > 1 and self.cluster.accelerator.peak_for(self.workload.precision) / self.between > SLOW_RIDGE

    @property
    def moe(self) -> bool:
        return bool(self.model.experts)

    def fits(self, plan: Plan | None) -> bool:
        e = self.trial.of(plan)
        return e is not None and fits(e)

    def first_fitting(self, plans: Iterable[Plan | None]) -> Plan | None:
        """The first plan that fits, else the last legal one."""
        last = None
        for plan in plans:
            if plan is not None:
                last = plan
                if self.fits(plan):
                    break
        return last

    def fastest(self, plans: Sequence[Plan | None]) -> Plan | None:
        """The fastest plan that fits, else the first legal one."""
        best = self.trial.fastest(plans)
        return best.plan if best else next((plan for plan in plans if plan), None)

    def replicated(self) -> tuple[Plan | None, bool]:
        """Pure data parallelism: replicas (DDP) if they fit, which the second value says, else ZeRO-3 over all devices."""
        ddp = self.shaped()
        plan = ddp if self.fits(ddp) else self.shaped(zero=3)
        return plan, plan == ddp

    def aside(self, plan: Plan | None) -> str:
        """Explain a pipeline in a plan for which pure data parallelism was recommended."""
        if plan is None or plan.pp == 1:
            return ""
        return f"; pp {plan.pp}, since batch {self.workload.batch} does not divide over {self.world} ranks"

    # Shaping

    @cached_property
    def tensor_degrees(self) -> list[int]:
        """Degrees that divide heads, KV heads, FFN and the devices of a node."""
        return [d for d in divisors(self.node) if self._splits(d)]

    def _splits(self, tp: int) -> bool:
        return Plan(tp=tp).is_legal(self.model, self.workload.but(batch=1))

    def shaped(
        self, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, zero: int = 0, hybrid: bool = False, virtual: int = 1
    ) -> Plan | None:
        """Complete a recommendation to the nearest legal plan; None if there is none."""
        wish = (tp, pp, cp, ep, zero, hybrid, virtual)
        if wish not in self._shaped:
            self._shaped[wish] = self._nearest(*wish)
        return self._shaped[wish]

    def _nearest(self, tp: int, pp: int, cp: int, ep: int, zero: int, hybrid: bool, virtual: int) -> Plan | None:
        if self.model.kind != "transformer":
            tp, pp, cp, ep = 1, 1, 1, 1
        for t in [d for d in reversed(self.tensor_degrees) if d <= tp and self.world % d == 0]:
            for c in [d for d in reversed(divisors(self.world // t)) if d <= cp]:
                for p in self._stage_counts(t * c, pp):
                    plan = self._built(t, c, p, ep, zero, hybrid, virtual)
                    if plan is not None:
                        return self.with_recompute(plan)
        return None

    def _stage_counts(self, taken: int, wished: int) -> list[int]:
        """Legal pipeline degrees, the recommended one first, then smaller, then larger ones: some batches divide only with more stages."""
        legal = [d for d in divisors(self.world // taken) if d <= self.model.layers or d == 1]
        return sorted(legal, key=lambda d: (d > wished, abs(d - wished)))

    def _built(self, tp: int, cp: int, pp: int, ep: int, zero: int, hybrid: bool, virtual: int) -> Plan | None:
        dp = self.world // (tp * cp * pp)
        inside = gcd(dp, max(1, self.node // (tp * cp))) if hybrid else dp
        shards = zero > 0 and inside > 1
        sharing = {"replicate": dp // inside, "shard": inside, "zero": zero} if shards else {"replicate": dp}
        experts = [e for e in divisors(self.model.experts or 1) if e <= ep and (cp * dp) % e == 0]
        local = self.workload.batch // dp
        looped = virtual > 1 and pp > 1 and pp * virtual <= self.model.layers and local % pp == 0
        stages = {"virtual": virtual, "schedule": "interleaved"} if looped else {}
        inside_experts = 1 if ep > 1 and tp > 1 else 0
        degrees = {"tp": tp, "cp": cp, "pp": pp, "ep": max(experts, default=1), "expert_tp": inside_experts}
        sp = tp > 1 and self.workload.seq % (tp * cp) == 0
        try:
            plan = Plan(**degrees, **stages, **sharing, sp=sp, bucket=self.bucket(dp * cp))
            return plan.check(self.model, self.workload, self.cluster, self.stack)
        except MeshwrightError:
            return None

    def bucket(self, ranks: int) -> float:
        return float(bucket_for(self.cluster, ranks))

    def with_recompute(self, plan: Plan) -> Plan:
        """Choose the least recompute that fits, then the largest micro-batch that fits and keeps M ≥ 4·P if possible."""
        local = self.workload.batch // plan.dp
        sizes = [d for d in reversed(divisors(local)) if d <= MOST_MICROBATCH]
        if plan.pp > 1:
            sizes = [d for d in sizes if local // d >= 4 * plan.pp] or [1]
        tried = [changed(plan, microbatch=d, recompute=r) for r in ("none", "selective", "full") for d in sizes]
        legal = [p for p in tried if p is not None and self._legal(p)]
        for candidate, peak in zip(legal, self._peaks(legal), strict=True):
            if peak <= USABLE_MEMORY * self.memory:
                return candidate
        return plan.but(microbatch=1, recompute="full")

    def _peaks(self, plans: list[Plan]) -> list[float]:
        """Peak bytes of each plan's fullest rank."""
        if not plans:
            return []
        return rank_peaks(step_program(self.model, plans, self.workload, self.stack)).max(axis=0).tolist()

    def _legal(self, plan: Plan) -> bool:
        return plan.is_legal(self.model, self.workload, self.cluster, self.stack)


class Advice(NamedTuple):
    """What a guide says about a problem: a legal plan, or None if it advises against its strategy or is not about training; and the reason
    with the figures of the problem."""

    plan: Plan | None
    reason: str
    wording: str = ""  # of the guide's text
    correction: str = ""  # what is wrong in the wording


@dataclass(frozen=True)
class Recommendation:
    """The advice of a guide, with the guide's name and source."""

    guide: str
    plan: Plan | None
    reason: str
    source: str
    wording: str = ""
    correction: str = ""

    def as_dict(self) -> Json:
        return {**vars(self), "plan": self.plan.as_dict() if self.plan else None}


def guide(name: str, source: str, wording: str = "") -> Callable[[Callable[[GuideProblem], Advice]], Guide]:
    """A decision guide: its name, where its text stands, and its wording where that does not depend on the problem."""

    def decorate(advise: Callable[[GuideProblem], Advice]) -> Guide:
        @wraps(advise)
        def recommend(problem: GuideProblem) -> Recommendation:
            advice = advise(problem)
            words = advice.wording or wording
            return Recommendation(name, advice.plan, advice.reason, source, words, advice.correction)

        return recommend

    return decorate


Guide = Callable[[GuideProblem], Recommendation]
