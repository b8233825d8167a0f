"""An independent count, below torch.distributed, of every collective a rank issues and of its peak tensor memory.

Every way to communicate in torch (functions, functional collectives, `fully_shard`, pipeline stages) ends in an
operator of the `c10d` namespace, which the dispatcher calls. A dispatch mode sees each call, in forward and backward,
with its group and its tensors. It counts the operation, the group, and n, the full unsharded buffer:

    all_reduce  the tensor     all_gather  the output     reduce_scatter  the input     send  the tensor

A group of the backend `meshwright` is called without the dispatcher: it notifies the observer itself.

Bytes sent are those of the programs where the backend is ours. Other backends do not tell: there they are what a bandwidth-optimal algorithm
sends in the group of the call (`lower.program.sent`), which may be a part of its axis (the two ends of a pipeline), and of an all-to-all with
splits the parts for other ranks.

Memory is the bytes of all live storages: added when an operator allocates one, removed when it is freed or resized
(`fully_shard` resizes). Storages from before the step (parameters, gradients, optimizer states, their moving average, errors of
compressors, receive buffers of a pipeline) are added first.

The operators of a compiled graph do not pass the dispatcher: an observed step runs without compilation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.comm.backend.program_group import LISTENERS, ProgramGroup
from meshwright.describe.sharding import KV_COPIES
from meshwright.lower.program import sent
from meshwright.parallel.data.reduction import compressors_in
from meshwright.parallel.mesh import ON_DEMAND, Mesh
from meshwright.parallel.numerics.compress.powersgd import PowerSGD
from meshwright.parallel.pieces import local_tensor
from meshwright.training.hooks import Observed
from meshwright.training.loop import Trainer

AXES = ("tp", "cp", "pp", "shard", "replicate", "dp", "dp_cp", "shard_cp", "world", *ON_DEMAND)
CONTEXT_AXES = ("dp_cp", "shard_cp")  # with context parallelism they have separate communicators
# operator → (our name, which argument holds the full buffer)
COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
NOT_COUNTED = ("c10d::recv_", "c10d::recv_any_source_", "c10d::barrier", "_c10d_functional::wait_tensor")


class Observer(TorchDispatchMode):
    """Counts the collectives and the tensor memory of what runs inside its `with` block."""

    def __init__(self, trainer: Trainer, separate_axes: bool = False) -> None:
        super().__init__()
        self.axis_of = axes_by_group(trainer.parallel.mesh, separate_axes)
        self.groups = {str(group.group_name): group for _, group in groups_of(trainer.parallel.mesh)}
        self.seen: dict[tuple[str, str], list[int]] = {}
        self.sent: dict[str, float] = {}
        self.unknown: set[str] = set()
        self.names: dict[int, str] = {}  # of operators that communicate, by id: the hash of an operator is slow
        self.in_operator = False  # an operator that communicates is counted; the call it makes to its group is not
        self.compiled = trainer.parallel.compilation.mode != "off"
        self.eager: Any = nullcontext()
        self.memory = LiveBytes(trainer.parallel.mesh.device)
        for tensor in existing_tensors(trainer):
            self.memory.add(tensor)

    def __enter__(self) -> Observer:
        if self.compiled:
            self.eager = torch.compiler.set_stance("force_eager")
        self.eager.__enter__()
        self.memory.watch_resizes()
        LISTENERS.append(self.listen)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        LISTENERS.remove(self.listen)
        self.memory.unwatch_resizes()
        self.eager.__exit__(*exception)

    def observed(self) -> Observed:
        collectives = {key: (count, size) for key, (count, size) in self.seen.items()}
        return Observed(collectives, self.memory.peak, sorted(self.unknown), self.sent)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap `__torch_dispatch__` to guard it against compilation, for a third of the time of an observed step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by every operator of a step, thousands of times: the path of an operator that does not communicate is short."""
        if DTensor in types:
            return NotImplemented  # first decompose into operators on local tensors, which include the collectives
        name = self.names.get(id(func))
        if name is None:
            name = self.names[id(func)] = distributed_operator(func)
        if name:
            self.in_operator = True
            out = func(*args, **(kwargs or {}))
            self.in_operator = False
            if name in COLLECTIVES:
                self._count(name, args, out)
            elif name not in NOT_COUNTED:
                self.unknown.add(name)
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(out, Tensor):  # most operators
            self.memory.add(out)
        elif out is not None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.memory.add(leaf)
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        operation, which = COLLECTIVES[name]
        buffers = [t for t in tree_leaves(out if which is None else args[which]) if isinstance(t, Tensor)]
        name = next(g for g in map(group_name, args) if g)
        size = sum(t.nbytes for t in buffers)
        self._add(operation, name, size)
        group = self.groups.get(name)
        if group is not None and not isinstance(group, ProgramGroup):
            splits = splits_of(args) if operation == "all_to_all" else []
            own = splits[group.rank()] / max(sum(splits), 1) * size if splits else None
            self._send(name, float(sent(operation, size, group.size())) if own is None else size - own)

    def _add(self, operation: str, group: str, size: int) -> None:
        row = self.seen.setdefault((self.axis_of.get(group, group), operation), [0, 0])
        row[0] += 1
        row[1] += size

    def _send(self, group: str, size: float) -> None:
        if (axis := self.axis_of.get(group)) is not None:
            self.sent[axis] = self.sent.get(axis, 0.0) + size

    def listen(self, operation: str, buffer: Tensor, group: str, sent_bytes: int) -> None:
        """A call to a group of the backend `meshwright`."""
        self._send(group, sent_bytes)
        if self.in_operator or operation == "barrier":
            return
        if operation in {name for name, _ in COLLECTIVES.values()}:
            self._add(operation, group, buffer.nbytes)
        else:
            self.unknown.add(operation)


