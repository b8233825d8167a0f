"""A group of ranks that runs collective programs, one after the other, in a thread of its own.

    communicator = Communicator.of_group(group)                 # the ranks of a torch.distributed group
    work = communicator.run(program, tensor, async_op=True)     # returns at once
    work.wait()

The ranks of one host exchange data through shared memory; a group on several hosts sends point-to-point messages.

The first failure breaks the group: connections are closed, the error is published to the group's store, so that every rank reports the
first cause and not its consequence, and every later call raises it. A group whose ranks disagree about what they have sent cannot be
used further.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from mmap import mmap
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from meshwright.comm.call import Call, Lost
from meshwright.comm.run import Prepared, execute, prepare
from meshwright.comm.schedule import schedule
from meshwright.comm.transport import handshake
from meshwright.comm.transport.base import Transport, name_of
from meshwright.comm.transport.point_to_point import PointToPoint
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.comm.work import Work
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.contract import SHARDED
from meshwright.programs.collectives.program import Program, split

KEY = "failure"
PAUSE_S = 0.2  # a consequence waits this long for the cause to be published
Result = TypeVar("Result")


class GroupFailure:
    """The failure of a group. The first one that is published stays."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.store_ended = store, rank, False
        self.error: MeshwrightError | None = None

    def publish(self, error: MeshwrightError) -> MeshwrightError:
        """Publish an error of this rank unless another rank was first; return the error to raise here."""
        if self.error is None:
            if error.code == "MW-COMM-004":  # perhaps only a consequence: the peer may know more
                error = self.traced(error)
            first = self.published()
            if first is None:
                fields = {"rank": self.rank, "exit_code": error.exit_code, **error.as_dict()}
                self._ask(lambda store: store.set(KEY, json.dumps(fields)))
            self.error = first or error
        return self.error

    def traced(self, error: MeshwrightError) -> MeshwrightError:
        """The error with the rank that all others wait for: a peer that does not answer may itself be waiting for another rank."""
        if not isinstance(error, Lost) or error.peer < 0:
            time.sleep(PAUSE_S)
            return error
        self._ask(lambda store: store.set(f"waits/{self.rank}", str(error.peer)))
        time.sleep(PAUSE_S)
        return self._ask(lambda store: self._last_of_chain(store, error)) or error

    def _last_of_chain(self, store: Any, error: Lost) -> Lost:
        peer, seen = error.peer, {self.rank}
        while peer not in seen and store.check([f"waits/{peer}"]):
            seen.add(peer)
            peer = int(store.get(f"waits/{peer}"))
        return error if peer in seen else Lost(error.place, peer, error.cause + refusal(store, peer))

    def refuse(self, error: MeshwrightError) -> None:
        """Publish that this rank rejected a call. It may repeat the call; if it does not, its peers report the reason at their timeout."""
        self._ask(lambda store: store.set(f"refused/{self.rank}", str(error)))

    def published(self) -> MeshwrightError | None:
        """The error that another rank has published, if any."""
        fields = self._ask(lambda store: json.loads(store.get(KEY)) if store.check([KEY]) else None)
        return MeshwrightError(**fields) if fields and fields.pop("rank") != self.rank else None

    def check(self) -> None:
        """Raise if this group has failed, here or on another rank."""
        self.error = self.error or self.published()
        if self.error is not None:
            raise self.error

    def _ask(self, use: Callable[[Any], Result]) -> Result | None:
        """The result of `use(store)`; None if that fails: without the store a rank still raises its own error. A store ends with the process that
        serves it; then it is not asked again, because torch prints a stack of C++ functions each time."""
        if self.store_ended:
            return None
        try:
            return use(self.store)
        except distributed.DistNetworkError:
            self.store_ended = True
        except Exception:
            pass
        return None


def refusal(store: Any, peer: int) -> str:
    """Return why a rank that does not answer rejected its last call, if it did."""
    key = f"refused/{peer}"
    return f"; it rejected a call: {store.get(key).decode()}" if store.check([key]) else ""


