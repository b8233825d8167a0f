"""The interpreter for ranks of one host: one loop over a flat list of operations.

Between two collectives a rank computes, and its caches lose the interpreter's code and objects. Each Python function that
a collective then calls costs one to two microseconds until it is fetched from memory, more than its execution: with a
hundred functions the fixed part of an all-reduce was 0.3 ms of 0.5 ms at 1 MiB. So the usual operations are compiled
once for each schedule, and executed here without a call of our own for each of them:

    send      one contiguous piece that fits a slot: copy it into a free slot, write the entries, post the semaphores
    receive   one contiguous piece that fits a slot: wait, compare the entry, store or reduce, return the slot

Everything else (several pieces, messages larger than a slot, no free slot, local copies) is done by `run.Run`, one step
of a lane at a time. The order of operations and the bytes in shared memory are the same on both ways.

Lanes are independent. Where a group has several channels (`transport.handshake`), each channel has every second lane and its own thread: numpy
copies and adds without the interpreter lock.
"""

from __future__ import annotations

import contextvars
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.comm.call import Place
from meshwright.comm.reductions import array_of, divide
from meshwright.comm.run import Prepared, Run
from meshwright.comm.schedule import SEND, Step, length
from meshwright.comm.transport import area
from meshwright.comm.transport.shared_memory import TOTAL, Link, SharedMemory, check_entry

NOTHING = np.empty(0)
MOST_KNOWN = 64  # addresses of tensors whose arrays are kept
LEAST_LANES = 2


class QuickSend(NamedTuple):
    buffer: int
    start: int
    stop: int
    size: int  # bytes
    links: list[Link]


class QuickReceive(NamedTuple):
    into: tuple[int, int, int]  # buffer, start, stop
    base: tuple[int, int, int] | None
    elements: int
    size: bytes  # bytes of the message, as an entry has them
    link: Link
    slots: list[Any]  # of the link, as arrays of the dtype


class SharedOperation(NamedTuple):
    """Begin or finish of one step of one lane; `quick` is None if `Run` does it."""

    is_begin: bool
    step: int
    lane: int
    quick: tuple[Any, ...] | None  # of QuickSend or of QuickReceive


class SharedPlan:
    """A prepared schedule for the ranks of one host: its runs, one for each channel, and how its tensors become arrays."""

    def __init__(self, prepared: Prepared, memories: Sequence[SharedMemory], threads: ThreadPoolExecutor) -> None:
        self.prepared, self.schedule, self.threads = prepared, prepared.schedule, threads
        self.dtype = array_of(torch.empty(0, dtype=prepared.dtype)).dtype
        self.inputs, self.outputs = self.schedule.inputs, self.schedule.outputs
        self.types = [ctypes.c_ubyte * (n * self.dtype.itemsize) for n in (self.inputs, self.outputs)]
        self.known: tuple[dict[int, Any], ...] = ({}, {})  # inputs and outputs: address → array
        channels = memories if len(self.schedule.lanes) >= LEAST_LANES else memories[:1]
        self.runners = [SharedRun(prepared, self.dtype, memory, k, len(channels)) for k, memory in enumerate(channels)]

    def execute(self, tensor: torch.Tensor, output: torch.Tensor, sequence: int) -> bool:
        """Run the collective on contiguous tensors; return False if they need a copy or an error."""
        in_place = output is tensor
        if not tensor.is_cpu or not tensor.is_contiguous() or (self.inputs and tensor.numel() != self.inputs):
            return False
        if not in_place and (not output.is_contiguous() or (self.outputs and output.numel() != self.outputs)):
            return False
        if tensor.dtype is not self.prepared.dtype or (not in_place and output.dtype is not tensor.dtype):
            return False
        mine = self.array(tensor, 0)
        result = mine if in_place and self.inputs == self.outputs else self.array(output, 1)
        scratch = np.empty(self.schedule.scratch, self.dtype) if self.schedule.scratch else NOTHING
        if len(self.runners) == 1:
            self.runners[0].execute((mine, result, scratch), sequence)
        else:
            self.run_channels((mine, result, scratch), sequence)
        if result is not mine:
            for at, to in self.schedule.unmoved:
                result[to.start : to.stop] = mine[at.start : at.stop]
        if self.prepared.reduction == "avg" and self.outputs:
            divide(output.detach(), self.prepared.transport.size)
        return True

    def run_channels(self, buffers: tuple[Any, ...], sequence: int) -> None:
        """Run all channels at the same time, the first in this thread; raise the first error of any.

        A channel that fails closes the connections, which all channels have in common: the others do not wait for a peer that has left.
        """
        errors: list[BaseException] = []

        def run(runner: SharedRun) -> None:
            try:
                runner.execute(buffers, sequence)
            except BaseException as error:
                errors.append(error)
                runner.memory.close()

        others = [self.threads.submit(run, runner) for runner in self.runners[1:]]
        run(self.runners[0])
        for other in others:
            other.result()
        if errors:
            raise errors[0]

    def array(self, tensor: torch.Tensor, which: int) -> Any:
        """The elements of a tensor as an array, by address: `Tensor.numpy` takes 30 µs when it is not in the caches.

        An array of an address owns no memory, so it may be kept: it is used only while a tensor is at that address.
        """
        address = tensor.data_ptr()
        found = self.known[which].get(address)
        if found is None:
            elements = (self.inputs, self.outputs)[which]
            memory: Any = self.types[which].from_address(address) if elements else None
            found = np.ndarray(elements, self.dtype, memory) if elements else NOTHING
            if len(self.known[which]) >= MOST_KNOWN:
                self.known[which].clear()
            self.known[which][address] = found
        return found


