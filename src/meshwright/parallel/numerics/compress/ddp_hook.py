"""Compression as a communication hook of torch's own `DistributedDataParallel`, for a model of your own:

    model = DistributedDataParallel(module)
    model.register_comm_hook(Compressed("powersgd", rank=4), hook)

torch hands over a bucket, one flat tensor of whole parameters, and wants the *mean* over ranks; gradients are divided before
they are compressed, so that a sum of 16-bit numbers cannot overflow where their mean does not.

What a rank has not sent yet is remembered by bucket, and torch regroups its buckets once, after the first step. So a bucket
that was not seen before, index and shapes, goes as it is, and is compressed from the next step on: nothing is remembered of
a bucket that is no more. Under a loss scale that moves, `rescale` it when that does: errors are of scaled gradients.

PowerSGD takes two rounds, and which of several buckets is in which round is where torch's own hook hangs on gloo: its second
round is issued whenever the first is done, in another order on every rank. Here a bucket's rounds are all issued before the
next bucket's. On a GPU the host runs ahead of them on a stream of their own, so they overlap with backward; on a CPU the hook
waits for them (`zero.Buckets` waits at the end of backward only).
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.parallel.numerics.compress.compressors import Compressor, Running, make

Shapes = list[torch.Size]

# Annotations are no texts in this file: torch reads those of a hook.


class Compressed:
    """What the hook keeps of one model: `name` and options as `compress.make` takes them, over `group` (None: all ranks)."""

    def __init__(self, name: str, group: ProcessGroup | None = None, **options: Any) -> None:
        self.group = group
        self.make = partial(make, name, **options)
        self.make()  # a wrong name is told here
        self.known: dict[int, tuple[Shapes, Compressor | None]] = {}
        self.stream: Any = None

    def rescale(self, factor: float) -> None:
        """The loss is scaled so many times what it was: `scaler.get_scale()` after `scaler.update()`, by that before."""
        for _, compressor in self.known.values():
            if compressor is not None:
                compressor.feedback.rescale(factor)

    def mean(self, index: int, flat: torch.Tensor, shapes: Shapes) -> None:
        """`flat` becomes the mean over ranks."""
        group = self.group or distributed.group.WORLD
        assert group is not None
        flat.div_(group.size())
        before, compressor = self.known.get(index, ([], None))
        if before != shapes or compressor is None:
            self.known[index] = shapes, self.make()
            distributed.all_reduce(flat, group=group)
            return
        layout = list(zip(accumulate((shape.numel() for shape in shapes), initial=0), shapes, strict=False))
        running = Running(compressor.reduce(index, flat, layout, group.rank(), group.size()), group)
        while running.wait():
            pass


def hook(state: Compressed, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat, shapes = bucket.buffer(), [g.shape for g in bucket.gradients()]
    if not flat.is_cuda:
        state.mean(bucket.index(), flat, shapes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done
    state.stream = state.stream or torch.cuda.Stream(flat.device)
    state.stream.wait_stream(torch.cuda.current_stream(flat.device))
    done = torch.futures.Future(devices=[flat.device])
    with torch.cuda.stream(state.stream):
        state.mean(bucket.index(), flat, shapes)
        done.set_result(flat)  # whoever waits, waits for this stream
    return done
