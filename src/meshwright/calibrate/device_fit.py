"""Fit the constants of one process of a CPU to operations that were measured on it.

Each measured operation is lowered by the same builders as a training step (`lower.layer`, `lower.sync`), so a fitted constant means in the
prediction what it meant in the fit. On a CPU, where the host computes, one operation takes

    t = launches · launch + flops / rate + bytes / bandwidth + exponentials · exponential

The fits go part by part, each with the constants of the part before, weighted by 1/t so that small and large operations have equal weight:

    norms, activations, residuals, RoPE, loss   → launch, bandwidth, exponential; then for each of them a factor on its host time and
                                                  one on its bytes: torch runs some in more operators and passes than we count
    linear layers                               → product_launch, rate of products
    attention                                   → attention_launch, rate of attention
    attention in tiles of torch operators       → tile_launch
    top-k                                       → selection
    whole layers                                → factors on all of these: caches hold what other operations left, and modules and
                                                  views take the host's time
    optimizer; ZeRO units                       → update_launch, update_byte, unit_launch, unit_hooks

An update has a separate rate: it works in place, while other operators allocate their results. Points are measured in the dtype of the
run, and their bytes are those of that dtype; an update of 16-bit parameters works on fp32 masters, so it is measured in fp32.

The efficiencies of a GPU, from the device part of a bench: the constants of `cost.compute`, each from the operations that it governs.

    copies      t = t₀ + bytes / (memory · bandwidth)                          → the share of the memory bandwidth
    products    t = t₀ + max(a, m) + c · min(a, m), a = flops / (gemm · peak)  → the share of the peak rate
    attention   t = t₀ + flops / (flash · s/(s + 700) · peak)                  → the share of the peak rate; `fused` for the vendor's kernel
    host-copy   t = bytes / bandwidth                                          → the bandwidth to the host, with pinned memory
    ZeRO units  t = t₀ + factor · bytes / (memory · bandwidth)                 → the factor of each of the two copies (`elementwise`)

Each share is the one with which `cost.compute` gives the measured time. t₀ and c are the catalog's: back to back, small kernels wait
for the host to launch them, so their times do not show t₀. For the same reason only shapes with at least a tenth of the largest work
count. The median over these shapes is taken, so one shape for which the library has no good kernel does not move it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.calibrate.fit import non_negative
from meshwright.calibrate.points import DevicePoint
from meshwright.cost.compute import device_time, memory_time
from meshwright.describe.accelerator import DTYPE_BYTES, Accelerator
from meshwright.describe.catalog import load
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower import attention_tiles, ends, sync
from meshwright.lower.batch import Batch
from meshwright.lower.layer import LayerLowering
from meshwright.lower.program import Op
from meshwright.lower.step import step_program
from meshwright.units import format_rate

STACK, MODEL = "gloo-cpu", "nano"
PARTS = ("norm", "activation", "residual", "rotation", "loss")
PULL = 0.1  # weight of the pull of a factor towards 1, against one point
LEAST_FACTOR = 0.1
UNIT_COLLECTIVES = 3.0  # of a measured unit: gathered forward and backward, then reduced
UNIT_KINDS = ("plain-units", "held-units", "sharded-units")  # layers alone, with ZeRO's hooks, and with its collectives


class DeviceFit(NamedTuple):
    """Seconds of one process that has a core to itself, and the residuals of the fit."""

    launch: float
    byte: float
    exponential: float
    product_launch: float
    flop: float
    attention_launch: float
    attention_flop: float
    tile_launch: float
    selection: float
    update_launch: float
    update_byte: float
    unit_launch: float
    unit_hooks: float
    elementwise_launch: dict[str, float]  # factors on the host time of norm, activation, …
    elementwise: dict[str, float]  # factors on the seconds of their bytes and exponentials
    residuals: dict[str, float]  # by kind, the median of |fitted / measured − 1|


class Features(NamedTuple):
    """Counts of one measured operation, summed over forward and backward."""

    launches: float  # of products or attention; of any operation in a point without these
    flops: float
    bytes: float
    exponentials: float
    other_launches: float = 0.0  # launches of other operations in the same point


def lowered(point: DevicePoint) -> list[Op]:
    """The operations of the step program that a measured point ran, forward and backward."""
    s = point.shape
    if point.kind == "linear":
        low = _lowering(point, int(s["m"]), 16)
        low.gemm("linear", "ffn", s["m"], s["n"], s["k"])
    elif point.kind == "attention":
        low = _lowering(point, int(s["seq"]), int(s["heads"] * s["width"]), int(s["heads"]), int(s["batch"]))
        low.core(s["heads"])
    elif point.kind == "layer":
        return layer_ops(int(s["width"]), int(s["tokens"] // s["sequences"]), int(s["sequences"]), point.dtype)
    elif point.kind == "tile":
        launches = {"F": s["operators"], "I": 0.0}
        phases = attention_tiles.tile_ops(s["batch"] * s["heads"], s["seq"], s["seq"], s["width"], s["width"], launches)
        return [op for ops in phases.values() for op in ops]
    elif point.kind == "optimizer":
        low = _lowering(point, 1, 16)
        return sync.optimizer(low.b, np.array([s["tensors"] * s["elements"]]), np.array([s["tensors"]]))
    else:
        low = _lowering(point, int(s["tokens"]), int(s["width"]), max(1, int(s["width"]) // 16))
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


def _lowering(point: DevicePoint, seq: int, width: int, heads: int = 1, batch: int = 1) -> LayerLowering:
    """The lowering of a layer of a given width, as `train` runs it on one CPU process in the dtype of the point."""
    dtype = point.dtype
    model = load("models", MODEL).but(hidden=width, heads=heads, kv_heads=heads, ffn=width, vocab=width)
    workload = Workload(batch=batch, seq=seq, precision=dtype)
    plan = Plan(microbatch=batch, param_dtype=dtype, master=False)
    made = Batch.of([plan], model, workload, load("stacks", STACK))
    return LayerLowering(made, model.blocks["dense"], DTYPE_BYTES[dtype], {})


def layer_model(width: int, seq: int) -> Model:
    """The model whose layers `comm.bench.layers` runs: heads of 16, half as many of keys and values, FFN twice as wide."""
    heads = width // 16
    sizes = {"hidden": width, "heads": heads, "kv_heads": max(1, heads // 2), "ffn": 2 * width}
    return load("models", MODEL).but(**sizes, max_positions=seq)


def layer_ops(width: int, seq: int, batch: int, dtype: str = "fp32") -> list[Op]:
    """The operations of one layer, forward and backward, as `train` runs it on one CPU process."""
    workload = Workload(batch=batch, seq=seq, precision=dtype)
    plan = Plan(microbatch=batch, param_dtype=dtype, master=False)
    program = step_program(layer_model(width, seq), plan, workload, load("stacks", STACK))
    return [op for phase in ("F", "I", "W") for op in program.blocks["dense", phase]]


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
        coefficients, missed = relative_fit(rows, names, known)
        residuals[" ".join(kinds) if len(kinds) == 1 else "elementwise"] = missed
        return coefficients

    launch, byte, exponential = solve(PARTS, ("launches", "bytes", "exponentials"), {})
    product, flop = solve(("linear",), ("launches", "flops"), {"bytes": byte, "other_launches": launch})
    attention, attention_flop = solve(
        ("attention",), ("launches", "flops"), {"bytes": byte, "exponentials": exponential}
    )
    single = SingleOperation(launch, byte, exponential, product, flop, attention, attention_flop)
    factors = {part: two_factors(by_kind.get(part, []), single) for part in PARTS}
    single = single._replace(factors=factors)
    host, device = two_factors(by_kind.get("layer", []), single)
    residuals["layer"] = max(abs(host - 1), abs(device - 1))
    tile = launch
    if "tile" in by_kind:
        (tile,) = solve(("tile",), ("launches",), {"flops": flop, "bytes": byte, "exponentials": exponential})
    selections = [p.median_s / p.shape["elements"] for p in by_kind.get("top-k", [])]
    update, update_byte = solve(("optimizer",), ("launches", "bytes"), {})
    unit = hooks = 0.0
    if all(kind in by_kind for kind in UNIT_KINDS):
        plain, gathered, exchanged = (by_kind[kind][0] for kind in UNIT_KINDS)
        hooks = max(gathered.median_s - plain.median_s, 0.0) / gathered.shape["units"]
        unit = max(exchanged.median_s - gathered.median_s, 0.0) / (exchanged.shape["units"] * UNIT_COLLECTIVES)
    return DeviceFit(
        launch * host,
        byte * device,
        exponential * device,
        product * host,
        flop * device,
        attention * host,
        attention_flop * device,
        tile,
        max(selections, default=0.0),
        update,
        update_byte,
        unit,
        hooks,
        {part: factors[part][0] for part in PARTS},
        {part: factors[part][1] for part in PARTS},
        residuals,
    )


class SingleOperation(NamedTuple):
    """Constants fitted to chains of one operation: seconds of a unit of each."""

    launch: float
    byte: float
    exponential: float
    product: float
    flop: float
    attention: float
    attention_flop: float
    # Of norm, activation, …: on the host time, on bytes and exponentials
    factors: Mapping[str, tuple[float, float]] = {}

    def seconds(self, op: Op) -> tuple[float, float]:
        """Return the host seconds, and the arithmetic and memory seconds, of an operation."""
        host = {"gemm": self.product, "attention": self.attention}.get(op.kind, self.launch) * op.launches
        exponentials = op.shape[0] * op.shape[1] * op.shape[2] if op.kind == "attention" else op.exponentials
        flop = self.attention_flop if op.kind == "attention" else self.flop
        work = op.flops * flop + op.bytes * self.byte + exponentials * self.exponential
        of_host, of_work = self.factors.get(op.elementwise, (1.0, 1.0))
        return float(np.sum(op.count * host)) * of_host, float(np.sum(op.count * work)) * of_work


def two_factors(points: Sequence[DevicePoint], single: SingleOperation) -> tuple[float, float]:
    """Return how much longer than `single` says the host, and arithmetic and memory, take in these points: 1 without points. Of whole
    layers it is what caches cost (a chain of one operation keeps its code and its data there, a training step does not), and what modules and
    views cost.

    Both factors are pulled weakly towards 1, since few points determine them."""
    if not points:
        return 1.0, 1.0
    rows = [[sum(x) for x in zip(*(single.seconds(op) for op in lowered(point)), strict=True)] for point in points]
    times = np.array([point.median_s for point in points])
    columns = np.array([*(np.array(row) / t for row, t in zip(rows, times, strict=True)), *(PULL * np.eye(2))])
    right = np.array([*np.ones(len(points)), PULL, PULL])
    host, device = nonnegative_fit(columns, right, np.ones(len(right))).tolist()
    return max(host, LEAST_FACTOR), max(device, LEAST_FACTOR)


def relative_fit(
    points: Sequence[DevicePoint], names: Sequence[str], known: dict[str, float]
) -> tuple[list[float], float]:
    """Non-negative seconds per unit of each named feature, after what the `known` ones take; and the median relative residual."""
    rows = [features(point) for point in points]
    times = np.array([point.median_s for point in points])
    rest = times - sum(np.array([getattr(row, name) for row in rows]) * value for name, value in known.items())
    columns = np.array([[getattr(row, name) for name in names] for row in rows])
    coefficients = nonnegative_fit(columns, rest, times)
    return coefficients.tolist(), float(np.median(np.abs(columns @ coefficients - rest) / times))


def nonnegative_fit(columns: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The values ≥ 0 that minimise Σ ((columns · values − seconds) / scale)²."""
    return non_negative(columns / scale[:, None], np.ones(len(scale)), seconds / scale)


