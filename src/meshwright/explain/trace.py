"""The trace of one rank as data: events in columns, never one object per event.

A profiler writes an event for each operator, kernel and annotation; a trace of a few steps has millions. A column is a numpy array with one
element per event. Texts (names, shapes) occur many times, so that a column has their number in a list of distinct texts.

Times are whole nanoseconds from the origin of the trace: sums of parts are exact.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.units import Json

OPERATOR, ANNOTATION, PYTHON, RUNTIME, KERNEL, COPY, OTHER = range(7)
CATEGORIES = {  # of torch.profiler, and of our own profiles
    "cpu_op": OPERATOR, "operator": OPERATOR, "user_annotation": ANNOTATION, "python_function": PYTHON, "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME, "hip_runtime": RUNTIME, "xpu_runtime": RUNTIME, "kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": COPY,
}  # fmt: skip
ON_DEVICE = (KERNEL, COPY)


class Detail(NamedTuple):
    """What the profiler wrote about an event beside its times: shapes and dtypes of its inputs, or the collective it belongs to."""

    dims: str = ""  # JSON, as in "Input Dims"
    dtypes: str = ""  # JSON, as in "Input type"
    collective: str = ""  # "Collective name" of NCCL's records
    elements: int = 0  # the larger of its messages in and out
    dtype: str = ""
    group: str = ""  # "Process Group Name"
    ranks: tuple[int, ...] = ()


NO_DETAIL = Detail()


@dataclass(frozen=True)
class EventTable:
    """The events of a rank in columns, ordered by start; an event that encloses others comes before them."""

    name: NDArray[np.int32]  # index in `names`
    category: NDArray[np.int8]
    thread: NDArray[np.int32]  # number of a thread of the host, or of a stream of the device
    start: NDArray[np.int64]  # nanoseconds from the origin of the trace
    duration: NDArray[np.int64]
    correlation: NDArray[np.int64]  # joins a call of the runtime and its kernel; −1: none
    external: NDArray[np.int64]  # joins an operator and its kernels; −1: none
    sequence: NDArray[np.int64]  # joins an operator and its backward; −1: none
    forward_thread: NDArray[np.int64]  # not 0 in backward; −1: none
    detail: NDArray[np.int32]  # index in `details`
    names: tuple[str, ...]
    details: tuple[Detail, ...]

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def end(self) -> NDArray[np.int64]:
        return self.start + self.duration

    def where(self, selected: NDArray) -> "EventTable":
        """The events that a mask or a list of indices selects."""
        columns = {name: getattr(self, name)[selected] for name in COLUMNS}
        return EventTable(**columns, names=self.names, details=self.details)


COLUMNS = (
    "name", "category", "thread", "start", "duration", "correlation", "external", "sequence", "forward_thread", "detail",
)  # fmt: skip


class NamedSpan(NamedTuple):
    """A named interval of a rank in nanoseconds: a step, a phase, or a layer's part of a phase."""

    name: str
    start: int
    end: int


class ListedGroup(NamedTuple):
    """A process group as the profiler lists it."""

    description: str = ""  # such as mesh_tp
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """What one rank did: its events, the process groups that the profiler listed, and what is missing."""

    file: str
    rank: int  # −1: neither the file nor its name says it
    world: int  # at least as many ranks were there
    events: EventTable
    origin_ns: int = 0  # time of the host's clock at 0
    host: str = ""  # ranks of one host share a clock
    groups: dict[str, ListedGroup] = field(default_factory=dict)  # by the name of a process group
    devices: tuple[Json, ...] = ()  # "deviceProperties"
    steps: tuple[NamedSpan, ...] = ()  # steps that the file itself lists, beside those in its events
    peak_bytes: int = 0  # most bytes that the allocator had given out (a profile with profile_memory); 0: not traced
    notes: tuple[str, ...] = ()  # what could not be read, and what was assumed

    @property
    def on_device(self) -> bool:
        """Whether the trace has kernels of a device; else operators of the host stand for them."""
        return bool(np.isin(self.events.category, ON_DEVICE).any())


@dataclass(frozen=True)
class TracedCollectives:
    """The collectives of a rank in columns, in the order in which they started."""

    # all_reduce | all_gather | reduce_scatter | all_to_all | send | receive | broadcast | barrier
    kind: tuple[str, ...]
    group: tuple[str, ...]  # name of the process group; empty where the trace does not say it
    ranks: tuple[tuple[int, ...], ...]  # of the group; empty where the trace does not say them
    bytes: NDArray[np.int64]  # of the full buffer; 0 where the trace has no shapes
    start: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)
