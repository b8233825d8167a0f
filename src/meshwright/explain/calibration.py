"""A stack and links calibrated to one trace: its seconds by kind of work and its collectives, combined with what was known by Bayes' rule.

A step time is one number; a trace has its parts. Each part is a measurement of the numbers of the stack (`calibrate.runs.stack_fit`):

    products      matrix products
    attention     attention kernels
    elementwise   all other kernels; on a CPU, which is its own host, also the time between operators
    host          the device waits for launches
    network       collectives that nothing hides

    ln y_part = ln t_part(x) + ε,    ε ~ noise of runs,    x ~ N(numbers of the stack, as before any run is seen)

t_part(x) is the predicted step less the prediction in which this work takes no time, both without the bubble; of the network it is the exposed
communication. The posterior is that of the other calibrations (`Normal`, `prior_of`), found by Newton's method. A device whose rates are round
numbers (a CPU that was never measured) has a prior wide enough to follow the trace.

Links first: the collectives of the trace, from the arrival of the last rank on, fit a factor on the latency and one on the bytes of each operation
(`calibrate.fit`). Operations that the trace does not have take the mean factors of those it has, between the same kinds of ranks.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tomli_w

from meshwright.calibrate.fit import FittedFactors, fit, with_factors
from meshwright.calibrate.points import Point
from meshwright.calibrate.runs.from_run import prior_of
from meshwright.calibrate.runs.normal import Normal
from meshwright.calibrate.runs.stack_fit import NOISE, NUMBERS, fields_of, numbers_of, varied_stack
from meshwright.cost.collective import OPERATIONS
from meshwright.cost.step import step_cost
from meshwright.describe.cluster import Cluster, Factors
from meshwright.describe.config import Config
from meshwright.describe.result import AXES
from meshwright.describe.stack import Stack
from meshwright.describe.toml_values import table
from meshwright.errors import MeshwrightError
from meshwright.explain.attribution import BUBBLE, COMMUNICATION, COMPUTE, HOST
from meshwright.explain.explanation import TraceExplanation
from meshwright.lower.step import step_program
from meshwright.predict.prediction import predict
from meshwright.units import counted

PARTS = ("products", "attention", "elementwise", "host", "network")
COORDINATE = dict(zip(PARTS, (1, 2, 3), strict=False))  # of the numbers: the one that makes a part free
FREE, LEAST_LAUNCH = -30.0, math.log(1e-9)
UNMEASURED = 1.5  # standard deviation of ln rates of a device that was never measured
# A trace has them in each part: they become `launch`
OTHER_LAUNCHES = ("product_launch", "attention_launch", "tile_launch", "update_launch")
ROUNDS, SLOPE, LARGEST_STEP = 12, 0.02, 0.7
LEAST_SHARE = 0.005  # of the step: a smaller part is not used
SAME_WORK = 1.6  # products of the trace over those of the plan: further apart, it is another program
UNEVEN = 1.5  # slowest over fastest traced step
LARGEST_RESIDUAL = 0.5  # of fitted factors, relative
Size = tuple[str, int, int]  # operation, ranks, bytes
LIMITS = {"products": (1e-3, 2.0), "attention_rate": (1e-3, 2.0), "elementwise": (0.05, 20.0), "network": (1e-3, 2.0)}


@dataclass(frozen=True)
class TraceCalibration:
    """The cluster and the stack after a trace, and the parts of its step as measured and as predicted before and after."""

    cluster: Cluster
    stack: Stack
    measured: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    step_s: tuple[float, float, float]  # measured, predicted before, predicted after
    links: tuple[FittedFactors, ...]
    notes: tuple[str, ...]

    def to_toml(self) -> str:
        comments = "".join(f"# {note}\n" for note in self.notes)
        return comments + tomli_w.dumps({"cluster": table(self.cluster), "stack": self.stack.as_dict()})

    def as_dict(self) -> dict[str, Any]:
        parts = {part: {"measured_s": self.measured[part], "before_s": self.before[part], "after_s": self.after[part]}
                 for part in self.measured}  # fmt: skip
        links = [
            {"operation": f.operation, "across": f.across, **f.factors.model_dump(), "points": f.points}
            for f in self.links
        ]
        return {"stack": self.stack.as_dict(), "cluster": table(self.cluster), "step_s": self.step_s, "parts": parts, "links": links,
                "notes": self.notes}  # fmt: skip


def calibrate_from_trace(explanation: TraceExplanation, config: Config, name: str = "") -> TraceCalibration:
    """The cluster and the stack of a configuration, adjusted to a trace of it."""
    notes = check_program(explanation, config)
    links = fitted_links(config.cluster, explanation, notes)
    cluster = with_links(config.cluster, links)
    measured = measured_parts(explanation, notes)
    stack = config.stack.but(**dict.fromkeys(OTHER_LAUNCHES, 0.0))
    prior = prior_of(stack)
    if config.cluster.accelerator.name.startswith("cpu") and not stack.covariance:
        wide = np.diag([UNMEASURED**2] * 4 + [0.0, 0.0])  # launches and rates of the device
        prior = Normal.of(prior.mean, prior.covariance + wide)
    used = [part for part in PARTS if measured[part] > LEAST_SHARE * explanation.step_s]
    fitted = posterior(config.but(cluster=cluster, stack=stack), used, measured, prior, notes)
    fields = {
        key: float(f"{np.clip(float(value), *LIMITS.get(key, (0.0, math.inf))):.4g}")
        for key, value in fields_of(fitted.mean, stack).items()
    }
    after = stack.but(
        **fields,
        name=name or (stack.name if stack.covariance else f"{stack.name}-traced"),
        covariance=tuple(float(f"{x:.6g}") for x in fitted.covariance.ravel()),
        source=f"{stack.name}, adjusted to a trace of {counted(len(explanation.steps), 'rank')}",
    )
    calibrated = config.but(cluster=cluster, stack=after)
    times = explanation.step_s, predict(config).step_time_s, predict(calibrated).step_time_s
    return TraceCalibration(
        cluster.but(source=f"{cluster.source}; collectives as in a trace"),
        after,
        {part: measured[part] for part in used},
        dict(zip(PARTS, part_times(config, numbers_of(config.stack)[None])[0].tolist(), strict=True)),
        dict(zip(PARTS, part_times(calibrated, numbers_of(after)[None])[0].tolist(), strict=True)),
        times,
        links,
        tuple(notes),
    )


def check_program(explanation: TraceExplanation, config: Config) -> list[str]:
    """Notes on what the trace lacks; raises if it is of another program than the plan."""
    world, plan_world = explanation.run.world, config.plan.world
    if world not in (0, 1, plan_world):
        raise another_program(f"it was made by {world} ranks, and the plan has {plan_world}")
    notes, rank = [], explanation.busiest_rank
    steps = [step.duration for step in explanation.steps[rank]]
    if not steps or not explanation.step_s:
        raise another_program("it has no whole step")
    if max(steps) > UNEVEN * min(steps):
        notes.append(f"the traced steps take {min(steps) / 1e9:.3g} to {max(steps) / 1e9:.3g} s: their mean was used")
    flops = sum(p.flops for p in explanation.products.get(rank, [])) / len(steps)
    if not flops:
        notes.append(
            "no products with shapes in the trace: rates are by their seconds alone, and the program was not compared with the plan"
        )
        return notes
    program = step_program(config.model, config.plan, config.workload, config.stack)
    planned = float(np.max(step_cost(program, config.cluster).flops))
    if not 1 / (2 * SAME_WORK) < flops / planned < SAME_WORK:  # attention's products are not in the trace's
        raise another_program(f"a rank computes {flops:.3g} FLOPs in products, and the plan {planned:.3g}")
    device = config.cluster.accelerator
    rate = flops / max(explanation.parts[rank].get((COMPUTE, "products"), 0.0), 1e-12)
    if not device.name.startswith("cpu") and rate > device.peak.get(config.workload.precision, math.inf):
        raise another_program(
            f"its products run at {rate / 1e12:,.0f} TFLOP/s, more than the peak of {device.name}: another device"
        )
    return notes


def another_program(why: str) -> MeshwrightError:
    return MeshwrightError(
        "MW-CALIB-008",
        "the trace is not one of this plan",
        why=why[:1].upper() + why[1:],
        fix="--plan with the settings of the traced run",
    )


def measured_parts(explanation: TraceExplanation, notes: list[str]) -> dict[str, float]:
    """Seconds of each part in the mean step of the busiest rank. Products far below the rate of their shape count at that rate: an odd size says
    nothing of other plans."""
    rank = explanation.busiest_rank
    on_device = explanation.run.rank(rank).found.trace.on_device
    out = dict.fromkeys(PARTS, 0.0)
    for (kind, group), seconds in explanation.parts[rank].items():
        if kind == COMPUTE:
            out[group if group in ("products", "attention") else "elementwise"] += seconds
        elif kind == HOST:
            out["host" if on_device else "elementwise"] += seconds
        elif kind == COMMUNICATION:
            out["network"] += seconds
    odd = [p for p in explanation.products.get(rank, []) if p.excess_s > 0]
    excess = sum(p.excess_s for p in odd) / len(explanation.steps[rank])
    if excess > LEAST_SHARE * explanation.step_s:
        out["products"] = max(out["products"] - excess, 0.0)
        notes.append(
            f"{excess:.3g} s of products are not used: {odd[0].shape} is far below the usual rate ({odd[0].reason})"
        )
    return out


def part_times(config: Config, x: np.ndarray) -> np.ndarray:
    """Predicted seconds of each part at the coordinates in each row of `x`: what the step without the bubble loses if that work is free. On a
    CPU the host's time is part of the operators, so `elementwise` has it."""
    c, rows = config, []
    on_cpu = c.cluster.accelerator.name.startswith("cpu")
    for row in x:
        no_host = row.copy()
        no_host[0] = LEAST_LAUNCH
        rows += [row, no_host]
        for part in ("products", "attention", "elementwise"):
            free = (row if on_cpu else no_host).copy()
            free[COORDINATE[part]] = FREE
            if on_cpu and part == "elementwise":
                free[0] = LEAST_LAUNCH
            rows.append(free)
    coordinates = np.array(rows)
    program = step_program(c.model, [c.plan] * len(rows), c.workload, varied_stack(c.stack, 0, coordinates))
    cost = step_cost(program, c.cluster)
    work = np.broadcast_to(cost.time - cost.exposed.get(BUBBLE, 0.0), len(rows)).reshape(len(x), 5)
    whole = work[:, 0] if on_cpu else work[:, 1]
    products, attention, elementwise = (whole - work[:, k] for k in range(2, 5))
    communication = sum(cost.exposed.get(axis, 0.0) for axis in AXES)
    network = np.broadcast_to(communication, len(rows)).reshape(len(x), 5)[:, 0]
    host = np.zeros(len(x)) if on_cpu else work[:, 0] - work[:, 1]
    return np.maximum(np.stack([products, attention, elementwise, host, network], axis=1), 1e-12)


