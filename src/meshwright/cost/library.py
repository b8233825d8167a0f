"""Which algorithm a communication library runs, on which links, and the measured shares of the link rates that it reaches.

**The rule.** NCCL models the time of every algorithm it has for a call (latency + bytes / bandwidth, `src/graph/tuning.cc`) and runs the
one with the smallest time (`ncclTopoGetAlgoTime` is asked for each; NCCL 2.7 to 2.27). It has a tree, NVLS and CollNet (SHARP) for all-reduce;
all-gather and reduce-scatter run rings; all-to-all is a group of sends to all peers at once (`ncclGroupStart … ncclSend/ncclRecv`). NVLS needs
NVSwitches that reduce, more than two GPUs a node (`src/transport/nvls.cc`), CollNet a fabric that reduces. RCCL is NCCL's code without
switches that reduce. gloo has rings (`allreduce.cc`, `allgather.cc`, `reduce_scatter.h`) and posts all blocks of an all-to-all at once
(`alltoall.cc`). So: of the programs a library has, the one whose formula gives the smallest time, which is what `cost.collective` does.

**Links as a library sees them.** A library pays `hop` for a step of a ring or tree (its protocol's synchronisation, above the wire's α),
reaches `efficiency` of the bandwidth, and adds while it receives, so γ is hidden. `library_links` makes that cluster; a program walked on
it takes what the closed formula gives.

**Measured shares on top** (the table of published collectives, `benchmarks/collectives.py`):

    call          seconds of one call before any byte moves, larger when network cards take part
    small group   a group of P in one node reaches (1 − 0.45/P) / (1 − 0.45/8) of what eight reach
    in-switch     reduction in a switch sustains a share of the rate that rings reach (Link.in_switch)
    chunks        a wire time of w takes 2√(ℓ·w) longer, ℓ the start of one chunk: what is left of starting and ending
                  a transfer that is cut into the best number of chunks
"""

from __future__ import annotations

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.lower.op import Array
from meshwright.programs.collectives.comparison import SWITCHED, runs_on

CALL = 8e-6  # kernel start and synchronisation of one call
CALL_ACROSS = 30e-6  # the same when network cards take part
CHUNK = 2.5e-6  # ℓ
PEER = 1e-6  # one more send and receive in a group of them
PAIR_LOSS = 0.45

RINGS = {"all-gather": ("multi-ring",), "reduce-scatter": ("multi-ring",), "all-to-all": ("direct",), "point-to-point": ("direct",)}  # fmt: skip
LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {
    "NCCL": {"all-reduce": ("multi-ring", "rail-tree", "nvls", "sharp"), **RINGS},
    "RCCL": {"all-reduce": ("multi-ring", "rail-tree"), **RINGS},
    "gloo": {"all-reduce": ("multi-ring",), **RINGS},
}


def library_of(cluster: Cluster) -> str:
    """The library that a cluster's devices use: gloo on CPUs, RCCL on AMD Instinct, else NCCL."""
    name = cluster.accelerator.name.lower()
    return "gloo" if name.startswith("cpu") else "RCCL" if name.startswith("mi") else "NCCL"


def algorithms(cluster: Cluster, operation: str) -> tuple[str, ...]:
    """The programs that the cluster's library has for an operation, those of absent switches left out."""
    return tuple(name for name in LIBRARIES[library_of(cluster)].get(operation, ()) if runs_on(cluster, name))


def small_group(size: Array) -> Array:
    """Share of the node's rate that a group of `size` reaches, against eight."""
    return (1 - PAIR_LOSS / size) / (1 - PAIR_LOSS / 8)


def in_switch(cluster: Cluster, algorithm: str) -> tuple[float, float]:
    """Shares of the rates inside nodes and between them that an algorithm reaches: less than all where a switch reduces."""
    inside = cluster.levels[0].link.in_switch if algorithm in SWITCHED else 1.0
    return inside, cluster.levels[1].link.in_switch if algorithm == "sharp" else 1.0


def library_links(cluster: Cluster, operation: str, algorithm: str, ranks: int) -> Cluster:
    """The cluster as its library uses it for one algorithm on a group of `ranks`: hops, reached rates, hidden additions."""
    levels = []
    for k, level in enumerate(cluster.levels):
        link = level.link
        rate = link.bandwidth * in_switch(cluster, algorithm)[min(k, 1)]
        if k == 0:
            inside = min(ranks, cluster.node_size)
            rate = rate if operation == "point-to-point" else rate * float(small_group(inside))
        levels.append(level.but(link=link.but(alpha=link.library_hop, bandwidth=rate)))
    device = cluster.accelerator.but(memory_bandwidth=1e30)
    return cluster.but(levels=tuple(levels), accelerator=device)


def chunking(wire: Array) -> Array:
    """Seconds that cutting a transfer of `wire` seconds into chunks adds."""
    return 2 * np.sqrt(CHUNK * wire)
