"""All-reduce of the backend meshwright compared with gloo's, on this machine and on an emulated cluster.

    python benchmarks/collectives.py [--parts host emulated order] [--ranks 2 4] [--mib 0.001 1 16 64] [--repeats 15]

    host       ranks of this machine: gloo's all-reduce, our ring over point-to-point messages of gloo (connected as by the backend), our direct
               all-reduce through shared memory, and the backend with the program that it chooses
    emulated   4 nodes × 2 ranks, 200 Mb/s between nodes (`meshwright emulate`, needs root): gloo and the backend, ranks placed in
               blocks and round-robin, 1 to 64 MiB; and 1 KiB with a delay of 5 ms
    order      the same nodes, ranks placed round-robin: our programs sorted by the time that `walk` predicts and by the time measured

All ways reduce the same tensor, one after the other in every round, so that all see the same machine. Prints the median milliseconds, the
ratio to gloo's, and the aim. On one host it measures twice:

    in a loop       CALLS calls in a row after a barrier and one call more, as nccl-tests and `meshwright bench` do: the time of one of them
    after a pause   one call after all ranks have slept, from a common start until the last rank is done: code is no longer in the caches
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from meshwright.comm.backend.program_group import TIE  # programs whose predictions differ by less are not ordered
from meshwright.training.launch import local

NODES, PER_NODE, RATE = 4, 2, 200e6 / 8
HOST_LEAD_S, NODES_LEAD_S = 0.005, 0.1  # a broadcast reaches all ranks within this time
AIMS = {"host": "0.6 with shared memory from 16 MiB, ring over point-to-point 2", "blocks": "1.0", "round-robin": "0.55"}  # fmt: skip
CALLS = 5
PROGRAMS = ("ring", "halving-doubling", "tree", "two-level", "hierarchical", "rail-tree")


def medians(ways: dict[str, Callable[[], Any]], tensor: Any, repeats: int, lead_s: float) -> dict[str, float]:
    """Median seconds of each way from a common start until the last rank is done, as `walk` counts; every result is compared with the sum.
    All ranks are on one machine and read one clock, so rank 0 sends the time of the start, `lead_s` ahead."""
    import torch
    from torch import distributed

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 2 if repeats > 3 else repeats + 1):
        for name, call in ways.items():
            tensor.fill_(1.0)
            distributed.barrier()
            times = torch.tensor([time.perf_counter() + lead_s], dtype=torch.float64)
            distributed.broadcast(times, src=0)
            start = float(times)
            time.sleep(max(0.0, start - time.perf_counter()))
            call()
            times[0] = time.perf_counter() - start
            distributed.all_reduce(times, distributed.ReduceOp.MAX)
            seconds[name].append(float(times))
            if not bool((tensor == distributed.get_world_size()).all()):
                raise ValueError(f"{name} of {tensor.numel()} elements is wrong")
    return {name: statistics.median(found[-repeats:]) for name, found in seconds.items()}


def medians_in_a_loop(ways: dict[str, Callable[[], Any]], tensor: Any, repeats: int) -> dict[str, float]:
    """Median seconds of a call of each way among CALLS in a row, on the slowest rank; every result is compared with the sum."""
    import torch
    from torch import distributed

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, call in ways.items():
            tensor.fill_(1.0)
            distributed.barrier()
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times = torch.tensor([(time.perf_counter() - start) / CALLS], dtype=torch.float64)
            distributed.all_reduce(times, distributed.ReduceOp.MAX)
            seconds[name].append(float(times))
            if not bool((tensor == distributed.get_world_size() ** (CALLS + 1)).all()):
                raise ValueError(f"{name} of {tensor.numel()} elements is wrong")
    return {name: statistics.median(found[-repeats:]) for name, found in seconds.items()}


def on_host(context: Any, sizes: list[float], repeats: int) -> list[dict[str, dict[str, float]]]:
    """Medians of each way, in a loop and after a pause, by size."""
    from datetime import timedelta

    import torch
    from torch import distributed

    import meshwright.comm.backend  # noqa: F401
    from meshwright.comm.communicator import Communicator
    from meshwright.programs.collectives import build

    ours = distributed.new_group(backend="meshwright")
    store = distributed.PrefixStore("ring", distributed.distributed_c10d._get_default_store())
    far = Communicator.create(store, context.rank, context.world, timedelta(minutes=1), shared_memory=False)
    near = Communicator.of_group()
    found = []
    for mib in sizes:
        tensor = torch.ones(int(mib * 2**20 / 4))
        ring, direct = (build("all-reduce", name, context.world, tensor.numel()) for name in ("ring", "direct"))
        ways: dict[str, Callable[[], Any]] = {
            "gloo": partial(distributed.all_reduce, tensor),
            "ring, point-to-point": partial(far.run, ring, tensor),
            "direct, shared memory": partial(near.run, direct, tensor),
            "backend": partial(distributed.all_reduce, tensor, group=ours),
        }
        loop = medians_in_a_loop(ways, tensor, repeats)
        found.append({"in a loop": loop, "after a pause": medians(ways, tensor, repeats, HOST_LEAD_S)})
    return found


def show(label: str, times: dict[str, float]) -> None:
    cells = [f"{name} {1e3 * s:.2f} ms ({s / times['gloo']:.2f}×)" for name, s in times.items()]
    print(f"{label}: " + ", ".join(cells), flush=True)


def run_host(chosen: argparse.Namespace) -> None:
    print(f"one host; aim {AIMS['host']}")
    for ranks in chosen.ranks:
        results = local.run("__main__:on_host", ranks, chosen.mib, chosen.repeats)[0]
        for mib, by_start in zip(chosen.mib, results, strict=True):
            for start, times in by_start.items():
                show(f"{ranks} ranks, {mib:g} MiB, {start}", times)


def cluster_of(delay: float) -> Any:
    """The emulated cluster as the cost model describes it: the asked rate without frame headers, the asked delay."""
    from meshwright.comm.backend.program_group import BETWEEN, INSIDE
    from meshwright.comm.emulate.topology import DATA_BYTES, FRAME_BYTES
    from meshwright.describe import catalog
    from meshwright.describe.cluster import Level

    cluster = catalog.load("clusters", "laptop")
    usual = catalog.load("links", BETWEEN)
    link = usual.but(alpha=max(delay, usual.alpha), bandwidth=RATE * DATA_BYTES / FRAME_BYTES, efficiency=1.0, hop=0.0)
    inside = cluster.levels[0].but(size=PER_NODE, link=catalog.load("links", INSIDE))
    levels = (inside, Level(name="nodes", size=NODES, link=link, ports=1))
    return cluster.but(levels=levels, gpus=NODES * PER_NODE)


def as_rank(task: dict[str, Any]) -> None:
    """What each rank of the emulated cluster runs."""
    from torch import distributed

    measure(task)
    gc.collect()  # a communicator references the gloo group: torch may abort a process that ends before its groups
    distributed.destroy_process_group()


def measure(task: dict[str, Any]) -> None:
    """Measure all sizes; rank 0 prints one line of JSON for each."""
    from datetime import timedelta

    import torch
    from torch import distributed

    from meshwright.comm.backend import register
    from meshwright.comm.backend.program_group import placement_of
    from meshwright.comm.communicator import Communicator
    from meshwright.programs.collectives import build
    from meshwright.programs.collectives.comparison import compare, options_for

    limit = timedelta(seconds=120)
    cluster = cluster_of(task["delay"])
    register(cluster)
    distributed.init_process_group("gloo", timeout=limit)
    ours = distributed.new_group(backend="meshwright", timeout=limit)
    world, placement = distributed.get_world_size(), placement_of(ours.chooser.hosts)
    programs = Communicator.of_group(timeout=limit)
    for size in task["bytes"]:
        tensor = torch.ones(int(size / 4))
        ways: dict[str, Callable[[], Any]] = {"gloo": partial(distributed.all_reduce, tensor)}
        predicted: dict[str, float] = {}
        if task["order"]:
            times = compare("all-reduce", cluster, world, (size,), PROGRAMS, placement).times
            predicted = {name: times[name][0] for name in PROGRAMS}
            for name in PROGRAMS:
                options = options_for("all-reduce", name, cluster, world, size, placement)
                program = build("all-reduce", name, world, tensor.numel(), **options)
                ways[name] = partial(programs.run, program, tensor)
        else:
            ways["backend"] = partial(distributed.all_reduce, tensor, group=ours)
        few = task["repeats"] if size < 2**22 else min(task["repeats"], 5) if size < 2**25 else 2  # 64 MiB take 15 s
        found = medians(ways, tensor, few, NODES_LEAD_S)
        if distributed.get_rank() == 0:
            chosen = ours.chooser.choose("all-reduce", int(size)).algorithm
            print(json.dumps({"bytes": size, "times": found, "predicted": predicted, "chosen": chosen}), flush=True)


def emulated(delay: float, placements: list[str], sizes: list[float], repeats: int, order: bool) -> None:
    """Make the emulated cluster, run the ranks in it, and show what they measured."""
    from meshwright.comm.emulate.emulation import Emulation
    from meshwright.comm.emulate.ranks import RunSettings
    from meshwright.comm.emulate.topology import Topology

    with Emulation(Topology(NODES, PER_NODE, RATE, delay), "benchcoll") as cluster:
        for placement in placements:
            task = {"delay": delay, "bytes": sizes, "repeats": repeats, "order": order}
            command = [sys.executable, os.path.abspath(__file__), "--as-rank", json.dumps(task)]

            def line(rank: int, text: str, is_error: bool, placement: str = placement) -> None:
                if text.startswith("{"):
                    (show_order if order else show_emulated)(placement, delay, json.loads(text))
                elif is_error and "Warning" not in text:
                    print(f"[rank {rank}] {text}", file=sys.stderr)

            cluster.run(command, RunSettings(placement=placement, timeout_s=170.0, line=line))


def show_emulated(placement: str, delay: float, found: dict[str, Any]) -> None:
    aim = "0.35" if delay else AIMS[placement]
    label = f"{NODES} nodes × {PER_NODE}, 200 Mb/s, {1e3 * delay:g} ms, {placement}, {found['bytes'] / 2**20:g} MiB"
    show(f"{label} ({found['chosen']}; aim {aim})", found["times"])


def show_order(placement: str, delay: float, found: dict[str, Any]) -> None:
    measured, predicted = found["times"], found["predicted"]
    print(f"{placement}, {1e3 * delay:g} ms, {found['bytes'] / 2**20:g} MiB; predicted → measured, ms:")
    for name in sorted(predicted, key=predicted.__getitem__):
        print(f"    {name:18} {1e3 * predicted[name]:9.1f} → {1e3 * measured[name]:9.1f}")
    pairs = [(a, b) for a in predicted for b in predicted if predicted[a] < (1 - TIE) * predicted[b]]
    wrong = [f"{b} before {a}" for a, b in pairs if measured[a] >= measured[b]]
    verdict = f"not in {len(wrong)}: {', '.join(wrong)}" if wrong else "in all of them"
    print(
        f"    {len(pairs)} pairs are predicted over {TIE:.0%} apart; measured in the same order {verdict}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="All-reduce beside gloo's: medians of side-by-side runs.")
    parser.add_argument("--parts", nargs="+", choices=["host", "emulated", "order"], default=["host"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[0.001, 1, 16, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--as-rank", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_rank:
        as_rank(json.loads(chosen.as_rank))
        return
    if "host" in chosen.parts:
        run_host(chosen)
    if "emulated" in chosen.parts:
        sizes = [mib * 2**20 for mib in chosen.mib if mib >= 1]
        emulated(0.0, ["round-robin", "blocks"], sizes, chosen.repeats, order=False)
        emulated(5e-3, ["round-robin", "blocks"], [1024.0], chosen.repeats, order=False)
    if "order" in chosen.parts:
        emulated(0.0, ["round-robin"], [4.0 * 2**20], 3, order=True)
        emulated(5e-3, ["round-robin"], [1024.0], chosen.repeats, order=True)


if __name__ == "__main__":
    main()
