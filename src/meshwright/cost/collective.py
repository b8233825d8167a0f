"""How long a collective takes: the algorithm to pick for a size on a topology, and the library's curve that a training run meets.

The closed costs of every algorithm stand in `programs.collectives.formulas`; `best_algorithm` picks by them. Few bytes want few messages
(halving-doubling, trees), many bytes want each byte moved once (rings), and groups that span nodes want the two-level forms, which send
through each network card only its share.

**Library** (NCCL and its kin): a base cost per call, hops along the cheaper of ring and tree, and the slower of what passes
inside nodes and what passes between them, since the levels are pipelined. A group with p members in each of N nodes runs p rings, one
through each network card of a node; a ring moves in lockstep, so each of its P−1 steps takes the slowest hop:

    t = base + hops + 2√(ℓ·t_wire) + t_wire,   t_wire = max( m(n,P)/B₀ , m(n,P)/(p·B₁) )

The square root is what remains of α when a message is cut into the best number of chunks. Bandwidths are the *reached* ones of the
cluster's links. Where switches reduce (NVLink SHARP) an all-reduce inside a node moves each byte once instead of twice.
"""

from __future__ import annotations

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.errors import unknown
from meshwright.lower.batch import Batch
from meshwright.lower.op import Array, Op
from meshwright.programs.collectives import formulas

BASE = 8e-6  # one call: kernel start and its synchronisation
BASE_ACROSS = 30e-6  # the same when network cards take part
CHUNK = 2.5e-6  # ℓ
PAIR_LOSS = 0.45  # a group of P reaches (1 − 0.45/P) / (1 − 0.45/8) of what eight do, where links are measured


def log2ceil(p: Array) -> Array:
    return np.ceil(np.log2(np.maximum(p, 1)))


def best_algorithm(operation: str, n: float, ranks: int, cluster: Cluster) -> tuple[str, float]:
    """The fastest algorithm for n bytes over the first `ranks` devices of a cluster, and its seconds.

    An algorithm that knows no nodes pays the slowest link it meets in every step; node-aware ones need equal nodes.
    """
    nodes = -(-ranks // cluster.node_size)
    inner = cluster.levels[0].link
    outer = cluster.levels[min(1, len(cluster.levels) - 1)].link if nodes > 1 else inner
    gamma = cluster.accelerator.gamma
    times = {}
    for kind, algorithm in formulas.FORMULAS:
        if kind != operation:
            continue
        cost = formulas.terms(operation, algorithm, ranks, nodes=nodes)
        aware = bool(cost.outer_alpha or cost.outer_beta)
        if aware and ranks % nodes:
            continue
        times[algorithm] = cost.time(n, inner if aware else outer, gamma, outer)
    if not times:
        raise unknown("MW-PROG-005", "collective", operation, sorted({o for o, _ in formulas.FORMULAS}))
    return min(times.items(), key=lambda item: item[1])


class Network:
    """The library's collectives on a cluster, for a batch of plans."""

    def __init__(self, cluster: Cluster, batch: Batch) -> None:
        self.cluster, self.batch = cluster, batch
        self._axes: dict[str, tuple[Array, ...]] = {}
        self._times: dict[tuple[str, str, int], tuple[Array, Array]] = {}
        self._curves: dict[tuple[str, str], tuple[Array, ...]] = {}
        top = len(cluster.levels) - 1
        self.inside = cluster.device_bandwidth(0)
        self.outside = [cluster.device_bandwidth(k) for k in range(1, top + 1)] or [self.inside]
        self.hop_in = cluster.levels[0].link.library_hop
        self.hop_out = cluster.levels[min(1, top)].link.library_hop

    def geometry(self, axis: str) -> tuple[Array, ...]:
        """Group size P, members p in a node, nodes N, and the device bandwidth of the highest level spanned."""
        if axis not in self._axes:
            size = self.batch.size(axis)
            inner = np.minimum(self.batch.members(axis, self.cluster.node_size), size)
            nodes = size / inner
            outside = np.full(self.batch.n, self.outside[0])
            for k in range(1, len(self.cluster.levels) - 1):
                crosses = self.batch.members(axis, self.cluster.spans[k]) < size
                outside = np.where(crosses, self.outside[k], outside)
            self._axes[axis] = (size, inner, nodes, outside)
        return self._axes[axis]

    def time(self, op: Op) -> Array:
        """Seconds of one occurrence of a collective or a send. Operations that share their message array are timed once."""
        key = (op.collective, op.axis, id(op.message_bytes))
        if key not in self._times:
            self._times[key] = (self._time(op), op.message_bytes)  # holding the array keeps its id from being reused
        return self._times[key][0]

    def _time(self, op: Op) -> Array:
        several, start, byte, tree, tree_byte = self._curve(op.collective, op.axis)
        wire = op.message_bytes * byte
        if op.collective == "send":
            return np.where(several, start + wire, 0.0)
        # A tree carries every byte twice through its inner ranks: it wins only while latency rules.
        ways = start + wire if tree is None else np.minimum(start + wire, tree + op.message_bytes * tree_byte)
        return np.where(several, ways + 2 * np.sqrt(CHUNK * wire), 0.0)

    def _curve(self, collective: str, axis: str) -> tuple[Array, ...]:
        """Of an axis: whether there is anybody, seconds to start and of a byte around a ring, and along a tree where there is one."""
        key = (collective, axis)
        if key not in self._curves:
            self._curves[key] = self._make_curve(collective, axis)
        return self._curves[key]

    def _make_curve(self, collective: str, axis: str) -> tuple[Array, ...]:
        size, inner, nodes, outside = self.geometry(axis)
        across = nodes > 1
        base = np.where(across, BASE_ACROSS, BASE)
        if collective == "send":
            start = base + np.where(across, self.hop_out, self.hop_in)
            return size > 1, start, 1 / np.where(across, outside, self.inside), None, None
        factor = 2.0 if collective == "all_reduce" else 1.0
        inside_rate = self.inside * (1 - PAIR_LOSS / size) / (1 - PAIR_LOSS / 8)
        # A ring moves in lockstep: each of its P−1 steps takes as long as its slowest hop.
        ring = (size - 1) * np.where(across, max(self.hop_in, self.hop_out), self.hop_in)
        if collective == "all_to_all":
            byte = np.maximum((inner - 1) / size / inside_rate, (size - inner) / size / outside)
            return (
                size > 1,
                base + np.minimum(ring, size * 1e-6 + np.where(across, self.hop_out, self.hop_in)),
                byte,
                None,
                None,
            )
        in_switch = factor == 2.0 and self.cluster.levels[0].reduces
        moved = np.where(~across & (inner >= 8), 1.45, 2.0) if in_switch else factor
        byte = np.maximum(
            moved * (size - 1) / size / inside_rate,
            np.where(across, factor * (size - 1) / size / (inner * outside), 0.0),
        )
        if collective != "all_reduce":
            return size > 1, base + ring, byte, None, None
        tree = 2 * (log2ceil(inner) * self.hop_in + log2ceil(nodes) * self.hop_out)
        return size > 1, base + 2 * ring, byte, base + tree, 2 * byte
