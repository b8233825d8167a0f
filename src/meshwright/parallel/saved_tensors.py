"""Hooks on saved tensors that can be nested.

Autograd calls only the innermost pair of `saved_tensors_hooks`, so a tensor-parallel region that saves its share instead
of the gathered tensor (`regather`) would hide all it saves from hooks around the layer, which send tensors to the host
(`offload`). The outer hooks are set with `keeping`; inner hooks pass what they do not change to `outside()`:

    layer:   keeping(send, fetch)                             x → host
    region:  pack(t) = share, if t is the gathered tensor     share → send
             pack(t) = send(t) otherwise                      softmax, activations, … → send
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.models.step_context import current, within

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