def without_warnings() -> Callable[[Callable[[], None]], None]:
    """A function that calls another without numpy's warnings of overflow: a sum that overflows is the caller's, as in torch.

    numpy 2 keeps its settings in the context, so one context is prepared; older versions set them for every call.
    """
    context, before = contextvars.copy_context(), np.geterr()
    context.run(np.seterr, all="ignore")
    if np.geterr() == before and context.run(np.geterr)["over"] == "ignore":
        return context.run
    np.seterr(**before)

    def call(function: Callable[[], None]) -> None:
        with np.errstate(all="ignore"):
            function()

    return call


def quick_sends(now: Step, memory: SharedMemory, dtype: np.dtype) -> tuple[QuickSend, ...] | None:
    found = []
    for peers, spans in now.sends:
        size = length(spans) * dtype.itemsize
        if len(spans) != 1 or size > area.SLOT:
            return None
        found.append(QuickSend(*spans[0], size, [memory.links[peer] for peer in peers]))
    return tuple(found)


def quick_receives(
    now: Step, memory: SharedMemory, dtype: np.dtype, views: dict[int, list[Any]]
) -> tuple[QuickReceive, ...] | None:
    found = []
    for receive in now.receives:
        size = receive.elements * dtype.itemsize
        if len(receive.targets) != 1 or size > area.SLOT:
            return None
        link = memory.links[receive.peer]
        found.append(QuickReceive(*receive.targets[0], receive.elements, TOTAL.pack(size), link, views[receive.peer]))
    return None if now.copies else tuple(found)


class SharedRun(Run):
    """The lanes of one channel of a plan, on numpy arrays. A group executes one collective at a time."""

    def __init__(self, prepared: Prepared, dtype: np.dtype, memory: SharedMemory, channel: int, channels: int) -> None:
        super().__init__(prepared._replace(transport=memory), (), prepared.begin.call)
        self.memory, self.sequence = memory, 0
        self.slots = [slot.view(dtype) for slot in memory.slots]
        views = {peer: [slot.view(dtype) for slot in link.slots] for peer, link in memory.links.items()}
        self.operations: list[SharedOperation] = []
        for kind, step, lane, *_ in prepared.order:
            if lane % channels != channel:
                continue
            now = self.lanes[lane][step]
            quick = quick_sends(now, memory, dtype) if kind == SEND else quick_receives(now, memory, dtype, views)
            if quick != ():
                self.operations.append(SharedOperation(kind == SEND, step, lane, quick))
        self.begin_call = prepared.begin
        self.quietly = without_warnings()

    def execute(self, buffers: tuple[Any, ...], sequence: int) -> None:
        """Execute call number `sequence` on its buffers."""
        self.buffers, self.sequence, self.memory.begun = buffers, sequence, self.begin_call
        self.sends.clear()
        self.seen.clear()
        self.quietly(self.run)
        self.buffers = ()  # scratch memory is freed

    def place(self, step: int, lane: int) -> Place:
        call = self.call.numbered(self.sequence)
        return Place(self.transport.rank, call, self.lanes[lane][step].number, lane)

    def run(self) -> None:
        """Execute all operations in order."""
        memory, buffers, slots = self.memory, self.buffers, self.slots
        packed = self.call.packed_as(self.sequence)
        for is_begin, step, lane, quick in self.operations:
            if quick is None or self.sends or memory.queue:
                (self.begin if is_begin else self.finish)(step, lane)
            elif is_begin:
                for k, (buffer, start, stop, size, links) in enumerate(quick):
                    slot = memory.free_slot()
                    if slot < 0:
                        self.begin(step, lane, k)
                        break
                    slots[slot][: stop - start] = buffers[buffer][start:stop]
                    memory.deliver(slot, links, packed, size, size)
            else:
                self.receive(step, lane, quick, packed)
        for key in list(self.sends):
            self.wait_for_sends(*key)

    def receive(self, step: int, lane: int, quick: tuple[QuickReceive, ...], packed: bytes) -> None:
        """Wait for the messages of a step, and store or reduce them."""
        memory, buffers = self.memory, self.buffers
        for k, (into, base, elements, size, link, slots) in enumerate(quick):
            if link.kept:  # copied out of its slot while this rank waited for free slots
                self.post(step, lane, k, True).wait()
                continue
            block = link.reading
            if memory.try_wait(block.data):
                memory.wait_for_data(link, self.place(step, lane))
            entry, _, slot = link.read()
            if not entry.startswith(packed + size):
                check_entry(self.place(step, lane), link.peer, entry, TOTAL.unpack(size)[0])
            received = slots[slot][:elements]
            buffer, start, stop = into
            if base is None:
                buffers[buffer][start:stop] = received
            else:
                assert self.combine is not None
                self.combine(buffers[base[0]][base[1] : base[2]], received, buffers[buffer][start:stop])
            memory.post(block.returned)
