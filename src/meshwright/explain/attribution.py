"""Where a step went: its nanoseconds by part. Parts sum exactly to the step: each nanosecond is given to the first of these that holds.

    compute        a kernel runs (on a CPU: an operator), by group: products, attention, optimizer, other, …
    waiting        a collective runs whose last rank has not arrived, by that rank
    bubble         a stage waits for a message of another one: the time by which it exceeds the shortest one of its size
    communication  a collective or message runs and nothing is computed, by axis: exposed
    data           the loader has no batch ready
    host           the device is idle because the host launches too late, or waited for the device before; on a CPU what runs between operators
    other          none of these: on a device kernels were launched and do not start, because of something that the trace does not show

`hidden` has the communication behind compute. A step of a CPU has no kernels: operators by their own time stand for them, and data comes first.
"""

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.explain.collectives import axis_of
from meshwright.explain.intervals import (
    EMPTY,
    Intervals,
    clip,
    complement,
    innermost,
    intersect,
    length,
    subtract,
    union,
)
from meshwright.explain.kernels import group_of
from meshwright.explain.ranks import MESSAGES, RankInGroup
from meshwright.explain.trace import ANNOTATION, OPERATOR, NamedSpan

COMPUTE, WAITING, BUBBLE, COMMUNICATION, DATA, HOST, UNATTRIBUTED = (
    "compute", "waiting", "bubble", "communication", "data", "host", "other",
)  # fmt: skip
KINDS = (COMPUTE, WAITING, BUBBLE, COMMUNICATION, DATA, HOST, UNATTRIBUTED)
Part = tuple[str, str]  # kind and name: ("compute", "products"), ("communication", "dp")
LAUNCHES, SYNCHRONISING, QUEUED, BETWEEN = (
    "launches",
    "synchronising calls",
    "gaps between queued kernels",
    "between operators",
)
FRAMEWORK = re.compile(r"autograd::engine|torch::autograd::|torch::distributed|torch\.distributed")
QUEUED_GAP = 20_000  # ns: a launched kernel that starts later than this after the one before it waits for something
RECENT = 100_000  # ns: a gap that begins this soon after a synchronising call is its consequence


@dataclass(frozen=True)
class StepAttribution:
    """The parts of one step on one rank, in nanoseconds."""

    rank: int
    step: str
    start: int
    duration: int
    parts: dict[Part, int]
    hidden: dict[str, int] = field(default_factory=dict)  # by axis: communication behind compute; not in the sum
    pieces: dict[Part, Intervals] = field(default_factory=dict, repr=False)  # when each part was

    def __post_init__(self) -> None:
        if sum(self.parts.values()) != self.duration:
            raise AssertionError(f"parts of step {self.step} sum to {sum(self.parts.values())} ns, not {self.duration}")

    def total(self, kind: str) -> int:
        return sum(ns for (of, _), ns in self.parts.items() if of == kind)

    @property
    def attributed(self) -> float:
        """Share of the step that has a cause."""
        return 1 - self.total(UNATTRIBUTED) / self.duration if self.duration else 1.0


def attribute(rank: RankInGroup) -> list[StepAttribution]:
    """The attribution of every traced step of a rank."""
    compute = device_compute(rank) if len(rank.found.device) else host_compute(rank)
    communication = communication_layers(rank)
    return [attribute_step(rank, step, compute, communication) for step in rank.steps]


def attribute_step(
    rank: RankInGroup, step: NamedSpan, compute: dict[Part, Intervals], communication: dict[Part, Intervals]
) -> StepAttribution:
    taken, pieces = EMPTY, dict[Part, Intervals]()

    def take(part: Part, times: Intervals) -> None:
        nonlocal taken
        new = subtract(clip(times, step.start, step.end), taken)
        if len(new):
            pieces[part] = union(pieces.get(part, EMPTY), new)
            taken = union(taken, new)

    on_device = len(rank.found.device) > 0
    if not on_device:
        take((DATA, "loader"), rank.found.data)
    for layers in (compute, communication):
        for part, times in layers.items():
            take(part, times)
    idle = complement(taken, step.start, step.end)
    for part, times in (device_idle(rank, idle) if on_device else host_idle(rank, idle)).items():
        take(part, times)
    rest = "launched kernels that do not start" if on_device else "unknown"
    take((UNATTRIBUTED, rest), complement(taken, step.start, step.end))
    hidden = dict[str, int]()
    computing = union(*(clip(times, step.start, step.end) for times in compute.values()))
    for (kind, axis), times in communication.items():
        if kind == COMMUNICATION and (behind := length(intersect(clip(times, step.start, step.end), computing))):
            hidden[axis] = behind
    duration = step.end - step.start
    return StepAttribution(
        rank.rank, step.name, step.start, duration, {p: length(t) for p, t in pieces.items()}, hidden, pieces
    )


def device_compute(rank: RankInGroup) -> dict[Part, Intervals]:
    """Kernels and copies by group; those launched by the optimizer are its own."""
    found, e = rank.found, rank.found.events
    groups = np.array([group_of(name) for name in e.names])[e.name[found.device]]
    phases = found.phase_of(found.launched_at)
    groups = np.where((phases == "optimizer") & (groups != "comm"), "optimizer", groups)
    return by_group(groups, e.start[found.device], e.end[found.device])


