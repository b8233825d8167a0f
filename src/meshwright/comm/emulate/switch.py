"""The switch process: links of a rate and a delay in user space, for kernels without netem.

Every node has a TUN device; what its kernel sends is read here, waits, and is written to the device of its destination. A frame of
n bytes on the wire passes links 1 … k (out of the node, up, down, into the node), each free from time f on:

    start_i = max(start_{i-1}, f_i)       f_i ← start_i + n / rate_i       (start_0: when it was read)
    delivered at  max_i f_i + delay

The links work on a frame at the same time (cut-through), as on a wire: a frame of 64 KiB is paid once, not once per link. A node
whose own link is more than `BACKLOG_S` behind is not read for a while: its queue fills and its TCP waits. Frames that several nodes
send to one wait here, bounded by the windows of TCP (`emulation.tcp_settings`). So no frame is ever dropped, as on a lossless
fabric. Acknowledgements overtake data: with windows waiting in both directions each would slow the other.

Python needs about 40 µs for a frame; with frames of 20 to 60 KiB that is a few percent of a core at 200 Mb/s, and the limit is
some Gb/s in all. The process runs with real-time priority, since a late frame is a wrong delay. It ends with SIGTERM, or when its
namespaces are gone.

Frames between a TUN device and the switch process: how a frame is read, its destination, and what it costs on the wire.

The kernel hands over a packet before it cuts it into frames of the link's size (segmentation offload), up to 64 KiB in one piece:
one system call in place of forty. A header of 10 bytes before each packet (`virtio_net_hdr`) has the size of the cuts; it is passed
on unchanged, so that the receiving kernel treats the packet as the sending one did. On the wire each frame has separate headers.
"""

import contextlib
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from meshwright.comm.emulate import system
from meshwright.comm.emulate.topology import INTERFACE, Topology, address, namespace
from meshwright.units import Json

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
CHECKSUM, SEGMENTATION_V4 = 0x01, 0x02  # offloads: the kernel may leave both to the device
OFFLOAD_HEADER = struct.Struct("=BBHHHH")  # flags, kind, header bytes, bytes of one cut, checksum start and offset
ETHERNET_BYTES = 14
MAX_FRAME = OFFLOAD_HEADER.size + 65536
TCP, ACK_FLAG = 6, 0x10
MAX_ACKNOWLEDGEMENT = OFFLOAD_HEADER.size + 60 + 60  # the largest headers of IP and TCP
ADDRESS_AT = OFFLOAD_HEADER.size + 16  # of the IPv4 destination


def open_tun() -> int:
    """Make the network device of a node in the namespace of this thread, and return its file. It lives as long as the file is
    open."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(file, TUNSETOFFLOAD, CHECKSUM | SEGMENTATION_V4)
    except BaseException:
        os.close(file)
        raise
    return file


def destination(frame: bytes) -> bytes | None:
    """The four bytes of the IPv4 address of a frame's destination; None for another protocol or a frame that is too short."""
    if len(frame) < ADDRESS_AT + 4 or frame[OFFLOAD_HEADER.size] >> 4 != 4:
        return None
    return frame[ADDRESS_AT : ADDRESS_AT + 4]


