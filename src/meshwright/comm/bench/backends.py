"""One adapter for each communication library that `bench` measures: the calls of one operation, on buffers of n bytes.

    adapter = Torch("gloo", ranks, device)          # every rank makes it, in the same order (new_group is collective)
    call = adapter.collective("all-gather", "", n)  # buffers are allocated here, not while the clock runs
    call()

n is the full buffer: the output of an all-gather, the input of a reduce-scatter. It is rounded up to equal shards of whole elements
(`rounded`). To measure another library, write one class with the methods of `BenchLibrary` and name it in BACKENDS.

Texts exchanged between ranks as bytes: nothing is pickled, so a rank receives data and never code.

One rank of a bench and the other ranks: where each runs, barriers, agreements, and texts of all ranks.

The ranks were started by the local launcher or by torchrun, Slurm or Open MPI (`training.join`). Barriers and agreements use a gloo group
that no measurement uses.
"""

import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from meshwright.calibrate.points import RankInfo
from meshwright.comm.bench.timing import Synchronization, no_operation
from meshwright.comm.communicator import Communicator
from meshwright.errors import MeshwrightError
from meshwright.host import usable_processes
from meshwright.programs.collectives import ALGORITHMS, accepts, build
from meshwright.programs.collectives.comparison import SWITCHED


def gather_texts(text: str, group: ProcessGroup | None) -> list[str]:
    """The text of every rank of a group on the CPU, on every rank. No group: this process is the only one."""
    if group is None or group.size() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
    padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
    padded[: len(data)] = torch.from_numpy(data.copy())
    found = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(found, padded, group=group)
    return [bytes(part[: int(size)].numpy()).decode() for part, size in zip(found, sizes, strict=True)]


