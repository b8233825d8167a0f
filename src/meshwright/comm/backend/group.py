"""The backend "meshwright": the methods of a process group that torch calls for each collective, from Python and from C++ (DDP, functional
collectives, DTensor), and its registration.

torch 2.13 renamed some methods (`_allgather_base` → `all_gather_single`, …); both names are here. Each method brings the
tensors into the form of a program (one flat input, one flat output) and runs it (`program_group`). A wrong argument raises an error that
names the method and both sizes, before anything is sent.

    MESHWRIGHT_CLUSTER=FILE        the calibration (`meshwright calibrate`) by which programs are chosen
    MESHWRIGHT_SHARED_MEMORY=0     messages between ranks of one host use gloo too

The variables are for ranks that torchrun or another launcher starts; Python code passes the same to `register`.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed import ReduceOp

from meshwright.comm.backend.program_group import ProgramGroup
from meshwright.comm.communicator import flat, with_sizes
from meshwright.comm.work import Work
from meshwright.describe.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.registry import build

REDUCTIONS = (
    (ReduceOp.SUM, "sum"), (ReduceOp.AVG, "avg"), (ReduceOp.PRODUCT, "product"), (ReduceOp.MIN, "min"), (ReduceOp.MAX, "max"),
    (ReduceOp.BAND, "band"), (ReduceOp.BOR, "bor"), (ReduceOp.BXOR, "bxor"),
)  # fmt: skip


def one(items: Sequence, name: str) -> Sequence:
    """The only item of a list: a process has one device, so one tensor."""
    if len(items) != 1:
        raise MeshwrightError("MW-COMM-001", f"{name} expects one tensor (or list) per rank, not {len(items)}")
    return items


def rows(tensor: torch.Tensor, splits: Sequence[int] | None, ranks: int) -> list[int]:
    """Elements of each block: splits count rows of the first dimension; without them all blocks are equal."""
    length = tensor.shape[0] if tensor.dim() else tensor.numel()
    counts = list(splits) if splits else [length // ranks] * ranks
    if len(counts) != ranks or sum(counts) != length:
        raise sizes_differ("all_to_all_single", sum(counts), length)
    width = tensor.numel() // length if length else 0
    return [count * width for count in counts]


def copies(into: Sequence[torch.Tensor], merged: torch.Tensor) -> Callable[[], None]:
    """The step after a program: copy the parts of one buffer into the caller's tensors."""

    def copy() -> None:
        at = 0
        for tensor in into:
            tensor.copy_(merged[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()

    return copy


def last(works: list[Work]) -> Work:
    """The handle of the last of several calls; calls complete in order."""
    return works[-1] if works else Work().finish()


def reduction_of(opts: Any) -> str:
    for value, name in REDUCTIONS:
        if opts is None or opts.reduceOp == value:  # None: torch's default, the sum
            return name
    valid = [name for _, name in REDUCTIONS]
    raise MeshwrightError("MW-COMM-002", f"the backend meshwright has no reduction {opts.reduceOp}", valid=valid)


def root_of(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def sizes_differ(name: str, found: int, expected: int) -> MeshwrightError:
    return MeshwrightError("MW-COMM-001", f"{name}: a tensor has {found} elements where {expected} are needed")


Tensors = list[torch.Tensor]


class MeshwrightGroup(ProgramGroup):
    """The ranks of one group, with torch's collectives."""

    # Collectives of one buffer

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        (tensor,) = one(tensors, "allreduce")
        return self.run("all-reduce", tensor, reduction=reduction_of(opts), opts=opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """All tensors in one call: small ones share its latency."""
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise MeshwrightError("MW-COMM-001", "the tensors of allreduce_coalesced have different dtypes")
        merged = torch.cat([flat(tensor) for tensor in tensors])
        copy_back = copies(tensors, merged)
        return self.run("all-reduce", merged, reduction=reduction_of(opts), after=copy_back, result=tensors, opts=opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        (tensor,) = one(tensors, "broadcast")
        return self.run("broadcast", tensor, root=root_of(opts), opts=opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        (tensor,) = one(tensors, "reduce")
        return self.run("reduce", tensor, root=root_of(opts), reduction=reduction_of(opts), opts=opts)

    def barrier(self, opts: Any = None) -> Work:
        return self.run("barrier", torch.empty(0), opts=opts)

    # All-gather: the output has one shard per rank

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        if output.numel() != tensor.numel() * self.ranks:
            raise sizes_differ("all_gather", output.numel(), tensor.numel() * self.ranks)
        return self.run("all-gather", tensor, output, opts=opts)

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """The outputs may have different sizes."""
        (tensor,), (into,) = one(tensors, "allgather"), one(outputs, "allgather")
        sizes = [out.numel() for out in into]
        if len(sizes) != self.ranks or sizes[self.me] != tensor.numel():
            raise sizes_differ("all_gather", sizes[self.me] if self.me < len(sizes) else 0, tensor.numel())
        merged = torch.empty(sum(sizes), dtype=tensor.dtype)
        program, after = self.program_of_sizes("all-gather", sizes, tensor.dtype), copies(into, merged)
        return self.run("all-gather", tensor, merged, program=program, after=after, result=into, opts=opts)

    def allgather_coalesced(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """outputs[r][k] is tensor k of rank r."""
        return last([self.allgather([list(into)], [t], opts) for t, *into in zip(tensors, *outputs, strict=True)])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        return last([self._allgather_base(out, t, opts) for out, t in zip(outputs, tensors, strict=True)])

    # Reduce-scatter: the input has one shard per rank

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        if tensor.numel() != output.numel() * self.ranks:
            raise sizes_differ("reduce_scatter", tensor.numel(), output.numel() * self.ranks)
        return self.run("reduce-scatter", tensor, output, reduction=reduction_of(opts), opts=opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        """The inputs may have different sizes."""
        (output,), (shards,) = one(outputs, "reduce_scatter"), one(inputs, "reduce_scatter")
        sizes = [shard.numel() for shard in shards]
        if len(sizes) != self.ranks or sizes[self.me] != output.numel():
            raise sizes_differ("reduce_scatter", output.numel(), sizes[self.me] if self.me < len(sizes) else 0)
        merged = torch.cat([flat(shard) for shard in shards])
        program = self.program_of_sizes("reduce-scatter", sizes, merged.dtype)
        return self.run("reduce-scatter", merged, output, program=program, reduction=reduction_of(opts), opts=opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return last([self._reduce_scatter_base(out, t, opts) for out, t in zip(outputs, inputs, strict=True)])

    # All-to-all: a block to every rank and from every rank

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        if not output_splits and not input_splits:
            if output.numel() != tensor.numel() or tensor.numel() % self.ranks:
                raise sizes_differ("all_to_all_single", output.numel(), tensor.numel())
            return self.run("all-to-all", tensor, output, opts=opts)
        sent, received = rows(tensor, input_splits, self.ranks), rows(output, output_splits, self.ranks)
        return self.exchange(flat(tensor), output, sent, received, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        merged = torch.cat([flat(tensor) for tensor in inputs])
        into = torch.empty(sum(out.numel() for out in outputs), dtype=merged.dtype)
        sent, received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self.exchange(merged, into, sent, received, opts, copies(outputs, into), outputs)

    def exchange(
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        opts: Any,
        after: Callable[[], None] | None = None,
        result: Any = None,
    ) -> Work:
        """An all-to-all of blocks of any sizes. A rank knows its row and its column of the table of sizes, which is all that
        the direct program needs."""
        if sent[self.me] != received[self.me]:
            raise sizes_differ("all_to_all", received[self.me], sent[self.me])
        table = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        table[self.me, :], table[:, self.me] = sent, received
        program = build("all-to-all", "direct", self.ranks, 0).but(sizes=table.ravel(), elements=int(sum(sent)))
        return self.run(
            "all-to-all", tensor, output, program=program, splits=True, after=after, result=result, opts=opts
        )

    # Gather and scatter: only the root knows all sizes

    def gather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        (tensor,), root = one(tensors, "gather"), root_of(opts)
        into = one(outputs, "gather")[0] if self.me == root else []
        merged = torch.empty(sum(out.numel() for out in into), dtype=tensor.dtype)
        sizes = [out.numel() for out in into] or [tensor.numel() if r == self.me else 0 for r in range(self.ranks)]
        program = with_sizes(build("gather", "naive", self.ranks, 0, root=root), sizes)
        after = copies(into, merged)
        return self.run("gather", tensor, merged, program=program, splits=True, after=after, result=into, opts=opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        (output,), root = one(outputs, "scatter"), root_of(opts)
        shards = one(inputs, "scatter")[0] if self.me == root else []
        merged = torch.cat([flat(shard) for shard in shards]) if shards else output.new_empty(0)
        sizes = [s.numel() for s in shards] or [output.numel() if r == self.me else 0 for r in range(self.ranks)]
        if sizes[self.me] != output.numel():
            raise sizes_differ("scatter", output.numel(), sizes[self.me])
        program = with_sizes(build("scatter", "naive", self.ranks, 0, root=root), sizes)
        return self.run("scatter", merged, output, program=program, splits=True, opts=opts)

    # Point to point

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        (tensor,) = one(tensors, "send")
        self.notify("send", tensor, tensor.nbytes)
        return self.messages.send(tensor, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        return self.messages.receive(one(tensors, "recv")[0], peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.messages.receive(one(tensors, "recv")[0], None, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.communicator.group.monitored_barrier(timeout or self.timeout, wait_all_ranks)


COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "_allgather_base", "allgather", "_reduce_scatter_base", "reduce_scatter",
    "alltoall_base", "alltoall", "gather", "scatter",
)  # fmt: skip


NEWER_NAMES = {  # of torch 2.13
    "all_gather_single": "_allgather_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base", "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}  # fmt: skip


def reporting(method: Callable[..., Work]) -> Callable[..., Work]:
    """The method, which also publishes why it rejects its arguments: peers that wait for this rank report it at their timeout."""

    @functools.wraps(method)
    def call(self: MeshwrightGroup, *args: Any, **options: Any) -> Work:
        try:
            return method(self, *args, **options)
        except MeshwrightError as error:
            if error.code in ("MW-COMM-001", "MW-COMM-002"):
                self.communicator.failure.refuse(error)
            raise

    return call


for collective in COLLECTIVES:
    setattr(MeshwrightGroup, collective, reporting(getattr(MeshwrightGroup, collective)))
for newer, older in NEWER_NAMES.items():
    setattr(MeshwrightGroup, newer, getattr(MeshwrightGroup, older))


NAME = "meshwright"


@dataclass
class Settings:
    """Options of new groups."""

    cluster: Cluster | None = None
    shared_memory: bool = True


SETTINGS = Settings()


def register(cluster: Cluster | None = None, shared_memory: bool | None = None) -> None:
    """Register the backend with torch.distributed; call it again to change the settings of later groups."""
    file = os.environ.get("MESHWRIGHT_CLUSTER", "")
    if cluster is None and file:
        from meshwright.describe.config import load_cluster

        cluster = load_cluster(file)
    SETTINGS.cluster = cluster
    if shared_memory is None:
        shared_memory = os.environ.get("MESHWRIGHT_SHARED_MEMORY", "1") != "0"
    SETTINGS.shared_memory = shared_memory
    if NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])


def create(store: Any, rank: int, size: int, timeout: timedelta) -> MeshwrightGroup:
    """Create a new group; torch.distributed calls this on all of its ranks."""
    return MeshwrightGroup(store, rank, size, timeout, SETTINGS.cluster, SETTINGS.shared_memory)
