"""Hooks on saved tensors that nest.

Autograd asks the innermost pair of `saved_tensors_hooks` only, so a region that keeps its share instead of the gathered
whole (`regather`) would hide all it saves from hooks around the layer that send things to the host (`offload`). Whoever
stands outside says so with `keeping`; whoever stands inside hands what it does not change on to `outside()`:

    layer:   keeping(send, fetch)                    x → host
    region:  pack(t) = share, if t is the whole      share → send
             pack(t) = send(t) otherwise             softmax, activations, … → send
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


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_outside: ContextVar[tuple[Pack, Unpack]] = ContextVar("outside", default=(_as_it_is, _as_it_is))


def outside() -> tuple[Pack, Unpack]:
    """The hooks that would see a tensor if there were none inside."""
    return _outside.get()


@contextlib.contextmanager
def keeping(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Hooks for what is saved within, and for what hooks inside hand on."""
    token = _outside.set((pack, unpack))
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _outside.reset(token)
