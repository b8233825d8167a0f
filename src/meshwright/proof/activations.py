"""Find the module at which two trainings part: the first output that differs in forward, or the first gradient of an output in backward.

A loss tells that something before it is wrong, not what. When a proof fails, the step that differs first runs once more on both sides and
records the output of every module and the gradient of the loss in it (`Activations`). A rank has a part of each tensor, found by its shape:

    samples      those of its data-parallel index and micro-batch
    positions    those of its context-parallel part; under sequence parallelism one of tp equal runs of these
    features     an equal range for each tensor-parallel rank, or the KV head that it shares with its neighbours

A module whose output is a partial sum by design (a shared expert, whose sum is taken later) differs from one device's too. So a difference counts
only if it reaches the module around it, and in backward if it reaches the gradient of a parameter.

The step of one device with the weights of the step before shows stale weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.describe.sharding import KV_COPIES, even_range
from meshwright.proof.compare import TraceStep
from meshwright.proof.first import first_that_reaches
from meshwright.proof.parts import INITIAL_VALUE, Copy
from meshwright.proof.patterns import Pattern, pattern_of, ratio, same
from meshwright.proof.records import Activations, Trace
from meshwright.proof.tolerance import FP64_BOUND, NEARLY_ZERO, tensor_error

BATCH = ("inputs", "targets")
DIMS = ("samples", "positions", "features", "features")
Rows = Mapping[int, np.ndarray]


@dataclass(frozen=True)
class FirstDifference:
    """Where two trainings part first, and the pattern of the difference there."""

    what: str  # output, gradient of the output, …
    name: str  # of the module
    pattern: Pattern


@dataclass(frozen=True)
class Sides:
    """One step of one device, perhaps with the weights of the step before too, and of the ranks."""

    one: Trace
    many: list[Trace]
    factors: Mapping[str, int]
    stale: Trace | None = None

    @property
    def axes(self) -> dict[str, int]:
        return {axis: n for axis, n in self.factors.items() if axis in self.many[0].coordinates}

    @property
    def key_heads(self) -> set[str]:
        """Modules whose head is on several ranks: each has the gradient of its own queries, and the sum is that of the parameters."""
        shared = [piece.name for trace in self.many for piece in trace.pieces if piece.partial == KV_COPIES]
        return {f"{name.rpartition('.')[0]}{norm}" for name in shared for norm in ("", "_norm")}

    def named(self, what: str, name: str, copies: list[Copy]) -> FirstDifference:
        pattern = another_ranks(copies) or another_sample(copies) or added_parameter(self.one, name, copies)
        return FirstDifference(what, name, pattern or pattern_of(copies, self.factors, self.axes))


def first_in_forward(sides: Sides) -> FirstDifference | None:
    """The first tensor that differs in forward: an initial weight, the batch, the output of a module, or the loss."""
    start = TraceStep(sides.one, sides.many, 0, "fp64", None)
    for name in start.of(INITIAL_VALUE)[0] if sides.stale is None else ():
        copies = list(start.copies(INITIAL_VALUE, name))
        if any(differs(c, c.expected) for c in copies):
            return sides.named("initial weights", name, copies)
    outputs = activations(sides.one).outputs
    first = first_that_reaches(
        outputs,
        lambda name: bool(wrong_copies(sides, "outputs", name)),
        lambda name: name in outputs and comparable(sides, "outputs", name),
    )
    if first is not None:
        return sides.named("batch" if first in BATCH else "output", first, wrong_copies(sides, "outputs", first))
    losses = list(loss_copies(sides))
    if not losses and (last := first_in_backward(sides)):  # each rank has a part of the tokens: their gradients tell
        return replace(last, what="loss", name="")
    if not any(differs(c, c.expected) for c in losses):
        return None
    place = sides.named("loss of each micro-batch", "", losses)
    last = first_in_backward(sides) if place.pattern.kind in ("noise", "other") else None
    return replace(place, pattern=last.pattern) if last is not None else place  # a sum hides what a gradient shows


def first_in_backward(sides: Sides) -> FirstDifference | None:
    """The first gradient of an output that differs, in the order of backward, or a recomputed output that is not the original."""
    for trace in sides.many:
        for name, (first, second) in activations(trace).recomputed.items():
            return sides.named("recomputed output", name, [Copy(trace.coordinates, (0,) * first.ndim, second, first)])
    gradients = activations(sides.one).gradients
    largest = max(
        (float(np.abs(g).max(initial=0.0)) for rows in gradients.values() for g in rows.values()), default=0.0
    )
    floor = NEARLY_ZERO["fp64"] * largest
    names = reversed(activations(sides.one).outputs)
    at = first_that_reaches(names, lambda name: bool(wrong_copies(sides, "gradients", name, floor)))
    if at is None:
        return None
    return sides.named("gradient of the output", at, wrong_copies(sides, "gradients", at, floor))


def activations(trace: Trace) -> Activations:
    return trace.activations or Activations()


def differs(copy: Copy, whole: np.ndarray, floor: float = 0.0) -> bool:
    return not tensor_error(copy.got, copy.expected, whole, floor)[0] <= FP64_BOUND


def wrong_copies(sides: Sides, series: str, name: str, floor: float = 0.0) -> list[Copy]:
    """What the ranks have of a tensor, if some of it differs; empty if all is equal, or if it cannot be compared."""
    copies = list(copies_of(sides, series, name))
    whole = np.stack(list(getattr(activations(sides.one), series)[name].values())) if copies else np.empty(0)
    return copies if any(differs(copy, whole, floor) for copy in copies) else []


def comparable(sides: Sides, series: str, name: str) -> bool:
    return any(True for _ in copies_of(sides, series, name))


def copies_of(sides: Sides, series: str, name: str) -> Iterator[Copy]:
    """What each rank has of the output of a module, or of the gradient in it, beside the same part of one device's."""
    whole: Rows = getattr(activations(sides.one), series).get(name, {})
    stale: Rows = getattr(activations(sides.stale), series).get(name, {}) if sides.stale is not None else {}
    for trace in sides.many:
        own: Rows = getattr(activations(trace), series).get(name, {})
        samples = sorted(own.keys() & whole.keys())
        box = box_of(whole[samples[0]].shape, own[samples[0]].shape, trace, sides) if samples else None
        if box is None or (series == "gradients" and name in sides.key_heads):
            continue
        cut = np.ix_(*box) if box else ()
        got, expected = np.stack([own[s] for s in samples]), np.stack([whole[s][cut] for s in samples])
        old = np.stack([stale[s][cut] for s in samples]) if samples[0] in stale else None
        start = (samples[0], *(int(at[0]) if len(at) else 0 for at in box))
        yield Copy(trace.coordinates, start, got, expected, old, old, DIMS)


