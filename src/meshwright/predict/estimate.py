"""The result of `meshwright estimate` for one configuration: prediction, verdicts against targets, roofline.

Targets: MFU above 40% is good and above 50% excellent; the bubble is below 10% of the schedule; at least 80% of communication is hidden; exposed
communication is below 20% of the step.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.roofline import Position, position
from meshwright.cost.step import Message, StepCost, messages, step_calls, step_cost
from meshwright.cost.walked import WalkedStep, walk_step
from meshwright.describe import legality
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config, Configured
from meshwright.describe.own_stack import is_typical, with_own_stack
from meshwright.describe.plan import Plan, in_framework
from meshwright.describe.result import COMMUNICATION, USABLE_MEMORY, Prediction
from meshwright.describe.shown import Shown
from meshwright.errors import MeshwrightError
from meshwright.lower.program import StepProgram, scalar
from meshwright.lower.step import step_program
from meshwright.predict.prediction import predict, prediction, resolve_recompute
from meshwright.units import format_seconds


@dataclass(frozen=True)
class Verdict:
    """One target: its name, our value, the target, and whether the value meets it."""

    name: str
    value: float
    target: str
    good: bool


class CriticalBatch(NamedTuple):
    """The critical batch in sequences (None if no batch hides the communication), with the reason as text."""

    sequences: int | None
    reason: str


@dataclass(frozen=True)
class OwnTrainer:
    """The prediction of a plan on Meshwright's own trainer, or why the trainer does not run the plan."""

    stack: str
    prediction: Prediction | None = None
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        if self.prediction is None:
            return {"stack": self.stack, "refused": self.refused}
        keys = ("step_time_s", "step_time_low_s", "step_time_high_s", "memory_gib", "fits")
        return {"stack": self.stack} | {key: getattr(self.prediction, key) for key in keys}

    @property
    def sentence(self) -> str:
        p = self.prediction
        if p is None:
            return f"Meshwright's own trainer does not run this plan: {self.refused}"
        step, low, high = map(format_seconds, (p.step_time_s, p.step_time_low_s, p.step_time_high_s))
        return f"on Meshwright's own trainer {step} ({low} to {high}), {p.memory_gib:.1f} GiB: {p.memory_fit}; stack {self.stack}"


