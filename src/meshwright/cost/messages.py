"""Every collective of a training step: its size, the program that the library runs, the level it crosses, its time and rate.

`estimate` adds the seconds of these calls up; here they are listed one by one, for one plan. `traffic` lists the same operations by number
and bytes alone, without a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost.collective import OPERATIONS, CollectiveTimes
from meshwright.cost.phase import AXIS_OF
from meshwright.cost.step import StepCost
from meshwright.describe.cluster import Cluster
from meshwright.lower.program import Op, scalar


@dataclass(frozen=True)
class Message:
    """One kind of collective of the slowest rank: how often a step calls it, and what one call moves and takes."""

    name: str
    axis: str  # under which its time is reported: tp, cp, ep, pp, dp
    operation: str
    algorithm: str
    ranks: int
    level: int  # the highest level that its groups use
    count: float  # calls per step
    size: float  # bytes of the full buffer
    sent: float  # bytes that one device sends through that level
    seconds: float  # of one call

    @property
    def rate(self) -> float:
        """Bytes per second that a device sends through the level during the call."""
        return self.sent / self.seconds


def step_calls(cost: StepCost) -> Iterator[tuple[Op, float]]:
    """Every collective of the slowest rank with the number of calls in a step; sends between stages are not among them."""
    program = cost.program
    rank = program.ranks[int(cost.slowest[0])]
    rounds = max(1.0, float(program.batch.microbatches[0]))
    for key, ops in program.blocks.items():
        for op in ops:
            if op.axis:
                yield op, rounds * scalar(op.count) * scalar(rank.times(*key))
    for op in program.closing:
        if op.axis and op.axis != "ends":
            yield op, scalar(op.count)


def messages(cost: StepCost, cluster: Cluster) -> list[Message]:
    """All collectives and sends of one plan's step, those that take longest first. Equal calls of several blocks are one entry."""
    program = cost.program
    network = CollectiveTimes(cluster, program.batch)
    rounds = max(1.0, float(program.batch.microbatches[0]))
    sends = program.ranks[int(cost.slowest[0])].sends
    calls = [*step_calls(cost), *((op, rounds * scalar(op.count) * scalar(times)) for op, times in sends)]
    by_call: dict[tuple[str, str, str, float], Message] = {}
    for op, times in calls:
        size = scalar(op.message_bytes)
        ranks = int(scalar(program.batch.size(op.axis)))
        if times <= 0 or ranks < 2 or size <= 0:
            continue
        key = (op.name, op.axis, op.collective, size)
        before = by_call[key].count if key in by_call else 0.0
        by_call[key] = _message(network, op, ranks, before + times, size)
    return sorted(by_call.values(), key=lambda m: -m.count * m.seconds)


def _message(network: CollectiveTimes, op: Op, ranks: int, count: float, size: float) -> Message:
    level = network.level(op.axis)
    if op.collective == "send":
        sent, algorithm = size, "direct"
    else:
        sent, algorithm = network.bytes_by_level(op).get(level, 0.0), network.algorithm(op)
    name, axis = OPERATIONS[op.collective], AXIS_OF[op.axis]
    return Message(op.name, axis, name, algorithm, ranks, level, count, size, sent, scalar(network.time(op)))
