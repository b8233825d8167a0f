"""Overlap on a slowed link: the time that data-parallel communication adds to a step, compared with the part that cannot be hidden.

    python benchmarks/overlap.py [--ranks 2] [--rounds 3]

Every rank limits the rate of its sockets in the kernel (which uses no core), so that the gradient reduction takes half,
once and twice as long as backward. It times, one after the other:

    compute        forward and backward, no messages                 comm     the same messages without compute
    ours           `Buckets`, messages during backward               late     the same, all messages after backward
    torch          `DistributedDataParallel` with the same bucket

It prints the time that each adds to `compute`, and the bound max(0, comm − backward) + 15% of comm: backward cannot hide more
communication than it takes itself. Needs Linux, one core per rank and one more for gloo's sums; with fewer cores the sums slow
backward down.
"""

import argparse
import os
import socket
import sys
import time
from typing import Any

import numpy as np

from meshwright.describe.model import Model
from meshwright.training.launch import local

MODEL = Model(name="bench", hidden=384, layers=4, heads=6, ffn=1024, vocab=512)
ROWS, SEQ = 4, 256  # much compute per byte, because gloo's sums use the same cores
BUCKET = 1e6
LONGER = (0.5, 1.0, 2.0)  # communication time / backward time
SO_MAX_PACING_RATE = 47


def set_rate(bytes_per_second: float) -> None:
    """Limit the rate of every connection of this process."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(fd)))
        except OSError:  # the descriptor was closed in the meantime
            continue
        with connection:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                rate = int(bytes_per_second).to_bytes(8, sys.byteorder)
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def work(context: Any, rounds: int) -> list[dict[str, list[float]]]:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from meshwright.models import build, initial_value, loss_function
    from meshwright.parallel.data.buckets import Buckets

    group, criterion = distributed.group.WORLD, loss_function(MODEL)
    generator = torch.Generator().manual_seed(context.rank)
    inputs, targets = (torch.randint(MODEL.vocab, (ROWS, SEQ), generator=generator) for _ in range(2))
    backwards: list[float] = []

    def made() -> Any:
        module = build(MODEL, range(MODEL.layers)).to_empty(device="cpu")
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(initial_value(MODEL, name, p.shape, 0))
        return module

    def step(module: Any, buckets: Buckets | None = None) -> None:
        if buckets is not None:
            buckets.begin(last=True)
        loss = criterion(module(inputs), targets)
        started = time.perf_counter()
        loss.backward()
        backwards.append(time.perf_counter() - started)
        if buckets is not None:
            buckets.finish()

    modules = [made() for _ in range(3)]
    compute, ours, late = (
        Buckets(modules[0], None, BUCKET),
        Buckets(modules[1], group, BUCKET),
        Buckets(modules[2], group, BUCKET, overlap=False),
    )
    plain = DistributedDataParallel(made(), bucket_cap_mb=BUCKET / 2**20, gradient_as_bucket_view=True)
    sides = {
        "compute": lambda: step(modules[0], compute),
        "comm": late.finish,
        "ours": lambda: step(modules[1], ours),
        "late": lambda: step(modules[2], late),
        "torch": lambda: step(plain),
    }
    for side in [*sides.values()] * 2:
        timed(side)
    for _ in range(5):
        timed(sides["compute"])
    backward = torch.tensor(np.median(backwards[-5:]))
    distributed.all_reduce(backward, op=distributed.ReduceOp.MAX)
    found = []
    for ratio in LONGER:
        sent = 2 * (context.world - 1) / context.world * ours.flat.nbytes  # by a rank of a ring
        set_rate(sent / (ratio * float(backward)))
        times: dict[str, list[float]] = {name: [] for name in (*sides, "backward")}
        for i in range(rounds + 1):
            for name in sorted(sides, reverse=bool(i % 2)):
                times[name].append(timed(sides[name]))
                if name == "compute":
                    times["backward"].append(backwards[-1])
        found.append({name: values[1:] for name, values in times.items()})
    return found


def timed(side: Any) -> float:
    from torch import distributed

    distributed.barrier()
    started = time.perf_counter()
    side()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results = local.run("__main__:work", options.ranks, options.rounds, silence=600)
    print(
        "milliseconds, medians       compute  backward    comm │  added by ours   late  torch │ bound  share of comm hidden by ours, torch"
    )
    for ratio, *ranks in zip(LONGER, *results, strict=True):
        t = {name: 1e3 * np.median(np.max([r[name] for r in ranks], axis=0)) for name in ranks[0]}
        added = {name: t[name] - t["compute"] for name in ("ours", "late", "torch")}
        bound = max(0.0, t["comm"] - t["backward"]) + 0.15 * t["comm"]
        hidden = ", ".join(f"{1 - added[name] / t['comm']:.0%}" for name in ("ours", "torch"))
        print(
            f"comm about {ratio:3.1f} × backward  {t['compute']:7.0f}  {t['backward']:8.0f} {t['comm']:7.0f} │ "
            f"{added['ours']:14.0f} {added['late']:6.0f} {added['torch']:6.0f} │ {bound:5.0f}  {hidden}"
        )


if __name__ == "__main__":
    main()
