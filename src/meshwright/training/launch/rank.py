"""The life of one rank of the local launcher: join the process group, call the target, send the result to the parent, exit.

Parent and rank exchange plain data over their pipe. What the rank prints goes to its log, and so does its Python stack
when a signal kills it or when the parent requests it (SIGUSR1).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
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
from pathlib import Path
from typing import Any

from meshwright.describe.shown import function_of
from meshwright.errors import MeshwrightError
from meshwright.host import end_with_parent
from meshwright.training.launch.failure import INTERNAL_ERROR, failure_of, write_failure

AGENT_POLL_S = 0.5


@dataclass(frozen=True)
class RankContext:
    """Where a target runs. `send` sends one plain message to the parent."""

    rank: int
    world: int
    device: str
    send: Callable[[Any], None]


def main(
    target: str,
    rank: int,
    world: int,
    args: tuple,
    store: str,
    log: str,
    group_timeout: float,
    device: str,
    backend: str,
    pipe: Connection,
) -> None:
    parent = _prepare_process(log, pipe, Path(store).parent)
    try:
        device = _join(rank, world, store, group_timeout, device, backend)
        context = RankContext(rank, world, device, lambda message: pipe.send(("message", message)))
        result = function_of(target)(context, *args)
        pipe.send(("done", result))
    except BaseException as error:  # the parent must learn of every failure
        fields = {**error.as_dict(), "exit_code": error.exit_code} if isinstance(error, MeshwrightError) else None
        pipe.send(("failed", time.monotonic(), traceback.format_exc(), fields))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    parent.join()  # stay until the parent closes the pipe: other ranks may still be connecting to this one


def _prepare_process(log: str, pipe: Connection, folder: Path) -> threading.Thread:
    """Redirect output to the log, and return the thread that ends this process when the parent closes the pipe."""
    gc.freeze()  # what was imported before the fork stays: a full collection over it would take 0.3 s, and copy its memory
    try:
        stream = redirect_output(log)
    except FileNotFoundError:  # the parent ended before this rank began, and removed the folder
        os._exit(1)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    prepare_local_rank()

    def parent_ended() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()

    return end_with_parent(folder, parent_ended)


def redirect_output(log: str, append: bool = False) -> int:
    """Send what this process prints to its log, and its Python stack if a signal kills it; returns the file's descriptor."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC), 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.enable(file=stream)
    return stream


def prepare_local_rank() -> None:
    """Settings of a rank whose parent process is on this machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its ranks
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def end_with_agent(rank: int, folder: Path) -> threading.Thread:
    """Start a thread that ends this rank, with a failure in the run folder, soon after the agent of torchrun that started it was killed.

    An agent ends its ranks in every other case. Without this, its ranks would compute on, or wait for each other until their timeouts, and
    keep their GPUs and their lock on the run folder. The kernel gives a process whose parent has ended another parent."""
    agent = os.getppid()

    def wait() -> None:
        while os.getppid() == agent:
            time.sleep(AGENT_POLL_S)
        what = f"the agent of torchrun (process {agent}) that started rank {rank} was killed"
        error = MeshwrightError("MW-RANK-011", what, fix="start torchrun again with --resume", exit_code=INTERNAL_ERROR)
        write_failure(folder, failure_of(rank, error))
        with contextlib.suppress(OSError):  # what the agent read is closed
            os.write(2, f"{error}\n".encode())
        os._exit(INTERNAL_ERROR)

    thread = threading.Thread(target=wait, name="meshwright-agent", daemon=True)
    thread.start()
    return thread


def _join(rank: int, world: int, store: str, group_timeout: float, device: str, backend: str) -> str:
    """Join the process group and return this rank's device."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if device.startswith("cuda"):
        device = f"cuda:{rank % torch.cuda.device_count()}"  # several ranks on one GPU only with --share-device
        torch.cuda.set_device(device)
    if backend == "meshwright":
        import meshwright.comm.backend  # noqa: F401  registers it
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=group_timeout),
    )
    return device
