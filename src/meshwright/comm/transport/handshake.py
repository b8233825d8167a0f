"""Connect the ranks of a group that are all on one host: sockets, and memory that all of them read.

Ranks may share memory only if they are on the same host (kernel boot id), in the same network namespace (an emulated
node must use its emulated network) and of the same user. Each rank publishes these three and the address of its socket to
the group's store. Then each pair of ranks opens one Unix socket and exchanges anonymous memory files through it: each
rank gives the file of its area to all others. The socket stays open: it closes with its process, which
peers notice. A group uses shared memory only if all its ranks report that they are connected; otherwise it uses messages of gloo.

**Nothing to clean up.** The sockets have names in the kernel's abstract namespace, which belongs to the network namespace and
is empty after the process ends. The memory files (`memfd_create`) have no name at all: they are not in /dev/shm, no other
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
import json
import logging
import mmap
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.comm.call import LAYOUT

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


HELLO = struct.Struct("<I16s")  # rank, token of the listening rank

log = logging.getLogger("meshwright.comm")


class Connection(NamedTuple):
    """A connected peer: the socket that closes when it ends, and the areas of this rank and of the peer."""

    socket: socket.socket
    outgoing: mmap.mmap
    incoming: mmap.mmap
    peer: int
    rank: int


class Identity(NamedTuple):
    """Facts that ranks compare before they share memory."""

    host: str
    namespace: int
    user: int
    address: str
    token: str

    def shares_memory_with(self, other: Identity) -> bool:
        return bool(self.address and other.address) and self[:3] == other[:3]


def supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create") and load() is not None


def host_id() -> str:
    """The same for all processes of one running kernel, also in containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return socket.gethostname()


def network_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0


def connect(store: Any, rank: int, size: int, timeout: float, wanted: bool = True) -> dict[int, Connection]:
    """Connect to all other ranks of the group; nothing if some rank is on another host or cannot share memory.

    All ranks of the group must call it; one that does not want shared memory only publishes where it is.
    """
    connections: dict[int, Connection] = {}
    listener: socket.socket | None = None
    address, token = "", secrets.token_bytes(16)
    if supported() and wanted:
        try:
            os.close(new_memory(1))  # a rank without memory must not be waited for
            listener, address = listen(size)
        except OSError as error:
            log.warning("rank %d: no shared memory (%s); the group uses gloo", rank, error)
    me = Identity(host_id(), network_namespace(), os.getuid(), address, token.hex())
    store.set(f"identity/{rank}", json.dumps(me))
    everyone = [Identity(*json.loads(store.get(f"identity/{r}"))) for r in range(size)]
    if listener is not None:
        try:
            if all(me.shares_memory_with(one) for one in everyone):
                connections = connect_peers(rank, everyone, listener, time.monotonic() + timeout)
        except OSError as error:
            log.warning("rank %d: no shared memory (%s); the group uses gloo", rank, error)
        finally:
            listener.close()
    store.set(f"connected/{rank}", str(len(connections)))
    if any(int(store.get(f"connected/{r}")) < size - 1 for r in range(size)):
        for connection in connections.values():
            connection.socket.close()
        return {}
    return connections


def hosts(store: Any, size: int) -> list[tuple[int, ...]]:
    """The ranks by host and network namespace, in the order of their first rank."""
    nodes: dict[tuple, list[int]] = {}
    for rank in range(size):
        me = Identity(*json.loads(store.get(f"identity/{rank}")))
        nodes.setdefault(me[:2], []).append(rank)
    return [tuple(members) for members in nodes.values()]


def listen(backlog: int) -> tuple[socket.socket, str]:
    """A socket in the abstract namespace under a random name."""
    address = f"meshwright-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address}")
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener, address


def connect_peers(
    rank: int, everyone: list[Identity], listener: socket.socket, deadline: float
) -> dict[int, Connection]:
    """Connect to the lower ranks, accept the higher ones, and exchange memory with each."""
    links: dict[int, socket.socket] = {}
    incoming: dict[int, mmap.mmap] = {}
    left, size = partial(time_left, deadline), len(everyone)
    file, outgoing = new_area(size)
    try:
        for peer in range(rank):
            links[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            links[peer].settimeout(left())
            links[peer].connect(f"\0{everyone[peer].address}")
            socket.send_fds(links[peer], [HELLO.pack(rank, bytes.fromhex(everyone[peer].token))], [file])
        while len(links) < size - 1:
            listener.settimeout(left())
            token = bytes.fromhex(everyone[rank].token)
            peer, link, memory = accept(listener, token, size, left())
            links[peer], incoming[peer] = link, memory
            socket.send_fds(link, [HELLO.pack(rank, bytes(16))], [file])
        for peer in range(rank):
            links[peer].settimeout(left())
            _, incoming[peer] = receive_memory(links[peer], size)
    except OSError:
        for link in links.values():
            link.close()
        raise
    finally:
        os.close(file)
    for link in links.values():
        link.setblocking(False)
    return {peer: Connection(link, outgoing, incoming[peer], peer, rank) for peer, link in links.items()}


def time_left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def accept(listener: socket.socket, token: bytes, members: int, timeout: float) -> tuple[int, socket.socket, mmap.mmap]:
    """The next rank of this group that connects; a process of another user, or one without the token, is turned away."""
    while True:
        link, _ = listener.accept()
        link.settimeout(timeout)
        try:
            hello, memory = receive_memory(link, members)
        except OSError:
            link.close()
            continue
        peer, given = HELLO.unpack(hello)
        if given == token and user_of(link) == os.getuid():
            return peer, link, memory
        link.close()


def new_memory(members: int) -> int:
    """An anonymous memory file for one area; only its owner may open it through /proc."""
    file = os.memfd_create("meshwright", os.MFD_CLOEXEC)
    os.fchmod(file, 0o600)
    os.ftruncate(file, area_bytes(members))
    return file


def new_area(members: int) -> tuple[int, mmap.mmap]:
    """The file of a new area, and its memory."""
    file = new_memory(members)
    memory = mmap.mmap(file, area_bytes(members))
    prepare(memory, members)
    return file, memory


def receive_memory(link: socket.socket, members: int) -> tuple[bytes, mmap.mmap]:
    """Receive a greeting and the area that comes with it."""
    hello, files, _, _ = socket.recv_fds(link, HELLO.size, 1)
    try:
        size = area_bytes(members)
        if len(hello) != HELLO.size or len(files) != 1 or os.fstat(files[0]).st_size != size:
            raise OSError("a rank sent no memory")
        return hello, mmap.mmap(files[0], size)
    finally:
        for file in files:
            os.close(file)


def user_of(link: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user
