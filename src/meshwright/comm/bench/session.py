"""One rank of a bench and the other ranks: where each runs, barriers, agreements, and texts of all ranks.

The ranks were started by the local launcher or by torchrun, Slurm or Open MPI (`training.join`). Barriers and agreements use a gloo group
that no measurement uses.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from meshwright.calibrate.points import RankInfo
from meshwright.comm.bench.timing import Synchronization, no_operation
from meshwright.comm.texts import gather_texts
from meshwright.host import usable_processes


@dataclass(frozen=True)
class Session:
    """One rank of a bench: where it runs, and how it acts together with the other ranks."""

    rank: int
    world: int
    device: torch.device
    control: Any
    ranks: tuple[RankInfo, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(info.host for info in self.ranks)

    def barrier(self) -> None:
        if self.world > 1:
            distributed.barrier(group=self.control)

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest value of any rank, element by element."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.control)
        return [float(value) for value in tensor]

    def smallest(self, value: float) -> float:
        """The smallest value of any rank."""
        return -self.agree([-value])[0]

    def gather(self, text: str) -> list[str]:
        """The text of every rank, on every rank."""
        return gather_texts(text, self.control) if self.world > 1 else [text]

    @property
    def synchronization(self) -> Synchronization:
        synchronize: Callable[[], object] = torch.cuda.synchronize if self.device.type == "cuda" else no_operation
        return Synchronization(synchronize, self.barrier, self.agree)


def session(device: str) -> Session:
    """The session of this rank in the default process group; `device` is "cpu" or a CUDA device."""
    if not distributed.is_initialized():
        return _with_ranks(0, 1, device, None)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    gloo = distributed.get_backend() == "gloo"
    control = distributed.group.WORLD if gloo else distributed.new_group(backend="gloo")
    return _with_ranks(rank, world, device, control)


def _with_ranks(rank: int, world: int, device: str, control: Any) -> Session:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    info = RankInfo(rank=rank, host=host_name(), device=name, cores=usable_processes())
    alone = Session(rank, world, torch.device(device), control, ())  # enough to gather where the ranks are
    infos = [RankInfo.model_validate_json(text) for text in alone.gather(info.model_dump_json())]
    return Session(rank, world, alone.device, control, named_hosts(infos))


def host_name() -> str:
    """The host, and the network namespace: containers and emulated nodes of one machine have one name but separate networks."""
    try:
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/net"))
    except OSError:  # not Linux
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


def named_hosts(infos: Sequence[RankInfo]) -> tuple[RankInfo, ...]:
    """Hosts by their name alone; where several namespaces share a name, each gets a number: vm, vm-1, …"""
    found: dict[str, list[str]] = {}
    for info in infos:
        known = found.setdefault(info.host.rpartition("/")[0], [])
        if info.host not in known:
            known.append(info.host)
    names = {
        full: name if len(known) == 1 else f"{name}-{k}"
        for name, known in found.items()
        for k, full in enumerate(known)
    }
    return tuple(info.but(host=names[info.host]) for info in infos)
