"""Join the ranks that a launcher started: torchrun, Slurm (`srun`), or `meshwright bench --ranks N` on this machine.

    torchrun    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun        SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST: the first host of the list is the rendezvous address, the
                port follows from the job's number, so that two jobs do not meet
    --ranks N   the forkserver of `training.launch` has already made the process group

Every rank announces itself in the store before any process group is made. So a missing rank is named after `timeout_s`, on every
rank that is there, instead of an error about sockets. Barriers and agreements use a gloo group that no measurement uses.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from meshwright.calibrate.points import RankInfo
from meshwright.comm.bench.timing import Synchronization
from meshwright.errors import MeshwrightError, listed

PORT = 29_500
JOIN_TIMEOUT_S = 60.0


class Placement(NamedTuple):
    """What a launcher's environment says about one rank."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    store_is_running: bool = False  # torchrun's agent already serves the store


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
        """The text of every rank, on every rank. Only bytes are exchanged: nothing is unpickled."""
        if self.world == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        longest = int(self.agree([float(len(data))])[0])
        padded = torch.zeros(longest + 8, dtype=torch.uint8)
        padded[:8] = torch.tensor(list(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        padded[8 : 8 + len(data)] = data
        found = [torch.empty_like(padded) for _ in range(self.world)]
        distributed.all_gather(found, padded, group=self.control)
        return [bytes(t[8 : 8 + int.from_bytes(bytes(t[:8].tolist()), "little")].tolist()).decode() for t in found]

    @property
    def synchronization(self) -> Synchronization:
        synchronize: Callable[[], object] = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        return Synchronization(synchronize, self.barrier, self.agree)


def placement(environment: Mapping[str, str]) -> Placement | None:
    """The placement that torchrun or Slurm set; None where no launcher did."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _of_variables(
            environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", environment.get("MASTER_ADDR", ""), "torchrun"
        )
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1") or 1) > 1:
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        address = environment.get("MASTER_ADDR") or first_host(hosts)
        return _of_variables(environment, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", address, "srun")
    return None


def _of_variables(
    environment: Mapping[str, str], rank: str, world: str, local: str, address: str, launcher: str
) -> Placement:
    try:
        default_port = PORT + int(environment.get("SLURM_JOB_ID", "0") or 0) % 10_000
        found = Placement(
            int(environment[rank]),
            int(environment[world]),
            int(environment.get(local, "0")),
            address,
            int(environment.get("MASTER_PORT", default_port)),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    except (KeyError, ValueError) as error:
        raise _bad_environment(f"{rank} and {world} are needed and must be numbers: {error}", launcher) from None
    if not 0 <= found.rank < found.world:
        raise _bad_environment(f"{rank} = {found.rank} is not from 0 to {world} − 1 = {found.world - 1}", launcher)
    if found.world > 1 and not address:
        raise _bad_environment("MASTER_ADDR, the host of rank 0, is not set", launcher)
    return found


def _bad_environment(why: str, launcher: str) -> MeshwrightError:
    fix = f"start the ranks with {launcher}, or unset these variables and use --ranks"
    return MeshwrightError("MW-BENCH-003", "the variables of the launcher do not place this rank", why=why, fix=fix)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list of nodes: `gpu[003-007,12],login1` → gpu003."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return (found[1] + (found[2] or "")) if found else ""


def join(place: Placement, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Meet the other ranks and make the default process group (gloo, on the CPU). A missing rank is named on every rank."""
    timeout = timedelta(seconds=timeout_s)
    try:
        store = distributed.TCPStore(
            place.address,
            place.port,
            place.world,
            is_master=place.rank == 0 and not place.store_is_running,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise _unreachable(place, timeout_s, error) from None
    meeting = distributed.PrefixStore("meshwright-bench", store)
    keys = [f"rank-{rank}" for rank in range(place.world)]
    meeting.set(keys[place.rank], socket.gethostname())
    try:
        meeting.wait(keys, timeout)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not meeting.check([key])]
        raise MeshwrightError(
            "MW-BENCH-004",
            f"rank {listed([str(r) for r in missing])} of {place.world} did not join within {timeout_s:.0f} s",
            why="Either it was not started, or it ended, or it cannot reach " + f"{place.address}:{place.port}",
            fix="look at the output of that rank; --timeout waits longer",
        ) from None
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore("gloo", meeting),
            rank=place.rank,
            world_size=place.world,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise connection_failed(error) from None


def _unreachable(place: Placement, timeout_s: float, error: Exception) -> MeshwrightError:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        why, fix = "Another process uses the port", f"MASTER_PORT={place.port + 1}"
    else:
        why, fix = str(error).splitlines()[0][:200], "check MASTER_ADDR, MASTER_PORT and the firewall"
    what = (
        f"rank {place.rank} cannot reach the rendezvous address {place.address}:{place.port} within {timeout_s:.0f} s"
    )
    return MeshwrightError("MW-BENCH-005", what, why=why, fix=fix)


def connection_failed(error: Exception) -> MeshwrightError:
    """The error for ranks that met but cannot exchange messages."""
    return MeshwrightError(
        "MW-BENCH-005",
        "the ranks met but cannot exchange messages",
        why=str(error).splitlines()[0][:200],
        fix="GLOO_SOCKET_IFNAME=eth0 (an interface that all hosts share); NCCL_SOCKET_IFNAME for NCCL",
    )


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
    info = RankInfo(rank=rank, host=host_name(), device=name, cores=usable_cores())
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


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
