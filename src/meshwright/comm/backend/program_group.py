"""A process group that runs programs: its connections, its names, and the way of one call from a flat tensor to a handle.

The methods that torch calls are in `group`.

**Which program a call runs**: the one with the smallest simulated time, for its size, on the hosts of its ranks. Rank 0 of the group
walks every program that `cost.library` lists for the backend over a cluster with the group's shape (its ranks by host) and the links of
the calibration, or of the catalog if there is none. It publishes the choice in the group's store, so that all ranks run the same program
also where their floating point differs. Sizes are rounded up to powers of two, and a choice is made once for each; a log line says
which and why.

Programs whose times are equal within TIE are chosen by what the walk does not count: first the smallest messages between hosts (the walk
gives the flows over one link equal shares; in fact one may get more, and the ranks behind the others wait for a whole message), then
the fewest steps (each ends with ranks that wait for each other), then the order of the library.
"""

import json
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import distributed

from meshwright.comm.backend import messages
from meshwright.comm.backend.messages import PeerMessages
from meshwright.comm.communicator import Communicator, with_sizes
from meshwright.comm.schedule import largest_message
from meshwright.comm.transport.handshake import hosts
from meshwright.comm.work import Deferred, Work
from meshwright.cost.library import LIBRARIES
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster, Level
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.comparison import compare, options_for
from meshwright.programs.collectives.program import Program
from meshwright.programs.collectives.registry import build
from meshwright.units import Json, counted, format_bytes, format_seconds

log = logging.getLogger("meshwright.comm")
INSIDE, BETWEEN = "shared-memory", "ethernet-10"  # links of the catalog, until the machine is measured
SMALLEST = 1024  # bytes; smaller calls use the same program
TIE = 0.01


class ProgramChoice(NamedTuple):
    algorithm: str
    options: Json


class Chooser:
    """Chooses programs for one group, and keeps them: the same sizes return every step."""

    def __init__(self, store: Any, rank: int, hosts: list[tuple[int, ...]], cluster: Cluster | None) -> None:
        self.store, self.rank, self.size = store, rank, sum(map(len, hosts))
        self.hosts, self.calibrated = hosts, cluster is not None
        self.cluster = shaped(cluster, hosts)
        self.placement = placement_of(hosts)
        self.choices: dict[tuple[str, int], ProgramChoice] = {}
        self.program = lru_cache(maxsize=256)(self._program)

    def _program(self, operation: str, elements: int, element_bytes: int, root: int = 0) -> Program:
        """The program of a call; stored in the attribute `program`."""
        choice = self.choose(operation, elements * element_bytes)
        options = {**choice.options, "root": root} if root else choice.options
        return build(operation, choice.algorithm, self.size, elements, **options)

    def choose(self, operation: str, size: int) -> ProgramChoice:
        key = (operation, max(SMALLEST, 1 << max(0, size - 1).bit_length()))
        if key not in self.choices:
            self.choices[key] = self.agree(*key)
        return self.choices[key]

    def agree(self, operation: str, size: int) -> ProgramChoice:
        """The algorithm that rank 0 publishes; the options follow from it."""
        names = LIBRARIES["meshwright"].get(operation, ())
        name = names[0] if len(names) == 1 else ""
        if not name and self.rank == 0:
            name = self.fastest(operation, size, names)
            self.store.set(f"choice/{operation}/{size}", json.dumps(name))
        elif not name:
            name = json.loads(self.store.get(f"choice/{operation}/{size}"))
        return ProgramChoice(name, options_for(operation, name, self.cluster, self.size, size, self.placement))

    def fastest(self, operation: str, size: int, names: tuple[str, ...]) -> str:
        times = compare(operation, self.cluster, self.size, (float(size),), names, self.placement).times
        order = sorted(names, key=lambda name: times[name][0])
        equal = [name for name in names if times[name][0] <= (1 + TIE) * times[order[0]][0]]
        chosen = min(equal, key=lambda name: self.uncounted(operation, name, size))
        shown = ", ".join(f"{name} {format_seconds(times[name][0])}" for name in order[:3])
        why = "the smallest simulated time"
        if len(equal) > 1:
            why += f" within {TIE:.0%}, of these the smallest messages between hosts and the fewest steps"
        where = f"{counted(self.size, 'rank')} of {counted(len(self.hosts), 'host')}"
        links = self.cluster.name if self.calibrated else "uncalibrated, from the catalog"
        log.info(
            "%s up to %s on %s: %s, %s (%s; links: %s)", operation, format_bytes(size), where, chosen, why, shown, links
        )
        return chosen

    def uncounted(self, operation: str, name: str, size: int) -> tuple[int, int]:
        """The elements of a program's largest message between hosts, and its steps."""
        options = options_for(operation, name, self.cluster, self.size, size, self.placement)
        host = {rank: k for k, members in enumerate(self.hosts) for rank in members}
        program = build(operation, name, self.size, size, **options)
        return largest_message(program, [host[rank] for rank in range(self.size)]), program.steps


