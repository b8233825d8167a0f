"""Save this rank's share of a gathered tensor for backward instead of the whole, and gather it again in backward.

Sequence parallelism gathers the input of every region. Autograd would keep the gathered tensor (T·h elements on each
rank) for the gradients of the region's weights; this keeps the T·h/tp that the rank had before (Korthikanti et al. 2022),
at the price of one more all-gather in backward. Several products save the same input (q, k and v): it is gathered once
for all of them.

Where a whole layer is recomputed in backward (`recompute`), the recomputed forward gathers the input and it is still
there when it is needed: `keeps_gathered` of the `step_context` switches the regathering off. Hooks around the layer (`offload`) receive the
share, and everything else the region saves.

In a compiled graph there are no hooks: there the gather is marked as a part that backward computes again (`torch.utils.checkpoint`,
which the compiler knows), and the graph saves the share.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.models.step_context import current, within
from meshwright.parallel import exchange
from meshwright.parallel.saved_tensors import outside


class GatheredInput:
    """A gathered tensor that is gathered again from this rank's share, wherever the outer hooks keep it."""

    def __init__(self, share: Tensor, group: ProcessGroup, dim: int) -> None:
        pack, self.unpack = outside()
        self.share, self.group, self.dim = pack(share.detach()), group, dim
        self.savers = 0
        self.waiting = 0
        self.whole: Tensor | None = None

    def get(self) -> Tensor:
        if self.whole is None:
            self.whole = exchange.all_gather(self.unpack(self.share), self.group, self.dim)
            self.waiting = self.savers
        whole = self.whole
        self.waiting -= 1
        if self.waiting == 0:
            self.whole = None
        return whole


class _View(NamedTuple):
    """A saved view of a gathered tensor."""

    of: GatheredInput
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def regather(whole: Tensor, share: Tensor, group: ProcessGroup, dim: int = 1) -> Iterator[None]:
    """A context in which saving `whole` (or a view of it) for backward saves the share instead."""
    if current().keeps_gathered:
        yield
        return
    gathered = GatheredInput(share, group, dim)
    address, version = whole.untyped_storage().data_ptr(), whole._version
    outer_pack, outer_unpack = outside()

    def pack(tensor: Tensor) -> Any:
        # A tensor that a module changed in place is no longer the gathered one.
        if tensor.untyped_storage().data_ptr() != address or tensor._version != version:
            return outer_pack(tensor)
        gathered.savers += 1
        return _View(gathered, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _View):
            return saved.of.get().as_strided(saved.size, saved.stride, saved.offset)
        return outer_unpack(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), within(saved_as_share=address):
        yield
