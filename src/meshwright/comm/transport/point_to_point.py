"""Messages through the point-to-point operations of torch.distributed: gloo between hosts, or any other backend's.

**Data never arrives in a receive of another size.** gloo accepts a message that is shorter than the receive buffer, and ends the
process at one that is longer. Here

    small collective   every message is an *envelope* of ENVELOPE bytes: header, then the data. All envelopes have the same size,
    (largest message   so none can be longer than its receive, whatever the ranks call
    fits an envelope)
    others             the tag of a message contains its call and size, so a message of another call is never received; every pair
                       also exchanges envelopes with their headers, and compares them before it waits for data

Headers and data travel at the same time, so the comparison costs no extra trip.

**A failure reaches all ranks.** gloo cannot be aborted, but a receive that times out closes the connections of its
device, and all peers that wait for this rank raise an error at once. `close` does so after a failure.

On NCCL this transport is for teaching and checking: no sizes are compared (NCCL does not match messages by size), and
each message is a kernel launch. NCCL's built-in collectives are faster.

Staging buffers that are reused: a fresh large buffer costs a page fault every 4 KiB, more than the copy into it.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.comm.call import LAYOUT, Lost, Place, check_bytes, check_header
from meshwright.comm.transport.base import Begin, Combine, Destination, Pending, PendingGroup, apply, bytes_of

SMALLEST = 4096
KEPT = 64 * 2**20  # bytes of free buffers that are kept


class Pool:
    """Free byte buffers by capacity; capacities are powers of two."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.free: dict[int, list[torch.Tensor]] = {}
        self.kept = 0

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of `size` bytes, a view of one that may be larger."""
        capacity = max(SMALLEST, 1 << (size - 1).bit_length()) if size else SMALLEST
        free = self.free.get(capacity)
        if free:
            self.kept -= capacity
            found = free.pop()
        else:
            found = torch.empty(capacity, dtype=torch.uint8, device=self.device)
        return found if size == capacity else found[:size]

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        whole = buffer._base if buffer._base is not None else buffer
        if self.kept + whole.numel() <= KEPT:
            self.kept += whole.numel()
            self.free.setdefault(whole.numel(), []).append(whole)


ENVELOPE = 4096
SIZES = struct.Struct("<QQ")  # bytes of this message (or all to the peer), bytes expected from the peer
HEADER = LAYOUT.size + SIZES.size
TAG = struct.Struct("<IIQ")
ENVELOPE_TAG, BREAK_TAG, DATA_TAG = 1, 2, 64
TAG_SPACE = 2**26
FITS = ENVELOPE - HEADER


class Box(NamedTuple):
    """An envelope: its tensor, and the same bytes as an array. Boxes are reused, because a new array of a tensor costs up to 40 µs."""

    data: torch.Tensor
    array: np.ndarray

    @classmethod
    def create(cls) -> Box:
        data = torch.empty(ENVELOPE, dtype=torch.uint8)
        return cls(data, data.numpy())


class PointToPoint:
    """A transport over a process group (or one of its backends) that has `send` and `recv`."""

    arrays = False

    def __init__(
        self, group: Any, rank: int, size: int, timeout: timedelta, *, check: bool = True, device: str = "cpu"
    ) -> None:
        self.group, self.rank, self.size, self.timeout = group, rank, size, timeout
        self.check, self.device = check, device
        self.posts_early = check  # NCCL has no tags: its receives are posted in the order of the sends
        self.pool = Pool(device)
        self.begun: Begin | None = None
        self.small = False
        self.boxes: list[Box] = []  # that are free
        self.headers: dict[int, tuple[Any, Box]] = {}  # peer → receive of its header, not yet compared
        self.unfinished: list[tuple[Any, Box]] = []  # sends of envelopes
        self.before_wait: Callable[[Place], None] | None = None

    def begin(self, begin: Begin) -> None:
        """Note the collective. If its messages need more than an envelope, exchange headers with all peers."""
        self.begun = begin
        self.small = self.check and 0 <= begin.largest <= FITS
        if self.small or not self.check:
            return
        place = Place(self.rank, begin.call)
        for peer in sorted({*begin.sent, *begin.received}):
            box = self.take_box()
            self.headers[peer] = (self.post(peer, box.data, ENVELOPE_TAG, place), box)
        for peer in self.headers:
            sizes = SIZES.pack(begin.sent.get(peer, 0), begin.received.get(peer, 0))
            self.send_envelope(peer, sizes, (), place)

    def send(self, peers: Sequence[int], pieces: Sequence[torch.Tensor], place: Place) -> Pending | None:
        sends = [self.send_to(peer, pieces, place) for peer in peers]
        pending = [send for send in sends if send is not None]
        return pending[0] if len(pending) == 1 else PendingGroup(pending) if pending else None

    def send_to(self, peer: int, pieces: Sequence[torch.Tensor], place: Place) -> Pending | None:
        size = pieces[0].nbytes if len(pieces) == 1 else sum(piece.nbytes for piece in pieces)
        if self.small:
            self.send_envelope(peer, SIZES.pack(size, 0), pieces, place)
            return None
        if not size:
            return None
        tag = data_tag(place, size)
        if len(pieces) == 1:
            return Sent(self, self.start_send(peer, self.sendable(pieces[0]), tag, place), None, peer, place)
        staged = self.pool.take(size)
        at = 0
        for piece in map(bytes_of, pieces):
            staged[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        return Sent(self, self.start_send(peer, staged, tag, place), staged, peer, place)

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending:
        assert self.begun is not None
        combine = self.begun.combine
        size = pieces[0].into.nbytes if len(pieces) == 1 else sum(piece.into.nbytes for piece in pieces)
        if self.small:
            box = self.take_box()
            work = self.post(peer, box.data, ENVELOPE_TAG, place)
            return Enveloped(self, work, box, size, pieces, combine, peer, place)
        if not size:
            return DONE
        tag = data_tag(place, size)
        if direct and len(pieces) == 1 and pieces[0].base is None:
            into = self.sendable(pieces[0].into)
            return Received(self, self.post(peer, into, tag, place), None, (), combine, peer, place)
        staged = self.pool.take(size)
        work = self.post(peer, staged, tag, place)
        return Received(self, work, staged, pieces, combine, peer, place)

    def sendable(self, piece: torch.Tensor) -> torch.Tensor:
        """The piece as it is sent: gloo moves every dtype, NCCL not those that it cannot add."""
        return piece if self.check else bytes_of(piece)

    def end(self) -> None:
        """Compare headers that no send has waited for, and complete the envelopes."""
        assert self.begun is not None
        place = Place(self.rank, self.begun.call)
        for peer in list(self.headers):
            self.compare(peer, place)
        for work, box in self.unfinished:
            self.wait(work, -1, place)
            self.boxes.append(box)
        self.unfinished.clear()

    def close(self) -> None:
        """Close all connections, so that every peer that waits for this rank raises an error now."""
        if self.size > 1 and self.check:
            peer = (self.rank + 1) % self.size
            with contextlib.suppress(RuntimeError, ValueError):
                self.group.recv([torch.empty(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))

    def send_envelope(self, peer: int, sizes: bytes, pieces: Sequence[torch.Tensor], place: Place) -> None:
        assert self.begun is not None
        box = self.take_box()
        head = self.begun.call.packed + sizes
        box.array[:HEADER] = memoryview(head)
        at = HEADER
        for piece in map(bytes_of, pieces):
            box.data[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        self.unfinished.append((self.start_send(peer, box.data, ENVELOPE_TAG, place), box))

    def take_box(self) -> Box:
        return self.boxes.pop() if self.boxes else Box.create()

    def compare(self, peer: int, place: Place) -> None:
        """Wait for a peer's header and compare it with this rank's call."""
        if peer not in self.headers:
            return
        assert self.begun is not None
        work, box = self.headers.pop(peer)
        self.wait(work, peer, place)
        data = box.array[:HEADER].tobytes()
        self.boxes.append(box)
        check_header(place, peer, data[: LAYOUT.size])
        sent, expected = SIZES.unpack(data[LAYOUT.size :])
        check_bytes(place, peer, sent, self.begun.received.get(peer, 0))
        check_bytes(place, peer, self.begun.sent.get(peer, 0), expected)

    def start_send(self, peer: int, data: torch.Tensor, tag: int, place: Place) -> Any:
        try:
            return self.group.send([data], peer, tag)
        except RuntimeError as error:
            raise Lost(place, peer, reason(error)) from error

    def post(self, peer: int, data: torch.Tensor, tag: int, place: Place) -> Any:
        try:
            return self.group.recv([data], peer, tag)
        except RuntimeError as error:
            raise Lost(place, peer, reason(error)) from error

    def wait(self, work: Any, peer: int, place: Place) -> None:
        if self.before_wait is not None:
            self.before_wait(place)
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise Lost(place, peer, reason(error)) from error


def data_tag(place: Place, size: int) -> int:
    """A tag for each kind of message: calls that differ, or messages of other sizes, never match.

    The number of the call is not part of it: equal messages arrive in order, and gloo keeps an entry for every tag.
    """
    text = place.call.packed[4:] + TAG.pack(place.step, place.lane, size)
    return DATA_TAG + zlib.crc32(text) % TAG_SPACE


def reason(error: RuntimeError) -> str:
    """Return what gloo reports about a peer, in a few words."""
    text = str(error)
    if "Timed out" in text or "timeout" in text.lower():
        return "did not answer in time: Timed out waiting for a message"
    if "onnection" in text:
        return "has ended or left the group (Connection closed by peer)"
    return f"cannot be reached ({text.splitlines()[0][:200]})"


class Finished:
    """A send or receive that is complete."""

    def wait(self) -> None: ...


DONE = Finished()


class Sent(NamedTuple):
    transport: PointToPoint
    work: Any
    staged: torch.Tensor | None
    peer: int
    place: Place

    def wait(self) -> None:
        if self.transport.headers:
            self.transport.compare(self.peer, self.place)
        self.transport.wait(self.work, self.peer, self.place)
        if self.staged is not None:
            self.transport.pool.give(self.staged)


class Received(NamedTuple):
    transport: PointToPoint
    work: Any
    staged: torch.Tensor | None
    pieces: Sequence[Destination]
    combine: Combine | None
    peer: int
    place: Place

    def wait(self) -> None:
        if self.transport.headers:
            self.transport.compare(self.peer, self.place)
        self.transport.wait(self.work, self.peer, self.place)
        if self.staged is not None:
            apply(self.staged.view(self.pieces[0].into.dtype), self.pieces, self.combine, torch.Tensor.copy_)
            self.transport.pool.give(self.staged)


class Enveloped(NamedTuple):
    transport: PointToPoint
    work: Any
    box: Box
    expected: int
    pieces: Sequence[Destination]
    combine: Combine | None
    peer: int
    place: Place

    def wait(self) -> None:
        self.transport.wait(self.work, self.peer, self.place)
        data = self.box.array[:HEADER].tobytes()
        check_header(self.place, self.peer, data[: LAYOUT.size])
        check_bytes(self.place, self.peer, SIZES.unpack(data[LAYOUT.size :])[0], self.expected)
        if self.expected:
            payload = self.box.data[HEADER : HEADER + self.expected]
            apply(payload.view(self.pieces[0].into.dtype), self.pieces, self.combine, torch.Tensor.copy_)
        self.transport.boxes.append(self.box)
