"""Connect the ranks of a group that are all on one host: memory that all of them read, and a pipe from each to each.

Ranks may share memory only if they are on the same host (kernel boot id), in the same network namespace (an emulated
node must use its emulated network) and of the same user. Each rank makes an anonymous memory file for its area and a pipe for each peer, and
publishes these three, its process and the numbers of the files to the group's store; the others open the files through /proc. They keep a
handle of the process, by which they notice its end; a rank that leaves the group closes its pipes. A group uses shared memory only if all
its ranks report that they are connected; otherwise it uses messages of gloo.

**Nothing to clean up.** The files have no name: they are not in /dev/shm, no other user can open them, and the kernel frees them when the last
process that has opened them ends, however it ends. A full /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import mmap
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.host import process_start

SLOT = 2**21  # bytes: larger slots leave the caches, smaller ones cost more Python code
SLOTS = 16

log = logging.getLogger("meshwright.comm")


@dataclass
class PeerLink:
    """A connected peer: a handle of its process, the ends of two pipes, its area, and the entries that it has sent and nobody has read."""

    peer: int
    process: io.FileIO  # readable when the process has ended
    inbox: io.FileIO
    outbox: io.FileIO
    area: mmap.mmap
    entries: deque[Any] = field(default_factory=deque)
    unreturned: int = 0  # slots of this rank that the peer still reads
    closed: bool = False


class Identity(NamedTuple):
    """Facts that ranks compare before they share memory, and the numbers of a rank's files: its area, and the pipe of each peer."""

    host: str
    namespace: int
    user: int
    process: int
    started: int
    area: int  # −1: it has none
    pipes: list[int]

    def shares_memory_with(self, other: Identity) -> bool:
        return self.area >= 0 and other.area >= 0 and self[:3] == other[:3]

    def link(self, peer: int, rank: int, inbox: io.FileIO) -> PeerLink:
        """Open the files of this peer; raises OSError if its process has ended, or is not visible here."""
        process = io.FileIO(os.pidfd_open(self.process))
        if process_start(self.process) != self.started:
            raise OSError("a rank has ended")
        area, outbox = (f"/proc/{self.process}/fd/{number}" for number in (self.area, self.pipes[rank]))
        with open(area, "r+b", buffering=0) as file:
            return PeerLink(peer, process, inbox, io.FileIO(outbox, "w"), mmap.mmap(file.fileno(), SLOTS * SLOT))


def host_id() -> str:
    """The same for all processes of one running kernel, also in containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return socket.gethostname()


def network_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0


def connect(store: Any, rank: int, size: int, wanted: bool = True) -> tuple[mmap.mmap, dict[int, PeerLink]] | None:
    """This rank's area, and its links to all other ranks of the group; None if some rank is on another host or cannot share memory.

    All ranks of the group must call it; one that does not want shared memory only publishes where it is.
    """
    area, inboxes, links = -1, dict[int, io.FileIO](), dict[int, PeerLink]()
    published, process = [-1] * size, os.getpid()  # numbers of the files that peers open
    with gloo_instead(rank):
        if wanted and sys.platform == "linux" and hasattr(os, "pidfd_open"):
            for peer in set(range(size)) - {rank}:
                inbox, published[peer] = os.pipe()
                os.set_blocking(inbox, False)
                inboxes[peer] = io.FileIO(inbox)
            area = os.memfd_create("meshwright", os.MFD_CLOEXEC)
            os.fchmod(area, 0o600)
            os.ftruncate(area, SLOTS * SLOT)
    me = Identity(host_id(), network_namespace(), os.getuid(), process, process_start(process), area, published)
    store.set(f"identity/{rank}", json.dumps(me))
    everyone = [Identity(*json.loads(store.get(f"identity/{r}"))) for r in range(size)]
    if all(me.shares_memory_with(one) for one in everyone):
        with gloo_instead(rank):
            links = {peer: everyone[peer].link(peer, rank, inbox) for peer, inbox in inboxes.items()}
    store.set(f"connected/{rank}", str(len(links)))
    connected = size > 1 and all(int(store.get(f"connected/{r}")) == size - 1 for r in range(size))
    memory = mmap.mmap(area, SLOTS * SLOT) if connected else None
    for file in (area, *published):  # all peers have opened them, or failed
        if file >= 0:
            os.close(file)
    return (memory, links) if memory is not None else None


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
        nodes.setdefault(tuple(json.loads(store.get(f"identity/{rank}"))[:2]), []).append(rank)
    return [tuple(members) for members in nodes.values()]
