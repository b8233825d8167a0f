"""What one compressed message of gradients says on the wire, to the byte.

`sync.compressed_bytes` has the closed form that the cost of a batch of plans needs: of messages that are all as long as the mean
one. A real message has a scale for each rank's part, whole numbers of values, and factors of the matrices it holds:

    fp16, bf16         n values of 2 bytes, summed on the wire
    int8, fp8, int4    P parts of ⌈n/P⌉ values (an even number: int4 packs two a byte), each with a scale of 4 bytes
    top-k, random-k    ⌈r·n⌉ values, at least one; top-k with a place of 4 bytes each
    threshold          a count of 8 bytes, then as many (value, place) as the fullest rank has above its threshold
    powersgd           r·m of each m × n matrix and what does not shrink, whole; then r·n of each

Under ZeRO the message is P rows of what the owners keep: the same for each owner's part, and nothing is told to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.describe.plan import Plan
from meshwright.lower.sync import COUNT_BYTES, INDEX_BYTES, SCALE_BYTES, above

Shapes = Sequence[tuple[int, ...]]
Exchanges = list[tuple[str, float]]  # operation, bytes of the full buffer


def exchanges(
    plan: Plan, elements: int, width: int, shapes: Shapes, ranks: int, scattered: bool = False, told: int | None = None
) -> Exchanges:
    """Of one message of `elements` gradients of `width` bytes, whole parameters of `shapes` where they must be whole; `told` is
    how many values a threshold let pass on the fullest rank, unsaid: as many as of normally distributed ones."""
    sums = "reduce_scatter" if scattered else "all_reduce"
    part = elements // ranks if scattered else elements
    everyone = ranks if scattered else 1
    match plan.wire:
        case "none":
            return [(sums, elements * width)]
        case "fp16" | "bf16":
            return [(sums, elements * 2)]
        case "int8" | "int4" | "fp8":
            each = -(-elements // (2 * ranks)) * 2
            n = ranks * (SCALE_BYTES + (each // 2 if plan.wire == "int4" else each))
            return [("all_to_all", n)] if scattered else [("all_to_all", n), ("all_gather", n)]
        case "random-k":
            return [(sums, everyone * kept(part, plan.compression_ratio) * width)]
        case "top-k":
            n = ranks * kept(part, plan.compression_ratio) * (width + INDEX_BYTES)
            return [("all_to_all" if scattered else "all_gather", n)]
        case "threshold":
            most = told if told is not None else max(1, round(part * float(above(plan.compression_threshold))))
            pairs = ranks * most * (width + INDEX_BYTES)
            return [("all_gather", ranks * COUNT_BYTES), ("all_to_all" if scattered else "all_gather", pairs)]
    return factors(plan, shapes, width)


def kept(elements: int, ratio: float) -> int:
    """Values that a share of so many comes to: a whole number, at least one. In millionths, so that 0.1 of 10 is 1."""
    return max(1, min(elements, -(-int(elements * ratio * 1e6) // 1_000_000)))


def factors(plan: Plan, shapes: Shapes, width: int) -> Exchanges:
    """PowerSGD's two sums."""
    first = second = 0
    for shape in shapes:
        r = factor_width(shape, plan.compression_rank)
        first += r * shape[0] if r else math.prod(shape)
        second += r * math.prod(shape[1:]) if r else 0
    return [("all_reduce", n * width) for n in (first, second) if n]


def factor_width(shape: tuple[int, ...], rank: int) -> int:
    """Columns of the factors of a parameter; 0 where it goes whole."""
    if len(shape) < 2:
        return 0
    m, n = shape[0], math.prod(shape[1:])
    r = min(rank, m, n)
    return r if r * (m + n) < m * n else 0