class BenchContext(Protocol):
    """The interface of `training.rank.RankContext` that a rank uses."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def send(self) -> Callable[[Any], None]: ...


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
    numbered = ((name, k, full, len(known)) for name, known in found.items() for k, full in enumerate(known))
    names = {full: name if count == 1 else f"{name}-{k}" for name, k, full, count in numbered}
    return tuple(info.but(host=names[info.host]) for info in infos)


DTYPE, ELEMENT_BYTES = torch.float32, 4
OPERATIONS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "gather", "scatter", "barrier",
)  # fmt: skip
BUFFERS = {"all-reduce": 2, "all-gather": 2, "reduce-scatter": 3, "all-to-all": 2, "gather": 3, "scatter": 3}
Call = Callable[[], object]


class BenchLibrary(Protocol):
    """A communication library on a set of ranks; on other ranks its calls do nothing."""

    name: str
    ranks: tuple[int, ...]
    has_pairs: bool  # whether its transfers between two ranks are measured

    def algorithms(self, operation: str) -> tuple[str, ...]:
        """The algorithms that can be chosen for an operation; ("",) where the library chooses, () where it has none."""
        ...

    def collective(self, operation: str, algorithm: str, n: int) -> Call: ...

    def round_trip(self, peer: int, n: int, first: bool, answer: int = 0) -> Call:
        """A message of n bytes to `peer` and an answer of `answer` bytes back (default: n); `first`: this rank sends the message."""
        ...


def do_nothing() -> None:
    """The call of a rank that takes no part."""


def rounded(n: int, ranks: int, element_bytes: int = ELEMENT_BYTES) -> int:
    """The smallest size of at least n bytes that all ranks share in whole elements."""
    unit = element_bytes * ranks
    return max(-(-n // unit), 1) * unit


class Torch:
    """gloo or NCCL through torch.distributed."""

    has_pairs = True

    def __init__(self, backend: str, ranks: tuple[int, ...], device: torch.device) -> None:
        self.name, self.ranks = backend, ranks
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.group = distributed.new_group(list(ranks), backend=backend)
        self.member = distributed.get_rank() in ranks

    def algorithms(self, operation: str) -> tuple[str, ...]:
        return ("",)

    def collective(self, operation: str, algorithm: str, n: int, dtype: torch.dtype = DTYPE) -> Call:
        if not self.member:
            return do_nothing
        if operation == "barrier":
            return lambda: distributed.barrier(group=self.group)
        size, root = len(self.ranks), self.ranks[0]
        full = torch.zeros(n // dtype.itemsize, dtype=dtype, device=self.device)
        shard = torch.zeros(full.numel() // size, dtype=dtype, device=self.device)
        return self._call(operation, full, shard, root)

    def _call(self, operation: str, full: torch.Tensor, shard: torch.Tensor, root: int) -> Call:
        group, d = self.group, distributed
        # torch 2.13 renamed the collectives on single tensors; 2.11 and 2.12 have the older names only.
        gather: Any = getattr(d, "all_gather_single", None) or d.all_gather_into_tensor
        scatter: Any = getattr(d, "reduce_scatter_single", None) or d.reduce_scatter_tensor
        parts = list(full.chunk(len(self.ranks))) if d.get_rank() == root else None
        other = torch.empty_like(full) if operation == "all-to-all" else full
        calls: dict[str, Call] = {
            "all-reduce": lambda: d.all_reduce(full, group=group),
            "all-gather": lambda: gather(full, shard, group=group),
            "reduce-scatter": lambda: scatter(shard, full, group=group),
            "all-to-all": lambda: d.all_to_all_single(other, full, group=group),
            "broadcast": lambda: d.broadcast(full, root, group=group),
            "reduce": lambda: d.reduce(full, root, group=group),
            "gather": lambda: d.gather(shard, parts, root, group=group),
            "scatter": lambda: d.scatter(shard, parts, root, group=group),
        }
        if operation not in calls:
            what = f"'{operation}' is not an operation that bench measures"
            raise MeshwrightError("MW-BENCH-006", what, valid=OPERATIONS)
        return calls[operation]

    def round_trip(self, peer: int, n: int, first: bool, answer: int = 0) -> Call:
        counts = (max(size // ELEMENT_BYTES, 1) for size in (n, answer))
        message, reply = (torch.zeros(count, dtype=DTYPE, device=self.device) for count in counts)

        def call() -> None:
            if first:
                distributed.send(message, peer, group=self.group)
                distributed.recv(reply, peer, group=self.group)
            else:
                distributed.recv(message, peer, group=self.group)
                distributed.send(reply, peer, group=self.group)

        return call


class Programs:
    """The programs of Meshwright, each algorithm by name, run by `comm.run` over a gloo group. A message is gloo's, so pairs are not
    measured again."""

    has_pairs = False

    def __init__(self, ranks: tuple[int, ...], hosts: Sequence[str]) -> None:
        self.name, self.ranks = "meshwright", ranks
        self.group = distributed.new_group(list(ranks), backend="gloo")
        self.member = distributed.get_rank() in ranks
        self.communicator = Communicator.of_group(self.group) if self.member else None
        places: dict[str, list[int]] = {}
        for index, rank in enumerate(ranks):
            places.setdefault(hosts[rank] if hosts else "", []).append(index)
        self.groups = list(places.values())

    def algorithms(self, operation: str) -> tuple[str, ...]:
        return tuple(name for name in ALGORITHMS.get(operation, ()) if name not in SWITCHED)

    def collective(self, operation: str, algorithm: str, n: int) -> Call:
        if self.communicator is None:
            return do_nothing
        size, communicator = len(self.ranks), self.communicator
        elements = 0 if operation == "barrier" else n // ELEMENT_BYTES
        options = {"groups": self.groups} if "groups" in accepts(operation, algorithm) else {}
        program = build(operation, algorithm, size, elements, **options)
        whole = [operation not in ("all-gather", "gather"), operation not in ("reduce-scatter", "scatter")]
        if operation in ("gather", "scatter") and communicator.rank:
            whole = [False, False]
        source, result = (torch.zeros(elements if w else elements // size, dtype=DTYPE) for w in whole)
        if operation in ("all-reduce", "broadcast", "reduce", "barrier"):
            return lambda: communicator.run(program, source)
        return lambda: communicator.run(program, source, result)

    def round_trip(self, peer: int, n: int, first: bool, answer: int = 0) -> Call:
        raise MeshwrightError("MW-BENCH-006", "transfers between pairs are measured with gloo or nccl")


BACKENDS: dict[str, Callable[..., BenchLibrary]] = {  # ranks, device, and the host of each rank of the world
    "gloo": lambda ranks, device, hosts=(): Torch("gloo", ranks, device),
    "nccl": lambda ranks, device, hosts=(): Torch("nccl", ranks, device),
    "meshwright": lambda ranks, device, hosts=(): Programs(ranks, hosts),
}


def usable(backend: str, device: torch.device, one_device_each: bool) -> str:
    """Return why a backend cannot be measured here; empty if it can."""
    if backend != "nccl":
        return ""
    if device.type != "cuda":
        return "nccl needs GPUs"
    if not distributed.is_nccl_available():
        return "this torch has no NCCL"
    return "" if one_device_each else "nccl needs one GPU for each rank"
