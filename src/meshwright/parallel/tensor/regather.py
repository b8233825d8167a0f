"""Keep this rank's share of a gathered tensor for backward, and gather the whole again when backward asks for it.

Sequence parallelism gathers the input of every region. Autograd would keep the gathered tensor (T·h elements on each
rank) for the gradients of the region's weights; this keeps the T·h/tp the rank had before (Korthikanti et al. 2022),
for one more all-gather in backward. Several products save the same input (q, k and v): the first to ask gathers for
all of them.

Where a whole layer is made again in backward (`recompute`), its gathered input is made again with it and kept for the
moment it is needed: `keep_whole` says so. Hooks around the layer (`offload`) get the share, and all else the region
saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from meshwright.parallel import exchange
from meshwright.parallel.saved_tensors import outside

_whole_is_kept: ContextVar[bool] = ContextVar("whole_is_kept", default=False)


@contextlib.contextmanager
def keep_whole() -> Iterator[None]:
    """Within it, `gather_again` leaves saved tensors as they are: whoever made this scope looks after them."""
    token = _whole_is_kept.set(True)
    try:
        yield
    finally:
        _whole_is_kept.reset(token)


class Again:
    """A gathered tensor that can be made again from this rank's share, wherever that is kept."""

    def __init__(self, share: torch.Tensor, group: ProcessGroup, dim: int) -> None:
        pack, self.unpack = outside()
        self.share, self.group, self.dim = pack(share.detach()), group, dim
        self.savers = 0
        self.waiting = 0
        self.whole: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.whole is None:
            self.whole = exchange.all_gather(self.unpack(self.share), self.group, self.dim)
            self.waiting = self.savers
        whole = self.whole
        self.waiting -= 1
        if self.waiting == 0:
            self.whole = None
        return whole


class _View(NamedTuple):
    """Of a gathered tensor."""

    of: Again
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def gather_again(whole: torch.Tensor, share: torch.Tensor, group: ProcessGroup, dim: int = 1) -> Iterator[None]:
    """Within it, whoever saves `whole` (or a view of it) for backward saves the share instead."""
    if _whole_is_kept.get():
        yield
        return
    again = Again(share, group, dim)
    address, version = whole.untyped_storage().data_ptr(), whole._version
    keep, give = outside()

    def pack(tensor: torch.Tensor) -> Any:
        # What a module changed in place is no longer what was gathered.
        if tensor.untyped_storage().data_ptr() != address or tensor._version != version:
            return keep(tensor)
        again.savers += 1
        return _View(again, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _View):
            return saved.of.get().as_strided(saved.size, saved.stride, saved.offset)
        return give(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
