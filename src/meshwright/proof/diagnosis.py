"""What a difference means: the phase of the step that went wrong, the pattern of the numbers, and what usually causes that pattern.

The numbers themselves tell. A gradient that is half of one device's everywhere was divided twice; gradients that differ between ranks and
sum to one device's were never summed; the gradient of the step before was not replaced.

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

from meshwright.proof.activations import FirstDifference, Sides, first_in_backward, first_in_forward, weighted_samples
from meshwright.proof.compare import INITIAL, NARROWER, Agreement, Break, TraceStep, trace_steps
from meshwright.proof.emulation.update import AVERAGE, UPDATED
from meshwright.proof.parts import Copy
from meshwright.proof.patterns import (
    MOST_NOISE,
    NOT_UPDATED,
    SAME,
    Pattern,
    along,
    missing_sum,
    named_factor,
    noise_of,
    pattern_of,
    ratio,
    same,
)
from meshwright.proof.records import Trace
from meshwright.proof.tolerance import KINDS

GIVEN = "gradient given to the optimizer"

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
MODULE_CAUSES = {  # of the module whose output differs first
    r"^(inputs|targets)$": "a rank reads other samples, or cuts the sequence in another order",
    r"embedding": "the range of the vocabulary or the positions of a rank, or the sum over vocabulary ranks",
    r"attention(\.heads)?(\.o)?$": "mask, window, rotary positions, or the order in which blocks or heads are exchanged",
    r"_norm$": "the norm of a part of the features, or an activation that is cut in another way",
    r"drop$": "a dropout mask that does not depend on seed, step, sample and position alone",
    r"moe": "routing, the order of tokens after the exchange, or the experts of a rank",
    r"head|^loss$": "the range of the vocabulary of a rank, the maximum or the sum over it, or the number of tokens",
}


@dataclass(frozen=True)
class Diagnosis:
    phase: str  # forward, backward, reduction, clipping, update
    tensor: str
    pattern: Pattern
    what: str = ""  # of the tensor, or of the module of this name: its output, its gradient, …

    @classmethod
    def at(cls, phase: str, place: FirstDifference) -> Diagnosis:
        return cls(phase, place.name, place.pattern, place.what)

    @property
    def causes(self) -> tuple[str, ...]:
        by_module = [
            cause for names, cause in MODULE_CAUSES.items() if self.what and re.search(names, self.tensor or "loss")
        ]
        return (*by_module, *CAUSES.get((self.phase, self.pattern.kind), ()))

    def __str__(self) -> str:
        """ "forward, output of layers.0.attention.o: a missing sum, the 2 ranks of tp have parts whose sum is right"."""
        where = f", {self.what}{f' of {self.tensor}' if self.tensor else ''}" if self.what else ""
        detail = f", {self.pattern.detail}" if self.pattern.detail else ""
        return f"{self.phase}{where}: {WORDS.get(self.pattern.kind, self.pattern.kind)}{detail}"

    def as_dict(self) -> dict[str, Any]:
        tensor = {"phase": self.phase, "what": self.what, "tensor": self.tensor}
        return {**tensor, **asdict(self.pattern), "causes": list(self.causes)}


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
        if apart := replicas_apart(one, many, first):
            return Diagnosis("update", first.name, apart)
        replica = next(t.coordinates["replicate"] for t in many if t.rank == first.rank)
        many = [trace for trace in many if trace.coordinates["replicate"] == replica]
        one = one.replicas[replica]
    axes = {axis: n for axis, n in factors.items() if axis in many[0].coordinates}
    sides = Sides(broken.rerun[0], broken.rerun[1], factors, broken.rerun[2]) if broken.rerun else None
    step = trace_steps(one, many)[first.step]
    if first.what == "loss":
        return of_loss(step, factors, axes, sides)
    copies = list(step.copies(first.what, first.name))
    if first.what == "norm":
        counted = counted_copies(step, copies[0], axes)
        return Diagnosis("clipping", "", counted or pattern_of(copies, factors, axes))
    pattern = pattern_of(copies, factors, axes)
    if first.what == "gradient":
        place = first_in_backward(sides) if sides is not None else None
        if place is not None:
            return Diagnosis.at("backward", place)
        if sides is None:
            return Diagnosis(phase_of_gradients(step, first.name), first.name, pattern)
        counted = weighted_samples(sides, first.name, copies) if pattern.kind in ("other", "part") else None
        return Diagnosis("reduction", first.name, counted or pattern)
    replayed = [b for agreement in agreements for b in agreement.breaks if b.what == GIVEN and b.step == first.step]
    if replayed and clipped_alike(replayed):
        return of_replay(replayed[0])
    return Diagnosis("update", first.name, decayed_again(step, first.name) or pattern)


def clipped_alike(replayed: list[Break]) -> bool:
    """Whether the optimizer was given all gradients of a rank times one number, as clipping does; otherwise it was given other gradients."""
    ratios: dict[int, list[float]] = {}
    for b in replayed:
        ratios.setdefault(b.rank, []).append(b.ratio)
    return all(max(r) - min(r) <= 1e-3 * abs(max(r)) for r in ratios.values())


def of_replay(first: Break) -> Diagnosis:
    """A difference from the replayed update, or from the closed formula of the learning rate."""
    scaled = np.isfinite(first.ratio) and first.what in (GIVEN, UPDATED, INITIAL, "learning rate")
    pattern = Pattern("factor", f"{first.what} × {first.ratio:.4g}") if scaled else Pattern("other", first.what)
    if first.what == UPDATED and scaled:
        pattern = Pattern("factor", f"its change × {first.ratio:.4g}") if abs(first.ratio) > 0.01 else NOT_UPDATED
    if first.what == AVERAGE and not first.ratio:
        pattern = Pattern("stale", "of the weights before the update")
    if first.what == NARROWER or (first.what == "gradient norm" and first.error < MOST_NOISE):
        pattern = Pattern("noise", f"{first.name or first.what} in a narrower dtype")
    phase = {NARROWER: "forward", INITIAL: "forward", GIVEN: "clipping", "gradient norm": "clipping"}.get(
        first.what, "update"
    )
    return Diagnosis(phase, first.name, pattern)


def of_loss(
    step: TraceStep, factors: Mapping[str, int], axes: Mapping[str, int], sides: Sides | None = None
) -> Diagnosis:
    """A loss that differs alone is only reported wrong. One that differs as all gradients do, by one factor, is divided by a wrong number.
    Otherwise the first module that differs is named."""
    copies = list(step.copies("loss", ""))
    if not any(wrong_gradients(step)):
        return Diagnosis("reduction", "", pattern_of(copies, factors, axes))
    factor = float(copies[0].got[0] / copies[0].expected[0])
    tensors = [c for piece in step.one.pieces for c in step.copies("gradient", piece.name)]
    if all(same(c.got, factor * c.expected) for c in (*copies, *tensors)):
        name = named_factor(factor, factors)
        return Diagnosis("forward", "", Pattern("factor", f"{name}, and all gradients with it"))
    if sides is not None and (place := first_in_forward(sides)):
        return Diagnosis.at("forward", place)
    pattern = pattern_of(copies, factors, axes)
    if pattern.kind == "noise":  # a loss is a mean, and hides what a gradient shows
        pattern = noise_of([c for c in tensors if c.got.size and c.expected.any()])
    return Diagnosis("forward", "", pattern)


def wrong_gradients(step: TraceStep) -> Iterator[bool]:
    """In the order of the model, whether some rank's part of the gradient is not one device's."""
    for piece in step.one.pieces:
        yield any(not same(pair.got, pair.expected) for pair in step.pairs("gradient", piece.name))


def phase_of_gradients(step: TraceStep, first: str) -> str:
    """Backward, if nearly everything below the first wrong tensor is wrong and something above it is right; otherwise the reduction."""
    wrong = list(wrong_gradients(step))
    below = wrong[: [piece.name for piece in step.one.pieces].index(first)]
    spreads = bool(below) and sum(below) > 0.8 * len(below)
    return "backward" if spreads and not all(wrong) else "reduction"


def replicas_apart(one: Trace, many: list[Trace], first: Break) -> Pattern | None:
    """Whether replicas of local SGD have different weights whose mean is right: these tensors were not averaged."""
    copies = []
    for trace in many if first.what == "parameter" else ():
        replica = one.replicas[trace.coordinates["replicate"]]
        pairs = trace_steps(replica, [trace])[first.step].pairs("parameter", first.name)
        copies += [Copy(trace.coordinates, pair.start, pair.got, pair.expected) for pair in pairs]
    return missing_sum(copies, {"replicate": len(one.replicas)})


def decayed_again(step: TraceStep, name: str) -> Pattern | None:
    """Whether what an update has too much is a share of the weights themselves: weight decay, where it should not be or twice."""
    shares = set()
    for copy, before in zip(step.copies("parameter", name), step.before("parameter", name), strict=True):
        extra, weights = copy.got - copy.expected, before.expected
        if extra.size == 1 or not same(extra, ratio(extra, weights) * weights):
            return None
        shares.add(round(ratio(extra, weights), 9))
    return (
        Pattern("factor", f"the update has {shares.pop():+.3g} of the weights too much") if len(shares) == 1 else None
    )


def counted_copies(step: TraceStep, norm: Copy, axes: Mapping[str, int]) -> Pattern | None:
    """Whether the squares that a norm has too much are those of one tensor, or of the tensors that the ranks of one axis hold copies of."""
    gradients = {name: tensor.whole for name, tensor in step.of("gradient")[0].items()}
    squares = {name: float((gradient**2).sum()) for name, gradient in gradients.items() if gradient is not None}
    extra = float(norm.got[0] / norm.expected[0] - 1) * sum(squares.values())
    for axis, degree in axes.items():
        names = [n for n in squares if degree > 1 and along(list(step.copies("gradient", n)), axis)]
        if names and abs(extra - (degree - 1) * sum(squares[n] for n in names)) <= 1e-4 * extra:
            return Pattern("counted twice", f"copies of {len(names)} tensors on the {degree} ranks of {axis}", axis)
    kinds: dict[str, float] = {}  # of tensors: the same in every layer
    for name, square in squares.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name)] = kinds.get(re.sub(r"\.\d+\.", ".*.", name), 0.0) + square
    for some in (some for n in (1, 2, 3) for some in combinations(kinds, n)):
        if abs(abs(extra) - sum(kinds[kind] for kind in some)) <= SAME * abs(extra):
            return Pattern("counted twice" if extra > 0 else "missing sum", ", ".join(some))
    return None
