"""The pattern of a difference: how the tensor of the ranks relates to one device's, from the numbers alone.

pattern         the tensor of the ranks, compared with one device's
zero            nothing arrived
stale           the values of the step before, or these added to the right ones
missing sum     each rank has a part: along one axis they sum to the whole
factor          one device's times a number: an axis' degree, the micro-batches, or their inverse
counted twice   one device's, and a part of it once more
permutation     the same elements in another order, or those of another rank
part            right but for some rows or columns
noise           no larger than the rounding of a narrower dtype
other           none of these
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.proof.parts import Copy

SAME = 1e-6  # relative: two tensors that agree to this are the same numbers
NARROW = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}  # relative rounding of one operation
MOST_NOISE = 16 * NARROW["bf16"]  # of a step
MOST_PART = 0.75  # of the indices of a dimension: more is not a part


@dataclass(frozen=True)
class Pattern:
    kind: str
    detail: str = ""
    axis: str = ""


NOT_UPDATED = Pattern("stale", "it was not updated")


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two tensors are the same numbers, relative to the larger of their largest elements."""
    if a.shape != b.shape:
        return False
    scale = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    return bool(np.abs(a - b).max(initial=0.0) <= SAME * scale)


def named_factor(ratio: float, factors: Mapping[str, int]) -> str:
    """ "1/dp" or "tp" for a ratio that is the degree of an axis, the number of micro-batches, or its inverse; otherwise its value."""
    for name, n in factors.items():
        for value, text in ((n, name), (1 / n, f"1/{name}")):
            if n > 1 and abs(ratio - value) <= 1e-4 * value:
                return f"× {ratio:.4g} = {text}"
    return f"× {ratio:.4g}"


def pattern_of(copies: list[Copy], factors: Mapping[str, int], axes: Mapping[str, int]) -> Pattern:
    """The pattern of a tensor of which some copies differ. `axes` are degrees by axis, `factors` also has the micro-batches."""
    axes = {axis: degree for axis, degree in axes.items() if degree > 1}
    wrong = [c for c in copies if c.got.size and not same(c.got, c.expected)]
    if not wrong:
        return Pattern("noise", "the copies agree to six digits")
    if not all(np.isfinite(c.got).all() for c in wrong):
        return Pattern("other", "not a number")
    if all(not c.got.any() for c in wrong):
        return NOT_UPDATED if wrong[0].is_change else Pattern("zero")
    if stale := stale_values(wrong):
        return stale
    if summed := missing_sum(copies, axes):
        return summed
    if scaled := common_factor(wrong, factors):
        return scaled
    if all(same(np.sort(c.got, axis=None), np.sort(c.expected, axis=None)) for c in wrong):
        return Pattern("permutation", "the same elements in another order")
    if all(c.got.size > 1 and any(same(c.got, other.expected) for other in copies) for c in wrong):
        return Pattern("permutation", "each has the part of another rank")
    if largest_error(wrong) > 10 * SAME and (rows := part_of(wrong, copies, factors, axes)):
        return rows
    if extra := counted_again(copies, axes):
        return extra
    noise = noise_of(wrong)
    return noise if noise.kind == "noise" else scattered(wrong) or noise


def stale_values(wrong: list[Copy]) -> Pattern | None:
    olds = [(c, c.before, c.expected_before) for c in wrong]
    if all(
        old is not None and before is not None and (same(c.got, old) or same(c.got, before)) for c, before, old in olds
    ):
        return Pattern("stale", "the values of the step before")
    # What was clipped, that is times a number, since then.
    extra = [(c.got - c.expected, before) for c, before, _ in olds]
    if all(old is not None and old.size > 1 and old.any() and same(new, ratio(new, old) * old) for new, old in extra):
        return Pattern("stale", "the step before is added")
    return None


def ratio(a: np.ndarray, b: np.ndarray) -> float:
    """The number that b is multiplied by to come nearest to a."""
    square = float((b * b).sum())
    return float((a * b).sum()) / square if square else 0.0


def along(copies: list[Copy], axis: str, parts: bool = False) -> list[list[Copy]]:
    """The copies of ranks that differ along one axis only: of one part of the tensor, or with `parts` of several."""
    groups: dict[tuple, list[Copy]] = {}
    for copy in copies:
        others = tuple(sorted((a, i) for a, i in copy.coordinates.items() if a != axis))
        groups.setdefault((() if parts else copy.start, copy.got.shape, others), []).append(copy)
    return [group for group in groups.values() if len({c.start for c in group} if parts else group) > 1]