BIG = 0.1  # share of the largest work
LEAST, MOST = 0.01, 1.0  # a share outside this range is an error of the measurement
BISECTIONS = 30
# kind of operation → the share that governs it
SHARES = (
    ("copy", "memory"),
    ("gemm", "gemm"),
    ("fp8-gemm", "gemm_fp8"),
    ("grouped-gemm", "grouped"),
    ("attention", "flash"),
    ("fused-attention", "fused"),
)

UNIT_COPIES = ("unit-copy-out", "unit-copy-in")  # of `lower.gradients`
WHOLE = {"copy": "the memory bandwidth", "grouped-gemm": "the rate of one product"}


def gpu_accelerator(points: Sequence[DevicePoint], base: Accelerator, source: str) -> tuple[Accelerator, list[str]]:
    """The catalog's device with measured shares, and a note for each."""
    device, notes = base, []
    for kind, name in SHARES:
        shares = [share_of(point, device, name) for point in largest(points, kind)]
        if not shares:
            notes.append(f"{kind}: not measured, {base.name} of the catalog")
            continue
        share = round(float(np.median(shares)), 4)
        device = device.but(efficiency=device.efficiency.but(**{name: share}, source=source))
        spread = (
            f", the median of {len(shares)} shapes from {min(shares):.0%} to {max(shares):.0%}"
            if len(shares) > 1
            else ""
        )
        notes.append(f"{kind}: {share:.0%} of {WHOLE.get(kind, 'the peak rate')}{spread}")
    factors = {kind: time_factor(largest(points, kind), device) for kind in UNIT_COPIES}
    if measured := {kind: factor for kind, factor in factors.items() if factor}:
        elementwise = {**device.efficiency.elementwise, **measured}
        device = device.but(efficiency=device.efficiency.but(elementwise=elementwise))
        notes += [f"{kind}: {factor:.2f}× the time of a copy of its bytes" for kind, factor in measured.items()]
    rates = [point.rate for point in largest(points, "host-copy")]
    if rates:
        device = device.but(host_bandwidth=round(float(np.median(rates))))
        notes.append(f"copies to the host: {format_rate(device.host_bandwidth)}")
    return device, notes