@dataclass(frozen=True, repr=False)
class Estimate(Shown, Configured):
    """The prediction of one configuration, and what it was computed from."""

    config: Config
    asked: Plan  # before `recompute = auto` was resolved for the stack
    program: StepProgram
    cost: StepCost
    prediction: Prediction
    levels: dict[str, str]

    @property
    def plan(self) -> Plan:
        """The plan, its recompute resolved."""
        return self.config.plan

    @cached_property
    def own_trainer(self) -> OwnTrainer | None:
        """The prediction on our own trainer, where the stack is not known: the number that `train` predicts on these devices."""
        if not is_typical(self.stack):
            return None
        config = with_own_stack(self.config.but(plan=self.asked))
        stack = config.stack
        if self.cluster.accelerator.planning_only:
            return OwnTrainer(stack.name, refused=f"it does not run on {self.cluster.accelerator.name}")
        refused = legality.not_trained(config.plan, config.model, config.workload, stack)
        if refused is None:
            try:
                return OwnTrainer(stack.name, predict(config))
            except MeshwrightError as error:  # nothing that `recompute = auto` may choose fits
                refused = error
        return OwnTrainer(stack.name, refused=refused.what)

    @cached_property
    def walked(self) -> WalkedStep:
        """The step simulated action by action, as `simulate` draws it."""
        return walk_step(self.cost, self.plan)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over the time of the schedule, as walked; 0 without a pipeline."""
        return self.walked.walk.bubble_fraction if self.plan.pp > 1 else 0.0

    @cached_property
    def critical_batch(self) -> CriticalBatch:
        return critical_batch(self.config)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        return verdicts_of(self)

    @cached_property
    def roofline(self) -> Position:
        return roofline_position(self)

    @cached_property
    def messages(self) -> list[Message]:
        """The collectives of the step, those that take longest first."""
        return messages(self.cost)

    def __repr__(self) -> str:
        p = self.prediction
        return f"Estimate({self.model.name}, {self.plan.title()}, step {p.step_time_s:.4g} s, {p.memory_gib:.4g} GiB)"

    def as_dict(self) -> dict[str, Any]:
        roof = self.roofline
        return {
            **self.prediction.as_dict(),
            "parameters": self.model.total,
            "active_parameters": self.model.active,
            "trained_parameters": self.model.trained,
            "parameters_by_part": self.model.parameters(),
            "plan": self.plan.as_dict(),
            "world": self.plan.world,
            "stack": self.stack.name,
            **({"own_trainer": self.own_trainer.as_dict()} if self.own_trainer else {}),
            "verdicts": {v.name: {"value": v.value, "target": v.target, "good": v.good} for v in self.verdicts},
            "bubble_fraction": self.bubble_fraction,
            "critical_batch": self.critical_batch.sequences,
            "critical_batch_reason": self.critical_batch.reason,
            "roofline": {
                "level": roof.level,
                "ccr": None if roof.ccr == float("inf") else roof.ccr,
                "ridge": roof.ridge,
                "efficiency": roof.efficiency,
                "regime": roof.regime,
                "advice": list(roof.advice),
                "ceilings": [c.as_dict() for c in roof.ceilings],
            },
        }


@dataclass(frozen=True, repr=False)
class Simulation(Shown):
    """An estimate and its walked step."""

    estimate: Estimate
    walked: WalkedStep

    def __repr__(self) -> str:
        return f"Simulation({self.estimate.model.name}, {self.estimate.plan.title()}, step {self.walked.time:.4g} s)"

    def as_dict(self) -> dict[str, Any]:
        ranks = self.walked.walk
        return {
            "step_time_s": self.walked.time,
            "closed_form_s": self.estimate.prediction.step_time_s,
            "makespan_s": ranks.makespan,
            "closing_s": self.walked.closing,
            "bubble_fraction": self.estimate.bubble_fraction,
            "bubble_overhead": ranks.bubble_overhead if self.estimate.plan.pp > 1 else 0.0,
            "busy_s": ranks.busy.tolist(),
            "in_flight": ranks.peak_memory.tolist(),
        }


def estimate(config: Config) -> Estimate:
    """Check, lower and cost one configuration; verdicts, roofline, walk and critical batch are computed on first access."""
    asked, config, program = lowered(config)
    cost = step_cost(program, config.cluster)
    return Estimate(config, asked, program, cost, prediction(cost, config), axis_levels(program, config.cluster))


def lowered(config: Config) -> tuple[Plan, Config, StepProgram]:
    """Check and lower one configuration: the plan that was asked for, the configuration with the plan that runs, and its program."""
    config.check()
    model, workload, stack = config.model, config.workload, config.stack
    asked = in_framework(config.plan, model, stack)
    plan = resolve_recompute(model, asked, workload, stack, config.cluster.accelerator.memory)
    return asked, config.but(plan=plan), step_program(model, plan, workload, stack, every_rank=True, stages=True)


def communication(cost: StepCost) -> tuple[float, float]:
    """Seconds of communication of the slowest rank: the total and the exposed part."""
    total = sum(float(np.broadcast_to(cost.busy.get(f"comm:{axis}", 0.0), 1)[0]) for axis in COMMUNICATION)
    total += float(np.broadcast_to(cost.reduce, 1)[0])
    exposed = sum(float(np.broadcast_to(cost.exposed.get(axis, 0.0), 1)[0]) for axis in COMMUNICATION)
    return max(total, exposed), exposed


def verdicts_of(e: Estimate) -> tuple[Verdict, ...]:
    """Compare the estimate with the targets."""
    result, step = e.prediction, e.prediction.step_time_s
    total, exposed = communication(e.cost)
    out = [Verdict("MFU", result.mfu or 0.0, "above 40%, excellent above 50%", (result.mfu or 0) > 0.40)]
    if e.plan.pp > 1:
        out.append(Verdict("bubble fraction", e.bubble_fraction, "below 10% of the schedule", e.bubble_fraction < 0.10))
    if total > 0:
        hidden = 1 - exposed / total
        out.append(Verdict("communication hidden", hidden, "above 80%", hidden > 0.80))
        out.append(Verdict("communication exposed", exposed / step, "below 20% of the step", exposed / step < 0.20))
    peak, limit = result.memory_gib or 0.0, result.memory_limit_gib
    target = f"at most {USABLE_MEMORY:.0%}: {result.memory_fit}"
    return (*out, Verdict("memory", peak / limit, target, peak <= USABLE_MEMORY * limit))


def axis_levels(program: StepProgram, cluster: Cluster) -> dict[str, str]:
    """The lowest level that contains the groups of each axis."""
    b = program.batch
    out = {}
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        size = float(b.size(axis)[0])
        if size > 1:
            inside = [k for k, span in enumerate(cluster.spans) if float(b.members(axis, span)[0]) >= size]
            out[axis] = cluster.levels[inside[0] if inside else -1].name
    return out


def roofline_position(e: Estimate) -> Position:
    """The roofline position of the step: for each level, the bytes that the programs of the collectives send through it."""
    peak = e.cluster.accelerator.peak_for(e.workload.precision)
    flops = float(np.broadcast_to(e.cost.flops, 1)[0])
    return position(flops, level_bytes(e), peak, e.cluster, e.prediction.bound_by in COMMUNICATION.values())


def level_bytes(e: Estimate) -> list[float]:
    """Bytes that one device of the slowest rank sends through each level in a step; the cards of a node share its outgoing traffic."""
    network = e.cost.network
    out = [0.0] * len(e.cluster.levels)
    for op, times in step_calls(e.cost):
        if times and float(e.program.batch.size(op.axis)[0]) > 1:
            for level, size in network.bytes_by_level(op).items():
                out[level] += times * size
    sends = scalar(e.cost.traffic.get("pp", 0.0))
    if sends:
        out[network.level("pp")] += sends
    return out


# --- The critical batch: the smallest batch at which data-parallel communication is hidden, except the part that can never overlap.
#
# A larger micro-batch makes backward longer but not the gradients larger, so more communication is hidden. The search varies the micro-batch and
# keeps the number of micro-batches at the minimum (P with a pipeline, 1 without). For each size, the cost model gives the communication that could
# overlap but finds too little compute: gradients reduced behind the last backward, parameters gathered behind the next forward, and the weights of
# a layer (ZeRO-3) gathered behind the previous layer. Communication that can never overlap does not count: the last bucket, the weights of the first
# block, compression, averages of parameters.

LARGEST = 2**16  # sequences of a micro-batch; the search stops here


def critical_batch(config: Config) -> CriticalBatch:
    """The critical batch of a plan on a cluster, in sequences (in samples for a model without sequences)."""
    model, cluster, plan, stack = config.model, config.cluster, config.plan, config.stack
    unit = "sequences" if model.kind == "transformer" else "samples"
    if plan.dp * plan.cp == 1:
        return CriticalBatch(None, "none: no data-parallel communication")
    overlaps = plan.overlapped(stack, cluster.node_size)
    if "dp" not in overlaps:
        return CriticalBatch(None, "none: data-parallel communication does not overlap under this stack")
    rounds = plan.pp if plan.pp > 1 else 1

    def batch(microbatch: int) -> int:
        return microbatch * plan.dp * rounds

    def hidden(microbatch: int) -> bool:
        trial = plan.but(microbatch=microbatch, recompute_layers=plan.recompute_layers)
        work = config.workload.but(batch=batch(microbatch))
        cost = step_cost(step_program(model, trial, work, stack, every_rank=True), cluster)
        return float(np.broadcast_to(cost.unhidden, 1)[0]) <= 1e-9 * float(cost.time[0])

    if hidden(1):
        return CriticalBatch(batch(1), f"already hidden at the smallest batch, {batch(1):,} {unit}")
    high = 2
    while high < LARGEST and not hidden(high):
        high *= 2
    if high >= LARGEST:
        return CriticalBatch(None, "none: no batch hides data-parallel communication")
    least = batch(bisect_left(range(high), True, lo=high // 2, key=hidden))
    return CriticalBatch(
        least, f"{least:,} {unit}: for smaller batches, part of the data-parallel communication is exposed"
    )
