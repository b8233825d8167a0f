"""Hooks on saved tensors that can be nested.

Autograd calls only the innermost pair of `saved_tensors_hooks`, so a tensor-parallel region that saves its share instead
of the gathered tensor (`regather`) would hide all it saves from hooks around the layer, which send tensors to the host
(`offload`). The outer hooks are set with `keeping`; inner hooks pass what they do not change to `outside()`:

    layer:   keeping(send, fetch)                             x → host
    region:  pack(t) = share, if t is the gathered tensor     share → send
             pack(t) = send(t) otherwise                      softmax, activations, … → send
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory outside the graph. A hook that returned the output of an operator as it is would make the operator keep itself alive: if no
    later backward reaches it (the second half of a split one does not reach attention), its tensors would never be freed."""
    return tensor.detach()


_gathered: ContextVar[int] = ContextVar("gathered", default=-1)  # the address of the tensor that `regather` replaces
_outside: ContextVar[tuple[Pack, Unpack]] = ContextVar("outside", default=(without_history, without_history))


@contextlib.contextmanager
def saving_share_of(whole: torch.Tensor) -> Iterator[None]:
    """A context whose hooks save this rank's share in place of the gathered tensor."""
    token = _gathered.set(whole.untyped_storage().data_ptr())
    try:
        yield
    finally:
        _gathered.reset(token)


def is_saved_as_share(tensor: torch.Tensor) -> bool:
    """Whether saving this tensor for backward saves a share of it only: cheaper than saving anything that was computed from it. In a
    compiled graph the compiler decides what is saved."""
    if torch.compiler.is_compiling():
        return False
    return tensor.untyped_storage().data_ptr() == _gathered.get()


def outside() -> tuple[Pack, Unpack]:
    """The hooks set by the enclosing `keeping`: inner hooks call them."""
    return _outside.get()


@contextlib.contextmanager
def keeping(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Apply these hooks to tensors saved within this context, and to those that inner hooks pass on."""
    token = _outside.set((pack, unpack))
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _outside.reset(token)