def posterior(
    config: Config, used: Sequence[str], measured: dict[str, float], prior: Normal, notes: list[str]
) -> Normal:
    """The numbers of the stack after the parts of a trace. Parts that the plan does not have are left out with a note."""
    at = [PARTS.index(part) for part in used]
    predicted = part_times(config, prior.mean[None])[0]
    lacking = [PARTS[i] for i in at if predicted[i] < 1e-9]
    notes += [f"the plan has no {part}, and the trace has {measured[part]:.3g} s of it: not used" for part in lacking]
    at = [i for i in at if PARTS[i] not in lacking]
    logs = np.log([measured[PARTS[i]] for i in at])
    x, fitted = prior.mean, prior
    for _ in range(ROUNDS):
        moved = np.concatenate([x[None], x + SLOPE * np.eye(len(NUMBERS))])
        times = part_times(config, moved)
        weight = np.eye(len(at)) / noise_of(times[0]) ** 2
        values = np.log(times[:, at])
        slopes = (values[1:] - values[0]).T / SLOPE
        precision = slopes.T @ weight @ slopes
        fitted = prior * Normal(precision, precision @ x - slopes.T @ weight @ (values[0] - logs))
        step = np.clip(fitted.mean - x, -LARGEST_STEP, LARGEST_STEP)
        x = x + step
        if np.abs(step).max() < 1e-3:
            break
    return fitted


