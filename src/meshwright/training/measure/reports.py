"""Bring the reports of all ranks to rank 0, as text over the process group: nothing is unpickled.

A report has the communication of many steps. With many ranks fewer steps are sent, so that rank 0 receives about as much from
a thousand ranks as from ten.

Times of a report are those of the host's clock. Rank 0 compares its clock with that of one rank of every other host: it notes its time,
asks for the time of that rank, and notes when the answer arrives. The answer was given in the middle, up to half of the round trip; the
shortest of a few round trips counts.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import distributed

from meshwright.comm.bench.session import host_name
from meshwright.training.launch.rank import RankContext
from meshwright.training.records import CommEvent, Interval, RankReport, RecordedStep, TracedStep

MOST_STEPS = 512  # recorded steps of all ranks together
ROUND_TRIPS = 5


def gather_reports(context: RankContext, report: RankReport) -> list[RankReport]:
    """On rank 0 the reports of all ranks, with times of its clock; empty on the other ranks."""
    if context.world == 1:
        return [report]
    data = encode(report, context.world)
    table = all_gather(context, [len(data), zlib.crc32(host_name().encode())])
    lengths, hosts = table[:, 0].tolist(), table[:, 1].tolist()
    offsets = {host: compare_clocks(context, hosts.index(host)) for host in dict.fromkeys(hosts)}
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(context.device)
    received = [torch.empty_like(padded) for _ in lengths] if context.rank == 0 else None
    distributed.gather(padded, received)
    if received is None:
        return []
    found = [decode(t[:n].cpu().numpy().tobytes()) for t, n in zip(received, lengths, strict=True)]
    steps = min(len(r.recorded) for r in found)
    found = [replace(r, recorded=r.recorded[len(r.recorded) - steps :]) for r in found]
    return [shifted(r, offsets[host]) for r, host in zip(found, hosts, strict=True)]


def all_gather(context: RankContext, numbers: list[int]) -> torch.Tensor:
    """A row of whole numbers of each rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=context.device)
    rows = [torch.zeros_like(own) for _ in range(context.world)]
    distributed.all_gather(rows, own)
    return torch.stack(rows).cpu()


def compare_clocks(context: RankContext, other: int) -> float:
    """On rank 0, its clock minus the clock of rank `other`, in seconds; 0 if that is rank 0. The two ranks exchange messages."""
    value = torch.zeros(1, dtype=torch.float64, device=context.device)
    if other == 0 or context.rank not in (0, other):
        return 0.0
    if context.rank == other:
        for _ in range(ROUND_TRIPS):
            distributed.recv(value, 0)
            value.fill_(time.perf_counter())
            distributed.send(value, 0)
        return 0.0
    shortest, offset = float("inf"), 0.0
    for _ in range(ROUND_TRIPS):
        asked = time.perf_counter()
        distributed.send(value, other)
        distributed.recv(value, other)
        there, answered = float(value), time.perf_counter()
        if answered - asked < shortest:
            shortest, offset = answered - asked, (asked + answered) / 2 - there
    return offset


def encode(report: RankReport, world: int) -> bytes:
    """A report as compressed JSON, with fewer recorded steps if there are many ranks."""
    kept = max(1, MOST_STEPS // world)
    traced = report.traced if world <= MOST_STEPS // 8 else report.traced[:1]
    fields = asdict(replace(report, recorded=(), traced=()))
    fields |= {"recorded": report.recorded[-kept:], "traced": traced}  # named tuples become lists
    return zlib.compress(json.dumps(fields).encode(), 1)


def decode(data: bytes) -> RankReport:
    fields: dict[str, Any] = json.loads(zlib.decompress(data))
    recorded = tuple(recorded_step(row) for row in fields.pop("recorded"))
    traced = tuple(
        TracedStep(recorded_step(step), [Interval(*a) for a in actions], [Interval(*b) for b in blocks], updated)
        for step, actions, blocks, updated in fields.pop("traced")
    )
    return RankReport(**fields, recorded=recorded, traced=traced)


def recorded_step(row: list[Any]) -> RecordedStep:
    step, began, gradients, ended, events = row
    return RecordedStep(step, began, gradients, ended, [CommEvent(*event) for event in events])


def shifted(report: RankReport, offset: float) -> RankReport:
    """A report with all its times moved by an offset."""
    if not offset:
        return report

    def step(found: RecordedStep) -> RecordedStep:
        events = [CommEvent(*e[:4], *(t + offset for t in e[4:])) for e in found.events]
        return RecordedStep(found.step, found.began + offset, found.gradients + offset, found.ended + offset, events)

    def intervals(found: list[Interval]) -> list[Interval]:
        return [x._replace(start=x.start + offset, end=x.end + offset) for x in found]

    traced = tuple(
        TracedStep(step(t.recorded), intervals(t.actions), intervals(t.blocks), t.updated + offset)
        for t in report.traced
    )
    return replace(report, recorded=tuple(step(s) for s in report.recorded), traced=traced)
