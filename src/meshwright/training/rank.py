"""One rank, from its first instruction to its last: join the group, run the target, tell the parent, leave.

Only plain data passes between parent and rank, over their pipe. Whatever the rank prints goes to its log, and so does
its Python stack when it is killed by a signal or asked for it (SIGUSR1).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from meshwright.errors import MeshwrightError


@dataclass(frozen=True)
class RankContext:
    """What a target is told about where it runs. `tell` sends one plain message to the parent."""

    rank: int
    world: int
    device: str
    tell: Callable[[Any], None]


def main(
    target: str,
    rank: int,
    world: int,
    args: tuple,
    store: str,
    log: str,
    group_timeout: float,
    device: str,
    pipe: Connection,
) -> None:
    parent = _prepare_process(log, pipe)
    try:
        device = _join(rank, world, store, group_timeout, device)
        context = RankContext(rank, world, device, lambda message: pipe.send(("tell", message)))
        result = resolve(target)(context, *args)
        pipe.send(("done", result))
    except BaseException as error:  # the parent must hear of it, whatever it is
        plain = _plain(error) if isinstance(error, MeshwrightError) else None
        pipe.send(("failed", time.monotonic(), traceback.format_exc(), plain))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    parent.join()  # leave with the others: some may still be connecting to this rank


def resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _plain(error: MeshwrightError) -> dict[str, Any]:
    return {**error.as_dict(), "exit_code": error.exit_code}


def _prepare_process(log: str, pipe: Connection) -> threading.Thread:
    """Returns what ends this process when the parent closes the pipe, or is gone."""
    try:
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except FileNotFoundError:  # the parent has left before this rank began, and removed the folder
        os._exit(1)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.enable(file=stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks itself
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

    def end_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        # A group's destructor may wait for peers that are gone already; the operating system closes its sockets at once.
        os._exit(0)

    parent = threading.Thread(target=end_with_parent, daemon=True)
    parent.start()
    return parent


def _join(rank: int, world: int, store: str, group_timeout: float, device: str) -> str:
    """Join the group; returns this rank's device. `auto` takes GPUs where there is one for each rank."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        if (found := torch.cuda.device_count()) < world:
            raise MeshwrightError(
                "MW-RANK-002", f"{world} ranks need {world} GPUs, and {found} are here", fix="--device cpu"
            )
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=distributed.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=group_timeout),
    )
    return f"cuda:{rank}" if device == "cuda" else device
