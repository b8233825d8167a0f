"""What one compressed message of gradients puts on the wire, to the byte.

    none               n values as they are, summed on the wire
    fp16, bf16         n values of 2 bytes, summed on the wire
    int8, fp8, int4    P parts of ⌈n/P⌉ values (an even number: int4 packs two into a byte), each with a scale of 4 bytes, in an
                       all-to-all and an all-gather: sums would overflow on the wire
    top-k              ⌈r·n⌉ values, at least one, with an index of 4 bytes each, all-gathered (so it grows with P)
    random-k           ⌈r·n⌉ values, at least one; all ranks draw the same indices, so the values are summed on the wire
    threshold          a count of 8 bytes, then as many (value, index) pairs as the fullest rank has above its threshold: without
                       a measurement, as many as a normal distribution has beyond τ standard deviations
    absolute-threshold as threshold; without a measurement ⌈r·n⌉ values, the share that the plan expects
    powersgd           r·m of each m × n matrix and, whole, whatever would not shrink; then r·n of each matrix

Under ZeRO each rank needs only its shard of the sum (`scattered`). What can be summed on the wire is reduce-scattered, PowerSGD's
factors are all-reduced as before, and other tensors go to the owner of each shard in one all-to-all, without the all-gather.

The functions take integers (one message of one rank) or arrays (one message of each plan of a batch).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.describe.sharding.rules import Number, share
from meshwright.describe.variants import COMPRESSIONS

SCALE_BYTES = INDEX_BYTES = 4
COUNT_BYTES = 8
Array = Any
Exchanges = list[tuple[str, Any]]  # collective, bytes of the full buffer


class WireOptions(Protocol):
    """Options of compression of a plan, or of a batch of plans."""

    @property
    def compression_ratio(self) -> Number: ...
    @property
    def compression_threshold(self) -> Number: ...
    @property
    def compression_rank(self) -> Number: ...


class CompressedPlan(WireOptions, Protocol):
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
    options: WireOptions,
    wire: str,
    elements: Number,
    width: Number,
    ranks: Number,
    scattered: bool,
    factors: tuple[Number, Number] = (0, 0),
    passed: Number | None = None,
) -> Exchanges:
    """(collective, bytes of the full buffer) of one message; zero bytes where a plan sends nothing."""
    request = Request(options, elements, width, ranks, scattered, factors, passed)
    exchanges: Exchanges = COMPRESSIONS.part(wire, "wire")(request)
    return exchanges


class Request(NamedTuple):
    """One message: `elements` gradients of `width` bytes, summed over `ranks`; `scattered`: a rank needs only its shard of the sum.

    `factors` are the elements of PowerSGD's two sums; `passed` is how many values a threshold let pass on the fullest rank.
    """

    options: WireOptions
    elements: Number
    width: Number
    ranks: Number
    scattered: bool
    factors: tuple[Number, Number] = (0, 0)
    passed: Number | None = None

    @property
    def summed(self) -> str:
        """The collective that sums on the wire."""
        return "reduce_scatter" if self.scattered else "all_reduce"

    @property
    def exchanged(self) -> str:
        """The collective of what cannot be summed on the wire."""
        return "all_to_all" if self.scattered else "all_gather"

    @property
    def part(self) -> Number:
        """Elements from which values are chosen at a time: those of one owner, or all."""
        if not self.scattered:
            return self.elements
        return self.elements / self.ranks if isinstance(self.ranks, np.ndarray) else self.elements // self.ranks


def plain(r: Request) -> Exchanges:
    return [(r.summed, r.elements * r.width)]


def cast(r: Request) -> Exchanges:
    return [(r.summed, r.elements * 2)]


def quantised(r: Request, per_byte: int = 1) -> Exchanges:
    each = 2 * share(r.elements, 2 * r.ranks)
    n = r.ranks * (SCALE_BYTES + each // per_byte)
    return [("all_to_all", n)] if r.scattered else [("all_to_all", n), ("all_gather", n)]


def random_values(r: Request) -> Exchanges:
    return [(r.summed, (r.ranks if r.scattered else 1) * kept(r.part, r.options.compression_ratio) * r.width)]


def largest_values(r: Request) -> Exchanges:
    return [(r.exchanged, r.ranks * kept(r.part, r.options.compression_ratio) * (r.width + INDEX_BYTES))]


def above_threshold(r: Request) -> Exchanges:
    most = values_above(r.part, r.options.compression_threshold) if r.passed is None else r.passed
    return [("all_gather", r.ranks * COUNT_BYTES), (r.exchanged, r.ranks * most * (r.width + INDEX_BYTES))]


def above_absolute(r: Request) -> Exchanges:
    """Without a measurement as many values as the plan expects: no distribution says how large gradients are."""
    most = kept(r.part, r.options.compression_ratio) if r.passed is None else r.passed
    return [("all_gather", r.ranks * COUNT_BYTES), (r.exchanged, r.ranks * most * (r.width + INDEX_BYTES))]


def two_factors(r: Request) -> Exchanges:
    first, second = r.factors
    return [("all_reduce", first * r.width), ("all_reduce", second * r.width)]


def kept(elements: Number, ratio: Number) -> Number:
    """Number of values that a ratio keeps: ⌈ratio · elements⌉, at least one. Rounded to millionths first, so that 0.1 of 10 is 1."""
    count = np.ceil(np.floor(elements * ratio * 1e6) / 1e6)
    return (
        np.maximum(1.0, np.minimum(elements, count))
        if isinstance(count, np.ndarray)
        else max(1, min(elements, int(count)))
    )


def values_above(elements: Number, threshold: Number) -> Number:
    """Number of normally distributed values that lie beyond `threshold` standard deviations, at least one."""
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


# Buffers of one message: bytes while its collectives run, and bytes while it is compressed or expanded. x is gradient + error; when it is
# compressed it becomes the next error. `sent` is what the last collective of the message moves.


def cast_buffers(r: Request, sent: Array) -> tuple[Array, Array]:
    """The 16-bit copy of wider gradients."""
    waits = np.where(np.asarray(r.width) > 2, sent, 0.0) + (sent / r.ranks if r.scattered else 0.0)
    return waits, waits


def quantised_buffers(r: Request, sent: Array, through_fp32: bool = False) -> tuple[Array, Array]:
    """Bytes sent and received. At most x, x / scale in fp32 or wider, and two bytes of integers for each value; fp8 is converted
    through fp32."""
    whole, through = r.elements * r.width, np.where(through_fp32 & (np.asarray(r.width) != 4), 4 * r.elements, 0.0)
    return 2 * sent, whole + 2 * r.elements + np.maximum(np.maximum(r.width, 4) * r.elements, whole + through)


def largest_values_buffers(r: Request, sent: Array) -> tuple[Array, Array]:
    """Pairs sent, and those of all ranks. At most x, its magnitudes, and the values and indices chosen."""
    pairs = sent if r.scattered else sent / r.ranks  # of this rank
    waits, chosen = sent + pairs, pairs / (r.width + INDEX_BYTES) * (r.width + 8)
    return waits, np.maximum(2 * r.elements * r.width + chosen, waits + sent / r.ranks)


def above_threshold_buffers(r: Request, sent: Array) -> tuple[Array, Array]:
    """x and 8-byte indices (a mask under ZeRO) until all counts are known, then like top-k."""
    whole, pairs = r.elements * r.width, sent if r.scattered else sent / r.ranks
    most = np.maximum(2 * whole + r.elements, sent + pairs + sent / r.ranks)
    indices = r.elements if r.scattered else 8 * pairs / (r.width + INDEX_BYTES)
    return np.maximum(sent + pairs, whole + indices), most


def random_values_buffers(r: Request, sent: Array) -> tuple[Array, Array]:
    """Values sent and their 8-byte indices. At most x and a permutation of 8-byte indices."""
    parts = r.ranks if r.scattered else 1
    count = sent / r.width / parts
    waits = sent + 8 * count + (sent / r.ranks if r.scattered else 0.0)
    return waits, r.elements * r.width + 8 * count + np.maximum(8 * r.elements / parts, 2 * sent)


def two_factors_buffers(r: Request, sent: Array) -> tuple[Array, Array]:
    """x and the first factors. At most a copy of the largest matrix as well, counted as all of x."""
    whole, (first, second) = r.elements * r.width, r.factors
    return whole + first * r.width, 2 * whole + 2 * (first + second) * r.width


COMPRESSIONS.provide("none", wire=plain, buffers=lambda request, sent: (0.0, 0.0))
COMPRESSIONS.provide("fp16", wire=cast, buffers=cast_buffers)
COMPRESSIONS.provide("bf16", wire=cast, buffers=cast_buffers)
COMPRESSIONS.provide("int8", wire=quantised, buffers=quantised_buffers)
COMPRESSIONS.provide("int4", wire=partial(quantised, per_byte=2), buffers=quantised_buffers)
COMPRESSIONS.provide("fp8", wire=quantised, buffers=partial(quantised_buffers, through_fp32=True))
COMPRESSIONS.provide("top-k", wire=largest_values, buffers=largest_values_buffers)
COMPRESSIONS.provide("random-k", wire=random_values, buffers=random_values_buffers)
COMPRESSIONS.provide("threshold", wire=above_threshold, buffers=above_threshold_buffers)
COMPRESSIONS.provide("absolute-threshold", wire=above_absolute, buffers=above_threshold_buffers)
COMPRESSIONS.provide("powersgd", wire=two_factors, buffers=two_factors_buffers)
