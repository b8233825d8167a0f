"""Beyond one cluster, modelled: a hundred thousand devices, and several sites connected by a slow line.

**More devices.** Copies of a plan are added along data parallelism, `replicate · k`. Weak scaling lets the batch grow with the devices
(the step stays, convergence may not: beyond the critical batch size more data a step buys little); strong scaling keeps the batch,
so that a rank has fewer micro-batches to hide its reduction behind, and its pipeline fewer to fill its bubble with.

**Several sites.** Only what replicas exchange may cross a line between sites: the gradients, N·bytes/(tp·pp) from each of tp·pp
ranks of a replica, N·bytes in total. Reduced hierarchically each site sends, per step,

    2·(S−1)/S · N · bytes        over S sites, whatever their size

over the line's whole bandwidth, plus 2·(S−1)·α. With a line of 100 Gb/s and 405B parameters in bf16 that is 65 s between two sites. Where it does not
hide behind the step, sites may exchange only every H steps (local updates, as DiLoCo does: another algorithm, whose loss is not
that of synchronous training), which divides the traffic by H.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.planner.goodput import GPU_MTBF, Reliability, reliability
from meshwright.predict.estimate import Estimate, estimate

LATENCY = 0.02  # seconds: some 2,000 km and back
OVERLAP = 0.85  # share of a step behind which a transfer between sites can hide


@dataclass(frozen=True)
class Scaled:
    """A plan at another number of devices."""

    gpus: int
    batch: int
    step_s: float
    mfu: float
    efficiency: float  # tokens per device and second against the smallest size
    reliability: Reliability

    @property
    def goodput(self) -> float:
        return self.reliability.goodput

    @property
    def effective_mfu(self) -> float:
        """MFU × goodput: the MFU after saves and failures."""
        return self.mfu * self.goodput


def scale_out(start: Estimate, copies: Sequence[int], save: float, restart: float, weak: bool = True) -> list[Scaled]:
    """The plan of `start` repeated along data parallelism; strong scaling leaves out copies the batch cannot feed."""
    rows: list[Scaled] = []
    base = 0.0
    for k in copies:
        plan = repeated(start.plan, k)
        batch = start.workload.batch * k if weak else start.workload.batch
        try:
            cluster, workload = start.cluster.with_gpus(plan.world), start.workload.but(batch=batch)
            e = estimate(start.config.but(cluster=cluster, plan=plan, workload=workload))
        except MeshwrightError:
            if weak:
                raise
            continue
        rate = (e.prediction.tokens_per_s or 0.0) / plan.world
        base = base or rate
        failures = reliability(plan.world, save, restart, GPU_MTBF)
        rows.append(Scaled(plan.world, batch, e.prediction.step_time_s, e.prediction.mfu or 0.0, rate / base, failures))
    return rows


def repeated(plan: Plan, copies: int) -> Plan:
    """Multiply the data-parallel degree by `copies`."""
    return plan.but(replicate=plan.replicate * copies)


@dataclass(frozen=True)
class Crossing:
    """Traffic of a training step between sites, and its cost."""

    sites: int
    site_bytes: float  # sent by each site in one exchange
    transfer_s: float  # of one exchange
    step_s: float  # of a site alone
    exposed_s: float  # added to each step if sites exchange every step
    every: int  # steps between exchanges that keep the added time below `share` of the step
    share: float

    @property
    def slowdown(self) -> float:
        return 1 + self.exposed_s / self.step_s


def crossing(
    site: Estimate, sites: int, bandwidth: float, alpha: float, share: float = 0.05, dtype: str | None = None
) -> Crossing:
    """`sites` sites, each running `site`, exchange gradients over a line of `bandwidth` bytes/s a direction."""
    if sites < 2 or bandwidth <= 0 or not 0 < share < 1:
        raise MeshwrightError(
            "MW-GOOD-002",
            f"{sites} sites over {bandwidth:g} B/s with a share of {share:g}",
            valid=["2 sites or more", "a bandwidth above 0", "a share between 0 and 1"],
        )
    width = DTYPE_BYTES[dtype or site.plan.reduce_dtype]
    size = 2 * (sites - 1) / sites * site.model.total * width
    transfer = size / bandwidth + 2 * (sites - 1) * alpha
    alone = site.prediction.step_time_s
    exposed = max(0.0, transfer - OVERLAP * alone)
    # Exchanged every H steps it hides behind H steps: transfer − OVERLAP·H·step ≤ share·H·step.
    every = max(1, math.ceil(transfer / ((OVERLAP + share) * alone)))
    return Crossing(sites, size, transfer, alone, exposed, every, share)