def noise_of(times: np.ndarray) -> float:
    """Standard deviation of ln seconds, as of runs (`stack_fit.variance`): more where the host or the network takes most of the step, since short
    kernels say little of rates."""
    shares = times / times.sum()
    return math.hypot(NOISE[0], NOISE[1] * shares[PARTS.index("network")], NOISE[2] * shares[PARTS.index("host")])


def fitted_links(cluster: Cluster, explanation: TraceExplanation, notes: list[str]) -> tuple[FittedFactors, ...]:
    """Factors of the operations in the trace: seconds of each collective from the arrival of its last rank. Where that is not known, the shortest
    call of a size waited least; a send ends when its receiver is there, so messages are measured by their receives."""
    waited, shortest = defaultdict[Size, list[float]](list), defaultdict[Size, list[float]](list)
    for r in explanation.run.ranks:
        c = r.collectives
        for i, (kind, ranks) in enumerate(zip(c.kind, c.ranks, strict=True)):
            operation = "point-to-point" if kind == "receive" else OPERATIONS.get(kind, "") if kind != "send" else ""
            count = 2 if operation == "point-to-point" else len(ranks)
            seconds = float(c.end[i] - r.last_start[i]) / 1e9
            if operation and count > 1 and c.bytes[i] > 0 and seconds > 0:
                (shortest if r.last_rank[i] < 0 else waited)[operation, count, int(c.bytes[i])].append(seconds)
    typical = {size: min(times) for size, times in shortest.items()}
    typical |= {size: statistics.median(times) for size, times in waited.items()}
    points: dict[tuple[str, bool], list[Point]] = defaultdict(list)
    for (operation, count, size), middle in typical.items():
        timed = {"median_s": middle, "low_s": middle, "high_s": middle, "samples": 1}
        point = Point(operation=operation, backend="trace", ranks=tuple(range(count)), bytes=size, **timed)
        points[operation, count > cluster.node_size].append(point)
    links = [fit(cluster, operation, of, across) for (operation, across), of in points.items()]
    notes += [
        f"{f.operation}: its times follow no factors on the formula (residual {f.residual:.0%}), so they are the cluster's"
        for f in links
        if f.residual > LARGEST_RESIDUAL
    ]
    return tuple(f for f in links if f.residual <= LARGEST_RESIDUAL)


def with_links(cluster: Cluster, links: Sequence[FittedFactors]) -> Cluster:
    """The cluster with these factors; operations that were not traced take the mean of those that were, on the same kind of links."""
    out = list(links)
    for across in (False, True):
        known = [f for f in links if f.across == across]
        if not known:
            continue
        mean = Factors(
            latency=math.exp(statistics.fmean(math.log(max(f.factors.latency, 1e-3)) for f in known)),
            bytes=math.exp(statistics.fmean(math.log(f.factors.bytes) for f in known)),
        )
        have = {f.operation for f in links if f.across == across}
        out += [FittedFactors(operation, across, mean) for operation in OPERATIONS.values() if operation not in have]
    return with_factors(cluster, out)
