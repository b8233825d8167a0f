"""Compression as a communication hook of torch's own `DistributedDataParallel`, for any model:

    model = DistributedDataParallel(module)
    model.register_comm_hook(CompressionState("powersgd", rank=4), hook)

torch passes a bucket, one flat tensor of whole parameters, and expects the *mean* over ranks; gradients are divided
before they are compressed, so that a sum of 16-bit numbers cannot overflow where their mean does not.

Errors are stored by bucket, and torch regroups its buckets once, after the first step. So a bucket whose index and
shapes were not seen before is reduced uncompressed, and compressed from the next step on: no error of an old bucket is
added to a new one. Under a changing loss scale, call `rescale` when it changes: errors are of scaled gradients.

PowerSGD takes two rounds, and torch's own PowerSGD hook can hang on gloo: its second round is issued whenever the first
is done, in a different order of buckets on every rank. Here all rounds of a bucket are issued before the next bucket's.
On a GPU they run on a separate stream while the host continues, so they overlap with backward; on a CPU the hook waits
for them (`data.buckets` waits only at the end of backward).
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from meshwright.parallel.numerics.compress.base import Compressor, RunningReduction
from meshwright.parallel.numerics.compress.compressors import make_compressor

Shapes = list[torch.Size]

# No `from __future__ import annotations` here: torch inspects the annotations of a hook, which must be types.


class CompressionState:
    """The state of the hook for one model: `name` and options of `make_compressor`; `group` None means all ranks."""

    def __init__(self, name: str, group: ProcessGroup | None = None, **options: Any) -> None:
        self.group = group
        self.make = partial(make_compressor, name, **options)
        self.make()  # a wrong name raises here
        self.known: dict[int, tuple[Shapes, Compressor | None]] = {}
        self.stream: Any = None

    def rescale(self, factor: float) -> None:
        """The loss scale was multiplied by `factor`: `scaler.get_scale()` after `scaler.update()` divided by that before."""
        for _, compressor in self.known.values():
            if compressor is not None:
                compressor.feedback.rescale(factor)

    def mean(self, index: int, flat: Tensor, shapes: Shapes) -> None:
        """Replace `flat` by its mean over ranks."""
        group = self.group or distributed.group.WORLD
        assert group is not None
        flat.div_(group.size())
        known_shapes, compressor = self.known.get(index, ([], None))
        if known_shapes != shapes or compressor is None:
            self.known[index] = shapes, self.make()
            distributed.all_reduce(flat, group=group)
            return
        layout = list(zip(accumulate((shape.numel() for shape in shapes), initial=0), shapes, strict=False))
        running = RunningReduction(compressor.reduce(index, flat, layout, group.rank(), group.size()), group)
        while running.wait():
            pass


def hook(state: CompressionState, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    flat, shapes = bucket.buffer(), [g.shape for g in bucket.gradients()]
    if not flat.is_cuda:
        state.mean(bucket.index(), flat, shapes)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done
    state.stream = state.stream or torch.cuda.Stream(flat.device)
    state.stream.wait_stream(torch.cuda.current_stream(flat.device))
    done = torch.futures.Future(devices=[flat.device])
    with torch.cuda.stream(state.stream):
        state.mean(bucket.index(), flat, shapes)
        done.set_result(flat)  # waiting for the future waits for this stream
    return done
