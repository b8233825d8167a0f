"""The messages of a program, and the ports of a cluster that they pass.

All chunks that one rank sends to another in one step are one **message**: they pay α once. A message from device to
device passes ports (`Cluster.path`), each with a capacity in bytes/s. Flows through the same port share it **max-min
fairly**: no flow can get a higher rate without lowering the rate of a slower flow. The rates are found by *progressive
filling*: raise all rates together until a port is full, freeze the flows through it, and continue with the other flows.

A port is **private** if two messages can never use it at the same time: all messages through it leave the same rank, or
all enter the same rank, and at most one does so per step. If every port is private, no rate depends on other messages,
and the walk needs no event simulation (`walker`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.describe.cluster import Cluster, Path
from meshwright.programs.collectives.program import Array, Program


class Messages(NamedTuple):
    """Columns sorted by step, source, target."""

    step: Array
    source: Array
    target: Array
    bytes: Array
    work: Array  # seconds that the target computes after the arrival: γ per byte added
    bounds: Array  # messages of step t are [bounds[t], bounds[t+1])


def messages(program: Program, element_bytes: float, gamma: float) -> Messages:
    """Return the messages of a program: all moves between the same two ranks in one step are one message."""
    table = program.moves
    size = program.moved * float(element_bytes)
    work = np.zeros(len(size))
    # A switch adds as bytes pass
    np.multiply(size, gamma, out=work, where=table.reduce & (table.target < program.ranks))
    step, source, target = table.step, table.source, table.target
    new = np.ones(len(step), dtype=bool)
    new[1:] = (step[1:] != step[:-1]) | (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    if not new.all():
        first = np.flatnonzero(new)
        step, source, target = step[first], source[first], target[first]
        size, work = np.add.reduceat(size, first), np.add.reduceat(work, first)
    return Messages(step, source, target, size, work, np.searchsorted(step, np.arange(program.steps + 1)))


class LinkRoutes(NamedTuple):
    """Latency and ports of each pair of ranks that communicate; `pair` is the index of each message's pair."""

    pair: Array
    source: Array
    target: Array
    alpha: Array
    ports: Array  # pairs × longest path, padded with the index of a port of infinite capacity
    capacity: Array  # bytes/s of each port; the last one is infinite
    names: list[tuple[Any, ...]]

    @property
    def bottleneck(self) -> Array:
        """Bytes/s of each pair without competing flows."""
        return self.capacity[self.ports].min(axis=1)


def path_of(cluster: Cluster, program: Program, devices: Sequence[int], source: int, target: int) -> Path:
    """Return the path of a message: the full path between two ranks; half of it, with half of α, between a rank and a switch."""
    if max(source, target) < program.ranks:
        return cluster.path(devices[source], devices[target])
    rank, switch = min(source, target), max(source, target)
    device = devices[rank]
    members = [devices[r] for r in program.switches[switch - program.ranks] if r != rank]
    # The switch is at the level that connects all its members
    far = max(members, key=lambda other: cluster.level_between(device, other))
    way, full_path = ("in", cluster.path(far, device)) if source == switch else ("out", cluster.path(device, far))
    kinds = {"in": ("in", "nic-in", "down", "bus"), "out": ("out", "nic-out", "up", "bus")}[way]
    return Path(full_path.alpha / 2, tuple(port for port in full_path.ports if port[0] in kinds))


def routes(sent: Messages, cluster: Cluster, devices: Sequence[int], program: Program) -> LinkRoutes:
    """Return the paths of all pairs of ranks and switches that exchange messages."""
    ranks = program.endpoints
    key = sent.source * np.int32(ranks) + sent.target
    talks = np.zeros(ranks * ranks, dtype=bool)
    talks[key] = True
    pairs = np.flatnonzero(talks)
    number = np.zeros(ranks * ranks, dtype=np.int32)
    number[pairs] = np.arange(len(pairs))
    source, target = np.divmod(pairs, ranks)
    paths = [path_of(cluster, program, devices, s, t) for s, t in zip(source.tolist(), target.tolist(), strict=True)]
    index: dict[tuple[Any, ...], int] = {}
    for path in paths:
        for port in path.ports:
            index.setdefault(port, len(index))
    ports = np.full((len(paths), max((len(path.ports) for path in paths), default=1) or 1), len(index), dtype=np.int64)
    for k, path in enumerate(paths):
        ports[k, : len(path.ports)] = [index[port] for port in path.ports]
    capacity = np.array([cluster.capacity(port) for port in index] + [np.inf])
    alpha = np.array([path.alpha for path in paths])
    return LinkRoutes(number[key], source, target, alpha, ports, capacity, list(index))


def private_pairs(sent: Messages, via: LinkRoutes) -> Array:
    """For each pair, whether all ports on its path are private."""
    count = len(via.capacity)
    pairs_through = np.bincount(via.ports.ravel(), minlength=count)
    one_end = np.zeros(count, dtype=bool)
    for rank in (via.source, via.target):
        low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
        np.minimum.at(low, via.ports, rank[:, None])
        np.maximum.at(high, via.ports, rank[:, None])
        one_end |= low == high
    one_end[-1] = True  # the padding port has no limit, so it is never shared
    crowded = one_end & (pairs_through > 1)
    crowded[-1] = False
    if crowded.any():
        steps = len(sent.bounds)
        keys = []
        for column in via.ports.T:
            port = column[via.pair]
            is_crowded = crowded[port]
            keys.append(port[is_crowded] * steps + sent.step[is_crowded])
        port_step, times = np.unique(np.concatenate(keys), return_counts=True)
        one_end[port_step[times > 1] // steps] = False
    return one_end[via.ports].all(axis=1)


def max_min_rates(ports: Array, capacity: Array) -> Array:
    """Return the max-min fair rates of flows through `ports` (flows × ports, padded with the last, infinite port)."""
    rates = np.full(len(ports), np.inf)
    left = capacity.copy()
    open_flows = np.arange(len(ports))
    while len(open_flows):
        through = np.bincount(ports[open_flows].ravel(), minlength=len(left))
        through[-1] = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(through > 0, left / through, np.inf)
        least = share.min()
        if not np.isfinite(least):
            break
        full = share <= least * (1 + 1e-12)
        stops = full[ports[open_flows]].any(axis=1)
        frozen = open_flows[stops]
        rates[frozen] = least
        left = np.maximum(left - least * np.bincount(ports[frozen].ravel(), minlength=len(left)), 0.0)
        left[-1] = np.inf
        open_flows = open_flows[~stops]
    return rates


def bytes_by_port(sent: Messages, via: LinkRoutes) -> dict[tuple[Any, ...], float]:
    """Return the bytes that pass each port."""
    by_pair = np.bincount(via.pair, weights=sent.bytes, minlength=len(via.alpha))
    total = np.zeros(len(via.capacity))
    np.add.at(total, via.ports, by_pair[:, None])
    return dict(zip(via.names, total[:-1].tolist(), strict=True))