def box_of(full: tuple[int, ...], part: tuple[int, ...], trace: Trace, sides: Sides) -> list[np.ndarray] | None:
    """The indices of a sample's tensor that a rank has, in each dimension; None where its shape does not tell."""
    seq, tokens = activations(sides.one).seq, activations(trace).positions
    tp, index = sides.factors.get("tp", 1), trace.coordinates.get("tp", 0)
    if len(full) != len(part) or (seq > 1 and full[0] != seq):
        return None
    out = []
    for dim, (n, own) in enumerate(zip(full, part, strict=True)):
        if seq > 1 and dim == 0:
            positions = np.arange(n) if tokens is None else np.array(tokens)
            run = positions.reshape(tp, -1)[index] if len(positions) % tp == 0 else positions
            chosen = positions if own == len(positions) else run
        elif own == n:
            chosen = np.arange(n)
        else:
            chosen = np.arange(*even_range(n, tp, index))
            if len(chosen) != own and n % own == 0:  # a head that several ranks have
                chosen = np.arange(own) + index * (n // own) // tp * own
        if len(chosen) != own:
            return None
        out.append(chosen)
    return out


def loss_copies(sides: Sides) -> Iterator[Copy]:
    """The loss of each micro-batch of a rank, beside the sum of one device's losses of its samples."""
    single = activations(sides.one).losses
    for trace in sides.many:
        own = activations(trace).losses
        covered = all((sample,) in single for samples in own for sample in samples)
        if own and covered and activations(trace).positions is None:
            expected = [sum(single[(sample,)] for sample in samples) for samples in own]
            yield Copy(
                trace.coordinates,
                (min(own)[0],),
                np.array([*own.values()]),
                np.array(expected),
                dims=("micro-batches",),
            )


def another_ranks(copies: Iterable[Copy]) -> Pattern | None:
    """Whether each wrong rank has what another rank should have, or all together have the right elements in another order."""
    several = [c for c in copies if c.got.size > 1]
    wrong = [c for c in several if not same(c.got, c.expected)]
    owners = [next((o for o in several if o.start != c.start and same(c.got, o.expected)), None) for c in wrong]
    if wrong and owners[0] is not None and all(owner is not None for owner in owners):
        other = owners[0].coordinates
        axes = [axis for axis, i in wrong[0].coordinates.items() if other.get(axis) != i]
        return Pattern("permutation", f"the part of another rank of {', '.join(axes)}", axes[0] if axes else "")
    parts = {c.start: c for c in several}
    if len(parts) < 2 or len(parts) < len(several):
        return None
    got, expected = (
        np.sort(np.concatenate([x.ravel() for x in xs]))
        for xs in zip(*((c.got, c.expected) for c in several), strict=True)
    )
    return Pattern("permutation", "the elements of all ranks in another order") if same(got, expected) else None


def another_sample(copies: Iterable[Copy]) -> Pattern | None:
    """Whether each wrong sample of a rank has the values of another of its samples."""
    swaps: dict[int, int] = {}
    for copy in (c for c in copies if c.got.ndim > 1 and not same(c.got, c.expected)):
        for i, row in enumerate(copy.got):
            owners = [j for j, other in enumerate(copy.expected) if same(row, other)]
            if not owners:
                return None
            swaps |= {} if i in owners else {copy.start[0] + i: copy.start[0] + owners[0]}
    text = ", ".join(f"{wrong} those of {right}" for wrong, right in list(swaps.items())[:3])
    return Pattern("permutation", f"samples have the values of others: {text}") if swaps else None


def added_parameter(one: Trace, name: str, copies: Iterable[Copy]) -> Pattern | None:
    """Whether the ranks have a multiple of a bias of this module too much: it is added on several ranks."""
    wrong = [c for c in copies if not same(c.got, c.expected)]
    for piece in one.pieces:
        if not piece.name.startswith(f"{name}.") or piece.initial is None or piece.initial.ndim != 1:
            continue
        extra = [c.got - c.expected for c in wrong if c.got.shape[-1:] == piece.initial.shape]
        wide = [np.broadcast_to(piece.initial, e.shape) for e in extra]
        if (
            extra
            and len(extra) == len(wrong)
            and all(same(e, ratio(e, w) * w) for e, w in zip(extra, wide, strict=True))
        ):
            return Pattern("counted twice", f"{piece.name} × {ratio(extra[0], wide[0]):.4g} too much")
    return None


def weighted_samples(sides: Sides, name: str, copies: Iterable[Copy]) -> Pattern | None:
    """Whether the gradient of a parameter is a sum of the gradients of samples, some of which are missing, counted twice or scaled."""
    parts, weights = activations(sides.one).by_sample.get(name, {}), []
    if not parts:
        return None
    for copy in (c for c in copies if not same(c.got, c.expected)):
        columns = np.stack([part[copy.box].ravel() for part in parts.values()], axis=1)
        solution, _, rank, _ = np.linalg.lstsq(columns, copy.got.ravel(), rcond=1e-9)
        if rank < columns.shape[1] or not same(columns @ solution, copy.got.ravel()):
            return None
        weights.append(dict(zip(parts, solution.round(5), strict=True)))
    if not weights:
        return None
    counts = weights[0]
    absent, again = [s for s, w in counts.items() if w == 0], [s for s, w in counts.items() if w > 1]
    if again and all(w == round(w) for w in counts.values()):
        times = ", ".join(f"{counts[s]:g}" for s in again)
        return Pattern("counted twice", f"samples {joined(again)} are summed {times} times")
    if absent:
        return Pattern("missing sum", f"without the gradients of samples {joined(absent)} of {len(counts)}")
    return Pattern("factor", f"× {min(counts.values()):.4g} to × {max(counts.values()):.4g}, by sample")


def joined(samples: list[int]) -> str:
    """ "0, 1, 2" or "0–5"."""
    run = len(samples) > 2 and samples == list(range(samples[0], samples[-1] + 1))
    return f"{samples[0]}–{samples[-1]}" if run else ", ".join(map(str, samples))
