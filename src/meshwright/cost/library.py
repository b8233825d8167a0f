"""The algorithm that a communication library runs, and the measured share of each link rate that it reaches.

**The rule.** NCCL models the time of each of its algorithms for a call (latency + bytes / bandwidth, `ncclTopoGetAlgoTime` in
`src/graph/tuning.cc`, NCCL 2.7 to 2.27) and runs the fastest. For all-reduce it has a ring, a tree, NVLS and CollNet (SHARP). All-gather and
reduce-scatter run rings. All-to-all is a group of sends to all peers at once (`ncclGroupStart … ncclSend/ncclRecv`). NVLS needs reducing NVSwitches
and more than two GPUs per node (`src/transport/nvls.cc`); between nodes it takes the place of the tree. CollNet needs a reducing fabric. RCCL is
NCCL's code without reducing switches. XLA on a torus of TPUs runs rings along its axes (modelled only, never measured by us).
gloo has rings (`allreduce.cc`, `allgather.cc`, `reduce_scatter.h`) and posts all blocks of an all-to-all at once (`alltoall.cc`). So
`cost.collective` takes the program of the library whose formula gives the smallest time.

**Effective links of a library.** Each step of a ring or tree costs `hop` seconds (the synchronisation of the library's protocol, more than the
link's α). The library reaches `efficiency` of the bandwidth, and it reduces while it receives, so γ is hidden. `library_links` returns a cluster
with these links; a program walked on it takes exactly the time of the closed formula.

**Measured corrections** (`Cluster.collectives`; the defaults are from published collective benchmarks, `benchmarks/collectives_published.py`):

    call          seconds of one call before the first byte moves; larger if network cards take part
    small group   a group of P ranks in one node reaches (1 − 0.45/P) / (1 − 0.45/8) of the rate of eight (`pair_loss`); in a mesh of n devices
                  (`Link.mesh`) it uses P − 1 of the n − 1 links of a device
    in-switch     reduction in a switch sustains a share of the rate that rings reach (Link.in_switch)
    chunks        a transfer time of w takes 2√(ℓ·w) longer, ℓ: the start-up time of one chunk. This is the remaining cost of
                  pipelining a transfer with the optimal number of chunks
    factors       per operation, inside a node and between nodes, on the latency and on the transfer time (`meshwright calibrate`)
"""

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.lower.program import Array, Column
from meshwright.programs.collectives.comparison import SWITCHED, runs_on

RINGS = {
    "all-gather": ("multi-ring",),
    "reduce-scatter": ("multi-ring",),
    "all-to-all": ("direct",),
    "point-to-point": ("direct",),
}
LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {
    "NCCL": {"all-reduce": ("multi-ring", "rail-double-tree", "nvls", "sharp"), **RINGS},
    "RCCL": {"all-reduce": ("multi-ring", "rail-double-tree"), **RINGS},
    "gloo": {"all-reduce": ("multi-ring",), **RINGS},
    "XLA": {"all-reduce": ("multi-ring",), **RINGS},
    "meshwright": {  # `comm.backend`; barriers, gathers and scatters have one program each
        "all-reduce": (
            "direct",
            "ring",
            "halving-doubling",
            "tree",
            "multi-ring",
            "two-level",
            "hierarchical",
            "rail-tree",
        ),
        "all-gather": ("ring", "bruck", "recursive-doubling", "multi-ring", "two-level"),
        "reduce-scatter": ("pairwise", "ring", "bruck", "recursive-halving", "multi-ring", "two-level"),
        "all-to-all": ("direct", "pairwise", "bruck", "two-level"),
        "broadcast": ("binomial", "chain", "double-tree"),
        "reduce": ("binomial", "chain", "double-tree"),
        "barrier": ("dissemination",),
    },
}


def library_of(cluster: Cluster) -> str:
    """The library that a cluster's devices use: gloo on CPUs, RCCL on AMD Instinct, XLA on TPUs, else NCCL."""
    name = cluster.accelerator.name.lower()
    known = {"cpu": "gloo", "mi": "RCCL", "tpu": "XLA"}
    return next((library for start, library in known.items() if name.startswith(start)), "NCCL")


def algorithms(cluster: Cluster, operation: str) -> tuple[str, ...]:
    """The programs of the cluster's library for an operation, without those whose switches the cluster lacks."""
    return tuple(name for name in LIBRARIES[library_of(cluster)].get(operation, ()) if runs_on(cluster, name))


def small_group(cluster: Cluster, operation: str, size: Array) -> Array:
    """The share of a device's rate that it reaches in a group of `size` ranks inside a node. Behind a switch: relative to a group of eight.
    In a mesh each of its links leads to one other device, so a group uses size − 1 of them, and a send one."""
    if cluster.levels[0].link.mesh:
        size = 2 if operation == "point-to-point" else np.maximum(size, 2)
        return (size - 1) / (cluster.node_size - 1)
    if operation == "point-to-point":
        return 1.0
    loss = cluster.collectives.pair_loss
    return (1 - loss / size) / (1 - loss / 8)


def in_switch(cluster: Cluster, algorithm: str) -> tuple[float, float]:
    """The shares of the link rates, inside nodes and between nodes, that an algorithm reaches: below 1 where a switch reduces."""
    inside = cluster.levels[0].link.in_switch if algorithm in SWITCHED else 1.0
    return inside, cluster.levels[1].link.in_switch if algorithm == "sharp" else 1.0


def library_links(cluster: Cluster, operation: str, algorithm: str, ranks: int) -> Cluster:
    """The cluster with the library's effective links for one algorithm on `ranks` ranks: hops, reached rates, hidden reductions."""
    levels = []
    for k, level in enumerate(cluster.levels):
        link, factor = level.link, cluster.collectives.factor(operation, across=k > 0)
        rate = link.bandwidth * in_switch(cluster, algorithm)[min(k, 1)] / factor.bytes
        if k == 0:
            rate = rate * float(small_group(cluster, operation, min(ranks, cluster.node_size)))
        levels.append(level.but(link=link.but(alpha=link.library_hop * factor.latency, bandwidth=rate)))
    device = cluster.accelerator.but(memory_bandwidth=1e30)
    return cluster.but(levels=tuple(levels), accelerator=device)


def chunking(cluster: Cluster, wire: Column) -> Column:
    """Seconds that pipelining in chunks adds to a transfer of `wire` seconds."""
    return 2 * np.sqrt(cluster.collectives.chunk * wire)
