"""Connect the ranks of a group that are all on one host: memory that all of them read.

Ranks may share memory only if they are on the same host (kernel boot id), in the same network namespace (an emulated
node must use its emulated network) and of the same user. Each rank makes an anonymous memory file for its area and publishes these three, its
process and the number of the file to the group's store; the others open the file through /proc. They keep a handle of the process, by
which they notice its end; a rank that leaves the group says so in its area. A group uses shared memory only if all its ranks
report that they are connected; otherwise it uses messages of gloo.

**Nothing to clean up.** The memory files (`memfd_create`) have no name: they are not in /dev/shm, no other
user can open them, and the kernel frees them when the last process that has mapped them ends, however it ends. A full
/dev/shm does not matter.

**An area** is the memory in which a rank places its messages, with one block of semaphores and entries for each reader:

    [data ready | slots returned | ring of SLOTS entries] × ranks    [SLOT bytes] × SLOTS

A rank writes only its area (except for the semaphore by which a reader returns a slot), and all ranks
read it. So data for several ranks is copied once: each of them gets an entry that names the same slot.

**POSIX semaphores**, called through ctypes, order the memory accesses also on processors with a weak memory model: what was written
before `sem_post` is visible after the `sem_wait` that it allows. They need no system call while no rank sleeps, and a rank
that waits sleeps in the kernel and leaves its core to the others (ranks may outnumber cores).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.comm.call import LAYOUT
from meshwright.host import process_start

SLOT = 2**21  # bytes: larger slots leave the caches, smaller ones cost more Python code
SLOTS = 16
SEMAPHORE = 64  # bytes, one cache line; a sem_t has 32 or fewer
ENTRY = 64
HEADER = struct.Struct(f"<{LAYOUT.size}sQII")  # the call, bytes of the message, bytes in the slot, number of the slot
PAGE = 4096


class Functions(NamedTuple):
    """sem_init, sem_post, sem_trywait and sem_timedwait of the C library; they take the address of a semaphore."""

    create: Callable[[int, int, int], int]
    post: Callable[[int], int]
    try_wait: Callable[[int], int]
    timed_wait: Callable[[int, ctypes.Structure], int]


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def load() -> Functions | None:
    """The functions of the C library, or None if it lacks one. Those that never block keep the interpreter lock: that is faster."""
    blocking, quick = ctypes.CDLL(None), ctypes.PyDLL(None)
    try:
        create, post, try_wait = quick.sem_init, quick.sem_post, quick.sem_trywait
        timed_wait = blocking.sem_timedwait
    except AttributeError:
        return None
    create.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    post.argtypes = try_wait.argtypes = [ctypes.c_void_p]
    timed_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(Timespec)]
    return Functions(create, post, try_wait, timed_wait)


def sleep_until_posted(functions: Functions, semaphore: int, seconds: float) -> bool:
    """Wait for a semaphore, at most some seconds; return whether it was posted."""
    at = time.time() + seconds
    until = Timespec(int(at), int(at % 1 * 1e9))
    return functions.timed_wait(semaphore, until) == 0


def block_bytes() -> int:
    """Bytes of one rank's semaphores and entries."""
    return 2 * SEMAPHORE + SLOTS * ENTRY


