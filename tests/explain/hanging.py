"""A training loop on four gloo processes that hangs in a chosen way, and writes flight records and stacks as torch does.

python hanging.py KIND FOLDER STORE SECONDS
"""

import faulthandler
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

KINDS = ("missing", "order", "sizes", "dtypes", "dead", "circle", "slow")


def write_records(folder, rank, seconds):
    time.sleep(seconds)
    with open(f"{folder}/rank_{rank}", "wb") as file:
        file.write(_dump_fr_trace())
    with open(f"{folder}/json_{rank}.json", "wb") as file:
        file.write(_dump_fr_trace_json())
    with open(f"{folder}/stack_{rank}.txt", "w") as file:
        faulthandler.dump_traceback(file)
    time.sleep(0.5)
    os._exit(0)


def load_batch(kind, rank, step):
    """The fault of a rank between two collectives."""
    if step == 2 and kind == "missing" and rank == 2:
        time.sleep(600)
    if step == 2 and kind == "dead" and rank == 2:
        os._exit(0)
    if kind == "slow" and rank == 1:
        time.sleep(0.1)


def train_step(kind, rank, step, pair):
    here = step == 2
    if kind == "circle" and here and rank == 1:
        dist.broadcast(torch.ones(5), 0)  # rank 0 is in its pair first, and waits there for rank 1
    dist.all_reduce(torch.ones(8), group=pair)
    load_batch(kind, rank, step)
    if not (kind == "order" and here and rank == 3):
        dist.broadcast(torch.ones(5), 0)
    size = 6 if kind == "sizes" and here and rank == 1 else 5
    dtype = torch.float64 if kind == "dtypes" and here and rank == 1 else torch.float32
    dist.all_reduce(torch.ones(size, dtype=dtype))


def run_rank(kind, folder, store, seconds, rank, world=4):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    pairs = [dist.new_group([a, a + 1], group_desc="tensor") for a in range(0, world, 2)]
    writer = threading.Thread(target=write_records, args=(folder, rank, float(seconds)))
    writer.start()
    try:
        for step in range(8 if kind == "slow" else 4):
            train_step(kind, rank, step, pairs[rank // 2])
    except RuntimeError:
        pass  # a rank ended: gloo raises on the others
    writer.join()


if __name__ == "__main__":
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            run_rank(*sys.argv[1:], rank=number)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
