"""The error of the cost model's collectives against measured ones.

    python benchmarks/collectives_published.py COLLECTIVES.csv

Predicts every row whose machine is in the catalog, on a group that fills its nodes. Prints by source and operation the number of rows,
the median absolute error of the time, and the same for messages of 16 MiB and more, which training sends.
"""

import csv
import sys

import numpy as np

from meshwright.cost.collective import OPERATIONS, CollectiveTimes
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.lower.batch import Batch
from meshwright.lower.program import Op, sent

# (start of the source, part of the GPU's name) → catalog cluster
MACHINES = (
    ("NVIDIA dgxc", "", "dgx-h100"),
    ("SimuMax", "", "dgx-h100"),
    ("CoreWeave", "H100", "dgx-h100"),
    ("CoreWeave", "GB200", "gb200-nvl72"),
    ("GCP a3-mega", "", "gcp-a3-mega"),
    ("HF Ultrascale", "", "aws-p5"),
    ("NVIDIA/nccl-tests", "", "dgx-h100"),
    ("OCI", "", "oci-bm-gpu4"),
    ("OpenXLA", "gfx950", "mi355x-8"),
    ("OpenXLA", "sm_90", "dgx-h100"),
    ("OpenXLA", "sm_100_B200", "dgx-b200"),
    ("OpenXLA", "sm_100_GB200", "gb200-nvl72"),
    ("OpenXLA", "sm_103", "gb300-nvl72"),
    ("vTrain", "A100", "dgx-a100"),
    ("vTrain", "V100", "dgx-v100"),
)
KINDS = {"alltoall": "all_to_all", "sendrecv": "send", "collective_permute": "send"}
LARGE = 16 * 2**20


def cluster_of(row: dict[str, str]) -> Cluster | None:
    """The catalog cluster of a row, with SHARP if the row has it."""
    name = next((c for s, g, c in MACHINES if row["source"].startswith(s) and g in row["gpu"]), None)
    if name is None or not row["gpus"]:
        return None
    cluster = catalog.load("clusters", name).with_gpus(max(int(row["gpus"]), 1))
    if "SHARP" in row["interconnect"]:
        levels = list(cluster.levels)
        levels[1] = levels[1].but(reduces=True)
        cluster = cluster.but(levels=tuple(levels))
    return cluster


def predicted(cluster: Cluster, kind: str, sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Predicted seconds of each size on `ranks` devices that fill their nodes."""
    model, stack = catalog.load("models", "gpt2-small"), catalog.load("stacks", "default")
    plans = [Plan(replicate=ranks)] * len(sizes)
    batch = Batch.of(plans, model, Workload(batch=ranks, seq=1024), stack)
    op = Op("x", "x", "collective", collective=kind, axis="dp", message_bytes=sizes)
    return np.asarray(CollectiveTimes(cluster, batch).time(op))


def seconds_of(row: dict[str, str], kind: str) -> float:
    """Measured seconds; computed from the bus bandwidth if the row has only that."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    return float(sent(kind, float(row["size_bytes"]), float(row["gpus"]))) / (float(row["busbw_gbps"]) * 1e9)


def main(path: str) -> None:
    groups: dict[tuple[str, str, str, int], list[tuple[float, float]]] = {}
    clusters: dict[tuple[str, str], Cluster] = {}
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kind = row["collective"].replace("-", "_").split(" ")[0]
            kind = KINDS.get(kind, kind)
            cluster = cluster_of(row)
            if cluster is None or kind not in OPERATIONS:
                continue
            sharp = "+SHARP" if "SHARP" in row["interconnect"] else ""
            source = f"{row['source'].split(' ')[0]} {cluster.name}{sharp}"
            clusters[source, row["gpus"]] = cluster
            key = (source, kind, row["gpus"], int(row["gpus"]))
            groups.setdefault(key, []).append((float(row["size_bytes"]), seconds_of(row, kind)))
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (source, kind, name, ranks), rows in groups.items():
        sizes, times = np.array(rows).T
        found = predicted(clusters[source, name], kind, sizes, ranks)
        errors.setdefault((source, kind), []).extend(zip(sizes, found / times - 1, strict=True))
    print("| source and machine | operation | rows | error | of 16 MiB and more | bias there |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    table = []
    for (source, kind), points in sorted(errors.items()):
        size, error = np.array(points).T
        large = error[size >= LARGE] if np.any(size >= LARGE) else error
        table.append((np.median(np.abs(error)), np.median(np.abs(large))))
        cells = f"{100 * table[-1][0]:.1f}% | {100 * table[-1][1]:.1f}% | {100 * np.median(large):+.1f}%"
        print(f"| {source} | {kind} | {len(error)} | {cells} |")
    print("| **macro average** | | | " + " | ".join(f"**{100 * e:.1f}%**" for e in np.mean(table, axis=0)) + " | |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        print("collectives_published: needs the CSV of measured collectives as its argument")
