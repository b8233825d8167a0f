"""What a difference means: the phase of the step that went wrong, the pattern of the numbers, and what usually causes that pattern.

The numbers themselves tell. A gradient that is half of one device's everywhere was divided twice; gradients that differ between ranks and
sum to one device's were never summed; the gradient of the step before was not replaced.

    pattern         the tensor of the ranks, compared with one device's
    zero            nothing arrived
    stale           the values of the step before, or these added to the right ones
    missing sum     each rank has a part: along one axis they sum to the whole
    factor          one device's times a number: an axis' degree, the micro-batches, or their inverse
    counted twice   one device's, and a part of it once more
    permutation     the same elements in another order
    part            right but for some rows or columns
    noise           no larger than the rounding of a narrower dtype
    other           none of these

The phase follows from what differs first, and from which tensors differ with it: an error of backward spreads to every tensor below it and leaves
those above right, an error of the reduction concerns the tensors that are reduced together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from meshwright.proof.compare import NARROWER, Agreement, Break
from meshwright.proof.records import Trace
from meshwright.proof.tolerance import KINDS

SAME = 1e-6  # relative: two tensors that agree to this are the same numbers
NARROW = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}  # relative rounding of one operation
MOST_NOISE = 16 * NARROW["bf16"]  # of a step
GIVEN = "gradient given to the optimizer"
MOST_PART = 0.75  # of the indices of a dimension: more is not a part

WORDS = {
    "zero": "zero, nothing arrived",
    "stale": "stale values",
    "missing sum": "a missing sum",
    "factor": "a factor",
    "counted twice": "a sum counted twice",
    "permutation": "a permutation",
    "part": "a part of the tensor",
    "other": "no simple relation to one device's numbers",
}
CAUSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward", "factor"): (
        "the loss is divided by another number of tokens than that of all ranks and micro-batches",
    ),
    ("forward", "noise"): ("a norm, a softmax or the loss is computed in a narrower dtype than promised",),
    ("forward", "stale"): ("weights were not gathered or cast again after the update", "a batch was used twice"),
    ("forward", "other"): (
        "ranks read other samples or positions than they should",
        "an activation is cut, gathered or summed over the wrong group",
    ),
    ("backward", "missing sum"): ("the gradient of an activation is not summed over ranks that hold parts of a layer",),
    ("backward", "factor"): ("a sum in forward is summed again in backward", "a mean is divided twice"),
    ("backward", "permutation"): ("blocks of the sequence or of experts come back in another order than they left",),
    ("backward", "other"): ("the backward of a communication is not the transpose of its forward",),
    ("reduction", "missing sum"): ("gradients of these tensors are not reduced over that axis",),
    ("reduction", "counted twice"): ("a tensor that several stages or ranks share is summed on both sides",),
    ("reduction", "factor"): (
        "an average where the loss is already divided by all tokens",
        "a sum over ranks that each have the whole already",
    ),
    ("reduction", "other"): ("tensors that are different on each rank are summed as if they were copies",),
    ("reduction", "stale"): ("gradients are not zeroed after the update", "a bucket still holds the step before"),
    ("reduction", "zero"): ("a bucket is not filled or not sent", "the last micro-batch is dropped"),
    ("reduction", "part"): ("a bucket boundary, a shard or a padded row is off", "shared rows are summed on one side"),
    ("clipping", "counted twice"): ("copies of a tensor on several ranks are counted in the norm once each",),
    ("clipping", "missing sum"): ("each rank clips by the norm of its own part",),
    ("clipping", "factor"): ("the loss scale, or a divisor, is left in the norm", "ranks clip by different norms"),
    ("clipping", "noise"): ("the norm is computed in a narrower dtype than promised",),
    ("update", "stale"): ("the optimizer does not update these tensors", "masters are not copied to the weights"),
    ("update", "factor"): ("learning rate, weight decay or a coefficient of the optimizer",),
    ("update", "noise"): ("optimizer states or masters are kept in a narrower dtype than promised",),
    ("update", "part"): ("shards of the optimizer do not cover the tensor",),
    ("update", "other"): ("weight decay, betas or epsilon", "clipping by another norm on each rank"),
}


@dataclass(frozen=True)
class Copy:
    """The part of a tensor that a rank holds, beside the same part of one device's."""

    coordinates: Mapping[str, int]
    start: tuple[int, ...]
    got: np.ndarray
    expected: np.ndarray
    before: np.ndarray | None = None  # what this rank had in the step before
    expected_before: np.ndarray | None = None


