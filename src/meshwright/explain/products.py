"""Matrix products by shape: how often each ran, for how long, and at which rate.

The shape is that of the operator that launched the kernel (a profile with record_shapes); on a CPU the operator is the product. The usual rate is
the one that the cost model expects of this device for this shape, where the device is known; else the best rate that a shape with a fair part of
the FLOPs reaches in this trace.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from meshwright.cost.compute import gemm_time
from meshwright.describe.accelerator import Accelerator
from meshwright.explain.collectives import element_bytes, shapes_in
from meshwright.explain.kernels import group_of
from meshwright.explain.recognise import RecognisedTrace
from meshwright.explain.trace import Detail
from meshwright.lower.program import Op, scalar

# The position of the first factor among the arguments
OPERATORS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
FAIR_SHARE = 0.05  # of all FLOPs: a shape with less does not set the usual rate
SLOW = 0.5  # share of the usual rate below which a product is called slow
SLOW_UNKNOWN = 0.25  # the same where the rates of the device are not known: small products are slower than large ones for good reasons
THIN, ALIGNED = 32, 8  # a size below the first fills no tile; tensor cores read multiples of the second
PRECISIONS = {"bfloat16": "bf16", "half": "fp16", "float": "fp32", "double": "fp64", "float8": "fp8"}


@dataclass(frozen=True)
class TracedProduct:
    """All products of one shape in the traced steps of a rank."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    count: int
    seconds: float
    typical_s: float = 0.0  # the lower quartile, times the count: an interrupted process does not make a shape slow
    usual_s: float = 0.0  # what they would take at the usual rate
    slow: float = SLOW_UNKNOWN

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.batch * self.m * self.n * self.k

    @property
    def shape(self) -> str:
        return f"{self.batch} × " * (self.batch > 1) + f"({self.m}×{self.k})·({self.k}×{self.n})"

    @property
    def excess_s(self) -> float:
        """Seconds beyond the usual rate; 0 unless the product is clearly below it. Where the rates of the device are not known, a shape must be
        unusual too: rates of one trace alone differ for many reasons."""
        known = self.slow == SLOW
        return (
            self.typical_s - self.usual_s
            if self.usual_s < self.slow * self.typical_s and (known or self.unusual)
            else 0.0
        )

    @property
    def unusual(self) -> str:
        """What is unusual about the shape; empty for one that kernels are made for."""
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        thin = [f"{name} = {size}" for name, size in sizes.items() if size < THIN]
        odd = [f"{name} = {size}" for name, size in sizes.items() if size % ALIGNED]
        if thin and self.batch > 1:
            return f"{self.batch} small products with {', '.join(thin)} in place of one large one"
        if thin:
            return f"{', '.join(thin)} is too small to fill the device"
        return f"{', '.join(odd)} is not a multiple of {ALIGNED}: no aligned kernel fits" if odd else ""

    @property
    def reason(self) -> str:
        return self.unusual or "below the rate that its shape usually reaches"


@lru_cache(maxsize=4096)  # a training repeats few shapes in millions of calls
def product_shape(name: str, detail: Detail) -> tuple[int, int, int, int, str] | None:
    """Batch, m, n, k and dtype of a call; None if the profile has no shapes."""
    at = OPERATORS.get(name)
    shapes = [shape for shape in shapes_in(detail.dims) if shape]
    if at is None or len(shapes) < at + 2:
        return None
    a, b = shapes[at], shapes[at + 1]
    if len(a) not in (2, 3) or len(a) != len(b) or a[-1] != b[-2]:
        return None
    dtype = detail.dtypes.strip("[]").replace("'", "").partition(",")[0].removeprefix("c10::").lower()
    return (a[0] if len(a) == 3 else 1), a[-2], b[-1], a[-1], PRECISIONS.get(dtype, dtype)


def traced_products(found: RecognisedTrace, device: Accelerator | None = None) -> list[TracedProduct]:
    """The products in the traced steps, those with most time first."""
    e = found.events
    is_product = np.array([name in OPERATORS for name in e.names], bool)
    seconds = defaultdict[tuple[int, int, int, int, str], list[float]](list)
    begin, end = (found.steps[0].start, found.steps[-1].end) if found.steps else (0, 0)
    calls = np.flatnonzero(is_product[e.name] if len(e.names) else [])
    times = e.duration[calls].astype(float)
    inside = (e.start[calls] >= begin) & (e.start[calls] < end) & (times > 0)  # old profilers write whole microseconds
    if len(found.device):
        times = kernel_times(found, calls)
        inside = times > 0
    for i, nanoseconds in zip(calls[inside].tolist(), times[inside].tolist(), strict=True):
        if shape := product_shape(e.names[e.name[i]], e.details[e.detail[i]]):
            seconds[shape].append(nanoseconds / 1e9)
    out = [TracedProduct(*shape, len(s), sum(s), len(s) * float(np.quantile(s, 0.25))) for shape, s in seconds.items()]
    return sorted(with_usual(out, device), key=lambda p: -p.seconds)


def kernel_times(found: RecognisedTrace, calls: np.ndarray) -> np.ndarray:
    """Nanoseconds of the products that each call launched, within the traced steps."""
    e = found.events
    launched = found.launches >= 0
    kernels, launches = found.device[launched], found.launches[launched]
    group = np.array([group_of(name) == "products" for name in e.names], bool)[e.name[kernels]]
    inside = (e.start[kernels] >= found.steps[0].start) & (e.start[kernels] < found.steps[-1].end)
    kernels, launches = kernels[group & inside], launches[group & inside]
    order = calls[np.argsort(e.external[calls], kind="stable")]
    keys, wanted = e.external[order], e.external[launches]
    out = np.zeros(len(calls))
    if len(order):
        at = np.minimum(np.searchsorted(keys, wanted), len(order) - 1)
        hit = (keys[at] == wanted) & (wanted >= 0)
        position = np.searchsorted(calls, order[at[hit]])
        np.add.at(out, position, e.duration[kernels[hit]])
    return out


def with_usual(products: list[TracedProduct], device: Accelerator | None) -> list[TracedProduct]:
    total = sum(p.flops for p in products)
    fair = [p.flops / p.typical_s for p in products if p.flops >= FAIR_SHARE * total and p.typical_s]
    best = max(fair, default=0.0)
    if device is not None:
        return [
            replace(p, typical_s=p.seconds, usual_s=expected_seconds(p, device), slow=SLOW)
            if p.dtype in device.peak
            else replace(p, usual_s=p.typical_s)
            for p in products
        ]
    return [replace(p, usual_s=p.flops / best if best else p.typical_s) for p in products]


def expected_seconds(p: TracedProduct, device: Accelerator) -> float:
    """What the cost model expects of these products on a device."""
    size = element_bytes(p.dtype) * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    op = Op(
        "product", "linear", "gemm", flops=p.flops / p.count, bytes=size, shape=(p.batch, p.m, p.n, p.k), dtype=p.dtype
    )
    return p.count * scalar(gemm_time(device, p.dtype, op))