def wire_bytes(frame: bytes) -> int:
    """Bytes of a frame on an Ethernet wire: its data, and the headers of every cut."""
    _, kind, headers, cut, _, _ = OFFLOAD_HEADER.unpack_from(frame)
    size = len(frame) - OFFLOAD_HEADER.size
    if not kind or not cut:
        return size + ETHERNET_BYTES
    data = size - headers
    return data + -(-data // cut) * (headers + ETHERNET_BYTES)


def is_acknowledgement(frame: bytes) -> bool:
    """Whether a frame is a TCP acknowledgement without data: it may overtake data without harm."""
    if len(frame) > MAX_ACKNOWLEDGEMENT or len(frame) < OFFLOAD_HEADER.size + 40:
        return False
    ip = OFFLOAD_HEADER.size
    tcp = ip + (frame[ip] & 0x0F) * 4
    if frame[ip + 9] != TCP or len(frame) < tcp + 20:
        return False
    return len(frame) == tcp + (frame[tcp + 12] >> 4) * 4 and frame[tcp + 13] == ACK_FLAG


BACKLOG_S = 4e-3
MAX_WAIT_S = 2.0  # between two looks at whether the namespaces still exist
READS_PER_TURN = 8  # frames taken from one node before the other nodes have their turn


class Switch:
    """Frames on their way, and when each link is free."""

    def __init__(self, topology: Topology, files: list[int]) -> None:
        self.topology, self.files = topology, files
        self.node_of = {socket.inet_aton(address(node)): node for node in range(topology.nodes)}
        self.free_at: dict[tuple[str, int], float] = {}
        self.blocked_until = [0.0] * len(files)
        self.waiting: list[tuple[float, int, int, bytes]] = []  # delivery time, number, node, frame
        self.count = 0

    def turn(self) -> None:
        """Wait for a frame or for the time of the next delivery; then read, and deliver what is due."""
        now = time.monotonic()
        blocked = [until for until in self.blocked_until if until > now]
        due = [self.waiting[0][0]] if self.waiting else []
        wait = min([*blocked, *due, now + MAX_WAIT_S]) - now
        readable = [file for file, until in zip(self.files, self.blocked_until, strict=True) if until <= now]
        ready, _, _ = select.select(readable, [], [], max(0.0, wait))
        for file in ready:
            self.read_node(self.files.index(file))
        self.deliver(time.monotonic())

    def read_node(self, node: int) -> None:
        for _ in range(READS_PER_TURN):
            try:
                frame = os.read(self.files[node], MAX_FRAME)
            except BlockingIOError:
                return
            now = time.monotonic()
            behind = self.admit(node, frame, now)
            if behind > BACKLOG_S:
                self.blocked_until[node] = now + behind - BACKLOG_S
                return

    def admit(self, node: int, frame: bytes, now: float) -> float:
        """Put a frame on its way; return by how many seconds the link out of the node is behind."""
        target = self.node_of.get(destination(frame) or b"")
        if target is None or target == node:
            return 0.0
        size, start, last = wire_bytes(frame), now, now
        overtakes = is_acknowledgement(frame)
        for link in self.topology.links(node, target):
            free, seconds = self.free_at.get(link, 0.0), size / self.topology.capacity(link)
            self.free_at[link] = max(start, free) + seconds
            start = start if overtakes else max(start, free)
            last = max(last, start + seconds)
        self.count += 1
        heapq.heappush(self.waiting, (last + self.topology.delay, self.count, target, frame))
        return self.free_at["out", node] - now

    def deliver(self, now: float) -> None:
        while self.waiting and self.waiting[0][0] <= now:
            _, _, node, frame = heapq.heappop(self.waiting)
            with contextlib.suppress(
                BlockingIOError, OSError
            ):  # a device that is down loses its frames, as a cable would
                os.write(self.files[node], frame)


def raise_priority() -> None:
    """Real-time priority if that is allowed, else the highest ordinary one."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-20)


def main(name: str, settings: Json) -> None:
    """Make the devices, print "ready", and carry frames once the parent has answered.

    If the parent ends before it answers, so does this process: an interrupted `up` leaves no switch behind."""
    topology = Topology(**settings)
    paths = [system.NAMESPACES / namespace(name, node) for node in range(topology.nodes)]
    files = [system.in_namespace(path.name, open_tun) for path in paths]
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    raise_priority()
    switch, look_at = Switch(topology, files), time.monotonic() + MAX_WAIT_S
    while True:
        switch.turn()
        if time.monotonic() > look_at:
            look_at = time.monotonic() + MAX_WAIT_S
            if not all(map(Path.exists, paths)):
                return


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal of `up` is the parent's
    main(sys.argv[1], json.loads(sys.argv[2]))
