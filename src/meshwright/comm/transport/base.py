"""What a transport does: begin a collective, post sends and receives of pieces of tensors, wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from meshwright.comm.call import Call, Place
from meshwright.comm.reductions import Combine


class Pending(Protocol):
    """A posted send or receive. A send is complete when its tensors may be overwritten, a receive when its data is applied."""

    def wait(self) -> None: ...


class Destination(NamedTuple):
    """Where received elements go: stored into `into`, or with a base combined: into = base ∘ received."""

    into: torch.Tensor
    base: torch.Tensor | None


class Begin(NamedTuple):
    """A collective that begins: the call, how it combines, the bytes to and from each peer, the bytes of the largest message.

    `largest` is over all ranks, and the same on all ranks; negative if a rank cannot know it (all-to-all with splits).
    """

    call: Call
    combine: Combine | None
    sent: dict[int, int]
    received: dict[int, int]
    largest: int


class Transport(Protocol):
    """Messages between the ranks of one group. Messages from one rank to another arrive in the order they were sent.

    `receive` may be called before the data may be applied. With `direct` the target may be written at any time from then
    on; without it the data is applied by `wait`. `posts_early`: a receive that is posted early makes the transfer faster.
    """

    rank: int
    size: int
    posts_early: bool

    def begin(self, begin: Begin) -> None: ...

    def send(self, peer: int, pieces: Sequence[torch.Tensor], place: Place) -> Pending: ...

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous one-dimensional tensor, as a view."""
    return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor


def apply(received: torch.Tensor, pieces: Sequence[Destination], combine: Combine | None, first: int = 0) -> None:
    """Store or combine received elements into the pieces, from element `first` of the message on."""
    if len(pieces) == 1 and received.numel() == pieces[0].into.numel():
        into, base = pieces[0]
        into.copy_(received) if base is None else combine(base, received, into)  # type: ignore[misc]
        return
    for destination, part in overlapping(pieces, first, received):
        if destination.base is None:
            destination.into.copy_(part)
        else:
            assert combine is not None
            combine(destination.base, part, destination.into)


def overlapping(
    pieces: Sequence[Destination], first: int, received: torch.Tensor
) -> Iterator[tuple[Destination, torch.Tensor]]:
    """Cut the elements [first, first + n) of a message at the borders of its pieces."""
    at, last = 0, first + received.numel()
    for into, base in pieces:
        low, high = max(at, first), min(at + into.numel(), last)
        if low < high:
            cut = slice(low - at, high - at)
            yield Destination(into[cut], None if base is None else base[cut]), received[low - first : high - first]
        at += into.numel()