def distributed_operator(func: Any) -> str:
    """The name of an operator that communicates, or nothing."""
    name = func.name().partition(".")[0]
    return name if "c10d" in name else ""


def existing_tensors(trainer: Trainer) -> Iterator[Tensor]:
    """The tensors that a trainer has between two steps."""
    parallel = trainer.parallel
    for piece in (*parallel.pieces, *(trainer.masters.pieces if trainer.masters is not None else ())):
        yield piece.local
        yield piece.gradient
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    yield from (local_tensor(value) for value in states if isinstance(value, Tensor))
    if parallel.pipeline is not None:
        yield from parallel.pipeline.receive_buffers
    if trainer.average is not None:
        yield from trainer.average.values
    for compressor in compressors_in(parallel.reductions):
        yield from compressor.feedback.errors.values()
        yield from compressor.bases.values() if isinstance(compressor, PowerSGD) else ()


def splits_of(args: Any) -> list[int]:
    """Return the rows of an all-to-all's input for each rank; empty if they are equal. Both operators take the splits of the output first."""
    lists = [x for x in args if isinstance(x, list | tuple) and all(isinstance(n, int) for n in x)]
    return list(lists[1]) if len(lists) > 1 else []


def group_name(argument: Any) -> str:
    """The name of the process group that an operator's argument is, or ""."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return distributed.ProcessGroup.unbox(argument).group_name
    return argument if isinstance(argument, str) and argument not in ("sum", "max", "avg", "min", "product") else ""


def groups_of(mesh: Mesh) -> Iterator[tuple[str, distributed.ProcessGroup]]:
    """The process groups of this rank with the axis of each; a group of several axes comes once for each."""
    for axis in AXES:
        if (group := mesh.group(axis)) is not None:
            yield axis, group
    if (copies := mesh.group(KV_COPIES)) is not None:
        yield KV_COPIES, copies
    if "ends" in mesh.__dict__ and mesh.ends is not None:
        yield "ends", mesh.ends


def axes_by_group(mesh: Mesh, separate_axes: bool = False) -> dict[str, str]:
    """Name of a process group → axis. Axes with the same ranks are all named as the first of them in `AXES`, unless
    `separate_axes`."""
    out: dict[str, str] = {}
    for name, group in groups_of(mesh):
        axis = {KV_COPIES: "tp", "ends": "pp"}.get(name, name)
        same = separate_axes or axis != name
        out.setdefault(group.group_name, axis if same else canonical(mesh, axis))
    return out


def canonical(mesh: Mesh, axis: str) -> str:
    """The first axis of `AXES` whose group on this rank has the same ranks."""
    ranks, cp = mesh.layout.group_of(axis, mesh.rank), mesh.size("cp")
    candidates = [a for a in AXES if cp == 1 or (a in CONTEXT_AXES) == (axis in CONTEXT_AXES)]
    return next(a for a in candidates if mesh.layout.group_of(a, mesh.rank) == ranks)


class LiveBytes:
    """Bytes of the live storages on one type of device: current and peak."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device).type
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._freed: dict[int, weakref.ref] = {}  # references whose callbacks hear of a storage's end
        self._resize = torch.UntypedStorage.resize_

    def add(self, tensor: Tensor) -> None:
        if tensor.device.type != self.device:
            return
        storage = local_tensor(tensor).untyped_storage()
        key, size = id(storage), storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._freed[key] = weakref.ref(storage, lambda _: self._free(key))
        if known != size:
            self._set(key, size)

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if self.now > self.peak:
            self.peak = self.now

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._freed[key]

    def watch_resizes(self) -> None:
        plain, live = self._resize, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = plain(storage, size)
            if id(storage) in live._sizes:
                live._set(id(storage), size)
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]

    def unwatch_resizes(self) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
