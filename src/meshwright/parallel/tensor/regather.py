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

Hooks on saved tensors that can be nested.

Autograd calls only the innermost pair of `saved_tensors_hooks`, so a tensor-parallel region that saves its share instead
of the gathered tensor (`regather`) would hide all it saves from hooks around the layer, which send tensors to the host
(`offload`). The outer hooks are set with `keeping`; inner hooks pass what they do not change to `outside()`:

    layer:   keeping(send, fetch)                             x → host
    region:  pack(t) = share, if t is the gathered tensor     share → send
             pack(t) = send(t) otherwise                      softmax, activations, … → send
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from meshwright.models.step_context import current, within
from meshwright.parallel import exchange

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def without_history(tensor: Tensor) -> Tensor:
    """The same memory outside the graph. A hook that returned the output of an operator as it is would make the operator keep itself alive: if no
    later backward reaches it (the second half of a split one does not reach attention), its tensors would never be freed."""
    return tensor.detach()


def is_saved_as_share(tensor: Tensor) -> bool:
    """Whether saving this tensor for backward saves a share of it only: cheaper than saving anything that was computed from it. In a
    compiled graph the compiler decides what is saved."""
    if torch.compiler.is_compiling():
        return False
    return tensor.untyped_storage().data_ptr() == current().saved_as_share


def outside() -> tuple[Pack, Unpack]:
    """The hooks set by the enclosing `keeping`: inner hooks call them."""
    return current().saving or (without_history, without_history)


@contextlib.contextmanager
def keeping(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Apply these hooks to tensors saved within this context, and to those that inner hooks pass on."""
    with within(saving=(pack, unpack)), saved_tensors_hooks(pack, unpack):
        yield


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
