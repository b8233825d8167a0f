"""A process group that runs programs: its connections, its names, and the way of one call from a flat tensor to a handle.

`run` lets the cost model choose the program, and keeps what it prepared for the sizes that return every step; `submit` runs a
program whose sizes differ from rank to rank. The methods that torch calls are in `group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from meshwright.comm.backend import staging
from meshwright.comm.backend.choice import Chooser
from meshwright.comm.backend.messages import Messages
from meshwright.comm.communicator import Communicator, with_sizes
from meshwright.comm.run import Prepared
from meshwright.comm.transport.handshake import hosts
from meshwright.comm.work import Deferred, Work
from meshwright.describe.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.program import Program

MOST_PREPARED = 256
Key = tuple[str, int, torch.dtype, str, int]  # operation, elements, dtype, reduction, root
Listener = Callable[
    [str, torch.Tensor, str, int], None
]  # operation, full buffer, name of the group, bytes that this rank sends
# Called for each collective and send: torch's dispatcher does not see those of a group in Python.
LISTENERS: list[Listener] = []
TorchGroup: Any = distributed.ProcessGroup  # torch declares overloads that a Python group is never called with


class ProgramGroup(TorchGroup):
    """The ranks of one group, and how they run a program."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, cluster: Cluster | None, shared_memory: bool
    ) -> None:
        super().__init__(rank, size)
        self.communicator = Communicator.create(store, rank, size, timeout, shared_memory)
        self.chooser = Chooser(store, rank, hosts(store, size), cluster)
        self.messages = Messages(self.communicator.group, rank, timeout, self.communicator.fail)
        self.ranks, self.me, self.timeout = size, rank, timeout
        self.names = {"name": "", "desc": ""}
        self.calls = 0
        self.prepared: dict[Key, Prepared] = {}

    # The C++ class keeps these in a backend object, which a group in Python does not have.

    @property
    def group_name(self) -> str:
        return self.names["name"]

    @property
    def group_desc(self) -> str:
        return self.names["desc"]

    def _set_group_name(self, name: str) -> None:
        self.names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self.names["desc"] = desc

    def getBackendName(self) -> str:
        return "meshwright"

    def name(self) -> str:
        return "meshwright"

    def _get_backend_name(self) -> str:
        return "meshwright"

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def notify(self, operation: str, buffer: torch.Tensor, sent: int) -> None:
        for listener in LISTENERS:
            listener(operation.replace("-", "_"), buffer, self.group_name, sent)

    def shutdown(self) -> None:
        self.communicator.close()

    def abort(self) -> None:
        self.communicator.close()

    def run(
        self,
        operation: str,
        tensor: torch.Tensor,
        output: torch.Tensor | None = None,
        *,
        root: int = 0,
        reduction: str = "sum",
        opts: Any = None,
        prepared: Prepared | None = None,
        after: Callable[[], None] | None = None,
        result: Any = None,
    ) -> Work:
        """Run a prepared program, or the program that the cost model chooses. Few functions are called on the usual way: after a pause each
        has to be fetched from memory again, which takes microseconds."""
        into = tensor if output is None else output
        whole = into if operation == "all-gather" else tensor
        if prepared is None:
            key = (operation, whole.numel(), whole.dtype, reduction, root)
            prepared = self.prepared.get(key) or self.prepare(key)
        if tensor.layout != torch.strided:
            raise MeshwrightError(
                "MW-COMM-001", "the backend meshwright moves dense tensors only", fix="tensor.to_dense()"
            )
        self.calls += 1
        if LISTENERS:
            self.notify(operation, whole, sum(prepared.begin.sent.values()))
        async_op, background = bool(getattr(opts, "asyncOp", True)), bool(LISTENERS)
        if staging.is_staged(tensor) or (output is not None and staging.is_staged(output)):
            return self.start_staged(prepared, tensor, output, async_op, after, result)
        return self.communicator.start(prepared, tensor, into, async_op, after, result, background)

    def prepare(self, key: Key) -> Prepared:
        """Prepare the program that the cost model chooses, and keep it."""
        operation, elements, dtype, reduction, root = key
        program = self.chooser.program(operation, elements, dtype.itemsize, root)
        if len(self.prepared) >= MOST_PREPARED:
            self.prepared.clear()
        found = self.prepared[key] = self.communicator.prepared(program, dtype, reduction, False)
        return found

    def prepare_sizes(
        self, operation: str, sizes: Sequence[int], dtype: torch.dtype, reduction: str = "sum"
    ) -> Prepared:
        """Prepare a program for shards whose sizes may differ."""
        program = self.chooser.program(operation, sum(sizes), dtype.itemsize)
        if len(set(sizes)) > 1:
            program = with_sizes(program, sizes)
        return self.communicator.prepared(program, dtype, reduction, False)

    def submit(
        self, program: Program, tensor: torch.Tensor, output: torch.Tensor | None = None, **options: Any
    ) -> Work:
        """Run a program whose sizes differ from rank to rank, each of which knows only its own."""
        prepared = self.communicator.prepared(program, tensor.dtype, "sum", True)
        return self.run(program.operation, tensor, output, prepared=prepared, **options)

    def start_staged(
        self,
        prepared: Prepared,
        tensor: torch.Tensor,
        output: torch.Tensor | None,
        async_op: bool,
        after: Callable[[], None] | None,
        result: Any,
    ) -> Work:
        """Run a program on host copies of tensors of a device."""
        source = staging.to_host(tensor)
        into = source if output is None else staging.host_buffer(output)
        work = self.communicator.start(prepared, source, into, async_op, background=bool(LISTENERS))

        def complete() -> None:
            work.wait()
            (tensor if output is None else output).detach().copy_(into)
            if after is not None:
                after()

        return Deferred(complete, result if result is not None else [tensor if output is None else output])
