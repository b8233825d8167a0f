"""What a transport does: begin a collective, post sends and receives of pieces of buffers, wait for them.

A piece is a contiguous one-dimensional tensor, or a numpy array if the transport has `arrays`: slicing an array takes a
tenth of the time of slicing a tensor, and shared memory needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from meshwright.comm.call import Call, Place
from meshwright.comm.reductions import Combine

Piece = Any  # a tensor or an array
Store = Callable[[Piece, Piece], object]  # (into, received)


class Pending(Protocol):
    """A posted send or receive. A send is complete when its tensors may be overwritten, a receive when its data is applied."""

    def wait(self) -> None: ...


class PendingGroup(NamedTuple):
    """Sends of the same data to several ranks."""

    sends: Sequence[Pending]

    def wait(self) -> None:
        for send in self.sends:
            send.wait()


class Destination(NamedTuple):
    """Where received elements go: stored into `into`, or with a base combined: into = base ∘ received."""

    into: Piece
    base: Piece | None


class Begin(NamedTuple):
    """A collective that begins: the call, how it combines and stores, the bytes to and from each peer, the largest message.

    `largest` is over all ranks, and the same on all ranks; negative if a rank cannot know it (all-to-all with splits).
    """

    call: Call
    combine: Combine | None
    store: Store
    sent: dict[int, int]
    received: dict[int, int]
    largest: int


class Transport(Protocol):
    """Messages between the ranks of one group. Messages from one rank to another arrive in the order they were sent.

    `receive` may be called before the data may be applied. With `direct` the target may be written at any time from then
    on; without it the data is applied by `wait`. `send` sends the same data to one or more ranks, and returns None if it is complete.
    `posts_early`: a receive that is posted early makes the transfer faster. `arrays`: pieces are numpy arrays.
    """

    rank: int
    size: int
    posts_early: bool
    arrays: bool

    def begin(self, begin: Begin) -> None: ...

    def send(self, peers: Sequence[int], pieces: Sequence[Piece], place: Place) -> Pending | None: ...

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous one-dimensional tensor, as a view."""
    return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor


def apply(
    received: Piece, pieces: Sequence[Destination], combine: Combine | None, store: Store, first: int = 0
) -> None:
    """Store or combine received elements into the pieces, from element `first` of the message on."""
    whole = len(pieces) == 1 and received.nbytes == pieces[0].into.nbytes
    parts = ((pieces[0], received),) if whole else overlapping(pieces, first, received)
    for (into, base), part in parts:
        if base is None:
            store(into, part)
        else:
            combine(base, part, into)  # type: ignore[misc]


def overlapping(pieces: Sequence[Destination], first: int, received: Piece) -> Iterator[tuple[Destination, Piece]]:
    """Cut the elements [first, first + n) of a message at the borders of its pieces."""
    at, last = 0, first + len(received)
    for into, base in pieces:
        low, high = max(at, first), min(at + len(into), last)
        if low < high:
            cut = slice(low - at, high - at)
            yield Destination(into[cut], None if base is None else base[cut]), received[low - first : high - first]
        at += len(into)
