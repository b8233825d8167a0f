"""Messages between ranks of one host through shared memory.

To send, a rank copies a slice of the message into a free slot of its area (`area`), writes an entry (call, sizes, slot) for
each receiver, and posts the receivers' semaphores. A receiver reads the slice where it is: a reduction reads the slot and
its own buffer and writes its buffer. Then it returns the slot. The data is copied once on its way, also if it is for
several ranks.

    sender     copy slice 0 → slot 0, post │ copy slice 1 → slot 1, post   │ …
    receiver                               │ reduce slot 0 → buffer, return │ reduce slot 1 → buffer, return

A rank never blocks in a send: slices wait in a queue until slots are free, and are copied while the rank waits for
something else. Slots are used in turn. Messages are sent and received in one order that is common to all ranks
(`run`), so the oldest message that waits for a slot always gets one: nothing can deadlock.

A rank that waits sleeps. It wakes regularly to look whether its peer has ended or left the group, or another rank has published
an error.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from mmap import mmap
from typing import NamedTuple

import torch

from meshwright.comm.call import LAYOUT, Call, CallPlace, Lost, check_bytes, check_header
from meshwright.comm.transport import handshake
from meshwright.comm.transport.base import Destination, Pending
from meshwright.comm.transport.handshake import Connection, ReaderBlock

TRIES = 20  # before a rank that waits sleeps, each with its core left to the others
SLEEP_S = 0.02  # a sleeping rank looks this often whether its peer has ended
SHORT_SLEEP_S = 2e-4  # or, if messages wait for slots, whether slots were returned
LOOK_S = 0.5  # a waiting rank looks this often whether another rank has failed
SIZES = struct.Struct("<QII")  # bytes of the message, bytes in the slot, number of the slot

Readers = list[tuple["PeerLink", int]]  # who reads a slot: link, number of the slice


class Outgoing:
    """A message in the queue: its pieces, and how much of it has been copied."""

    def __init__(
        self, memory: SharedMemory, links: list[PeerLink], pieces: list[torch.Tensor], place: CallPlace
    ) -> None:
        self.memory, self.links, self.pieces, self.place = memory, links, pieces, place
        self.dtype = pieces[0].dtype if pieces else torch.uint8
        self.count = sum(piece.numel() for piece in pieces)
        self.at = 0  # elements copied
        self.done = False

    def wait(self) -> None:
        """Wait until the message is copied, so that its tensors may be overwritten."""
        self.memory.drain(self.place, self)

    def copy_slice(self, slot: torch.Tensor) -> int:
        """Copy the next elements into a slot, as many as fit; return their bytes."""
        room, filled, at = slot.numel(), 0, 0
        for piece in self.pieces:
            skip, length = max(0, self.at - at), piece.numel()
            size = min(length - skip, room - filled)
            if size > 0:
                target = slot if size == room else slot[filled : filled + size]
                target.copy_(piece if size == length else piece[skip : skip + size])
                filled += size
            at += length
        self.at += filled
        return filled * self.dtype.itemsize


class Incoming(NamedTuple):
    """A message that a rank expects; it is applied slice by slice when it is waited for."""

    memory: SharedMemory
    link: PeerLink
    to: Destination
    place: CallPlace

    def wait(self) -> None:
        total, at = self.to.nbytes, 0
        dtype = self.to.parts[0].into.dtype if self.to.parts else torch.uint8
        while True:
            entry, slot = self.link.next_slice(self.place)
            check_header(self.place, self.link.peer, entry[: LAYOUT.size])
            sent, size, number = SIZES.unpack_from(entry, LAYOUT.size)
            check_bytes(self.place, self.link.peer, sent, total)
            if size:
                data = self.link.slots(dtype)[number] if slot is None else slot.view(dtype)
                count = size // dtype.itemsize
                self.to.apply(data if count == data.numel() else data[:count], at // dtype.itemsize)
            if slot is None:
                self.memory.post(self.link.reading.returned)
            at += size
            if at >= total:
                return


class PeerLink:
    """One peer: the blocks of both areas, and the counts of messages."""

    def __init__(self, memory: SharedMemory, peer: int, connection: Connection) -> None:
        self.memory, self.peer, self.connection = memory, peer, connection
        self.process = select.poll()
        self.process.register(connection.process, select.POLLIN)  # readable when the process has ended
        self.writing = ReaderBlock.of(connection.outgoing, connection.peer)
        self.reading = ReaderBlock.of(connection.incoming, connection.rank)
        self.slots = memory.slots_of(connection.incoming)
        self.sent = self.returned = self.received = 0
        self.copied: deque[tuple[bytes, torch.Tensor]] = deque()  # slices that were copied out of their slots early
        self.closed = False

    def next_slice(self, place: CallPlace) -> tuple[bytes, torch.Tensor | None]:
        """The entry of the next slice, and its bytes if they were copied out of their slot."""
        if self.copied:
            return self.copied.popleft()
        if self.memory.try_wait(self.reading.data):
            self.memory.wait_for_data(self, place)
        return self.read(), None

    def read(self) -> bytes:
        """The entry of a slice that has arrived."""
        block = self.reading
        at = block.entries + self.received % handshake.SLOTS * handshake.ENTRY
        self.received += 1
        return block.memory[at : at + handshake.HEADER.size]

    def copy_arrived(self) -> None:
        """Copy what has arrived out of its slots, and return them."""
        while self.memory.try_wait(self.reading.data) == 0:
            entry = self.read()
            _, size, number = SIZES.unpack_from(entry, LAYOUT.size)
            self.copied.append((entry, self.slots(torch.uint8)[number][:size].clone()))
            self.memory.post(self.reading.returned)


class SharedMemory:
    """The transport to the ranks of one host. `check_failure` raises if another rank has published an error."""

    def __init__(
        self,
        rank: int,
        size: int,
        connections: dict[int, Connection],
        timeout: float,
        check_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.timeout, self.check_failure = rank, size, timeout, check_failure
        self.slice_bytes = handshake.SLOT
        functions = handshake.load()
        assert functions is not None
        self.functions, self.post, self.try_wait = functions, functions.post, functions.try_wait
        outgoing = next(iter(connections.values())).outgoing
        self.slots = self.slots_of(outgoing)
        self.leave = weakref.finalize(self, handshake.leave, outgoing, rank)  # also where the group is just dropped
        self.links = {peer: PeerLink(self, peer, connection) for peer, connection in connections.items()}
        self.unused = list(range(handshake.SLOTS))  # slots that were never used
        self.in_use: deque[tuple[int, Readers]] = deque()  # slots in the order of their use
        self.queue: deque[Outgoing] = deque()

    def slots_of(self, memory: mmap) -> Callable[[torch.dtype], list[torch.Tensor]]:
        """The slots of an area, as tensors of any dtype."""
        area = torch.frombuffer(memory, dtype=torch.uint8, offset=handshake.first_slot(self.size))
        return cache(lambda dtype: list(area.view(dtype).split(handshake.SLOT // dtype.itemsize)))

    def begin(self, call: Call, sent: dict[int, int], received: dict[int, int]) -> None:
        """Every message has a header: nothing is exchanged beforehand."""

    def send(self, peers: Sequence[int], pieces: Sequence[torch.Tensor], place: CallPlace) -> Sequence[Pending]:
        message = Outgoing(self, [self.links[peer] for peer in peers], list(pieces), place)
        self.queue.append(message)
        self.try_queue()
        return [] if message.done else [message]

    def receive(self, peer: int, to: Destination, place: CallPlace) -> Pending:
        return Incoming(self, self.links[peer], to, place)

    def end(self) -> None:
        """All sends were waited for, so nothing is queued."""

    def close(self) -> None:
        """Close all connections; peers that wait for this rank raise an error."""
        self.leave()
        for link in self.links.values():
            link.closed = True

    # Sending

    def copy(self, message: Outgoing) -> None:
        """Copy a message into slots, as far as there are free ones, and tell the receivers."""
        while not message.done:
            slot = self.free_slot()
            if slot < 0:
                return
            size = message.copy_slice(self.slots(message.dtype)[slot])
            total = message.count * message.dtype.itemsize
            self.deliver(slot, message.links, message.place.call.packed, total, size)
            message.done = message.at == message.count

    def deliver(self, slot: int, links: list[PeerLink], packed: bytes, total: int, size: int) -> None:
        """Tell the receivers of a slot: it has `size` of a message's `total` bytes; `packed` describes the call."""
        readers: Readers = []
        for link in links:
            sent, block = link.sent, link.writing
            at = block.entries + sent % handshake.SLOTS * handshake.ENTRY
            handshake.HEADER.pack_into(block.memory, at, packed, total, size, slot)
            readers.append((link, sent))
            link.sent = sent + 1
            self.post(block.data)
        self.in_use.append((slot, readers))

    def free_slot(self) -> int:
        """A free slot, or −1. The slot that was used first is used again if it was returned: it is still in the cache."""
        if self.in_use and self.blocking_reader() is None:
            return self.in_use.popleft()[0]
        return self.unused.pop() if self.unused else -1

    def blocking_reader(self) -> PeerLink | None:
        """The peer that still reads the slot that was used first; None if all have returned it."""
        for link, number in self.in_use[0][1]:
            if link.returned <= number:
                while not self.try_wait(link.writing.returned):
                    link.returned += 1
                if link.returned <= number:
                    return link
        return None

    def try_queue(self) -> bool:
        """Copy queued messages into free slots; return whether the queue is empty."""
        while self.queue:
            self.copy(self.queue[0])
            if not self.queue[0].done:
                return False
            self.queue.popleft()
        return True

    def drain(self, place: CallPlace, last: Outgoing | None = None) -> None:
        """Send everything that is queued, or all up to one message; sleep until slots are returned.

        Meanwhile it copies what has arrived out of the peers' slots: a peer may be waiting for free slots too.
        """
        watch = Watch(self, place)
        while not (self.try_queue() or (last is not None and last.done)):
            for link in self.links.values():
                link.copy_arrived()
            reader = self.blocking_reader() if self.in_use else None
            if reader is None:
                continue
            if handshake.sleep_until_posted(self.functions, reader.writing.returned, SLEEP_S):
                reader.returned += 1
                watch = Watch(self, place)
            elif self.blocking_reader() is reader:
                watch.check(reader)

    # Waiting

    def wait_for_data(self, link: PeerLink, place: CallPlace) -> None:
        """Wait for the next slice of a peer, and send what is queued meanwhile."""
        semaphore = link.reading.data
        for _ in range(TRIES):
            self.try_queue()
            os.sched_yield()
            if not self.try_wait(semaphore):
                return
        watch = Watch(self, place)
        while not handshake.sleep_until_posted(self.functions, semaphore, SHORT_SLEEP_S if self.queue else SLEEP_S):
            if self.queue and not self.try_queue():
                for other in self.links.values():
                    if other is not link:
                        other.copy_arrived()
            if self.is_closed(link) and self.try_wait(semaphore) == 0:  # posted before the peer ended
                return
            watch.check(link)

    def is_closed(self, link: PeerLink) -> bool:
        """Whether a peer has ended, or left the group."""
        link.closed |= handshake.has_left(link.connection.incoming, link.peer) or bool(link.process.poll(0))
        return link.closed


class Watch:
    """The time that a rank has waited for a peer."""

    def __init__(self, memory: SharedMemory, place: CallPlace) -> None:
        self.memory, self.place = memory, place
        self.start = self.looked = time.monotonic()

    def check(self, link: PeerLink) -> None:
        """Raise if the peer has ended, another rank has failed, or the timeout is over."""
        if self.memory.is_closed(link):
            raise Lost(self.place, link.peer, "has ended or left the group (Connection closed by peer)")
        now = time.monotonic()
        if now >= self.looked + LOOK_S:
            self.looked = now
            self.memory.check_failure()
        if now >= self.start + self.memory.timeout:
            raise Lost(self.place, link.peer, "did not answer in time: Timed out waiting for a message")