def placement_of(hosts: list[tuple[int, ...]]) -> list[int]:
    """The device of each rank: the hosts' devices have consecutive numbers."""
    width = max(map(len, hosts))
    device = {rank: host * width + k for host, members in enumerate(hosts) for k, rank in enumerate(members)}
    return [device[rank] for rank in range(len(device))]


def shaped(cluster: Cluster | None, hosts: list[tuple[int, ...]]) -> Cluster:
    """A cluster with the group's hosts: the links and device of the calibration where there is one."""
    width = max(map(len, hosts))
    base = cluster or catalog.load("clusters", "laptop")
    inside = base.levels[0].but(size=width)
    if cluster is None:
        inside = inside.but(link=catalog.load("links", INSIDE))
    levels = [inside]
    if len(hosts) > 1:
        above = base.levels[1] if len(base.levels) > 1 else Level(name="hosts", size=len(hosts), link=BETWEEN, ports=1)
        levels.append(above.but(size=len(hosts)))
    return base.but(levels=tuple(levels), gpus=width * len(hosts))


# Called for each collective and send, with the operation, the full buffer, the name of the group and the bytes that this rank sends: torch's
# dispatcher does not see those of a group in Python.
Listener = Callable[[str, torch.Tensor, str, int], None]
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
        self.messages = PeerMessages(self.communicator.group, rank, timeout, self.communicator.fail)
        self.ranks, self.me, self.timeout = size, rank, timeout
        self.title = self.description = ""
        self.calls = 0

    # The C++ class keeps these in a backend object, which a group in Python does not have.

    @property
    def group_name(self) -> str:
        return self.title

    @property
    def group_desc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self.title = name

    def _set_group_desc(self, desc: str) -> None:
        self.description = desc

    def name(self) -> str:
        return "meshwright"

    getBackendName = _get_backend_name = name

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def notify(self, operation: str, buffer: torch.Tensor, sent: int) -> None:
        for listener in LISTENERS:
            listener(operation.replace("-", "_"), buffer, self.group_name, sent)

    def shutdown(self) -> None:
        self.communicator.close()

    abort = shutdown

    def run(
        self,
        operation: str,
        tensor: torch.Tensor,
        output: torch.Tensor | None = None,
        *,
        root: int = 0,
        reduction: str = "sum",
        opts: Any = None,
        program: Program | None = None,
        splits: bool = False,
        after: Callable[[], None] | None = None,
        result: Any = None,
    ) -> Work:
        """Run a program, or the one that the cost model chooses. `splits`: each rank knows only its own sizes."""
        if tensor.layout != torch.strided:
            what = "the backend meshwright moves dense tensors only"
            raise MeshwrightError("MW-COMM-001", what, fix="tensor.to_dense()")
        into = tensor if output is None else output
        buffer = into if operation == "all-gather" else tensor
        if program is None:
            program = self.chooser.program(operation, buffer.numel(), buffer.dtype.itemsize, root)
        self.calls += 1
        if LISTENERS:
            prepared = self.communicator.prepared(program, tensor.dtype, reduction, splits)
            self.notify(operation, buffer, sum(prepared.sent.values()))
        options: Json = {"reduction": reduction, "async_op": bool(getattr(opts, "asyncOp", True)), "splits": splits}
        if not messages.is_staged(tensor) and not messages.is_staged(into):
            return self.communicator.run(program, tensor, into, after=after, result=result, **options)
        source = messages.to_host(tensor)  # of a device: the program runs on host copies
        target = source if output is None else messages.host_buffer(output)
        work = self.communicator.run(program, source, target, **options)

        def complete() -> None:
            work.wait()
            into.detach().copy_(target)
            if after is not None:
                after()

        return Deferred(complete, result if result is not None else [into])

    def program_of_sizes(self, operation: str, sizes: Sequence[int], dtype: torch.dtype) -> Program:
        """The chosen program, for shards whose sizes may differ."""
        program = self.chooser.program(operation, sum(sizes), dtype.itemsize)
        return with_sizes(program, sizes) if len(set(sizes)) > 1 else program
