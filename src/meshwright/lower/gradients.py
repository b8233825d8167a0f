"""The messages of data parallelism, one by one, as one rank sends them: buckets, and the units of ZeRO.

`sync` has the closed form: how many there are, and the bytes of the mean one. A real rank sends

    buckets   of each of its stages by itself, ⌈elements / ⌈n/bucket⌉⌉ long: one flat buffer for what dp·cp sums, one for
              experts, and one for what must not be compressed where the rest is
    units     under ZeRO: so many layers (`plan.wrap`), each end by itself, both together where they share a weight, and the
              experts of each layer; every parameter's rows padded to a multiple of the ranks

and nothing of what is not trained.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import or_

from meshwright.describe.cluster import DTYPE_BYTES
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.sharding import DATA_AXES, Box
from meshwright.lower.compressed import exchanges

Sent = tuple[str, str, str, float]  # name, axis, collective, bytes of the full buffer
Told = Iterator[Sequence[int]]  # of each compressed message what a threshold let pass, round by round


@dataclass(frozen=True)
class DataParallel:
    """How one rank of a plan sums gradients and gathers parameters."""

    model: Model
    plan: Plan
    layout: Layout
    microbatches: int

    @property
    def sharded(self) -> bool:
        return self.plan.zero > 0 and self.layout.size("shard_cp") > 1

    @property
    def gradient_bytes(self) -> int:
        return int(DTYPE_BYTES[self.plan.grad_dtype])

    @property
    def kept_bytes(self) -> int:
        """Of a parameter as it is updated: its wide master's, where it has one."""
        narrow = int(DTYPE_BYTES[self.plan.param_dtype])
        return max(4, narrow) if self.plan.master else narrow

    def messages(self, layers: range, held: list[Box], told: Told | None) -> Iterator[Sent]:
        """Of one stage in one step."""
        if self.sharded:
            yield from self._units(layers, [s for s in held if s.zero], told)
        elif self.plan.average_every:
            return
        yield from self._buckets([s for s in held if not s.zero], told)

    # Buckets

    def _buckets(self, held: list[Box], told: Told | None) -> Iterator[Sent]:
        lossy = self.plan.wire != "none"
        for axis, kind in (("dp_cp", [s for s in held if not s.expert]), ("expert_dp", [s for s in held if s.expert])):
            exact = [s for s in kind if lossy and not s.compressible]
            if kind:
                yield from self._flat(axis, [s for s in kind if s not in exact], lossy, told)
            if exact:
                yield from self._flat(axis, exact, False, told)

    def _flat(self, axis: str, held: list[Box], lossy: bool, told: Told | None) -> Iterator[Sent]:
        ranks, plan = self.layout.size(axis), self.plan
        if ranks == 1:
            return
        rounds = self.microbatches if plan.reduce == "microbatch" else 1
        for shapes, elements in self._cut([s for s in held if s.learns][::-1], lossy and plan.wire == "powersgd"):
            for count in self._passed(told, lossy, rounds):
                said = (
                    exchanges(plan, elements, self.gradient_bytes, shapes, ranks, told=count)
                    if lossy
                    else [("all_reduce", elements * self.gradient_bytes)]
                )
                yield from (("reduce-gradients", axis, operation, n) for operation, n in said)

    def _passed(self, told: Told | None, lossy: bool, rounds: int) -> Sequence[int | None]:
        """Of one message's reductions what a threshold lets pass, where that was told."""
        return next(told) if told is not None and lossy and self.plan.wire == "threshold" else [None] * rounds

    def _cut(self, held: list[Box], aligned: bool) -> Iterator[tuple[list[tuple[int, ...]], int]]:
        """Messages of one flat buffer, in the order backward fills it: the parameters that begin in each, and its elements."""
        width = self.gradient_bytes
        starts = [0, *accumulate(s.size for s in held)]
        total = starts[-1]
        count = max(1, -(-total * width // max(int(self.plan.bucket), width)))
        edges = [*range(0, max(total, 1), max(1, -(-total // count))), total]
        if aligned:
            edges = sorted({starts[bisect_left(starts, edge)] for edge in edges})
        for start, stop in pairwise(edges):
            here = [s.shape for s, at in zip(held, starts, strict=False) if start <= at < stop]
            yield here, stop - start

    # Units of ZeRO

    def _units(self, layers: range, held: list[Box], told: Told | None) -> Iterator[Sent]:
        plan, m = self.plan, self.microbatches if self.plan.pp == 1 else 1
        frees = plan.zero == 3 and plan.reshard and plan.pp == 1
        reductions = m if plan.reduces_each else 1
        parts = list(self._parted(layers, held))
        for unit, again in zip(parts, self._gathered_again(parts), strict=True):
            gathers = m * (1 + again) if frees else 1
            _, over, copied = DATA_AXES[unit[0].group]
            ranks = self.layout.size(over)
            n = sum(s.padded_size for s in unit) * int(DTYPE_BYTES[plan.param_dtype])
            yield from [("gather-weights", over, "all_gather", n)] * gathers
            learns = [s for s in unit if s.learns]
            if not learns:
                continue
            sums = sum(s.padded_size for s in learns) // ranks * self._reduced_bytes
            lossy = any(s.compressible for s in learns)
            for count in self._passed(told, lossy, reductions):
                yield from (
                    ("scatter-gradients", over, operation, n) for operation, n in self._scatter(learns, ranks, count)
                )
                if self.layout.size(copied) > 1:
                    yield "reduce-shards", copied, "all_reduce", sums

    def _gathered_again(self, parts: list[list[Box]]) -> list[bool]:
        """The units that backward gathers: those that a gradient reaches, with something trained in them or before; and the one
        before these, where each asks for the next. (A unit of experts always does.)"""
        order = sorted(range(len(parts)), key=lambda i: done_with(parts[i]))
        reached = dict(zip(order, accumulate((any(s.learns for s in parts[i]) for i in order), or_), strict=True))
        asks = {i: reached[i] and (self.plan.prefetch or parts[i][0].expert) for i in order}
        after = dict(pairwise(order))
        return [reached[i] or (i in after and asks[after[i]]) for i in range(len(parts))]

    @property
    def _reduced_bytes(self) -> int:
        """What is sent narrower than gradients are is narrowed by the compression, not before."""
        plan = self.plan
        return int(DTYPE_BYTES[plan.grad_dtype if plan.wire != "none" else plan.reduce_dtype])

    def _scatter(self, learns: list[Box], ranks: int, told: int | None) -> list[tuple[str, float]]:
        width, plan = self._reduced_bytes, self.plan
        if plan.wire == "none":
            return [("reduce_scatter", sum(s.padded_size for s in learns) * width)]
        exact = sum(s.padded_size for s in learns if not s.compressible)
        lossy = sum(s.padded_size for s in learns) - exact
        shapes = [s.shape_in_transit for s in learns if s.compressible]
        said = exchanges(plan, lossy, width, shapes, ranks, True, told) if lossy else []
        return said + ([("reduce_scatter", exact * width)] if exact else [])

    def _parted(self, layers: range, held: list[Box]) -> Iterator[list[Box]]:
        """The units of one stage: what is gathered and reduced together."""
        dense = [s for s in held if not s.expert]
        if not self.plan.wrap:
            groups = [dense]
        else:
            at = range(0, len(layers), self.plan.wrap)
            of_layer = {f"{layer}": i for i, layer in enumerate(layers)}
            first = [s for s in dense if s.name.startswith("embedding.")]
            last = [s for s in dense if s.name.startswith("head.")]
            ends = [first + last, []] if self.model.tied and first and last else [first, last]
            runs: list[list[Box]] = [[] for _ in at]
            for s in dense:
                if s.name.startswith("layers."):
                    runs[of_layer[s.name.split(".")[1]] // self.plan.wrap].append(s)
            groups = [ends[0], *runs, ends[1]]
        groups += [[s for s in held if s.expert and s.name.split(".")[1] == f"{layer}"] for layer in layers]
        yield from (group for group in groups if group)


def done_with(unit: list[Box]) -> tuple[float, bool]:
    """When forward is: a layer's experts before the layer, both ends that share a weight with the last of them."""
    layers = [float(s.name.split(".")[1]) if s.name.startswith("layers.") else -1.0 for s in unit]
    last = float("inf") if any(s.name.startswith("head.") for s in unit) else max(layers)
    return last, not unit[0].expert
