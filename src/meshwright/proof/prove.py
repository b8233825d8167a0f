"""The proof of a plan: train its small copy on many ranks and on one device, and compare everything.

    1  fold      the plan to the fewest ranks that keep every axis, the model to a small one with the same flags
    2  train     both through `train`'s own step, in float64 and float32, from the same weights on the same batches
    3  compare   losses, norms, every gradient, every parameter; then collectives and memory of one watched step
    4  converge  where gradients or products are made with loss: the loss after the steps, beside the exact run's
    5  blame     should they differ: train again with each axis alone; the one that differs alone is the broken one

A proof is worth what it would catch, so weights start where no bias is zero, padding differs from rank to rank, and
gradients are large enough to be clipped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from meshwright.describe import legality
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError
from meshwright.proof.compare import Agreement, bounds_from_rounding, compare
from meshwright.proof.fold import AXES, Small, order_matters, small_copy
from meshwright.proof.records import Job, Row, Trace
from meshwright.training import launch

TARGET = "meshwright.proof.trace:record"
SILENCE_S = 120.0


@dataclass
class Proof:
    small: Small
    steps: int
    agreements: list[Agreement]
    traces: list[Trace]  # of the ranks, in the dtype that was watched
    blamed: str = ""
    seconds: float = 0.0
    exact_losses: tuple[float, ...] = ()  # of one device without the plan's loss, where it has one

    @property
    def parity(self) -> bool:
        return not any(agreement.breaks for agreement in self.agreements)

    @property
    def communication(self) -> bool:
        return not any(row.unexplained for _, row in self.rows) and not self.unknown

    @property
    def passed(self) -> bool:
        return self.parity and self.communication

    @property
    def rows(self) -> list[tuple[int, Row]]:
        return [(trace.rank, row) for trace in self.traces for row in trace.traffic]

    @property
    def collectives(self) -> dict[str, int]:
        """How many of the rows, one a rank, axis and collective, are equal, how many of these rest on the step's own data, and how
        many differ."""
        rows = [row for _, row in self.rows]
        return {
            "equal": sum(row.equal for row in rows),
            "explained": sum(bool(row.explained) for row in rows),
            "unexplained": sum(row.unexplained for row in rows),
        }

    @property
    def convergence(self) -> dict[str, float]:
        """The loss of the last step as this plan trains, as one device trains exactly, and their relative difference."""
        if not self.exact_losses:
            return {}
        lossy, exact = self.agreements[0].losses[-1], self.exact_losses[-1]
        return {"loss": lossy, "exact_loss": exact, "difference": (lossy - exact) / exact}

    @property
    def unknown(self) -> list[str]:
        return sorted({name for trace in self.traces if trace.observed for name in trace.observed.unknown})

    def as_dict(self) -> dict[str, Any]:
        first = next((asdict(b) for a in self.agreements for b in a.breaks), None)
        if first is not None:
            first = known(first) | {"axis": self.blamed}
        return {
            "passed": self.passed,
            "plan": self.small.plan.title(),
            "ranks": self.small.plan.world,
            "changes": list(self.small.changes),
            "steps": self.steps,
            "errors": {a.dtype: known(a.errors) for a in self.agreements},
            "first_break": first,
            "convergence": known(self.convergence),
            "collectives_compared": self.collectives,
            "collectives": [{"rank": rank, **asdict(row)} for rank, row in self.rows],
            "memory": [
                {"rank": t.rank, "peak_bytes": t.observed.peak_bytes, "predicted_bytes": t.predicted_bytes}
                for t in self.traces
                if t.observed
            ],
            "seconds": self.seconds,
        }


def known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can say: no number where one is infinite or undefined, as a broken plan may make it."""
    return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in numbers.items()}


def prove(
    config: Config, ranks: int = 8, steps: int = 5, seed: int = 0, device: str = "cpu", prepare: str = ""
) -> Proof:
    """Raise only for what cannot be tried; a plan that trains something else comes back as a failed proof."""
    started = time.perf_counter()
    # A small copy may be legal where the plan itself is not.
    legality.check(config.plan, config.model, config.workload, trainer=True)
    small = small_copy(config, ranks)
    if order_matters(small.plan) and (small.model.experts or small.workload.precision == "fp8"):
        steps = 1  # what the order of the sum has moved, a router or fp8 may take for its neighbour in the next
    job = Job(small.model, small.plan, small.workload, small.order, steps, seed, watch=True, prepare=prepare)
    many = run(job, device)
    alone = one_device(job, many)
    one = run(alone, device)[0]
    double = compare_doubles(alone, one["fp64"], [rank["fp64"] for rank in many], device)
    bounds = bounds_from_rounding(one["fp32"], one["fp64"])
    single = compare(one["fp64"], [rank["fp32"] for rank in many], bounds)
    # Where float32 rounds, fp8 and lossy sums may round to a neighbour: there float64 alone is judged.
    agreements = [double] if small.workload.precision == "fp8" or small.plan.lossy else [double, single]
    proof = Proof(small, steps, agreements, [rank["fp32"] for rank in many])
    if inexact(job):
        proof.exact_losses = tuple(run(exact(job), device)[0]["fp64"].losses)
    if not proof.parity:
        proof.blamed = blame(job, one["fp64"], device)
    proof.seconds = time.perf_counter() - started
    return proof


