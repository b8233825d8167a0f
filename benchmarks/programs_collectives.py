"""The time to build, check and walk collectives: the 1,024-rank ring (target: below one second), others, and the event engine.

    python benchmarks/programs_collectives.py

Each line is the best of three runs in one process, with the first, cold run, which allocates memory, in brackets.
"""

import time
from collections.abc import Callable
from typing import Any

from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Level, Link, uniform
from meshwright.programs.collectives import build, check, walk
from meshwright.programs.collectives.comparison import compare

NV = Link(name="inside", alpha=2e-6, bandwidth=450e9)
IB = Link(name="between", alpha=5e-6, bandwidth=50e9)
DEVICE = Accelerator(name="device", memory=80e9, memory_bandwidth=3.35e12, peak={"bf16": 1e15})


def nodes_of_eight(ranks: int, **between: float) -> Cluster:
    levels = (Level(name="node", size=8, link=NV), Level(name="net", size=max(1, ranks // 8), link=IB, **between))
    return Cluster(name="nodes of eight", accelerator=DEVICE, levels=levels, gpus=ranks)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def once(operation: str, algorithm: str, ranks: int, cluster: Cluster) -> tuple[float, float, float, int, float]:
    built, program = timed(lambda: build(operation, algorithm, ranks, ranks * 1024))
    checked, _ = timed(lambda: check(program))
    walked, result = timed(lambda: walk(program, cluster))
    return built, checked, walked, len(program.moves.step), result.makespan


def line(operation: str, algorithm: str, ranks: int, cluster: Cluster, what: str) -> None:
    runs = [once(operation, algorithm, ranks, cluster) for _ in range(3)]
    built, checked, walked, moves, makespan = min(runs, key=lambda r: sum(r[:3]))
    cold = sum(runs[0][:3])
    total = built + checked + walked
    print(
        f"{ranks:5d}  {algorithm + ' ' + operation:32s} {what:24s} {moves:9,d} moves   build {built:6.3f}  check {checked:6.3f}  "
        f"walk {walked:6.3f}  total {total:6.3f} s   (first run {cold:6.3f} s)   makespan {makespan * 1e3:9.3f} ms"
    )


def main() -> None:
    ring = uniform(1024, 1e-6, 100e9)
    line("all-reduce", "ring", 1024, ring, "uniform")
    line("all-reduce", "ring", 1024, nodes_of_eight(1024), "nodes of 8")
    for algorithm in ("halving-doubling", "two-level", "double-tree", "tree", "hierarchical"):
        line("all-reduce", algorithm, 1024, nodes_of_eight(1024), "nodes of 8")
    for algorithm in ("ring", "bruck", "recursive-doubling"):
        line("all-gather", algorithm, 1024, nodes_of_eight(1024), "nodes of 8")
    for algorithm in ("direct", "pairwise", "bruck", "two-level"):
        line("all-to-all", algorithm, 128, nodes_of_eight(128), "nodes of 8")
    line("all-to-all", "pairwise", 128, nodes_of_eight(128, oversubscription=4.0), "uplinks 4:1 (events)")
    line("all-reduce", "two-level", 256, nodes_of_eight(256, ports=2), "2 cards per node (events)")
    spent, _ = timed(lambda: compare("all-reduce", nodes_of_eight(64), 64))
    print(f"compare: all algorithms of all-reduce at 11 sizes on 64 ranks: {spent:.2f} s")


if __name__ == "__main__":
    main()
