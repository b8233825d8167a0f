"""Messages between ranks of one host through shared memory, with headers over Unix sockets.

Each direction of a pair has WINDOW slots of SLOT bytes in memory that both ranks have mapped. To send, a rank copies a
slice of the message into a free slot and sends a header over the socket. The receiver reads the slice where it is: a
reduction reads the slot and its own buffer and writes its buffer, so the data is copied once on its way. Then it returns
the slot. Messages up to INLINE bytes travel in the header's packet.

    sender     copy slice 0 → slot 0, header │ copy slice 1 → slot 1, header │ …
    receiver                                 │ reduce slot 0 → buffer        │ reduce slot 1 → buffer, return slots

Sockets and not flags in the memory, for three reasons. A rank that waits sleeps in the kernel and leaves its core to the
others (ranks may outnumber cores). A packet orders the memory accesses before it, also on processors with a weak memory
model. And a rank that ends closes its sockets, which its peers see at once.

A rank never blocks in a send: slices wait in a queue until slots are free, and are copied while the rank waits for
something else.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from meshwright.comm.call import LAYOUT, Place, check_bytes, check_header, lost
from meshwright.comm.reductions import Combine
from meshwright.comm.transport.base import Begin, Destination, Pending, apply, bytes_of
from meshwright.comm.transport.handshake import SLOT, WINDOW, Connection

PACKET = struct.Struct("<BxHIQI")  # kind, slot, step, bytes of the message, bytes of the slice
DATA, INLINE_DATA, RETURN = 1, 2, 3
INLINE = 8 * 1024
HEADER = PACKET.size + LAYOUT.size
LOOK_S = 0.5  # a waiting rank looks this often whether another rank has failed
EMPTY = torch.empty(0, dtype=torch.uint8)


class Outgoing:
    """A message on its way: its pieces as bytes, and how much of it has been copied."""

    def __init__(self, link: Link, pieces: Sequence[torch.Tensor], place: Place) -> None:
        self.link, self.place = link, place
        self.pieces = [bytes_of(piece) for piece in pieces]
        self.total = sum(piece.numel() for piece in self.pieces)
        self.at = 0  # bytes copied
        self.done = False

    def wait(self) -> None:
        """Wait until the message is copied, so that its tensors may be overwritten."""
        self.link.memory.wait_until(lambda: self.done, self.link, self.place)

    def inline_packet(self) -> bytes:
        """The whole message in one packet."""
        self.at = self.total
        head = PACKET.pack(INLINE_DATA, 0, self.place.step, self.total, self.total) + self.place.call.packed
        return head + b"".join(piece.numpy().tobytes() for piece in self.pieces)

    def copy_slice(self, into: torch.Tensor) -> int:
        """Copy the next bytes into a slot, as many as fit."""
        room, filled, at = into.numel(), 0, 0
        for piece in self.pieces:
            skip = max(0, self.at - at)
            size = min(piece.numel() - skip, room - filled)
            if size > 0:
                into[filled : filled + size].copy_(piece[skip : skip + size])
                filled += size
            at += piece.numel()
            if filled == room:
                break
        self.at += filled
        return filled


class Incoming:
    """A message that a rank expects, applied slice by slice as it arrives."""

    def __init__(self, link: Link, pieces: Sequence[Destination], combine: Combine | None, place: Place) -> None:
        self.link, self.pieces, self.combine, self.place = link, pieces, combine, place
        self.total = sum(piece.into.numel() * piece.into.element_size() for piece in pieces)

    def wait(self) -> None:
        at, first = 0, True
        while first or at < self.total:
            self.link.memory.wait_until(lambda: bool(self.link.arrived), self.link, self.place)
            packet = self.link.arrived.popleft()
            check_header(self.place, self.link.peer, packet.call)
            check_bytes(self.place, self.link.peer, packet.total, self.total)
            data = packet.data
            if data.numel():
                into = self.pieces[0].into
                apply(data.view(into.dtype), self.pieces, self.combine, at // into.element_size())
            if packet.in_slot:
                self.link.give_back()
            at += data.numel()
            first = False


@dataclass
class Packet:
    """A slice that has arrived. `in_slot`: its slot has not been returned yet."""

    call: bytes
    total: int  # bytes of the message
    data: torch.Tensor
    in_slot: bool = True


class Link:
    """One peer: what is queued for it, what has arrived from it, and the state of the slots of both directions."""

    def __init__(self, memory: SharedMemory, peer: int, connection: Connection) -> None:
        self.memory, self.peer, self.socket = memory, peer, connection.socket
        outgoing, incoming = (
            torch.frombuffer(m, dtype=torch.uint8) for m in (connection.outgoing, connection.incoming)
        )
        self.outgoing = [outgoing[k * SLOT : (k + 1) * SLOT] for k in range(WINDOW)]
        self.incoming = [incoming[k * SLOT : (k + 1) * SLOT] for k in range(WINDOW)]
        self.queue: deque[Outgoing] = deque()
        self.arrived: deque[Packet] = deque()
        self.unsent = b""  # a packet for which the socket had no room
        self.next_slot, self.free = 0, WINDOW
        self.to_return = 0
        self.closed = False

    def push(self) -> None:
        """Send what is queued, as far as slots are free and the socket has room."""
        while self.unsent or self.queue:
            if not self.unsent:
                message = self.queue[0]
                inline = message.total <= INLINE
                if not inline and not self.free:
                    return
                self.unsent = message.inline_packet() if inline else self.fill_slot(message)
            if not self.write(self.unsent):
                return
            self.unsent = b""
            if self.queue[0].at == self.queue[0].total:
                self.queue.popleft().done = True

    def fill_slot(self, message: Outgoing) -> bytes:
        """Copy the next slice into the next slot; slots are used in turn, so that they return in turn."""
        slot = self.next_slot
        size = message.copy_slice(self.outgoing[slot])
        self.next_slot, self.free = (slot + 1) % WINDOW, self.free - 1
        return PACKET.pack(DATA, slot, message.place.step, message.total, size) + message.place.call.packed

    def write(self, packet: bytes) -> bool:
        """Send one packet; if the socket is full, continue when it has room (`SharedMemory.read`)."""
        try:
            self.socket.send(packet)
        except BlockingIOError:
            self.memory.poll.modify(self.socket, select.POLLIN | select.POLLOUT)
            return False
        except OSError:
            self.closed = True
            return False
        return True

    def continue_writing(self) -> None:
        """The socket has room again."""
        self.memory.poll.modify(self.socket, select.POLLIN)
        self.return_slots()
        self.push()

    def read(self) -> None:
        """Take all packets that have arrived."""
        while not self.closed:
            try:
                packet = self.socket.recv(HEADER + INLINE)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.closed = True
                self.memory.poll.unregister(self.socket)
                return
            kind, slot, _, total, size = PACKET.unpack_from(packet)
            if kind == RETURN:
                self.free += slot
                self.push()
            elif kind == INLINE_DATA:
                data = torch.frombuffer(bytearray(packet[HEADER:]), dtype=torch.uint8) if size else EMPTY
                self.arrived.append(Packet(packet[PACKET.size : HEADER], total, data, in_slot=False))
            else:
                self.arrived.append(Packet(packet[PACKET.size : HEADER], total, self.incoming[slot][:size]))

    def empty_slots(self) -> None:
        """Copy what has arrived out of its slots and return them."""
        for packet in self.arrived:
            if packet.in_slot:
                packet.data, packet.in_slot = packet.data.clone(), False
                self.give_back()

    def give_back(self) -> None:
        """Return a slot; half a window is returned at a time, to wake the sender less often."""
        self.to_return += 1
        if self.to_return >= WINDOW // 2:
            self.return_slots()

    def return_slots(self) -> None:
        if self.to_return and not self.closed and self.write(PACKET.pack(RETURN, self.to_return, 0, 0, 0)):
            self.to_return = 0


class SharedMemory:
    """The transport to the ranks of one host. `check_failure` raises if another rank has published an error."""

    posts_early = False

    def __init__(
        self,
        rank: int,
        size: int,
        connections: dict[int, Connection],
        timeout: float,
        check_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.timeout, self.check_failure = rank, size, timeout, check_failure
        self.links = {peer: Link(self, peer, connection) for peer, connection in connections.items()}
        self.by_file = {link.socket.fileno(): link for link in self.links.values()}
        self.poll = select.poll()
        for link in self.links.values():
            self.poll.register(link.socket, select.POLLIN)
        self.combine: Combine | None = None

    def begin(self, begin: Begin) -> None:
        self.combine = begin.combine

    def send(self, peer: int, pieces: Sequence[torch.Tensor], place: Place) -> Pending:
        link = self.links[peer]
        message = Outgoing(link, pieces, place)
        link.queue.append(message)
        link.push()
        return message

    def receive(self, peer: int, pieces: Sequence[Destination], place: Place, direct: bool) -> Pending:
        return Incoming(self.links[peer], pieces, self.combine, place)

    def end(self) -> None:
        """All sends were waited for, so nothing is queued."""

    def close(self) -> None:
        """Close all connections; peers that wait for this rank raise an error."""
        for link in self.links.values():
            link.closed = True
            link.socket.close()

    def wait_until(self, ready: Callable[[], bool], link: Link, place: Place) -> None:
        """Read packets until a condition holds; raise if the link's peer has ended, or at the timeout."""
        deadline = 0.0
        while not ready():
            if link.closed:
                raise lost(place, link.peer, "has ended or left the group (Connection closed by peer)")
            if not self.read(LOOK_S):
                self.check_failure()
                now = time.monotonic()
                deadline = deadline or now - LOOK_S + self.timeout
                if now >= deadline:
                    raise lost(place, link.peer, "did not answer in time (Timed out waiting for a message)")

    def read(self, seconds: float) -> bool:
        """Read all packets that arrive within some seconds; return whether there were any."""
        events = self.poll.poll(seconds * 1000)
        for file, what in events:
            link = self.by_file[file]
            if what & select.POLLOUT:
                link.continue_writing()
            if what & ~select.POLLOUT:
                link.read()
        return bool(events)

    def drain(self, place: Place) -> None:
        """Send everything that is queued, before this rank blocks in another transport.

        While it waits for free slots it copies what has arrived out of its own slots: the peer may be draining too.
        """
        for link in self.links.values():
            while link.queue:
                for other in self.links.values():
                    other.empty_slots()
                self.wait_until(partial(self.progressed, link, len(link.queue)), link, place)

    def progressed(self, link: Link, left: int) -> bool:
        """Whether a queued message left, or something arrived that may occupy slots."""
        return len(link.queue) < left or any(p.in_slot for other in self.links.values() for p in other.arrived)
