"""Constants of the machine at hand, from operations and collectives of fixed sizes: the device part of a calibration.

`calibrate.device_fit` fits what one process does; this file turns its constants, and what collectives add between computations, into a device,
a stack and links.

Times are seconds in which one process computed. `sharing` processes per core take that many times longer, so every rate is divided by it.
"""

from statistics import median

import numpy as np
from pydantic import Field

from meshwright.calibrate.device_fit import DeviceFit, fit_device, nonnegative_fit
from meshwright.calibrate.points import IDLE_SHARE, DevicePoint
from meshwright.cost.library import LIBRARIES
from meshwright.describe.accelerator import Accelerator, Efficiency
from meshwright.describe.base import Described, Seconds
from meshwright.describe.catalog import load
from meshwright.describe.cluster import Cluster, Collectives, Factors, Link
from meshwright.describe.stack import Stack
from meshwright.programs.collectives.formulas import FORMULAS, Shape, Terms
from meshwright.units import Json

VERSION = 8  # raised whenever what is measured changes: a cached calibration of another version is measured anew
ACCELERATOR = "cpu"
# Host work of one action of a pipeline schedule, in launches: torch's stages are written in Python
ACTION_LAUNCHES = 40.0
SIZES = (2**10, 2**16, 2**20)  # bytes of the measured collectives
STEP_LAUNCHES = 100.0  # launches of a step outside model and optimizer: reading the batch, counting tokens, records
ALPHA, BANDWIDTH = 1e-4, 1e9  # of a link that factors scale to the measured one
LARGEST_LOSS = 0.99  # of compute while communication runs: where no core is free, nothing is gained by overlap
HOST_TIMES = (
    "launch", "product_launch", "attention_launch", "tile_launch", "update_launch", "unit_launch", "unit_hooks",
)  # fmt: skip
LEAST_FACTOR = 1e-6  # of bytes whose time is too short to measure
MOST_RATE = 1e15  # a fitted term that is not above zero costs nothing: this many per second


class AddedTime(Described):
    """Seconds that one collective adds to a layer, beyond the autograd function that contains it."""

    operation: str
    """all-reduce, all-gather, …, or point-to-point"""
    ranks: int = Field(ge=2)
    """ranks of a group"""
    bytes: int = Field(ge=0)
    """n, the full buffer"""
    wall_s: Seconds = Field(gt=0)
    """seconds on the clock"""
    cpu_s: Seconds = Field(gt=0)
    """seconds in which the rank's threads computed"""


class MachineMeasurement(Described):
    """Measurements of one machine with a number of ranks at once; the content of a cached calibration."""

    version: int = VERSION
    made: str = ""
    """date and time, UTC"""
    key: dict[str, str] = Field(default_factory=dict)
    """hardware and libraries that it holds for"""
    dtype: str
    """of the measured operations: that of the run"""
    reduced_dtype: str = "fp32"
    """that the measured all-reduce and reduce-scatter add up"""
    backend: str = "gloo"
    """of torch.distributed: that of the run"""
    ranks: int = Field(ge=1)
    cores: float = Field(gt=0)
    """cores that the ranks may use"""
    busy_cores: float = Field(default=0.0, ge=0)
    """cores that other processes used meanwhile"""
    overlap_cost: float = Field(default=1.0, ge=0, le=1)
    """seconds that a hidden second of communication costs"""
    function_s: Seconds = Field(default=0.0, ge=0)
    """host time of an autograd function around a collective"""
    seconds: float = Field(default=0.0, ge=0)
    """how long it took"""
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


def accelerator(fit: DeviceFit, sharing: float, source: str, dtype: str) -> Accelerator:
    """The device that one rank gets: its share of a core. Measured in `dtype`; other types are taken to be as fast, fp64 half as fast."""
    plain = load("accelerators", ACCELERATOR)
    rate = rate_of(fit.flop * sharing)
    bandwidth = rate_of(fit.byte * sharing)
    attention = min(1.0, rate_of(fit.attention_flop * sharing) / rate)
    ideal: Json = dict.fromkeys(("gemm", "gemm_traffic", "memory", "tile"), 1.0) | {"floor": 0.0, "sequence_half": 0.0}
    efficiency = Efficiency(
        **ideal,
        flash=attention,
        fused=attention,
        update=rate_of(fit.update_byte * sharing) / bandwidth,
        exponential=fit.exponential * sharing,
        elementwise=fit.elementwise,
        selection=fit.selection * sharing,
        measured_dtype=dtype,
        source=source,
    )
    peak = {name: rate / 2 if name == "fp64" != dtype else rate for name in plain.peak}
    return plain.but(memory_bandwidth=bandwidth, peak=peak, efficiency=efficiency, source=source, checked=source)


def stack(fit: DeviceFit, sharing: float, plain: Stack, source: str) -> Stack:
    """The stack with the host times of this machine: known as well as one that is calibrated with runs."""
    return plain.but(
        evidence="calibrated",
        **{name: getattr(fit, name) * sharing for name in HOST_TIMES},
        elementwise_launch=fit.elementwise_launch,
        action=ACTION_LAUNCHES * fit.launch * sharing,
        step_overhead=STEP_LAUNCHES * fit.update_launch * sharing,
        source=source,
    )


