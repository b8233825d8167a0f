"""Constants of the machine at hand, from operations and collectives of fixed sizes: the device part of a calibration.

Each measured operation is lowered by the same builders as a training step (`lower.layer`, `lower.sync`), so a fitted constant means in the
prediction what it meant in the fit. On a CPU, where the host computes, one operation takes

    t = launches · launch + flops / rate + bytes / bandwidth + exponentials · exponential

The fits go part by part, each with the constants of the part before, weighted by 1/t so that small and large operations have equal weight:

    norms, activations, residuals, RoPE, loss   → launch, bandwidth, exponential
    linear layers                               → product_launch, rate of products
    attention                                   → attention_launch, rate of attention
    optimizer, plain and sharded; ZeRO units    → update_launch, sharded_launch, unit_launch

Times are seconds in which one process computed. `sharing` processes per core take that many times longer, so every rate is divided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from meshwright.calibrate import factors
from meshwright.calibrate.points import DevicePoint, Point
from meshwright.describe.base import Described, Seconds
from meshwright.describe.catalog import load
from meshwright.describe.cluster import Accelerator, Cluster, Collectives, Efficiency, Level, Link
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.lower import ends, sync
from meshwright.lower.batch import Batch
from meshwright.lower.layer import LayerLowering
from meshwright.lower.op import Op

VERSION = 1
MEASURED = "measured on this machine"
IDLE_SHARE = 0.10  # a machine is idle if other processes use less than this share of its cores
STACK, ACCELERATOR, MODEL = "gloo-cpu", "cpu", "nano"
PARTS = ("norm", "activation", "residual", "rotation", "loss")
UNIT_COLLECTIVES = 3.0  # of a measured unit: gathered forward and backward, then reduced
ACTION_LAUNCHES = (
    40.0  # host work of one action of a pipeline schedule, in launches: torch's stages are written in Python
)
STEP_LAUNCHES = 100.0  # launches of a step outside model and optimizer: reading the batch, counting tokens, records
ALPHA, BANDWIDTH = 1e-4, 1e9  # of a link that factors scale to the measured one
LARGEST_LOSS = 0.99  # of compute while communication runs: where no core is free, nothing is gained by overlap
MOST_RATE = 1e15  # a fitted term that is not above zero costs nothing: this many per second


class AddedTime(Described):
    """What one collective adds to a loop of computations, mean over the ranks."""

    operation: str = Field(description="all-reduce, all-gather, …, or point-to-point")
    ranks: int = Field(ge=2, description="ranks of a group")
    bytes: int = Field(ge=0, description="n, the full buffer")
    wall_s: Seconds = Field(gt=0, description="seconds on the clock")
    cpu_s: Seconds = Field(gt=0, description="seconds in which the rank's threads computed")


class MachineMeasurement(Described):
    """What was measured on one machine with a number of ranks at once; the content of a cached calibration."""

    version: int = VERSION
    made: str = Field(default="", description="date and time, UTC")
    key: dict[str, str] = Field(default_factory=dict, description="hardware and libraries that it holds for")
    ranks: int = Field(ge=1)
    cores: float = Field(gt=0, description="cores that the ranks may use")
    busy_cores: float = Field(default=0.0, ge=0, description="cores that other processes used meanwhile")
    overlap_cost: float = Field(
        default=1.0, ge=0, le=1, description="seconds that a hidden second of communication costs"
    )
    seconds: float = Field(default=0.0, ge=0, description="how long it took")
    operations: tuple[DevicePoint, ...] = ()
    collectives: tuple[AddedTime, ...] = ()

    @property
    def sharing(self) -> float:
        """Processes per core, at least 1."""
        return max(1.0, self.ranks / self.cores)

    @property
    def is_idle(self) -> bool:
        """Whether other processes left the machine to the calibration."""
        return self.busy_cores <= IDLE_SHARE * self.cores


class DeviceFit(NamedTuple):
    """Seconds of one process that has a core to itself, and the residuals of the fit."""

    launch: float
    byte: float
    exponential: float
    product_launch: float
    flop: float
    attention_launch: float
    attention_flop: float
    update_launch: float
    sharded_launch: float
    unit_launch: float
    residuals: dict[str, float]  # by kind, the median of |fitted / measured − 1|


class Features(NamedTuple):
    """What one measured operation consists of, summed over forward and backward."""

    launches: float  # of products or attention; of any operation in a point without these
    flops: float
    bytes: float
    exponentials: float
    other_launches: float = 0.0  # launches of other operations in the same point


def lowered(point: DevicePoint) -> list[Op]:
    """The operations of the step program that a measured point ran, forward and backward."""
    s = point.shape
    if point.kind == "linear":
        low = _lowering(int(s["m"]), 16)
        low.gemm("linear", "ffn", s["m"], s["n"], s["k"])
    elif point.kind == "attention":
        low = _lowering(int(s["seq"]), int(s["heads"] * s["width"]), int(s["heads"]), int(s["batch"]))
        low.core(s["heads"])
    elif point.kind in ("optimizer", "sharded-optimizer"):
        low = _lowering(1, 16)
        return sync.optimizer(low.b, np.array([s["tensors"] * s["elements"]]), np.array([s["tensors"]]))
    else:
        low = _lowering(int(s["tokens"]), int(s["width"]), max(1, int(s["width"]) // 16))
        size = s["tokens"] * s["width"] * low.element
        if point.kind == "norm":
            low.norm("norm")
        elif point.kind == "activation":
            low.activation("ffn", size)
        elif point.kind == "residual":
            low.residual("residual")
        elif point.kind == "rotation":
            low.rotate(2 * size)
            low.residual("sum")
        else:
            phases = ends.head(low)
            return [op for ops in phases.values() for op in ops if op.name in ("loss", "loss-grad")]
    return [op for ops in low.phases.values() for op in ops]


def _lowering(seq: int, width: int, heads: int = 1, batch: int = 1) -> LayerLowering:
    """The lowering of a layer of a given width, as `train` runs it on one CPU process."""
    model = load("models", MODEL).but(hidden=width, heads=heads, kv_heads=heads, ffn=width, vocab=width)
    workload = Workload(batch=batch, seq=seq, precision="fp32")
    plan = Plan(microbatch=batch, param_dtype="fp32", master=False)
    made = Batch.of([plan], model, workload, load("stacks", STACK))
    return LayerLowering(made, model.blocks["dense"], 4.0, {})


def features(point: DevicePoint) -> Features:
    """Sums over the operations that a point ran."""
    ops = lowered(point)

    def total(name: str) -> float:
        return float(sum(np.sum(np.asarray(op.count) * getattr(op, name)) for op in ops))

    exponentials = total("exponentials")
    if point.kind == "attention":  # one softmax forward, and one more backward
        exponentials = float(sum(np.sum(op.shape[0] * op.shape[1] * op.shape[2]) for op in ops))
    main = [op for op in ops if op.kind != "memory"] or ops
    launches = float(sum(np.sum(np.asarray(op.count) * op.launches) for op in main))
    return Features(launches, total("flops"), total("bytes"), exponentials, total("launches") - launches)


def fit_device(points: Iterable[DevicePoint]) -> DeviceFit:
    """Fit the constants of one process to operations measured on a CPU."""
    by_kind: dict[str, list[DevicePoint]] = {}
    for point in points:
        by_kind.setdefault(point.kind, []).append(point)
    residuals: dict[str, float] = {}

    def solve(kinds: Sequence[str], names: Sequence[str], known: dict[str, float]) -> list[float]:
        rows = [p for kind in kinds for p in by_kind.get(kind, [])]
        found, missed = relative_fit(rows, names, known)
        residuals[" ".join(kinds) if len(kinds) == 1 else "elementwise"] = missed
        return found

    launch, byte, exponential = solve(PARTS, ("launches", "bytes", "exponentials"), {})
    product, flop = solve(("linear",), ("launches", "flops"), {"bytes": byte, "other_launches": launch})
    attention, attention_flop = solve(
        ("attention",), ("launches", "flops"), {"bytes": byte, "exponentials": exponential}
    )
    (update,) = solve(("optimizer",), ("launches",), {"bytes": byte})
    sharded = update
    if "sharded-optimizer" in by_kind:
        (sharded,) = solve(("sharded-optimizer",), ("launches",), {"bytes": byte})
    unit = 0.0
    if "sharded-units" in by_kind:
        with_units, without = (by_kind[kind][0] for kind in ("sharded-units", "plain-units"))
        unit = max(with_units.median_s - without.median_s, 0.0) / (with_units.shape["units"] * UNIT_COLLECTIVES)
    return DeviceFit(
        launch, byte, exponential, product, flop, attention, attention_flop, update, sharded, unit, residuals
    )


def relative_fit(
    points: Sequence[DevicePoint], names: Sequence[str], known: dict[str, float]
) -> tuple[list[float], float]:
    """Non-negative seconds per unit of each named feature, after what the `known` ones take; and the median relative residual.

    Minimises Σ (fitted / measured − 1)². A term that would be negative is dropped and the others are fitted again.
    """
    rows = [features(point) for point in points]
    times = np.array([point.median_s for point in points])
    rest = times - sum(np.array([getattr(row, name) for row in rows]) * value for name, value in known.items())
    design = np.array([[getattr(row, name) for name in names] for row in rows]) / times[:, None]
    used = list(range(len(names)))
    while True:
        values, *_ = np.linalg.lstsq(design[:, used], rest / times, rcond=None)
        if len(used) == 1 or (values > 0).all():
            break
        used.pop(int(np.argmin(values)))
    found = np.zeros(len(names))
    found[used] = np.maximum(values, 0.0)
    missed = float(np.median(np.abs(design @ found - rest / times)))
    return [float(x) for x in found], missed


def accelerator(fit: DeviceFit, sharing: float, source: str, dtypes: dict[str, float] | None = None) -> Accelerator:
    """The device that one rank gets: its share of a core. `dtypes`: seconds of a product in a dtype over those in fp32."""
    plain = load("accelerators", ACCELERATOR)
    rate = rate_of(fit.flop * sharing)
    slower = {"fp64": 2.0, **(dtypes or {})}
    bandwidth = rate_of(fit.byte * sharing)
    efficiency = Efficiency(
        gemm=1.0,
        gemm_traffic=1.0,
        floor=0.0,
        flash=min(1.0, rate_of(fit.attention_flop * sharing) / rate),
        fused=min(1.0, rate_of(fit.attention_flop * sharing) / rate),
        memory=1.0,
        tile=1.0,
        sequence_half=0.0,
        exponential=fit.exponential * sharing,
        source=source,
    )
    peak = {dtype: rate / slower.get(dtype, 1.0) for dtype in plain.peak}
    return plain.but(memory_bandwidth=bandwidth, peak=peak, efficiency=efficiency, source=source, checked=source)


def stack(fit: DeviceFit, sharing: float, plain: Stack, source: str) -> Stack:
    """The stack with the host times of this machine."""
    return plain.but(
        launch=fit.launch * sharing,
        product_launch=fit.product_launch * sharing,
        attention_launch=fit.attention_launch * sharing,
        update_launch=fit.update_launch * sharing,
        sharded_launch=fit.sharded_launch * sharing,
        unit_launch=fit.unit_launch * sharing,
        action=ACTION_LAUNCHES * fit.launch * sharing,
        step_overhead=STEP_LAUNCHES * fit.update_launch * sharing,
        source=source,
    )


def collectives(measured: MachineMeasurement, slower: float) -> tuple[Link, Collectives]:
    """The link between two ranks and the factors of each operation, from what collectives add between computations.

    On a busy machine the clock ran too long: a collective takes at least what its ranks compute, and otherwise the part of the clock that
    other processes left.
    """
    left = 1.0 - min(measured.busy_cores / measured.cores, 0.9) if not measured.is_idle else 1.0
    points = []
    for x in measured.collectives:
        idle = max(x.cpu_s * measured.sharing, x.wall_s * left) * slower
        points.append(
            Point(operation=x.operation, backend="gloo", ranks=tuple(range(x.ranks)), bytes=x.bytes,
                  median_s=idle, low_s=idle, high_s=idle, samples=1)
        )  # fmt: skip
    link = Link(name="loopback", alpha=ALPHA, bandwidth=BANDWIDTH, source=source_of(measured))
    plain = Collectives(call=0.0, call_across=0.0, chunk=0.0, peer=0.0, pair_loss=0.0, source=source_of(measured))
    level = Level(name="machine", size=max(measured.ranks, 2), link=link)
    bare = Cluster(name="machine", accelerator=ACCELERATOR, levels=(level,), collectives=plain)
    operations = dict.fromkeys(x.operation for x in measured.collectives)
    fitted = {name: factors.fit(bare, name, [p for p in points if p.operation == name]) for name in operations}
    return link, plain.but(factors={name: found.factors.as_dict() for name, found in fitted.items()})


def source_of(measured: MachineMeasurement) -> str:
    """A sentence about the origin of the constants."""
    busy = "" if measured.is_idle else f", while other processes used {measured.busy_cores:.1f} cores"
    ranks = f"{measured.ranks} process{'es' * (measured.ranks > 1)} at once on {measured.cores:g} cores"
    return f"{MEASURED} at {measured.made}: operations and collectives of fixed sizes, {ranks}{busy}"


def slowdown(ranks: int, cores: float, busy_cores: float) -> float:
    """How many times longer the ranks take while other processes keep `busy_cores` busy.

    The scheduler gives each running process an equal share: R ranks and b other busy processes get C·R/(R + b) of C cores, and at least
    those that the others leave.
    """
    alone = min(cores, float(ranks))
    left = min(alone, max(cores - busy_cores, cores * ranks / (ranks + busy_cores)))
    return alone / max(left, 1e-9)


def calibrated(
    cluster: Cluster, plain: Stack, measured: MachineMeasurement, busy_cores: float = 0.0
) -> tuple[Cluster, Stack]:
    """A cluster and a stack with the constants of this machine, while other processes keep `busy_cores` busy."""
    fit, slower = fit_device(measured.operations), slowdown(measured.ranks, measured.cores, busy_cores)
    source, stretch = source_of(measured), measured.sharing * slower
    device = accelerator(fit, stretch, source).but(memory=cluster.accelerator.memory)
    level = cluster.levels[0].but(size=max(measured.ranks, cluster.node_size), shared=False)
    found = cluster.but(accelerator=device, sharing=measured.sharing, source=source)
    if measured.collectives:
        link, shares = collectives(measured, slower)
        found = found.but(levels=(level.but(link=link),), collectives=shares)
    lost = LARGEST_LOSS if measured.sharing > 1 else min(measured.overlap_cost, LARGEST_LOSS)
    return found, stack(fit, stretch, plain, source).but(overlap=("dp",), compute_slowdown=lost, collective_launch=0.0)


def rate_of(seconds: float) -> float:
    """Units per second, bounded where a unit costs nothing."""
    return 1.0 / max(seconds, 1.0 / MOST_RATE)
