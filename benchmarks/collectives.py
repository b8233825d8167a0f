"""All-reduce of the backend meshwright compared with gloo, on this machine.

    python benchmarks/collectives.py [--ranks 2 4] [--mib 0.001 1 16 64] [--repeats 15]

Four ways to reduce the same tensor, one after the other in every round, so that all see the same machine: gloo's all-reduce,
our ring over gloo's point-to-point messages, our ring through shared memory, and the backend with the program that it
chooses. Prints the median milliseconds of rank 0 and the ratio to gloo's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from meshwright.training import launch


def work(context: Any, sizes: list[float], repeats: int) -> list[dict[str, float]]:
    """Median seconds of each way, by size; every result is compared with the sum."""
    import torch
    from torch import distributed

    import meshwright.comm.backend  # noqa: F401
    from meshwright.comm.communicator import Communicator
    from meshwright.programs.collectives import build

    ours = distributed.new_group(backend="meshwright")
    near, far = Communicator.of_group(), Communicator.of_group(shared_memory=False)
    found = []
    for mib in sizes:
        tensor = torch.ones(int(mib * 2**20 / 4))
        ring = build("all-reduce", "ring", context.world, tensor.numel())
        direct = build("all-reduce", "direct", context.world, tensor.numel())
        ways = {
            "gloo": lambda tensor=tensor: distributed.all_reduce(tensor),
            "ring, point-to-point": lambda tensor=tensor, ring=ring: far.run(ring, tensor),
            "ring, shared memory": lambda tensor=tensor, ring=ring: near.run(ring, tensor),
            "direct, shared memory": lambda tensor=tensor, direct=direct: near.run(direct, tensor),
            "backend": lambda tensor=tensor: distributed.all_reduce(tensor, group=ours),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats + 2):
            for name, call in ways.items():
                tensor.fill_(1.0)
                distributed.barrier()
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
                if not bool((tensor == context.world).all()):
                    raise ValueError(f"{name} of {mib} MiB is wrong")
        found.append({name: statistics.median(times[2:]) for name, times in seconds.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="All-reduce beside gloo's: medians of side-by-side runs.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[0.001, 1, 16, 64])
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        results = launch.run("__main__:work", ranks, chosen.mib, chosen.repeats)[0]
        for mib, times in zip(chosen.mib, results, strict=True):
            cells = [f"{name} {1e3 * s:.2f} ms ({s / times['gloo']:.2f}×)" for name, s in times.items()]
            print(f"{ranks} ranks, {mib:g} MiB: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