def time_factor(points: Sequence[DevicePoint], device: Accelerator) -> float:
    """The median over points of their time over that of a copy of their bytes; 0 without points."""
    ideal = [
        float(np.max(memory_time(device, Op("copy", "copies", "memory", bytes=np.array([p.work]))))) for p in points
    ]
    return round(float(np.median([p.median_s / t for p, t in zip(points, ideal, strict=True)])), 3) if points else 0.0


def largest(points: Sequence[DevicePoint], kind: str) -> list[DevicePoint]:
    """Points of a kind, measured while nothing else ran, whose work is at least a tenth of the largest."""
    matching = [point for point in points if point.kind == kind and not point.condition]
    return [point for point in matching if point.work >= BIG * max(p.work for p in matching)]


def operation(point: DevicePoint) -> Op:
    """The operation that the cost model prices, as the bench ran it: attention causal, forward and backward."""
    shape, flops = point.shape, np.array([point.work])
    if point.kind == "copy":
        return Op("copy", "other", "memory", bytes=flops)
    if point.kind in ("gemm", "fp8-gemm", "grouped-gemm"):
        m, n, k = (np.array([shape[name]]) for name in ("m", "n", "k"))
        experts = np.array([shape.get("experts", 1.0)])
        traffic = experts * (DTYPE_BYTES[point.dtype] * (m * k + n * k) + 2.0 * m * n)
        part = "experts" if point.kind == "grouped-gemm" else "ffn"
        return Op("gemm", part, "gemm", flops=flops, bytes=traffic, shape=(experts, m, n, k))
    rows = np.array([shape["batch"] * shape["heads"]])
    seq, width = np.array([shape["seq"]]), np.array([shape["width"]])
    return Op("core", "attention", "attention", flops=flops, shape=(rows, seq, seq, width))


def share_of(point: DevicePoint, device: Accelerator, name: str) -> float:
    """The share with which the cost model gives the measured time. Times fall as the share grows, so it is found by bisection."""
    op, low, high = operation(point), LEAST, MOST
    kernel = "fused" if name == "fused" else "flash"
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        priced = device.but(efficiency=device.efficiency.but(**{name: middle}))
        slower = float(np.max(device_time(priced, point.dtype, kernel, op))) > point.median_s
        low, high = (middle, high) if slower else (low, middle)
    return (low + high) / 2
