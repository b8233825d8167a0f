"""What one compressed message of gradients puts on the wire, to the byte.

    none               n values as they are, summed on the wire
    fp16, bf16         n values of 2 bytes, summed on the wire
    int8, fp8, int4    P parts of ⌈n/P⌉ values (an even number: int4 packs two into a byte), each with a scale of 4 bytes, in an
                       all-to-all and an all-gather: sums would overflow on the wire
    top-k              ⌈r·n⌉ values, at least one, with an index of 4 bytes each, all-gathered (so it grows with P)
    random-k           ⌈r·n⌉ values, at least one; all ranks draw the same indices, so the values are summed on the wire
    threshold          a count of 8 bytes, then as many (value, index) pairs as the fullest rank has above its threshold: without
                       a measurement, as many as a normal distribution has beyond τ standard deviations
    powersgd           r·m of each m × n matrix and, whole, whatever would not shrink; then r·n of each matrix

Under ZeRO each rank needs only its shard of the sum (`scattered`). What can be summed on the wire is reduce-scattered, PowerSGD's
factors are all-reduced as before, and other tensors go to the owner of each shard in one all-to-all, without the all-gather.

The functions take integers (one message of one rank) or arrays (one message of each plan of a batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from meshwright.describe.sharding.rules import Number, share

SCALE_BYTES = INDEX_BYTES = 4
COUNT_BYTES = 8
LINEAR = ("none", "fp16", "bf16")  # bytes proportional to the elements, however they are cut into messages
# Passes over the gradients in device memory that compressing and expanding cost.
PASSES = {
    "none": 0.0,
    "fp16": 1.5,
    "bf16": 1.5,
    "int8": 3.0,
    "int4": 3.0,
    "fp8": 3.0,
    "top-k": 8.0,
    "random-k": 4.0,
    "threshold": 5.0,
    "powersgd": 4.0,
}
# Torch operators that compressing and expanding cost: of each message, and of each parameter.
OPERATORS = {
    "int8": (35.0, 0.0),
    "int4": (35.0, 0.0),
    "fp8": (35.0, 0.0),
    "top-k": (23.0, 0.0),
    "powersgd": (6.0, 25.0),
}
FEW_OPERATORS = (4.0, 0.0)  # of the other compressions
Exchanges = list[tuple[str, Any]]  # collective, bytes of the full buffer


class Options(Protocol):
    """How a plan, or a batch of plans, compresses."""

    @property
    def compression_ratio(self) -> Number: ...
    @property
    def compression_threshold(self) -> Number: ...
    @property
    def compression_rank(self) -> Number: ...


class CompressedPlan(Options, Protocol):
    @property
    def wire(self) -> str: ...


def exchanges(
    plan: CompressedPlan,
    elements: int,
    width: int,
    shapes: Sequence[Sequence[int]],
    ranks: int,
    scattered: bool = False,
    passed: int | None = None,
) -> Exchanges:
    """The collectives of one message of `elements` gradients of `width` bytes, which holds parameters of these shapes."""
    factors = factor_sizes(shapes, plan.compression_rank)
    return [(c, n) for c, n in on_the_wire(plan, plan.wire, elements, width, ranks, scattered, factors, passed) if n]


def on_the_wire(
    options: Options,
    wire: str,
    elements: Number,
    width: Number,
    ranks: Number,
    scattered: bool,
    factors: tuple[Number, Number] = (0, 0),
    passed: Number | None = None,
) -> Exchanges:
    """(collective, bytes of the full buffer) of one message; zero bytes where a plan sends nothing.

    `factors` are the elements of PowerSGD's two sums; `passed` is how many values a threshold let pass on the fullest rank.
    """
    summed = "reduce_scatter" if scattered else "all_reduce"
    part = (
        elements / ranks
        if scattered and isinstance(ranks, np.ndarray)
        else elements // ranks
        if scattered
        else elements
    )
    match wire:
        case "none":
            return [(summed, elements * width)]
        case "fp16" | "bf16":
            return [(summed, elements * 2)]
        case "int8" | "int4" | "fp8":
            each = 2 * share(elements, 2 * ranks)
            n = ranks * (SCALE_BYTES + (each // 2 if wire == "int4" else each))
            return [("all_to_all", n)] if scattered else [("all_to_all", n), ("all_gather", n)]
        case "random-k":
            return [(summed, (ranks if scattered else 1) * kept(part, options.compression_ratio) * width)]
        case "top-k":
            n = ranks * kept(part, options.compression_ratio) * (width + INDEX_BYTES)
            return [("all_to_all" if scattered else "all_gather", n)]
        case "threshold":
            most = values_above(part, options.compression_threshold) if passed is None else passed
            pairs = ranks * most * (width + INDEX_BYTES)
            return [("all_gather", ranks * COUNT_BYTES), ("all_to_all" if scattered else "all_gather", pairs)]
    first, second = factors
    return [("all_reduce", first * width), ("all_reduce", second * width)]


def kept(elements: Number, ratio: Number) -> Number:
    """How many values a ratio keeps: ⌈ratio · elements⌉, at least one. Rounded to millionths first, so that 0.1 of 10 is 1."""
    count = np.ceil(np.floor(elements * ratio * 1e6) / 1e6)
    return (
        np.maximum(1.0, np.minimum(elements, count))
        if isinstance(count, np.ndarray)
        else max(1, min(elements, int(count)))
    )


def values_above(elements: Number, threshold: Number) -> Number:
    """How many of normally distributed values lie beyond `threshold` standard deviations, at least one."""
    if not isinstance(elements, np.ndarray) and not isinstance(threshold, np.ndarray):
        return max(1, round(elements * math.erfc(threshold / math.sqrt(2.0))))
    beyond = np.vectorize(math.erfc)(np.asarray(threshold) / math.sqrt(2.0))
    return np.maximum(1.0, np.round(elements * beyond))


def factor_sizes(shapes: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Elements of PowerSGD's two sums for parameters of these shapes."""
    pairs = [factor_size(shape, rank) for shape in shapes]
    return sum(first for first, _ in pairs), sum(second for _, second in pairs)


def factor_size(shape: Sequence[Number], rank: Number) -> tuple[Number, Number]:
    """The two factors of one parameter: r·m and r·n of an m × n matrix, or all of it and nothing where that is not smaller."""
    m, n = shape[0], math.prod(shape[1:])
    if len(shape) < 2:
        return m, 0
    if any(isinstance(x, np.ndarray) for x in (m, n, rank)):
        r = np.minimum(rank, np.minimum(m, n))
        smaller = r * (m + n) < m * n
        return np.where(smaller, r * m, m * n), np.where(smaller, r * n, 0.0)
    r = min(rank, m, n)
    return (r * m, r * n) if r * (m + n) < m * n else (m * n, 0)
