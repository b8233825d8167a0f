"""Messages through the point-to-point operations of torch.distributed: gloo between hosts, or any other backend's.

**Data never arrives in a receive of another size.** gloo accepts a message that is shorter than the receive buffer, and ends the
process at one that is longer. Here the tag of a message contains its call and size, so that a message of another call is never received.
Every pair of ranks also exchanges headers, and compares them before it waits for data. Headers and data travel at the same time,
so the comparison costs no extra trip.

**A failure reaches all ranks.** gloo cannot be aborted, but a receive that times out closes the connections of its
device, and all peers that wait for this rank raise an error at once. `close` does so after a failure.

On NCCL this transport is for teaching and checking: no sizes are compared (NCCL does not match messages by size), and
each message is a kernel launch. NCCL's built-in collectives are faster.
"""

import contextlib
import struct
import sys
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from meshwright.comm.call import HEADER_BYTES, Call, CallPlace, Lost, check_bytes, check_header
from meshwright.comm.transport.base import Destination, Pending, bytes_of

SLICE_BYTES = 2**23  # small slices overlap more, but each message costs about 0.1 ms of CPU time
SIZES = struct.Struct("<QQ")  # bytes that the sender of the header sends in all, and those it expects
HEADER_TAG, BREAK_TAG, DATA_TAG = 1, 2, 64
TAG_SPACE = 2**26


class PointToPoint:
    """A transport over a process group (or one of its backends) that has `send` and `recv`."""

    def __init__(
        self, group: Any, rank: int, size: int, timeout: timedelta, *, check: bool = True, device: str = "cpu"
    ) -> None:
        self.group, self.rank, self.size, self.timeout = group, rank, size, timeout
        self.check, self.device = check, device
        self.slice_bytes = SLICE_BYTES if check else sys.maxsize  # NCCL has no tags: one message in each step
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.headers: dict[int, tuple[Any, torch.Tensor]] = {}  # peer → receive of its header, not yet compared
        self.unfinished: list[PostedMessage] = []  # sends of headers

    def begin(self, call: Call, sent: dict[int, int], received: dict[int, int]) -> None:
        """Exchange headers with all peers."""
        self.sent, self.received = sent, received
        place, peers = CallPlace(self.rank, call), sorted({*sent, *received}) if self.check else []
        for peer in peers:
            header = torch.empty(HEADER_BYTES + SIZES.size, dtype=torch.uint8)
            self.headers[peer] = (self.post(peer, header, HEADER_TAG, place), header)
        for peer in peers:
            text = call.packed + SIZES.pack(sent.get(peer, 0), received.get(peer, 0))
            header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            started = self.start(peer, header, HEADER_TAG, place)
            self.unfinished.append(PostedMessage(self, started, header, None, peer, place))

    def send(self, peers: Sequence[int], pieces: Sequence[torch.Tensor], place: CallPlace) -> Sequence[Pending]:
        data = self.payload(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)) if pieces else None)
        tag = data_tag(place, data.nbytes)
        return [PostedMessage(self, self.start(peer, data, tag, place), data, None, peer, place) for peer in peers]

    def receive(self, peer: int, to: Destination, place: CallPlace) -> Pending:
        parts, staged = to.parts, None
        if to.direct and len(parts) == 1:
            data = self.payload(parts[0].into)
        else:
            elements = sum(len(part.into) for part in parts)
            staged = torch.empty(elements, dtype=parts[0].into.dtype, device=self.device) if parts else None
            data = self.payload(staged)
        work = self.post(peer, data, data_tag(place, data.nbytes), place)
        return PostedMessage(self, work, data, None if staged is None else (to, staged), peer, place)

    def payload(self, data: torch.Tensor | None) -> torch.Tensor:
        """The bytes of a message; one byte for a message without elements, which tells that its sender has come so far."""
        return torch.zeros(1, dtype=torch.uint8, device=self.device) if data is None else bytes_of(data)

    def end(self) -> None:
        """Complete the sends of headers, and compare the peers' headers that no message has waited for."""
        for message in self.unfinished:
            message.wait()
        self.unfinished.clear()

    def close(self) -> None:
        """Close all connections, so that every peer that waits for this rank raises an error now."""
        if self.size > 1 and self.check:
            peer = (self.rank + 1) % self.size
            with contextlib.suppress(RuntimeError, ValueError):
                self.group.recv([torch.empty(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))

    def compare(self, peer: int, place: CallPlace) -> None:
        """Wait for a peer's header and compare it with this rank's call."""
        if peer not in self.headers:
            return
        work, header = self.headers.pop(peer)
        self.wait(work, peer, place)
        data = header.numpy().tobytes()
        check_header(place, peer, data[:HEADER_BYTES])
        sent, expected = SIZES.unpack(data[HEADER_BYTES:])
        check_bytes(place, peer, sent, self.received.get(peer, 0))
        check_bytes(place, peer, self.sent.get(peer, 0), expected)

    def start(self, peer: int, data: torch.Tensor, tag: int, place: CallPlace) -> Any:
        try:
            return self.group.send([data], peer, tag)
        except RuntimeError as error:
            raise Lost(place, peer, reason(error)) from error

    def post(self, peer: int, data: torch.Tensor, tag: int, place: CallPlace) -> Any:
        try:
            return self.group.recv([data], peer, tag)
        except RuntimeError as error:
            raise Lost(place, peer, reason(error)) from error

    def wait(self, work: Any, peer: int, place: CallPlace) -> None:
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise Lost(place, peer, reason(error)) from error


class PostedMessage(NamedTuple):
    """A message under way. `staged`: received data that is applied when it has arrived."""

    transport: PointToPoint
    work: Any
    data: torch.Tensor  # gloo reads or writes it until the end
    staged: tuple[Destination, torch.Tensor] | None
    peer: int
    place: CallPlace

    def wait(self) -> None:
        self.transport.compare(self.peer, self.place)
        self.transport.wait(self.work, self.peer, self.place)
        if self.staged is not None:
            destination, data = self.staged
            destination.apply(data)


def data_tag(place: CallPlace, size: int) -> int:
    """A tag for each kind of message: calls that differ, or messages of other sizes, never match.

    The number of the call is not part of it: equal messages arrive in order, and gloo keeps an entry for every tag.
    """
    text = f"{place.call.description} {place.step} {place.lane} {size}"
    return DATA_TAG + zlib.crc32(text.encode()) % TAG_SPACE


def reason(error: RuntimeError) -> str:
    """Return what gloo reports about a peer, in a few words."""
    text = str(error)
    if "Timed out" in text or "timeout" in text.lower():
        return "did not answer in time: Timed out waiting for a message"
    if "onnection" in text:
        return "has ended or left the group (Connection closed by peer)"
    return f"cannot be reached ({text.splitlines()[0][:200]})"