def missing_sum(copies: list[Copy], axes: Mapping[str, int]) -> Pattern | None:
    for axis, degree in axes.items():
        apart = [g for g in along(copies, axis) if not all(same(c.got, g[0].got) for c in g)]
        for text, combine in (("sum", np.sum), ("mean", np.mean)):
            if apart and all(same(combine([c.got for c in g], axis=0), g[0].expected) for g in apart):
                return Pattern("missing sum", f"the {degree} ranks of {axis} have parts whose {text} is right", axis)
    return None


def counted_again(copies: list[Copy], axes: Mapping[str, int]) -> Pattern | None:
    """The right values and once more what is common to some of them: a shared tensor that is summed on both sides. Or the sum of the parts that
    the ranks of an axis should have, on each of them: they are different, and were taken for copies."""
    for axis in axes:
        groups = along(copies, axis)
        if groups and all(same(np.sum([c.got - c.expected for c in g], axis=0), g[0].expected) for g in groups):
            return Pattern("counted twice", f"what the ranks of {axis} have too much sums to the tensor", axis)
    for axis, degree in axes.items():
        groups = along(copies, axis, parts=True)
        sums = [np.sum(list({c.start: c.expected for c in g}.values()), axis=0) for g in groups]
        if groups and all(same(c.got, total) for g, total in zip(groups, sums, strict=True) for c in g):
            return Pattern("counted twice", f"the different parts of the {degree} ranks of {axis} are summed", axis)
    return None


def scattered(wrong: list[Copy]) -> Pattern | None:
    """Some elements differ, without a row or a column in common, and are zero on one side: a mask."""
    differ = [np.abs(c.got - c.expected) > SAME * np.abs(c.expected).max(initial=0.0) for c in wrong]
    masked = all((((c.got == 0) | (c.expected == 0)) | ~d).all() for c, d in zip(wrong, differ, strict=True))
    count, size = sum(int(d.sum()) for d in differ), sum(d.size for d in differ)
    return (
        Pattern("part", f"{count} of {size} elements, zero on one side only")
        if masked and count < MOST_PART * size
        else None
    )


def common_factor(wrong: list[Copy], factors: Mapping[str, int]) -> Pattern | None:
    ratios = []
    scalar = all(copy.got.size == 1 for copy in wrong)  # any two numbers have a ratio: only a telling one is a factor
    for copy in wrong:
        ratios.append(ratio(copy.got, copy.expected))
        if not ratios[-1] or not same(copy.got, ratios[-1] * copy.expected):
            return None
    if max(ratios) - min(ratios) > 1e-4 * abs(ratios[0]):
        return Pattern("factor", f"× {min(ratios):.4g} to × {max(ratios):.4g}, by rank")
    name = named_factor(ratios[0], factors)
    return None if scalar and "=" not in name else Pattern("factor", name)


def part_of(
    wrong: list[Copy], copies: list[Copy], factors: Mapping[str, int], axes: Mapping[str, int]
) -> Pattern | None:
    """Only some indices of one dimension differ; what is wrong with them stands in the detail."""
    for dim in range(wrong[0].got.ndim):
        rows = [bad_indices(c, dim) for c in wrong]
        if all(0 < len(r) <= MOST_PART * c.got.shape[dim] for r, c in zip(rows, wrong, strict=True)):
            chosen, name = rows[0], (*wrong[0].dims, *(f"indices of dimension {d}" for d in range(2, 9)))[dim]
            alike = [c for c in copies if (c.start, c.got.shape) == (wrong[0].start, wrong[0].got.shape)]
            inner = pattern_of(
                [Copy(c.coordinates, c.start, c.got.take(chosen, dim), c.expected.take(chosen, dim)) for c in alike],
                factors,
                axes,
            )
            text = f"{len(chosen)} of {wrong[0].got.shape[dim]} {name}, from {chosen[0] + wrong[0].start[dim]} on"
            return Pattern("part", f"{text}: {inner.kind} {inner.detail}".rstrip(), inner.axis)
    return None


def bad_indices(copy: Copy, dim: int) -> np.ndarray:
    others = tuple(d for d in range(copy.got.ndim) if d != dim)
    scale = np.abs(copy.expected).max(initial=0.0)
    return np.flatnonzero(np.abs(copy.got - copy.expected).max(axis=others, initial=0.0) > SAME * scale)


def noise_of(wrong: list[Copy]) -> Pattern:
    error = largest_error(wrong)
    dtype = next((name for name, unit in NARROW.items() if unit <= 4 * error <= 4 * MOST_NOISE), "")
    return (
        Pattern("noise", f"off by {error:.1e}, as {dtype} rounds") if dtype else Pattern("other", f"off by {error:.1e}")
    )


def largest_error(wrong: list[Copy]) -> float:
    return max(float(np.abs(c.got - c.expected).max()) / max(float(np.abs(c.expected).max()), 1e-300) for c in wrong)
