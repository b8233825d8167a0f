"""Simulate a program on a cluster (a *walk*): the start and end time of every message.

The model:

1. A rank runs its steps in order. It enters a step when all sends, receives and additions of its previous step are
   done. The messages of one step are concurrent. There is no barrier between ranks.
2. A message starts when both its ranks have entered the step (the receive buffer is free, and the data to send is
   ready). It first takes α, then its bytes flow through the ports of its path. Links are full-duplex.
3. Flows through the same port share it max-min fairly (`network`). Rates are recomputed when a flow starts or ends.
4. A rank adds received messages one at a time, with γ seconds per byte.

Without shared ports this is the α-β-γ model: the walk of a ring takes exactly 2(P−1)(α + n/P·β) + (P−1)/P·nγ
(`formulas`). With mixed or shared links it covers cases that the formulas cannot: a ring that waits for its slowest
link, network cards shared by devices, uplinks shared by the flows of an all-to-all.

Two engines give the same times. If all ports are private, a step is three numpy operations on all its messages
(`rounds`). Otherwise a discrete-event simulation runs (`events`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.describe.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.programs.collectives.events import play
from meshwright.programs.collectives.network import LinkRoutes, Messages, bytes_by_port, messages, private_pairs, routes
from meshwright.programs.collectives.program import Array, Program
from meshwright.programs.collectives.registry import place


@dataclass(frozen=True, eq=False)
class Walk:
    """Times of messages and steps, and the bytes sent by each rank and through each port."""

    makespan: float
    messages: Messages
    start: Array  # of each message: both ranks have entered its step
    end: Array  # of each message: its last byte has arrived
    step_end: Array  # of each step: its last message has arrived and is added
    sent: Array  # bytes sent by each rank
    bytes_by_port: dict[tuple[Any, ...], float]

    @property
    def steps(self) -> int:
        return len(self.step_end)


def walk(
    program: Program,
    cluster: Cluster,
    placement: Sequence[int] | None = None,
    element_bytes: float = 4.0,
    engine: str = "auto",
) -> Walk:
    """Simulate a program on a cluster; rank r runs on device placement[r], by default on device r."""
    devices = place(cluster, program.ranks, placement)
    sent = messages(program, element_bytes, cluster.accelerator.gamma)
    via = routes(sent, cluster, devices, program)
    private = private_pairs(sent, via)
    fast = bool(private.all()) and one_sum_a_step(sent)
    if engine == "rounds" and not fast:
        what = "the engine 'rounds' cannot simulate messages that share a port or additions that queue"
        raise MeshwrightError("MW-PROG-020", what, fix="engine='events'")
    if engine != "events" and fast:
        start, end, done = rounds(sent, via, program.endpoints)
    else:
        start, end, done = play(sent, via, private, program.endpoints)
    step_end = ends_of_steps(sent, done)
    bytes_sent = np.bincount(sent.source, weights=sent.bytes, minlength=program.endpoints)
    makespan = float(step_end.max(initial=0.0))
    return Walk(makespan, sent, start, end, step_end, bytes_sent[: program.ranks], bytes_by_port(sent, via))


def rounds(sent: Messages, via: LinkRoutes, ranks: int) -> tuple[Array, Array, Array]:
    """Compute the times step by step: a message starts when both ranks are ready, and they are ready again at its end."""
    start, end = np.empty(len(sent.step)), np.empty(len(sent.step))
    ready = np.zeros(ranks)
    alpha, beta = via.alpha, 1.0 / via.bottleneck
    for low, high in zip(sent.bounds[:-1].tolist(), sent.bounds[1:].tolist(), strict=True):
        source, target, pair = (column[low:high].astype(np.intp) for column in (sent.source, sent.target, via.pair))
        begin = np.maximum(ready[source], ready[target])
        arrival = begin + (alpha[pair] + sent.bytes[low:high] * beta[pair])
        start[low:high], end[low:high] = begin, arrival
        np.maximum.at(ready, source, arrival)
        np.maximum.at(ready, target, arrival + sent.work[low:high])
    return start, end, end + sent.work


def one_sum_a_step(sent: Messages) -> bool:
    """Whether no rank has two messages to add in one step, whose additions would queue."""
    adds = np.flatnonzero(sent.work)
    ranks = int(sent.target.max(initial=0)) + 1
    visited = np.zeros(len(sent.bounds) * ranks, dtype=bool)
    visited[sent.step[adds] * np.int64(ranks) + sent.target[adds]] = True
    return np.count_nonzero(visited) == len(adds)


def ends_of_steps(sent: Messages, done: Array) -> Array:
    """The last end of each step's messages; 0 for a step without messages."""
    last = np.zeros(len(sent.bounds) - 1)
    filled = np.flatnonzero(sent.bounds[1:] > sent.bounds[:-1])
    if len(filled):
        last[filled] = np.maximum.reduceat(done, sent.bounds[filled])
    return last