def compare_doubles(alone: Job, one: Trace, many: list[Trace], device: str) -> Agreement:
    """Equal to the last digits, but where ranks round as they sum: there one device sums in the other order as well."""
    plan = alone.emulated
    if plan is None or not order_matters(plan):
        return compare(one, many)
    other = run(replace(alone, backwards=True, dtypes=("fp64",)), device)[0]["fp64"]
    return compare(one, many, bounds_from_rounding(other, one, plan.wire), plan.wire)


def run(job: Job, device: str) -> list[dict[str, Trace]]:
    return launch.run(TARGET, job.plan.world, job, silence=SILENCE_S, group_timeout=SILENCE_S / 2, device=device)


def one_device(job: Job, many: Sequence[dict[str, Trace]] = ()) -> Job:
    """The same model and global batch on one device, all of the batch at once, and no fault injected. Where ranks do
    what no single device would, it does so in their place; of lossy sums `many` tell what they sum."""
    apart = job.workload.precision == "fp8"  # scales are of a micro-batch of a rank
    copies = job.plan.tp // job.model.kv_groups if apart and job.model.kind == "transformer" else 1
    job = replace(job, watch=False, prepare="", kv_copies=max(1, copies))
    if job.plan.average_every:
        size = job.plan.microbatch if apart else job.workload.batch // job.plan.dp
        plan = Plan(microbatch=size, param_dtype="fp32", master=False)
        return replace(job, plan=plan, emulated=job.plan)
    rounds = job.plan.microbatches(job.workload)
    counted = bool(job.model.experts) and job.model.router.counts_together
    if job.plan.lossy or (counted and (rounds > 1 or apart)):
        plan = Plan(microbatch=job.workload.batch // rounds, param_dtype="fp32", master=False)
        summed = {dtype: [summed for rank in many for summed in rank[dtype].summed] for dtype in job.dtypes}
        return replace(job, plan=plan, emulated=job.plan, summed=summed)
    size = job.plan.microbatch if apart else job.workload.batch
    plan = Plan(microbatch=size, param_dtype="fp32", master=False)
    return replace(job, plan=plan)


def inexact(job: Job) -> bool:
    """Whether the plan trains with a loss of its own, that the exact run has not."""
    return job.plan.lossy or job.plan.average_every > 0 or job.workload.precision == "fp8"


def exact(job: Job) -> Job:
    """One device without the plan's loss."""
    plan = job.plan.but(compression="none", comm_dtype=None, average_every=0)
    workload = job.workload.but(precision="fp32")
    return one_device(replace(job, plan=plan, workload=workload, watch=False, prepare="", dtypes=("fp64",)))


def blame(job: Job, one: Trace, device: str) -> str:
    """The axis that breaks parity by itself, or the words that none does."""
    wide = [axis for axis in (*AXES, "ep") if getattr(job.plan, axis) > 1]
    for axis in ["", *wide] if len(wide) > 1 else [""]:
        alone = alone_plan(job.plan, axis)
        trial = Job(job.model, alone, job.workload, job.order, job.steps, job.seed, ("fp64",), prepare=job.prepare)
        try:
            alone.check(job.model, job.workload)
            ranks = run(trial, device)
        except MeshwrightError:
            continue  # this axis cannot stand alone on the small model
        # Other ranks lose other parts of their gradients: each trial is held to an emulation of its own.
        lossy = job.plan.lossy or job.workload.precision == "fp8"
        alike = run(one_device(trial, ranks), device)[0]["fp64"] if lossy else one
        if compare(alike, [rank["fp64"] for rank in ranks]).breaks:
            return axis or "micro-batches"
    return " × ".join(wide) if len(wide) != 1 else wide[0]


def alone_plan(plan: Plan, axis: str) -> Plan:
    """The plan with every axis but one at 1."""
    sizes = {a: getattr(plan, a) if a == axis else 1 for a in AXES} | {"ep": 1, "expert_tp": 0}
    if axis == "ep":  # it adds no ranks: data parallelism of that degree carries it
        sizes |= {"ep": plan.ep, "replicate": plan.ep}
    if axis != "pp":
        sizes |= {"virtual": 1}
    keep: dict[str, Any] = {} if axis == "pp" else {"schedule": "1f1b", "layers_per_stage": ()}
    zero = plan.zero if axis == "shard" else 0
    return plan.but(**sizes, **keep, zero=zero, sp=plan.sp and axis == "tp")
