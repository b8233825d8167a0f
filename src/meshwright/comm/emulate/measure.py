"""Measure what the links carry: bytes per second and round trips between sockets in the namespaces of nodes.

    alone     node 0 sends to node 1 and no other node sends: the rate of one link
    ring      every node sends to the next one at once: what a ring all-reduce does, and what the machine must carry in all
    across    every node sends to its partner under the next switch at once: the shared uplinks (only if oversubscribed)

The receiver counts after a warm-up, in which TCP finds the rate and the token buckets empty. The asked rate is that of data: the
link's rate less headers (`Topology.rate_between`). All senders and receivers are threads of this process; Python copies some
GB/s, far more than such a test needs.
"""

import contextlib
import socket
import statistics
import threading
import time
from dataclasses import asdict, dataclass

from meshwright.comm.emulate.system import in_namespace
from meshwright.comm.emulate.topology import Topology, address, namespace
from meshwright.errors import MeshwrightError
from meshwright.units import Json

WARMUP_S, STREAM_S = 0.4, 0.8
ROUND_TRIPS = 30
CHUNK = 256 * 2**10
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Rate:
    """A pattern of traffic: bytes/s of data per sender, as asked and as the slowest and the median sender achieved."""

    pattern: str
    senders: int
    asked: float
    slowest: float
    median: float

    @property
    def share(self) -> float:
        return self.slowest / self.asked


@dataclass(frozen=True)
class LinkMeasurement:
    """Round trips in seconds (asked, median, slowest pair) and the rates by pattern."""

    round_trip_asked_s: float
    round_trip_s: float
    round_trip_slowest_s: float
    rates: tuple[Rate, ...]

    def as_dict(self) -> Json:
        return {**asdict(self), "rates": [asdict(rate) for rate in self.rates]}


def measure(name: str, topology: Topology) -> LinkMeasurement:
    """Measure all patterns; about 1.3 s each. Raises if a node does not answer."""
    try:
        trips = [round_trip(name, 0, node) for node in range(1, topology.nodes)]
        traffic = ((pattern, pairs) for pattern, pairs in patterns(topology).items() if pairs)
        rates = tuple(measure_rate(name, topology, *one) for one in traffic)
    except OSError as error:
        what, fix = f"the nodes of emulation '{name}' do not reach each other", f"meshwright emulate down --name {name}"
        raise MeshwrightError("MW-EMU-010", what, why=str(error), fix=fix) from error
    median, slowest = (statistics.median(trips), max(trips)) if trips else (0.0, 0.0)
    return LinkMeasurement(topology.round_trip, median, slowest, rates)


def patterns(topology: Topology) -> dict[str, list[tuple[int, int]]]:
    """(sender, receiver) pairs by pattern."""
    nodes, step = range(topology.nodes), topology.nodes_per_switch
    shifted = {"ring": 1, "across": step if topology.oversubscription > 1 else 0}
    found = {"alone": [(0, 1)] if topology.nodes > 1 else []}
    for pattern, shift in shifted.items():
        found[pattern] = [(node, (node + shift) % topology.nodes) for node in nodes if shift % topology.nodes]
    return found


def measure_rate(name: str, topology: Topology, pattern: str, pairs: list[tuple[int, int]]) -> Rate:
    streams = [Stream(name, *pair) for pair in pairs]
    try:
        for stream in streams:
            stream.start()
        time.sleep(WARMUP_S)
        before = [(stream.received, time.monotonic()) for stream in streams]
        time.sleep(STREAM_S)
        after = [(stream.received, time.monotonic()) for stream in streams]
    finally:
        for stream in streams:
            stream.stop()
    achieved = [(n1 - n0) / (t1 - t0) for (n0, t0), (n1, t1) in zip(before, after, strict=True)]
    return Rate(pattern, len(pairs), topology.rate_between(pairs), min(achieved), statistics.median(achieved))


class Stream:
    """One TCP connection that a thread fills as fast as it can while another thread counts what arrives."""

    def __init__(self, name: str, sender: int, receiver: int) -> None:
        self.source, self.sink = connect(name, sender, receiver)
        self.received = 0
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        for end in (self.source, self.sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(TIMEOUT_S)
        self.source.close()
        self.sink.close()

    def _send(self) -> None:
        data = bytes(CHUNK)
        with contextlib.suppress(OSError):
            while True:
                self.source.sendall(data)

    def _receive(self) -> None:
        buffer = bytearray(CHUNK)
        with contextlib.suppress(OSError):
            while count := self.sink.recv_into(buffer):
                self.received += count


def connect(name: str, sender: int, receiver: int) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, in the namespaces of two nodes."""

    def listen() -> socket.socket:
        server = socket.create_server((address(receiver), 0))
        server.settimeout(TIMEOUT_S)
        return server

    with in_namespace(namespace(name, receiver), listen) as server:
        target = server.getsockname()
        source = in_namespace(namespace(name, sender), lambda: socket.create_connection(target, TIMEOUT_S))
        try:
            sink, _ = server.accept()
        except BaseException:
            source.close()
            raise
    for end in (source, sink):
        end.settimeout(TIMEOUT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return source, sink


def round_trip(name: str, first: int, second: int) -> float:
    """Median seconds of one byte there and back."""
    source, sink = connect(name, first, second)
    answering = threading.Thread(target=_echo, args=(sink,), daemon=True)
    answering.start()
    seconds = []
    try:
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            source.sendall(b"x")
            if not source.recv(1):
                raise ConnectionResetError("a node closed the connection")
            seconds.append(time.perf_counter() - start)
    finally:
        source.close()
        answering.join(TIMEOUT_S)
        sink.close()
    return statistics.median(seconds)


def _echo(sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := sink.recv(64):
            sink.sendall(data)
