"""Record every collective, send and receive of the timed steps: when it was issued, how long the rank was blocked, when it was complete.

torch.distributed, `fully_shard`, pipeline stages and our strategies all call a method of the process group and then `wait` on the
handle that it returns. While a recorder is active these two methods are wrapped: two clock readings each, about 10 µs together, where a
dispatch mode or the profiler would add that to every operator. Attributes of torch's C++ objects (the name of a group, the bytes of a
tensor) take as long when the model has emptied the caches, so they are read once for each group, or after the operation was issued.
Functional collectives (DTensor) reach the group from C++, so their Python entries in `torch.ops._c10d_functional` are wrapped too.

    exposed   the rank's thread is inside the call or inside `wait`
    hidden    the operation is in progress, and the rank computes

The end of an asynchronous operation comes from its future (gloo), from its handle (our backend), or from an event of the device
(NCCL, `DeviceClock`). gloo does not report when a message of a send or receive arrived: it is complete when `wait` returns.

The recorder also knows the operation that the rank is inside of, and how many it has issued in each group: the watchdog (`faults`) reads
these from its thread when nothing moves. Groups that are not of the mesh (a checkpoint's, used by a thread in the background) are not recorded.

Private names of torch: `ProcessGroup._allgather_base`, `._reduce_scatter_base`, `._end_coalescing`. A missing one is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from meshwright.comm import work as own
from meshwright.comm.backend.group import MeshwrightGroup
from meshwright.explain.collectives import annotation_of
from meshwright.training.faults.heartbeat import Operation, operation_key
from meshwright.training.hooks import Hook, RecordedStep, StepRecord
from meshwright.training.loop import Trainer
from meshwright.training.measure.device_clock import MESSAGES, DeviceClock, HostClock
from meshwright.training.measure.observe import axes_by_group, groups_of

KEPT_STEPS = 64  # the last ones of a run: memory stays bounded
UNKNOWN = float("nan")
# method of a process group → (our name, the argument that holds the full buffer)
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
    "recv": ("receive", 0),
    "recv_anysource": ("receive", 0),
    "barrier": ("barrier", None),
}
# functional collective → (our name, the argument that holds the full buffer; None: the result)
FUNCTIONAL = {
    "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
}


@dataclass(slots=True, eq=False)
class Running:
    """An operation that was issued; its times are marks of the recorder's clock."""

    axis: str
    operation: str
    bytes: Any  # until the call returns the buffers themselves: counting them first would delay it
    peer: int
    ranks: tuple[int, ...]  # the group, or sender and receiver of a message
    number: int  # of operations of the group so far
    issued: Any = None
    returned: Any = None
    waited: Any = None
    resumed: Any = None
    done: Any = None