REDUCING = {"all-reduce", "reduce", "reduce-scatter"}
MOST_LANES = 256
TIMEOUT = timedelta(minutes=30)  # torch.distributed's default
NUMBERS = itertools.count()  # of the communicators of this process; all ranks create them in the same order


def group_store(group: Any) -> distributed.Store:
    """The store through which the ranks of a process group met. Private name of torch: `distributed_c10d._get_process_group_store`."""
    return distributed_c10d._get_process_group_store(group)


class Communicator:
    """Runs programs over a transport, in the order of the calls."""

    def __init__(self, transport: Transport, far: PointToPoint, failure: GroupFailure) -> None:
        self.transport, self.failure, self.timeout = transport, failure, far.timeout
        self.rank, self.size = transport.rank, transport.size
        self.far = far  # connections to close after a failure besides those of the transport
        self.group = far.group  # of gloo, or the one whose ranks communicate
        self.sequence = 0
        self.tasks: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.prepared = lru_cache(maxsize=256)(self._prepared)

    @classmethod
    def create(cls, store: Any, rank: int, size: int, timeout: timedelta, shared_memory: bool = True) -> Communicator:
        """Connect new ranks: shared memory to those on this host, gloo to the others. All ranks of the group call it."""
        near = handshake.connect(store, rank, size, shared_memory)
        gloo: Any = distributed.ProcessGroupGloo
        group = gloo(distributed.PrefixStore("gloo", store), rank, size, timeout)
        return cls.over(PointToPoint(group, rank, size, timeout), store, near)

    @classmethod
    def of_group(cls, group: Any = None, timeout: timedelta = TIMEOUT, shared_memory: bool = True) -> Communicator:
        """A communicator for the ranks of a torch.distributed group, over its point-to-point operations."""
        group = group or distributed.group.WORLD
        if group is None:
            what, fix = "torch.distributed has no process group", "torch.distributed.init_process_group"
            raise MeshwrightError("MW-COMM-001", what, fix=fix)
        rank, size = group.rank(), group.size()
        store = distributed.PrefixStore(f"meshwright-{next(NUMBERS)}", group_store(group))
        if distributed.get_backend(group) == "nccl":
            return cls.over(PointToPoint(group, rank, size, timeout, check=False, device="cuda"), store)
        near = handshake.connect(store, rank, size, shared_memory)
        return cls.over(PointToPoint(group, rank, size, timeout), store, near)

    @classmethod
    def over(
        cls, far: PointToPoint, store: Any, near: tuple[mmap, dict[int, handshake.PeerLink]] | None = None
    ) -> Communicator:
        """Shared memory if all ranks are on one host, else point-to-point messages."""
        failure = GroupFailure(store, far.rank)
        transport = far if near is None else SharedMemory(far.rank, *near, far.timeout.total_seconds(), failure.check)
        return cls(transport, far, failure)

    def run(
        self,
        program: Program,
        tensor: torch.Tensor,
        output: torch.Tensor | None = None,
        *,
        reduction: str = "sum",
        async_op: bool = False,
        splits: bool = False,
        after: Callable[[], None] | None = None,
        result: Any = None,
    ) -> Work:
        """Execute a program. Without an output the result replaces the tensor, which must have as many elements.

        The tensor holds the chunks the rank starts with, the output those it ends with, each in chunk order: the
        conventions of torch.distributed. Tensors need not be contiguous. `splits`: ranks may have different numbers of
        elements (all-to-all with splits), so that the number is not compared. `after` is called when the output is
        complete; `result` is what the handle of an asynchronous collective returns (default: the output).
        """
        prepared = self.prepared(program, tensor.dtype, reduction, splits)
        output = tensor if output is None else output
        if self.thread is None:
            self.thread = threading.Thread(target=self.work_off, name="meshwright-comm", daemon=True)
            self.thread.start()
        work = Work([output] if result is None else result)
        self.tasks.put((partial(self.execute, prepared, tensor, output, after), work))
        if not async_op:
            work.wait()
        return work

    def execute(
        self, prepared: Prepared, tensor: torch.Tensor, output: torch.Tensor, after: Callable[[], None] | None
    ) -> None:
        """Execute a program on flat tensors: copies of those that are not contiguous, or that overlap."""
        self.sequence += 1
        plan, call = prepared.schedule, replace(prepared.call, sequence=self.sequence)
        source = flat(tensor)
        result = source if output is tensor else flat(output)
        if plan.inputs == 0:
            source = result[:0]
        if plan.outputs == 0:
            result = source[:0]
        elif result is not source and overlap(source, result):
            source = source.clone()
        try:
            execute(prepared, source, result, call)
        except MeshwrightError as error:
            if error.code == "MW-COMM-001":  # nothing was sent
                self.sequence -= 1
            raise
        if plan.outputs and result.data_ptr() != output.data_ptr():
            output.copy_(result.view(output.shape))
        if after is not None:
            after()

    @torch.inference_mode()  # nothing here is differentiated, and the caller's tensors may be those of inference mode
    def work_off(self) -> None:
        """The thread: execute tasks in order, and complete their handles. After a failure every task fails with the first error."""
        while (item := self.tasks.get()) is not None:
            task, work = item
            error: BaseException | None = self.failure.error
            if error is None:
                try:
                    task()
                except Exception as raised:
                    error = self.failed(raised)
            work.finish(error)

    def failed(self, error: Exception) -> Exception:
        """The error to raise after a task has failed: the first of any rank, unless this rank only rejected its arguments."""
        if not isinstance(error, MeshwrightError):
            # Out of memory, for example: the other ranks cannot complete the collective either.
            what = f"rank {self.rank} failed in collective {self.sequence} of its group"
            error = MeshwrightError("MW-COMM-005", f"{what}: {type(error).__name__}: {error}", exit_code=70)
        if error.code in ("MW-COMM-003", "MW-COMM-004", "MW-COMM-005"):
            return self.fail(error)
        self.failure.refuse(error)
        return error

    def fail(self, error: MeshwrightError) -> MeshwrightError:
        """Break the group: publish the error, close all connections, and return the first error of any rank."""
        first = self.failure.publish(error)
        for transport in dict.fromkeys((self.transport, self.far)):
            transport.close()
        return first

    def close(self) -> None:
        """End the thread."""
        if self.thread is not None:
            self.tasks.put(None)
            self.thread.join(timeout=5)
            self.thread = None

    def lanes(self, program: Program, element_bytes: int) -> int:
        """Return how many lanes to run: enough that a lane's part of a chunk is one slice of the transport."""
        largest = int(program.sizes.max(initial=0)) * element_bytes
        return max(1, min(MOST_LANES, -(-largest // self.transport.slice_bytes)))

    def _prepared(self, program: Program, dtype: torch.dtype, reduction: str, splits: bool) -> Prepared:
        """Return the parts that do not change between calls; stored in the attribute `prepared`."""
        if program.ranks != self.size:
            what = f"{program!r} was built for {program.ranks} ranks, and the group has {self.size}"
            raise MeshwrightError("MW-COMM-001", what)
        reduction = reduction if program.operation in REDUCING else ""
        # With splits ranks know only their own sizes, and all ranks must use the same number of lanes.
        lanes = 1 if splits else self.lanes(program, dtype.itemsize)
        elements = 0 if splits else program.elements
        call = Call(0, program.operation, program.algorithm, name_of(dtype), reduction, program.root, elements)
        return prepare(schedule(program, self.rank, lanes), self.transport, dtype, call)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension: a view where the tensor is contiguous, else a copy."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory, but are not the same elements."""
    low = [t.data_ptr() for t in (a, b)]
    high = [t.data_ptr() + t.numel() * t.element_size() for t in (a, b)]
    same = low[0] == low[1] and high[0] == high[1]
    return not same and max(low) < min(high)


def with_sizes(program: Program, sizes: Sequence[int]) -> Program:
    """The same moves with other shard sizes: shard r of an all-gather, scatter or gather has sizes[r] elements."""
    if program.operation not in SHARDED:
        raise MeshwrightError("MW-COMM-001", f"{program.name} has no shards whose sizes could differ")
    per_shard = program.chunks // program.ranks
    chunks = np.concatenate([split(int(size), per_shard) for size in sizes])
    return program.but(sizes=chunks, elements=int(sum(sizes)))