def first_slot(members: int) -> int:
    """Return the offset of the first slot."""
    return -(-members * block_bytes() // PAGE) * PAGE


def area_bytes(members: int) -> int:
    """Size of an area that `members` ranks share."""
    return first_slot(members) + SLOTS * SLOT


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def prepare(memory: mmap.mmap, members: int) -> None:
    """Create the semaphores of a new area, all closed."""
    functions = load()
    assert functions is not None
    base = address(memory)
    for member in range(members):
        for k in range(2):
            functions.create(base + member * block_bytes() + k * SEMAPHORE, 1, 0)


class ReaderBlock(NamedTuple):
    """One reader's part of an area: the addresses of its semaphores, and where its entries begin."""

    memory: mmap.mmap
    data: int
    returned: int
    entries: int

    @classmethod
    def of(cls, memory: mmap.mmap, member: int) -> ReaderBlock:
        at = member * block_bytes()
        base = address(memory) + at
        return cls(memory, base, base + SEMAPHORE, at + 2 * SEMAPHORE)


log = logging.getLogger("meshwright.comm")


class Connection(NamedTuple):
    """A connected peer: a handle of its process, and the areas of this rank and of the peer."""

    process: io.FileIO
    outgoing: mmap.mmap
    incoming: mmap.mmap
    peer: int
    rank: int


class Identity(NamedTuple):
    """Facts that ranks compare before they share memory, and where the memory of a rank is; file −1: it has none."""

    host: str
    namespace: int
    user: int
    process: int
    started: int
    file: int

    def shares_memory_with(self, other: Identity) -> bool:
        return self.file >= 0 and other.file >= 0 and self[:3] == other[:3]

    def connection(self, peer: int, outgoing: mmap.mmap, rank: int, members: int) -> Connection:
        """Open the memory of this peer; raises OSError if its process has ended, or is not visible here."""
        process = io.FileIO(os.pidfd_open(self.process))
        file = os.open(f"/proc/{self.process}/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if process_start(self.process) != self.started or os.fstat(file).st_size != area_bytes(members):
                raise OSError("a rank has no memory of this group")
            return Connection(process, outgoing, mmap.mmap(file, area_bytes(members)), peer, rank)
        finally:
            os.close(file)


def supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and load() is not None


def host_id() -> str:
    """The same for all processes of one running kernel, also in containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return socket.gethostname()


def network_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0


def connect(store: Any, rank: int, size: int, wanted: bool = True) -> dict[int, Connection]:
    """Connect to all other ranks of the group; nothing if some rank is on another host or cannot share memory.

    All ranks of the group must call it; one that does not want shared memory only publishes where it is.
    """
    connections: dict[int, Connection] = {}
    file, process = -1, os.getpid()
    with gloo_instead(rank):
        file, outgoing = new_area(size) if supported() and wanted else (-1, None)
    me = Identity(host_id(), network_namespace(), os.getuid(), process, process_start(process), file)
    store.set(f"identity/{rank}", json.dumps(me))
    everyone = [Identity(*json.loads(store.get(f"identity/{r}"))) for r in range(size)]
    if all(me.shares_memory_with(one) for one in everyone):
        assert outgoing is not None
        with gloo_instead(rank):
            peers = [peer for peer in range(size) if peer != rank]
            connections = {peer: everyone[peer].connection(peer, outgoing, rank, size) for peer in peers}
    store.set(f"connected/{rank}", str(len(connections)))
    connected = all(int(store.get(f"connected/{r}")) >= size - 1 for r in range(size))
    if file >= 0:
        os.close(file)  # all peers have opened it, or failed
    return connections if connected else {}


@contextlib.contextmanager
def gloo_instead(rank: int) -> Iterator[None]:
    """Where memory cannot be shared, say so and go on without it."""
    try:
        yield
    except OSError as error:
        log.warning("rank %d: no shared memory (%s); the group uses gloo", rank, error)


def hosts(store: Any, size: int) -> list[tuple[int, ...]]:
    """The ranks by host and network namespace, in the order of their first rank."""
    nodes: dict[tuple, list[int]] = {}
    for rank in range(size):
        me = Identity(*json.loads(store.get(f"identity/{rank}")))
        nodes.setdefault(me[:2], []).append(rank)
    return [tuple(members) for members in nodes.values()]


def new_area(members: int) -> tuple[int, mmap.mmap]:
    """The file of a new area, which only its owner may open through /proc, and its memory."""
    file = os.memfd_create("meshwright", os.MFD_CLOEXEC)
    os.fchmod(file, 0o600)
    os.ftruncate(file, area_bytes(members))
    memory = mmap.mmap(file, area_bytes(members))
    prepare(memory, members)
    return file, memory


def leave(memory: mmap.mmap, member: int) -> None:
    """Write into the block of a rank in its own area, which it never reads, that it has left the group."""
    memory[member * block_bytes() + 2 * SEMAPHORE] = 1


def has_left(memory: mmap.mmap, member: int) -> bool:
    return memory[member * block_bytes() + 2 * SEMAPHORE] == 1
