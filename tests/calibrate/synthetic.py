"""Bench results as a known cluster would give them: transfers and collectives by the walker, with noise and outliers."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from meshwright.calibrate.points import Bench, Point, RankInfo
from meshwright.comm.bench.collectives import concurrent_pairs
from meshwright.cost.library import library_links
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Collectives, Factors, Level, Link
from meshwright.programs.collectives import build, groups_of, walk

SIZES = tuple(4**k for k in range(5, 14))  # 1 KiB to 64 MiB
CPU = Accelerator(name="cpu", memory=2**31, memory_bandwidth=8e9, peak={"fp32": 50e9})
NO_TERMS = Collectives(call=0, call_across=0, chunk=0, peer=0, pair_loss=0)
PROGRAMS = {"all-reduce": "multi-ring", "all-gather": "multi-ring", "reduce-scatter": "multi-ring"}


def cluster(
    *levels: tuple[int, float, float], ports: int = 0, shared: bool = False, factors: dict[str, Factors] | None = None
) -> Cluster:
    """A cluster of (size, α, bytes/s) levels."""
    found = tuple(
        Level(
            name=f"level{k}",
            size=size,
            link=Link(name=f"link{k}", alpha=alpha, bandwidth=rate),
            ports=ports if k else 0,
            shared=shared and k == 0,
        )
        for k, (size, alpha, rate) in enumerate(levels)
    )
    gpus = int(np.prod([size for size, _, _ in levels]))
    added = NO_TERMS.but(factors=factors or {})
    return Cluster(name="truth", accelerator=CPU, levels=found, gpus=gpus, collectives=added)


def bench(
    truth: Cluster,
    *,
    noise: float = 0.03,
    outliers: float = 0.0,
    seed: int = 0,
    device_of: Sequence[int] | None = None,
    slow: Callable[[int], float] = lambda rank: 1.0,
    sizes: Sequence[int] = SIZES,
    backend: str = "gloo",
    operations: dict[str, str] = PROGRAMS,
    topology: dict | None = None,
) -> Bench:
    """The bench of a cluster. `device_of` places ranks on devices; `slow(rank)` multiplies the times of a rank's transfers."""
    devices = list(device_of or range(truth.world))
    hosts = [f"node{device // truth.node_size}" for device in devices]
    random = np.random.default_rng(seed)

    def point(seconds: float, **fields) -> Point:
        times = seconds * random.uniform(1 - noise, 1 + noise)
        times *= random.uniform(3, 10) if random.random() < outliers else 1.0
        return Point(
            median_s=times, low_s=times * (1 - noise), high_s=times * (1 + noise), samples=9, backend=backend, **fields
        )

    points, alone = [], {}  # seconds of one pair by level and size: all pairs of a level are equal
    for a, b in combinations(range(len(devices)), 2):
        for n in sizes:
            kind = truth.level_between(devices[a], devices[b]), n
            if kind not in alone:
                alone[kind] = pair_seconds(truth, [(devices[a], devices[b])], n)
            seconds = alone[kind] * max(slow(a), slow(b))
            points.append(point(seconds, operation="point-to-point", ranks=(a, b), bytes=n))
    for pairs in concurrent_pairs(hosts):
        for n in sizes:
            seconds = pair_seconds(truth, [(devices[a], devices[b]) for a, b in pairs], n)
            ranks = tuple(rank for pair in pairs for rank in pair)
            points.append(point(seconds, operation="point-to-point", ranks=ranks, bytes=n, concurrent=len(pairs)))
    groups = {truth.node_size, len(devices)} if device_of is None else {len(devices)}  # the first node, and all ranks
    for operation, algorithm in operations.items():
        for count in sorted(groups):
            for n in sizes:
                seconds = collective_seconds(truth, operation, algorithm, count, n)
                points.append(point(seconds, operation=operation, ranks=tuple(range(count)), bytes=n))
    ranks = tuple(RankInfo(rank=r, host=host) for r, host in enumerate(hosts))
    return Bench(made="2026-01-01T00:00:00Z", ranks=ranks, points=tuple(points), topology=topology or {})


def pair_seconds(truth: Cluster, pairs: Sequence[tuple[int, int]], n: int) -> float:
    """Seconds until the last of several transfers of n bytes has arrived; each port is shared by its flows."""
    if len(pairs) == 1:
        return walk(build("point-to-point", "direct", 2, n // 4, root=0, target=1), truth, placement=pairs[0]).makespan
    paths = [truth.path(a, b) for a, b in pairs]
    flows = Counter(port for path in paths for port in path.ports)
    return max(path.alpha + n * max(flows[port] / truth.capacity(port) for port in path.ports) for path in paths)


def collective_seconds(truth: Cluster, operation: str, algorithm: str, ranks: int, n: int) -> float:
    """The walk of the program over the links as the library uses them, factors included."""
    links = library_links(truth, operation, algorithm, ranks)
    groups = {"groups": groups_of(truth, ranks)} if algorithm == "multi-ring" else {}
    return walk(build(operation, algorithm, ranks, n // 4, **groups), links).makespan
