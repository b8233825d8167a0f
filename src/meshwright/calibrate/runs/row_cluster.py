"""The cluster of a published run: the catalog's cluster for its card and network."""

from __future__ import annotations

import re

from meshwright.calibrate.runs.case import Case, integer, refusal
from meshwright.describe import catalog
from meshwright.describe.cards import accelerator_of
from meshwright.describe.cluster import Cluster

CLUSTER_COLUMNS = ("gpus", "gpu_type", "gpus_per_node", "interconnect", "tp", "cp", "pp", "dp", "ep", "etp")
CLUSTERS = (  # accelerator, words of the network → catalog cluster; the first that fits
    ("gb300", r"", "gb300-nvl72"),
    ("gb200", r"", "gb200-nvl72"),
    ("b300", r"", "dgx-b300"),
    ("b200", r"efa", "aws-p6-b200"),
    ("b200", r"", "dgx-b200"),
    ("h800", r"", "dgx-h800"),
    ("h200", r"efa", "aws-p5e"),
    ("h200", r"", "dgx-h200"),
    ("h100-sxm", r"efa", "aws-p5"),
    ("h100-sxm", r"roce per gpu", "meta-h100"),
    ("h100-sxm", r"", "dgx-h100"),
    ("v100-sxm2-16gb", r"", "dgx-v100"),
    ("v100-sxm2-32gb", r"", "dgx-v100"),
    ("a100-40gb", r"efa", "aws-p4d"),
    ("a100-40gb", r"", "a100-40gb-roce"),
    ("a100-80gb", r"omni.path", "jean-zay-a100"),
    ("a100-80gb", r"800 gb/s per node", "a100-hdr4"),
    ("a100-80gb", r"efa", "aws-p4de"),
    ("a100-80gb", r"", "dgx-a100"),
    ("mi300x", r"", "mi300x-8"),
    ("mi355x", r"", "mi355x-8"),
    ("rtx-4090", r"", "workstation-2x4090"),
    ("rtx-3090", r"", "workstation-4x3090"),
    (r"", r"", "ethernet-cluster"),  # cards on PCIe
)


def read_cluster(c: Case) -> Cluster:
    """The cluster of a row, with the assumptions added to the case."""
    r = c.row
    gpus = integer(r["gpus"])
    if not gpus:
        gpus = max(1, integer(r["tp"], 1) * integer(r["pp"], 1) * integer(r["cp"], 1) * max(1, integer(r["dp"], 1)))
        ranks = integer(r["ep"], 1) * max(1, integer(r["etp"], 1)) * integer(r["pp"], 1)
        gpus = max(gpus, ranks)
        c.assumed.append(f"GPUs: {gpus}, the smallest number that the degrees allow")
    if not r["gpu_type"]:
        raise refusal("the GPU is not published")
    card, network = accelerator_of(r["gpu_type"]), r["interconnect"].lower()
    if card is None:
        raise refusal(f"GPU {r['gpu_type']!r} is not in the catalog")
    name = next(n for gpu, words, n in CLUSTERS if gpu in ("", card) and re.search(words, network))
    if not network and gpus > 8:
        c.assumed.append(f"network: as {name}")
    cluster: Cluster = catalog.load("clusters", name)
    if cluster.accelerator.name != card:
        cluster = cluster.but(name=f"{name}-{card}", accelerator=card)
    return _with_nodes_of(cluster, integer(r["gpus_per_node"]), gpus).with_gpus(gpus)


def _with_nodes_of(cluster: Cluster, size: int, gpus: int) -> Cluster:
    """The cluster with smaller nodes, where a row has them and needs more than one. An NVLink domain of many nodes stays whole."""
    node = cluster.levels[0]
    if not 0 < size < min(node.size, gpus) or node.size > 16:
        return cluster
    levels = (node.but(size=size), *cluster.levels[1:])
    return cluster.but(name=f"{cluster.name}-nodes-of-{size}", levels=levels)