def collectives(measured: MachineMeasurement, slower: float) -> tuple[Link, Collectives]:
    """The link between two ranks and the terms of each operation, from what collectives add between computations:

        t = call + latency · a·α + bytes · b·n·β          a, b: of the closed formula of the program that gloo runs

    `call` does not depend on the number of ranks: waking a rank that waited, and filling its caches again. An all-to-all sends to all peers at
    once; its `peer` is what each of them adds.
    """
    link = Link(name="loopback", alpha=ALPHA, bandwidth=BANDWIDTH, source=source_of(measured))
    plain = Collectives(call=0.0, call_across=0.0, chunk=0.0, peer=0.0, pair_loss=0.0, source=source_of(measured))
    fitted, peer, wait = {}, 0.0, waits(measured)
    for operation in dict.fromkeys(x.operation for x in measured.collectives):
        points = [x for x in measured.collectives if x.operation == operation]
        terms = [formula_terms(operation, x.ranks) for x in points]
        columns = [
            (1.0, x.ranks if operation == "all-to-all" else t.alpha * ALPHA, t.beta * x.bytes / BANDWIDTH)
            for x, t in zip(points, terms, strict=True)
        ]
        waited = [wait[operation == "point-to-point", x.ranks] for x in points]
        seconds = np.array([(x.cpu_s * measured.sharing + w) * slower for x, w in zip(points, waited, strict=True)])
        call, latency, size = nonnegative_fit(np.array(columns, dtype=float), seconds, seconds).tolist()
        if operation == "all-to-all":
            peer, latency = latency, 0.0
        fitted[operation] = Factors(call=call, latency=latency, bytes=max(size, LEAST_FACTOR)).as_dict()
    return link, plain.but(factors=fitted, peer=peer)


def formula_terms(operation: str, ranks: int) -> Terms:
    """The closed formula of the program that gloo runs on one host."""
    (algorithm,) = LIBRARIES["gloo"][operation]
    return FORMULAS[operation, algorithm][1](Shape(float(ranks), 1.0, 1.0, float(ranks)))


def waits(measured: MachineMeasurement) -> dict[tuple[bool, int], float]:
    """Seconds that a rank waits in a collective while no rank computes for it, by (point-to-point, ranks): what the clock says beyond the
    computing of ranks that share cores. It depends on the scheduler and varies much from one measurement to the next, so it is the median
    over operations and sizes. On a busy machine the clock ran too long: other processes left only a part of it."""
    left = 1.0 - min(measured.busy_cores / measured.cores, 0.9) if not measured.is_idle else 1.0
    by_kind: dict[tuple[bool, int], list[float]] = {}
    for x in measured.collectives:
        waited = x.wall_s * left - x.cpu_s * measured.sharing
        by_kind.setdefault((x.operation == "point-to-point", x.ranks), []).append(max(waited, 0.0))
    return {kind: median(values) for kind, values in by_kind.items()}


def source_of(measured: MachineMeasurement) -> str:
    """A sentence about the origin of the constants."""
    busy = "" if measured.is_idle else f", while other processes used {measured.busy_cores:.1f} cores"
    ranks = f"{measured.ranks} process{'es' * (measured.ranks > 1)} at once on {measured.cores:g} cores"
    what = f"operations in {measured.dtype}"
    if measured.collectives:
        reduced = f" reducing {measured.reduced_dtype}" if measured.reduced_dtype != measured.dtype else ""
        what += f" and collectives of {measured.backend}{reduced}"
    return f"measured on this machine at {measured.made}: {what}, of fixed sizes, {ranks}{busy}"


def slowdown(ranks: int, cores: float, busy_cores: float) -> float:
    """Return how many times longer the ranks take while other processes keep `busy_cores` busy.

    The scheduler gives each running process an equal share: R ranks and b other busy processes get C·R/(R + b) of C cores, and at least
    those that the others leave.
    """
    alone = min(cores, float(ranks))
    left = min(alone, max(cores - busy_cores, cores * ranks / (ranks + busy_cores)))
    return alone / max(left, 1e-9)


def calibrated(
    cluster: Cluster, plain: Stack, measured: MachineMeasurement, busy_cores: float = 0.0
) -> tuple[Cluster, Stack]:
    """A cluster and a stack with the constants of this machine, while other processes keep `busy_cores` busy. A measurement without
    collectives leaves the links of the cluster."""
    fit, slower = fit_device(measured.operations), slowdown(measured.ranks, measured.cores, busy_cores)
    source, stretch = source_of(measured), measured.sharing * slower
    device = accelerator(fit, stretch, source, measured.dtype).but(memory=cluster.accelerator.memory)
    level = cluster.levels[0].but(size=max(measured.ranks, cluster.node_size), shared=False)
    both = f"links: {cluster.source}; device and host times: {source}"
    fitted = cluster.but(accelerator=device, sharing=measured.sharing, source=both)
    if measured.collectives:
        link, shares = collectives(measured, slower)
        fitted = fitted.but(levels=(level.but(link=link),), collectives=shares, source=source)
    lost = LARGEST_LOSS if measured.sharing > 1 else min(measured.overlap_cost, LARGEST_LOSS)
    return fitted, stack(fit, stretch, plain, source).but(
        overlap=("dp",), compute_slowdown=lost, collective_launch=measured.function_s * stretch
    )


def rate_of(seconds: float) -> float:
    """Units per second, bounded where a unit costs nothing."""
    return 1.0 / max(seconds, 1.0 / MOST_RATE)
