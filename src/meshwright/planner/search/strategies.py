"""Strategies: the usual name of a plan by the axes it uses. A plan has exactly one.

Pure data parallelism is DDP, ZeRO-1/2, FSDP (ZeRO-3) or HSDP (sharded inside groups, replicated between them). Otherwise a strategy says
which axes are in use: TP+DP, PP+DP, 3D (tensor, pipeline and data), each with +CP or +EP.

Of plans that are equally fast the simpler one is better: `complexity` counts the parts that a user has to set up.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.describe.plan import Plan
from meshwright.describe.plan_fields import PlanArrays
from meshwright.describe.schedules import SCHEDULES, UNUSUAL

TP, PP, CP, EP = 1, 2, 4, 8
DDP, ZERO, FSDP, HSDP = 0, 16, 17, 18
DATA = (DDP, ZERO, FSDP, HSDP)
BASES = {0: "DP", TP: "TP+DP", PP: "PP+DP", TP + PP: "3D"}
NAMES: dict[int, str] = {
    **{code: BASES[code & (TP + PP)] + ("+CP" if code & CP else "") + ("+EP" if code & EP else "") for code in range(1, 16)},
    DDP: "DDP", ZERO: "ZeRO-1/2", FSDP: "FSDP", HSDP: "HSDP",
}  # fmt: skip
ORDER = (DDP, ZERO, FSDP, HSDP, *range(1, 16))


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at closely."""

    plan: Plan
    strategy: str
    time: float  # seconds, simulated
    closed: float  # seconds by the closed forms
    memory: float  # bytes of the fullest rank
    shape: int
    complexity: float
    proved: bool = True  # best of its strategy for certain

    @property
    def key(self) -> tuple[float, float]:
        return self.time, self.complexity


def axes(rows: PlanArrays) -> np.ndarray:
    """Code of the axes in use: all that is known of a strategy before sharding; 0 is pure data parallelism."""
    return TP * (rows.tp > 1) + PP * (rows.pp > 1) + CP * (rows.cp > 1) + EP * (rows.ep > 1)


def strategy(rows: PlanArrays) -> np.ndarray:
    """The code of each row's strategy; rows are sharded."""
    code = axes(rows)
    hybrid = (rows.zero > 0) & (rows.replicate > 1)
    data = np.select([hybrid, rows.zero == 3, rows.zero > 0], [HSDP, FSDP, ZERO], DDP)
    return np.where(code == 0, data, code)


def name_of(plan: Plan) -> str:
    """The strategy of a plan."""
    code = TP * (plan.tp > 1) + PP * (plan.pp > 1) + CP * (plan.cp > 1) + EP * (plan.ep > 1)
    if code:
        return NAMES[code]
    if plan.zero and plan.replicate > 1:
        return NAMES[HSDP]
    return NAMES[FSDP if plan.zero == 3 else ZERO if plan.zero else DDP]


def complexity(rows: PlanArrays, own_order: int) -> np.ndarray:
    """Smaller is simpler. Above all, how many things there are to set up and to get wrong: axes in use, hybrid sharding, weights kept or
    gradients summed otherwise than usual for the ZeRO stage, an order other than the stack's, experts split otherwise, tensor without sequence
    parallelism, virtual stages, a schedule beyond 1F1B and interleaving. Then the schedule, ZeRO stage, recompute and degrees."""
    schedule = np.where(rows.pp > 1, SCHEDULES.column("unusualness")[rows.schedule], 0)
    used = sum((degree > 1) * 1 for degree in (rows.tp, rows.pp, rows.cp, rows.ep, rows.dp))
    odd = (
        1 * ((rows.zero > 0) & (rows.replicate > 1) & (rows.shard > 1))
        + ~rows.reshard
        + ((rows.zero == 3) & ~rows.reduces_each)
    )
    odd = odd + (rows.order != own_order) + (rows.etp != rows.tp) + ((rows.tp > 1) & ~rows.sp)
    odd = odd + (rows.virtual > 1) + (schedule >= UNUSUAL)
    minor = (
        schedule + rows.virtual / 8 + rows.zero + rows.recompute + np.log2(rows.tp * rows.cp * rows.pp * rows.ep) / 4
    )
    return (used + odd) * 100.0 + minor