@dataclass(frozen=True)
class Pattern:
    kind: str
    detail: str = ""
    axis: str = ""


@dataclass(frozen=True)
class Diagnosis:
    phase: str  # forward, backward, reduction, clipping, update
    tensor: str
    pattern: Pattern

    @property
    def causes(self) -> tuple[str, ...]:
        return CAUSES.get((self.phase, self.pattern.kind), ())

    def __str__(self) -> str:
        """ "reduction: a missing sum, the 2 ranks of dp have parts whose sum is right"."""
        detail = f", {self.pattern.detail}" if self.pattern.detail else ""
        return f"{self.phase}: {WORDS.get(self.pattern.kind, self.pattern.kind)}{detail}"

    def as_dict(self) -> dict[str, Any]:
        return {"phase": self.phase, "tensor": self.tensor, **asdict(self.pattern), "causes": list(self.causes)}


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
    wrong = [c for c in copies if c.got.size and not same(c.got, c.expected)]
    if not wrong:
        return Pattern("noise", "the copies agree to six digits")
    if not all(np.isfinite(c.got).all() for c in wrong):
        return Pattern("other", "not a number")
    if all(not c.got.any() for c in wrong):
        return Pattern("zero")
    if stale := stale_values(wrong):
        return stale
    if summed := missing_sum(copies, axes):
        return summed
    if scaled := common_factor(wrong, factors):
        return scaled
    if all(same(np.sort(c.got, axis=None), np.sort(c.expected, axis=None)) for c in wrong):
        return Pattern("permutation", "the same elements in another order")
    if largest_error(wrong) > 10 * SAME and (rows := part_of(wrong, copies, factors, axes)):
        return rows
    if extra := counted_again(copies, axes):
        return extra
    return noise_of(wrong)


def stale_values(wrong: list[Copy]) -> Pattern | None:
    olds = [(c, c.before, c.expected_before) for c in wrong]
    if all(
        old is not None and before is not None and (same(c.got, old) or same(c.got, before)) for c, before, old in olds
    ):
        return Pattern("stale", "the values of the step before")
    extra = [
        (c.got - c.expected, before) for c, before, _ in olds
    ]  # what was clipped, that is times a number, since then
    if all(old is not None and old.size > 1 and old.any() and same(new, ratio(new, old) * old) for new, old in extra):
        return Pattern("stale", "the step before is added")
    return None


def ratio(a: np.ndarray, b: np.ndarray) -> float:
    """The number that b is multiplied by to come nearest to a."""
    square = float((b * b).sum())
    return float((a * b).sum()) / square if square else 0.0


def along(copies: list[Copy], axis: str) -> Iterator[list[Copy]]:
    """The copies of one part of the tensor, of ranks that differ along one axis only."""
    groups: dict[tuple, list[Copy]] = {}
    for copy in copies:
        others = tuple(sorted((a, i) for a, i in copy.coordinates.items() if a != axis))
        groups.setdefault((copy.start, copy.got.shape, others), []).append(copy)
    return (group for group in groups.values() if len(group) > 1)


def missing_sum(copies: list[Copy], axes: Mapping[str, int]) -> Pattern | None:
    for axis, degree in axes.items():
        groups = list(along(copies, axis)) if degree > 1 else []
        apart = [g for g in groups if not all(same(c.got, g[0].got) for c in g)]
        for text, share in (("sum", 1), ("mean", 0)):
            parts = [np.sum([c.got for c in g], axis=0) / (1 if share else len(g)) for g in apart]
            if apart and all(same(part, g[0].expected) for part, g in zip(parts, apart, strict=True)):
                return Pattern("missing sum", f"the {degree} ranks of {axis} have parts whose {text} is right", axis)
    return None


