"""The memory in which a rank places its messages to the other ranks of its host, and the semaphores in it.

    semaphores and entries, one block for each rank of the host      slots
    [data ready | slots returned | ring of SLOTS entries] × members  [SLOT bytes] × SLOTS

A rank writes only its area (except for the semaphore by which a reader returns a slot), and all ranks of the host
read it. So data for several ranks is copied once: each of them gets an entry that names the same slot.

**POSIX semaphores**, called through ctypes, order the memory accesses also on processors with a weak memory model: what was written
before `sem_post` is visible after the `sem_wait` that it allows. They need no system call while no rank sleeps, and a rank
that waits longer sleeps in the kernel and leaves its core to the others (ranks may outnumber cores).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from meshwright.comm.call import LAYOUT

SLOT = 2**19  # bytes: larger slots leave the caches, smaller ones cost more Python code
SLOTS = 32
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
    """Where the slots begin."""
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


class Block(NamedTuple):
    """One reader's part of an area: the addresses of its semaphores, and where its entries begin."""

    memory: mmap.mmap
    data: int
    returned: int
    entries: int

    @classmethod
    def of(cls, memory: mmap.mmap, member: int) -> Block:
        at = member * block_bytes()
        base = address(memory) + at
        return cls(memory, base, base + SEMAPHORE, at + 2 * SEMAPHORE)