def by_group(groups: NDArray, start: NDArray[np.int64], end: NDArray[np.int64]) -> dict[Part, Intervals]:
    names = [g for g in ("products", "attention", "loss", "optimizer", "other", "copies") if (groups == g).any()]
    return {(COMPUTE, g): union(np.column_stack([start[groups == g], end[groups == g]])) for g in names}


def host_compute(rank: RankInGroup) -> dict[Part, Intervals]:
    """Operators of a CPU by group, each by its own time, on whatever thread they ran."""
    found, e = rank.found, rank.found.events
    groups = np.array([host_group(name) for name in e.names])
    starts, ends, names = [], [], []
    for thread in np.unique(e.thread[e.category == OPERATOR]).tolist():
        mine = np.flatnonzero(
            (e.thread == thread) & np.isin(e.category, (OPERATOR, ANNOTATION)) & ~found.names_with("gloo:")
        )
        pieces, owners = innermost(e.start[mine], e.end[mine])
        kept = (e.category[mine] == OPERATOR)[owners]
        starts.append(pieces[kept, 0])
        ends.append(pieces[kept, 1])
        names.append(e.name[mine[owners[kept]]])
    if not starts:
        return {}
    start, end, name = np.concatenate(starts), np.concatenate(ends), np.concatenate(names)
    of_piece = groups[name]
    in_update = (found.phase_of(start) == "optimizer") & (of_piece != "")
    return by_group(np.where(in_update, "optimizer", of_piece), start, end)


def host_group(name: str) -> str:
    """The group of an operator; empty for collectives, and for the work of Python and the framework around operators: nodes of autograd and functions
    of users have names without a namespace."""
    group = group_of(name)
    return "" if group == "comm" or "::" not in name or FRAMEWORK.match(name) else group


def communication_layers(rank: RankInGroup) -> dict[Part, Intervals]:
    """Waiting by the late rank, bubbles, and collectives by axis, in the order in which they claim time."""
    c = rank.collectives
    spans = np.column_stack([c.start, c.end])
    axes = [axis_of(kind, group) for kind, group in zip(c.kind, c.group, strict=True)]
    out = dict[Part, Intervals]()
    until_last = np.column_stack([c.start, rank.last_start])
    for late in np.unique(rank.last_rank[(rank.last_rank >= 0) & (rank.last_rank != rank.rank)]).tolist():
        out[WAITING, f"rank {late}"] = union(until_last[rank.last_rank == late])
    messages = np.array([kind in MESSAGES for kind in c.kind], bool)
    for size in np.unique(c.bytes[messages]).tolist():
        alike = messages & (c.bytes == size)
        shortest = int((c.end - c.start)[alike].min())
        late_part = np.column_stack([c.start, c.end - shortest])[alike]
        out[BUBBLE, "messages"] = union(out.get((BUBBLE, "messages"), EMPTY), late_part)
    for axis in dict.fromkeys(axes):
        out[COMMUNICATION, axis] = union(spans[np.array([a == axis for a in axes], bool)])
    if not len(rank.found.device) and len(c):  # the calls of the host that issue collectives, and copy for them
        main = axes[0] if len(set(axes)) == 1 else "calls"
        calls = rank.found.spans_of(rank.found.names_with("c10d::"))
        out[COMMUNICATION, main] = union(out.get((COMMUNICATION, main), EMPTY), calls)
    return out


def device_idle(rank: RankInGroup, idle: Intervals) -> dict[Part, Intervals]:
    """Why no kernel ran. The next kernel had not been launched: the host is late, because it waits for data, has waited for the device,
    or launches too slowly. It had been launched: the short gap between two kernels, or a dependency that the trace does not show."""
    found = rank.found
    starts, launched = found.device_start, found.launched_at
    following = np.searchsorted(starts, idle[:, 1])
    exists = following < len(starts)
    launch = np.where(exists, launched[np.minimum(following, len(starts) - 1)], idle[:, 1])
    late = launch >= idle[:, 0]
    ends = found.synchronised_at
    before = np.searchsorted(ends, np.maximum(launch, idle[:, 0]), side="right") - 1
    after_call = late & (before >= 0)
    after_call[after_call] &= ends[before[after_call]] >= idle[after_call, 0] - RECENT
    short = ~late & (idle[:, 1] - idle[:, 0] <= QUEUED_GAP)
    return {
        (DATA, "loader"): intersect(idle[late], found.data),
        (HOST, SYNCHRONISING): idle[after_call],
        (HOST, LAUNCHES): idle[late],
        (HOST, QUEUED): idle[short],
    }


def host_idle(rank: RankInGroup, idle: Intervals) -> dict[Part, Intervals]:
    """What the host of a CPU run did while no operator ran: it read a number of a tensor just before, or it ran Python and the framework."""
    ends, reads = rank.found.operators_on_main
    before = np.searchsorted(ends, idle[:, 0], side="right") - 1
    after_read = np.zeros(len(idle), bool)
    if len(ends):
        after_read = (before >= 0) & reads[np.maximum(before, 0)]
    return {(HOST, SYNCHRONISING): idle[after_read], (HOST, BETWEEN): idle}