def counted_again(copies: list[Copy], axes: Mapping[str, int]) -> Pattern | None:
    """The right values and once more what is common to some of them: a shared tensor that is summed on both sides."""
    for axis, degree in axes.items():
        groups = list(along(copies, axis)) if degree > 1 else []
        extra = [[c.got - c.expected for c in g] for g in groups]
        if groups and all(same(np.sum(e, axis=0), g[0].expected) for e, g in zip(extra, groups, strict=True)):
            return Pattern("counted twice", f"what the ranks of {axis} have too much sums to the tensor", axis)
    return None


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
            chosen, name = rows[0], {0: "row", 1: "column"}.get(dim, f"index of dimension {dim}")
            alike = [c for c in copies if (c.start, c.got.shape) == (wrong[0].start, wrong[0].got.shape)]
            inner = pattern_of(
                [Copy(c.coordinates, c.start, c.got.take(chosen, dim), c.expected.take(chosen, dim)) for c in alike],
                factors,
                axes,
            )
            text = f"{len(chosen)} of {wrong[0].got.shape[dim]} {name}s, from {chosen[0] + wrong[0].start[dim]} on"
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


# From the traces of a proof


def diagnose(agreements: list[Agreement], factors: Mapping[str, int]) -> Diagnosis | None:
    """What the first difference of a proof means; None if there is none. `factors` are the degrees of the axes and the number of micro-batches."""
    broken = next((agreement for agreement in agreements if agreement.breaks), None)
    if broken is None:
        return None
    first = broken.breaks[0]
    if broken.phase:  # a run that is evaluated, saved and resumed: the agreement itself names what went wrong
        return Diagnosis(broken.phase, first.name, Pattern("other", first.what))
    if first.what not in KINDS:
        return of_replay(first)
    one, many = broken.one, broken.many
    assert one is not None
    if one.replicas:
        replica = next(t.coordinates["replicate"] for t in many if t.rank == first.rank)
        many = [trace for trace in many if trace.coordinates["replicate"] == replica]
        one = one.replicas[replica]
    axes = {axis: n for axis, n in factors.items() if axis in many[0].coordinates}
    if first.what == "loss":
        return of_loss(one, many, first.step, factors, axes)
    if first.what == "norm":
        squares = [numbers(trace, one, "norm", first.step, power=2) for trace in many]
        counted = counted_copies(one, many, squares[0], first.step, axes)
        return Diagnosis("clipping", "", counted or pattern_of(squares, factors, axes))
    pattern = pattern_of(list(copies_of(one, many, first.what, first.name, first.step)), factors, axes)
    if first.what == "gradient":
        return Diagnosis(phase_of_gradients(one, many, first), first.name, pattern)
    replayed = [b for agreement in agreements for b in agreement.breaks if b.what == GIVEN and b.step == first.step]
    if replayed:
        return of_replay(replayed[0])
    if pattern.kind == "zero":  # of a change
        pattern = Pattern("stale", "it was not updated")
    elif decay := decayed_again(one, many, first):
        pattern = decay
    return Diagnosis("update", first.name, pattern)


def of_replay(first: Break) -> Diagnosis:
    """A difference from the replayed update, or from the closed formula of the learning rate."""
    scaled = np.isfinite(first.ratio) and first.what in (GIVEN, "learning rate")
    pattern = Pattern("factor", f"{first.what} × {first.ratio:.4g}") if scaled else Pattern("other", first.what)
    if first.what == NARROWER or (first.what == "gradient norm" and first.error < MOST_NOISE):
        pattern = Pattern("noise", f"{first.name or first.what} in a narrower dtype")
    phase = {NARROWER: "forward", GIVEN: "clipping", "gradient norm": "clipping"}.get(first.what, "update")
    return Diagnosis(phase, first.name, pattern)


def of_loss(one: Trace, many: list[Trace], step: int, factors: Mapping[str, int], axes: Mapping[str, int]) -> Diagnosis:
    """A loss that differs alone is only reported wrong. One that differs as all gradients do, by one factor, is divided by a wrong number."""
    copies = [numbers(trace, one, "loss", step, power=1) for trace in many]
    if not any(wrong_tensors(one, many, "gradient", step)):
        return Diagnosis("reduction", "", pattern_of(copies, factors, axes))
    factor = float(copies[0].got[0] / copies[0].expected[0])
    tensors = [c for piece in one.pieces for c in copies_of(one, many, "gradient", piece.name, step)]
    if all(same(c.got, factor * c.expected) for c in (*copies, *tensors)):
        name = named_factor(factor, factors)
        return Diagnosis("forward", "", Pattern("factor", f"{name}, and all gradients with it"))
    pattern = pattern_of(copies, factors, axes)
    if pattern.kind == "noise":  # a loss is a mean, and hides what a gradient shows
        pattern = noise_of([c for c in tensors if c.got.size and c.expected.any()])
    return Diagnosis("forward", "", pattern)


