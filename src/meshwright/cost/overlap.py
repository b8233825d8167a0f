"""Timelines of data parallelism behind the layers of one backward or forward pass: DDP's buckets and FSDP's prefetching.

DDP: backward produces gradients layer by layer; a bucket is sent as soon as its last gradient exists and the previous bucket has left. FSDP: the
weights of a layer must be gathered before it computes; with prefetching, the next layer is gathered while this one computes. Both are drawn for a
few layers, to show the rule that `cost.phase` charges for all of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """One bar of a timeline: the stream (compute or communication), its name, its start and its length in seconds."""

    stream: str
    name: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


class BackwardLayer(NamedTuple):
    """One layer of backward: its name, the seconds of its backward, the bytes of its gradients."""

    name: str
    seconds: float
    bytes: float


def bucket_timeline(
    layers: Sequence[BackwardLayer], bucket: float, time_of: Callable[[float], float], overlap: bool = True
) -> list[Span]:
    """Backward of the layers in the given order, and their gradients in buckets of `bucket` bytes; `time_of(bytes)` is one all-reduce.

    Without `overlap` the first bucket waits for the whole backward.
    """
    spans: list[Span] = []
    ready: list[float] = []  # when each bucket is full
    sizes: list[float] = []
    at = filled = 0.0
    for layer in layers:
        spans.append(Span("compute", layer.name, at, layer.seconds))
        at += layer.seconds
        filled += layer.bytes
        while filled >= bucket:
            ready.append(at)
            sizes.append(bucket)
            filled -= bucket
    if filled > 0:
        ready.append(at)
        sizes.append(filled)
    free = 0.0
    for number, (moment, size) in enumerate(zip(ready, sizes, strict=True)):
        start = max(free, moment if overlap else at)
        spans.append(Span("communication", f"bucket {number}", start, time_of(size)))
        free = spans[-1].end
    return spans


def prefetch_timeline(names: Sequence[str], compute: float, gather: float, prefetch: bool = True) -> list[Span]:
    """Forward of layers that take `compute` seconds each, whose weights take `gather` seconds to collect.

    With `prefetch` the weights of the next layer are collected while this one computes; two layers are in memory at a time.
    """
    spans: list[Span] = []
    done = gathered = 0.0  # end of the last compute and of the last gather
    previous_start = 0.0
    for k, name in enumerate(names):
        start = max(gathered, previous_start if prefetch else done) if k else 0.0
        spans.append(Span("communication", name, start, gather))
        gathered = start + gather
        previous_start = max(done, gathered)
        spans.append(Span("compute", name, previous_start, compute))
        done = previous_start + compute
    return spans
