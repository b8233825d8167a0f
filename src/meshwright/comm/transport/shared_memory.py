"""Messages between ranks of one host: data in memory that all of them read, and short entries about it through pipes.

To send, a rank copies a slice of the message into a free slot of its area and writes an entry (call, sizes, slot) into the pipe of
each receiver. A receiver reads the slice where it is: a reduction reads the slot and its own buffer and writes its buffer. Then it returns
the slot, by an entry in the other direction. The data is copied once on its way, also if it is for several ranks.

    sender     copy slice 0 → slot 0, entry │ copy slice 1 → slot 1, entry  │ …
    receiver                                │ reduce slot 0 → buffer, return │ reduce slot 1 → buffer, return

An entry is shorter than what the kernel writes at once, and a pipe holds more entries than there are slots: no write blocks. The system
calls also order the memory accesses of the two ranks, on every processor.

A rank never blocks in a send: slices wait in a queue until slots are free, and are copied while the rank waits for something else. A rank
that waits sleeps until an entry comes. If slices wait for slots meanwhile and nothing comes, it copies what has arrived out of the slots of
its peers, who may be waiting for free slots too: so nothing can deadlock.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from mmap import mmap
from typing import NamedTuple

import torch

from meshwright.comm.call import HEADER_BYTES, Call, CallPlace, Lost, check_bytes, check_header
from meshwright.comm.transport import handshake
from meshwright.comm.transport.base import Destination, Pending
from meshwright.comm.transport.handshake import PeerLink

# Call, bytes of the message, bytes in the slot, slot; ~slot: it is returned
ENTRY = struct.Struct(f"<{HEADER_BYTES}sQIi")
# A waiting rank looks this often whether another rank has failed; if slices wait, whether peers wait too
LOOK_MS, SHORT_MS = 500, 1


class Slice(NamedTuple):
    """A slice that has arrived; slot −1: its data was copied out of the slot."""

    call: bytes
    sent: int  # bytes of the message
    size: int
    slot: int
    data: torch.Tensor


class Outgoing:
    """A message in the queue: its pieces, and how much of it has been copied."""

    def __init__(
        self, memory: SharedMemory, links: list[PeerLink], pieces: Sequence[torch.Tensor], place: CallPlace
    ) -> None:
        self.memory, self.links, self.pieces, self.place = memory, links, pieces, place
        self.dtype = pieces[0].dtype if pieces else torch.uint8
        self.count = sum(piece.numel() for piece in pieces)
        self.at = 0  # elements copied
        self.done = False

    def wait(self) -> None:
        """Wait until the message is copied, so that its tensors may be overwritten."""
        self.memory.wait(self.place, lambda: self.done)

    def copy_slice(self, slot: torch.Tensor) -> int:
        """Copy the next elements into a slot, as many as fit; return their bytes."""
        room, filled, at = slot.numel(), 0, 0
        for piece in self.pieces:
            skip, length = max(0, self.at - at), piece.numel()
            size = min(length - skip, room - filled)
            if size > 0:
                slot[filled : filled + size].copy_(piece[skip : skip + size])
                filled += size
            at += length
        self.at += filled
        self.done = self.at == self.count
        return filled * self.dtype.itemsize


class Incoming(NamedTuple):
    """A message that a rank expects; it is applied slice by slice when it is waited for."""

    memory: SharedMemory
    link: PeerLink
    to: Destination
    place: CallPlace

    def wait(self) -> None:
        total, at, link = self.to.nbytes, 0, self.link
        dtype = self.to.parts[0].into.dtype if self.to.parts else torch.uint8
        while True:
            if not link.entries:
                self.memory.wait(self.place, lambda: bool(link.entries), link)
            call, sent, size, slot, data = link.entries.popleft()
            check_header(self.place, link.peer, call)
            check_bytes(self.place, link.peer, sent, total)
            if size:
                self.to.apply(data.view(dtype), at // dtype.itemsize)
            if slot >= 0:
                self.memory.tell(link, ~slot)
            at += size
            if at >= total:
                return


class SharedMemory:
    """The transport to the ranks of one host. `check_failure` raises if another rank has published an error."""

    def __init__(
        self,
        rank: int,
        area: mmap,
        links: dict[int, PeerLink],
        timeout: float,
        check_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.links = rank, len(links) + 1, links
        self.timeout, self.check_failure = timeout, check_failure
        self.slice_bytes = handshake.SLOT
        whole = torch.frombuffer(area, dtype=torch.uint8)
        self.slots = cache(lambda dtype: whole.view(dtype).split(handshake.SLOT // dtype.itemsize))
        self.free = list(range(handshake.SLOTS))
        self.readers = [0] * handshake.SLOTS
        self.queue: deque[Outgoing] = deque()
        self.areas = {peer: torch.frombuffer(link.area, dtype=torch.uint8) for peer, link in links.items()}
        self.poller, self.by_file = select.poll(), dict[int, PeerLink]()
        for link in links.values():
            for file in (link.inbox, link.process):
                self.poller.register(file, select.POLLIN)
                self.by_file[file.fileno()] = link

    def begin(self, call: Call, sent: dict[int, int], received: dict[int, int]) -> None:
        """Every message has a header: nothing is exchanged beforehand."""

    def send(self, peers: Sequence[int], pieces: Sequence[torch.Tensor], place: CallPlace) -> Sequence[Pending]:
        message = Outgoing(self, [self.links[peer] for peer in peers], pieces, place)
        self.queue.append(message)
        self.send_queued()
        return [] if message.done else [message]

    def receive(self, peer: int, to: Destination, place: CallPlace) -> Pending:
        return Incoming(self, self.links[peer], to, place)

    def end(self) -> None:
        """All sends were waited for, so nothing is queued."""

    def close(self) -> None:
        """Close all pipes; peers that wait for this rank raise an error."""
        for link in self.links.values():
            link.outbox.close()

    def send_queued(self) -> None:
        """Copy queued messages into free slots, and tell the receivers."""
        while self.queue and self.free:
            message, slot = self.queue[0], self.free.pop()
            size = message.copy_slice(self.slots(message.dtype)[slot])
            self.readers[slot] = len(message.links)
            for link in message.links:
                link.unreturned += 1
                total = message.count * message.dtype.itemsize
                self.tell(link, slot, message.place.call.packed, total, size)
            if message.done:
                self.queue.popleft()

    def tell(self, link: PeerLink, slot: int, call: bytes = b"", sent: int = 0, size: int = 0) -> None:
        try:
            os.write(link.outbox.fileno(), ENTRY.pack(call, sent, size, slot))
        except BrokenPipeError:
            link.closed = True

    def look(self, milliseconds: int) -> bool:
        """Read the entries that have come, or come within this time; return whether there are any."""
        events = self.poller.poll(milliseconds)
        for file, _ in events:
            link = self.by_file[file]
            try:
                data = os.read(link.inbox.fileno(), select.PIPE_BUF // ENTRY.size * ENTRY.size)
                link.closed |= not data
            except BlockingIOError:  # its process has ended
                data, link.closed = b"", True
            for call, sent, size, slot in ENTRY.iter_unpack(data):
                if slot >= 0:
                    start = slot * handshake.SLOT
                    link.entries.append(Slice(call, sent, size, slot, self.areas[link.peer][start : start + size]))
                    continue
                link.unreturned -= 1
                self.readers[~slot] -= 1
                if not self.readers[~slot]:
                    self.free.append(~slot)
            if link.closed:
                for ended in (link.inbox, link.process):
                    with contextlib.suppress(KeyError):
                        self.poller.unregister(ended)
        return bool(events)

    def copy_arrived(self) -> None:
        """Copy what has arrived out of the slots of the peers, and return them."""
        for link in self.links.values():
            for k, arrived in enumerate(link.entries):
                if arrived.slot >= 0:
                    link.entries[k] = arrived._replace(slot=-1, data=arrived.data.clone())
                    self.tell(link, ~arrived.slot)

    def wait(self, place: CallPlace, done: Callable[[], bool], link: PeerLink | None = None) -> None:
        """Send what is queued and read what comes until `done`; without a link the rank waits for slots. Raises if that peer has ended,
        another rank has failed, or the timeout is over."""
        start = looked = time.monotonic()
        while True:
            self.send_queued()
            if done():
                return
            peer = link or next((one for one in self.links.values() if one.unreturned), None)
            if peer is not None and peer.closed:
                raise Lost(place, peer.peer, "has ended or left the group (Connection closed by peer)")
            if self.look(SHORT_MS if self.queue else LOOK_MS):
                continue
            if self.queue:
                self.copy_arrived()
            now = time.monotonic()
            if now >= looked + LOOK_MS / 1000:
                looked = now
                self.check_failure()
            if peer is not None and now >= start + self.timeout:
                raise Lost(place, peer.peer, "did not answer in time: Timed out waiting for a message")