def numbers(trace: Trace, one: Trace, what: str, step: int, power: int) -> Copy:
    """A loss or a norm as a tensor of one element."""
    got, expected = (trace.losses, one.losses) if what == "loss" else (trace.norms, one.norms)
    values = [np.array([series[at] ** power]) for series in (got, expected) for at in (step, max(step - 1, 0))]
    before = (values[1], values[3]) if step and what == "loss" else (None, None)
    return Copy(trace.coordinates, (0,), values[0], values[2], *before)


def copies_of(one: Trace, many: list[Trace], what: str, name: str, step: int) -> Iterator[Copy]:
    """What the ranks hold of a tensor: its gradient, or of a parameter the change of this step."""
    full = next(piece for piece in one.pieces if piece.name == name)
    for trace in many:
        for piece in (p for p in trace.pieces if p.name == name):
            got, whole = (p.gradients if what == "gradient" else p.values for p in (piece, full))
            at = step if what == "gradient" else step + 1  # `values` begin with the initial ones
            here = tuple(slice(a, a + n) for a, n in zip(piece.start, got[at].shape, strict=True))
            now, then = (got[at], whole[at][here]), (got[at - 1], whole[at - 1][here]) if at else (None, None)
            if what == "parameter":
                yield Copy(trace.coordinates, piece.start, now[0] - then[0], now[1] - then[1])
            else:
                yield Copy(trace.coordinates, piece.start, *now, *then)


def wrong_tensors(one: Trace, many: list[Trace], what: str, step: int) -> Iterator[bool]:
    """In the order of the model, whether some rank's part of the tensor is not one device's."""
    for piece in one.pieces:
        yield any(not same(c.got, c.expected) for c in copies_of(one, many, what, piece.name, step))


def phase_of_gradients(one: Trace, many: list[Trace], first: Break) -> str:
    """Backward, if nearly everything below the first wrong tensor is wrong and something above it is right; otherwise the reduction."""
    wrong = list(wrong_tensors(one, many, "gradient", first.step))
    below = wrong[: [piece.name for piece in one.pieces].index(first.name)]
    spreads = bool(below) and sum(below) > 0.8 * len(below)
    return "backward" if spreads and not all(wrong) else "reduction"


def decayed_again(one: Trace, many: list[Trace], first: Break) -> Pattern | None:
    """Whether what an update has too much is a share of the weights themselves: weight decay, where it should not be or twice."""
    full = next(piece for piece in one.pieces if piece.name == first.name)
    shares = set()
    for copy in copies_of(one, many, "parameter", first.name, first.step):
        here = tuple(slice(a, a + n) for a, n in zip(copy.start, copy.got.shape, strict=True))
        extra, weights = copy.got - copy.expected, full.values[first.step][here]
        if not same(extra, ratio(extra, weights) * weights):
            return None
        shares.add(round(ratio(extra, weights), 9))
    return (
        Pattern("factor", f"the update has {shares.pop():+.3g} of the weights too much") if len(shares) == 1 else None
    )


def counted_copies(one: Trace, many: list[Trace], norm: Copy, step: int, axes: Mapping[str, int]) -> Pattern | None:
    """Whether the squares that a norm has too much are those of one tensor, or of the tensors that the ranks of one axis hold copies of."""
    squares = {piece.name: float((piece.gradients[step].astype(np.float64) ** 2).sum()) for piece in one.pieces}
    extra = float(norm.got[0] / norm.expected[0] - 1) * sum(squares.values())
    for axis, degree in axes.items():
        names = [n for n in squares if degree > 1 and any(along(list(copies_of(one, many, "gradient", n, step)), axis))]
        if names and abs(extra - (degree - 1) * sum(squares[n] for n in names)) <= 1e-4 * extra:
            return Pattern("counted twice", f"copies of {len(names)} tensors on the {degree} ranks of {axis}", axis)
    kinds: dict[str, float] = {}  # of tensors: the same in every layer
    for name, square in squares.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name)] = kinds.get(re.sub(r"\.\d+\.", ".*.", name), 0.0) + square
    for some in (some for n in (1, 2, 3) for some in combinations(kinds, n)):
        if extra > 0 and abs(extra - sum(kinds[kind] for kind in some)) <= SAME * extra:
            return Pattern("counted twice", ", ".join(some))
    return None