def annotated(running: Running) -> AbstractContextManager[Any]:
    """An annotation around a call while torch's profiler runs: gloo's records have no group."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(annotation_of(running.operation, running.axis, running.ranks))


class CommRecorder(Hook):
    """Records the steps of a trainer between `with` and its end; `steps` are the last ones."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.axis_of = axes_by_group(trainer.parallel.mesh, separate_axes=True)
        self.rank = trainer.parallel.mesh.rank
        self.members: dict[str, tuple[int, ...]] = {
            str(group.group_name): tuple(distributed.get_process_group_ranks(group))
            for _, group in groups_of(trainer.parallel.mesh)
        }
        self.issued: dict[str, int] = {}  # operations so far, by `operation_key`
        self.completed = 0  # operations that ended: it does not change while the rank hangs
        self.open: Running | None = None  # what the rank is blocked by now
        self.groups: dict[int, tuple[Any, str, str | None]] = {}  # by id of a group: itself, its name and axis
        self.channels: dict[tuple[str, str, int], tuple[tuple[int, ...], str]] = {}  # ranks and key, by group and peer
        # Of a single rank nothing is recorded: the device's clock would only wait for it in every step.
        on_device = torch.device(trainer.parallel.mesh.device).type == "cuda" and trainer.parallel.plan.world > 1
        self.clock = DeviceClock() if on_device else HostClock()
        self.steps: deque[RecordedStep] = deque(maxlen=KEPT_STEPS)
        self.events: list[Running] = []
        self.waiting: dict[int, tuple[Any, Running]] = {}  # by handle: it is kept, so that its id stays unique
        self.gradients = UNKNOWN
        self.inside = False  # a method of a group may call another one
        self._undo = ExitStack()

    def __enter__(self) -> CommRecorder:
        for group in (distributed.ProcessGroup, MeshwrightGroup):
            for name, (operation, which) in METHODS.items():
                if name in vars(group):
                    self._replace(group, name, self._recorded(vars(group)[name], operation, which))
            if "_end_coalescing" in vars(group):
                self._replace(group, "_end_coalescing", self._joined(vars(group)["_end_coalescing"]))
        for handle in (distributed.Work, own.Work, own.Deferred):
            self._replace(handle, "wait", self._timed(vars(handle)["wait"]))
        operators = torch.ops._c10d_functional
        for name, (operation, which) in FUNCTIONAL.items():
            plain = getattr(operators, name)
            self._replace(operators, name, WrappedOperator(plain, self._functional(plain, operation, which)))
        plain = operators.wait_tensor
        timed = self._timed(plain, key=torch.Tensor.data_ptr)
        self._replace(operators, "wait_tensor", WrappedOperator(plain, timed))
        self.clock.attach(self._replace)
        self.trainer.hooks.insert(0, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        self.trainer.hooks.remove(self)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, new)

    def _recorded(self, plain: Callable, operation: str, which: int | None) -> Callable:
        """A method of a process group that also records its call."""
        clock, axis_of, groups, waiting, events = self.clock, self.axis_of, self.groups, self.waiting, self.events
        mark, message = clock.mark, operation in MESSAGES

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            known = groups.get(id(group))
            if known is None:
                known = groups[id(group)] = group, group.group_name, axis_of.get(group.group_name)
            _, name, axis = known
            if self.inside or axis is None:
                return plain(group, *args, **kwargs)
            peer = args[1] if message and len(args) > 1 and isinstance(args[1], int) else -1
            running = self._begin(name, axis, operation, 0 if which is None else args[which], peer)
            self.inside = True
            try:
                running.issued = mark()
                with annotated(running):
                    work = plain(group, *args, **kwargs)
                running.returned = running.waited = running.resumed = mark()
            finally:
                self.inside, self.open = False, None
            running.bytes = bytes_of(running.bytes)
            self.completed += 1
            events.append(running)
            clock.place(running)
            if work is not None:
                if message or getattr(args[-1] if args else None, "asyncOp", True):
                    clock.watch(running, work)
                waiting[id(work)] = work, running
            return work

        return call

    def _begin(self, group: str, axis: str, operation: str, buffers: Any, peer: int) -> Running:
        """Count an operation of a group, and note that the rank is inside of it. It blocks until its call returns."""
        direction = operation if peer >= 0 else ""
        channel = self.channels.get((group, direction, peer))
        if channel is None:
            ranks = self.members[group]
            if direction:
                other = ranks[peer]
                ranks = (self.rank, other) if operation == "send" else (other, self.rank)
            channel = self.channels[group, direction, peer] = ranks, operation_key(axis, ranks, direction)
        ranks, key = channel
        number = self.issued[key] = self.issued.get(key, 0) + 1
        self.open = Running(axis, operation, buffers, peer, ranks, number)
        return self.open

    def open_operation(self) -> Operation | None:
        """The operation that this rank is inside of, for the watchdog's thread."""
        running, started = self.open, True
        if running is None:
            running, started = self.clock.unfinished(self.events)
        if running is None:
            return None
        size = bytes_of(running.bytes)
        return Operation(running.operation, running.axis, running.ranks, running.number, size, started)

    def _joined(self, plain: Callable) -> Callable:
        """The end of a batch of messages that NCCL sends together: its handle completes with the last of them."""

        def end(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = plain(group, *args, **kwargs)
            if work is not None and self.events:
                self.clock.watch(self.events[-1], work)
                self.waiting[id(work)] = work, self.events[-1]
            return work

        return end

    def _timed(self, plain: Callable, key: Callable[[Any], int] = id) -> Callable:
        """A handle's `wait` that also records how long it blocked."""
        mark, waiting = self.clock.mark, self.waiting

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry = waiting.pop(key(work), None)
            if entry is None:
                return plain(work, *args, **kwargs)
            running = self.open = entry[1]
            running.waited = mark()
            try:
                return plain(work, *args, **kwargs)
            finally:
                running.resumed = mark()
                self.open = None
                self.completed += 1
                if isinstance(work, own.Work) and running.operation not in MESSAGES:
                    running.done = work.finished_at

        return wait

    def _functional(self, plain: Any, operation: str, which: int | None) -> Callable:
        """A functional collective that also records its calls. The rank waits in `wait_tensor`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            name = kwargs.get("group_name", args[-1] if args else "")
            axis = self.axis_of.get(name)
            if axis is None:
                return plain(*args, **kwargs)
            running = self._begin(name, axis, operation, 0, -1)
            outer, self.inside = self.inside, True
            running.issued = self.clock.mark()
            try:
                with annotated(running):
                    out = plain(*args, **kwargs)
            finally:
                self.inside, self.open = outer, None
            running.returned = running.waited = running.resumed = self.clock.mark()
            running.bytes = bytes_of(out if which is None else args[which])
            self.completed += 1
            self.events.append(running)
            self.waiting[out.data_ptr()] = out, running
            return out

        return call

    def before_step(self, trainer: Trainer) -> None:
        """Drop what was issued since the last step: a hook that communicates (evaluation) belongs to no step."""
        self.events.clear()
        self.waiting.clear()
        self.clock.begin_step()

    def after_gradients(self, trainer: Trainer) -> None:
        self.gradients = self.clock.mark()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        ended = time.perf_counter()
        seconds = self.clock.seconds
        events = self.clock.events(self.events)
        # A rank that loses its core after the step was timed gets here late: the step began before its first event.
        began = min(ended - record.seconds, *(e.issued for e in events[:1]), seconds(self.gradients))
        self.steps.append(RecordedStep(record.step, began, seconds(self.gradients), ended, events))


class WrappedOperator:
    """An operator of `torch.ops._c10d_functional` with another call."""

    def __init__(self, plain: Any, call: Callable[..., Any]) -> None:
        self.plain, self.call = plain, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def bytes_of(buffers: Any) -> int:
    """Bytes of a tensor, or of all tensors of nested lists; a number of bytes is returned as it is."""
    if isinstance(buffers, int):
        return buffers
    while not isinstance(buffers, Tensor):
        if len(buffers) != 1:
            return sum(map(bytes_of, buffers))
        (buffers,) = buffers  # the usual case, a list of one tensor
    return buffers.nbytes
