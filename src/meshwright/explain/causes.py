"""What to change first: causes of lost time in the traced steps, each with the seconds of a step that it costs, the largest first.

    slow rank          others wait for it at collectives; what it does longer than they do says why
    data               the device, or the process, waits for the loader
    synchronising      the host reads a value of the device, which then has nothing to do until the host has launched more
    launches           the host launches kernels more slowly than the device runs them
    overlap            collectives start after backward although most gradients are complete before
    communication      exposed communication that could not have started earlier
    product            a shape below half of its usual rate
    bubble             a stage waits for messages of other stages

Seconds are those of the mean traced step, on the rank where they are largest; a cause below 1% of the step is left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.explain.attribution import (
    BETWEEN,
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    DATA,
    HOST,
    LAUNCHES,
    SYNCHRONISING,
    WAITING,
    Part,
    StepAttribution,
)
from meshwright.explain.intervals import clip, contains, of_spans, union
from meshwright.explain.products import TracedProduct
from meshwright.explain.ranks import LateRank, RankInGroup, TracedRun
from meshwright.explain.recognise import SYNCHRONISES
from meshwright.explain.trace import PYTHON, RUNTIME
from meshwright.units import format_decimal_bytes, format_seconds

WORTH = 0.01  # share of the step below which a cause is left out
USUAL_HOST = 0.1  # share of a step on a CPU that Python and the framework take between operators
UNEVEN = 1.15  # times the compute of the median rank at which a stage is called longer
BUCKETS = 4  # into which gradients should at least be divided: all but the last can be sent during backward
SAMPLE = 100  # calls whose line of Python is looked for
AFTER_BACKWARD = 0.7  # share of the bytes that start after backward at which overlap is said to be off


# What to change, by cause, and of a slow rank by the part of its step that is longer.
FIXES = {
    "data loader": "more loader workers and prefetching, or data closer to the host",
    "synchronising calls": "read values on the host once per step at most, and after the update: .item(), print, nonzero",
    "launches": "compile the model or use CUDA graphs; larger micro-batches",
    "host": "fewer, larger operators: compile the model",
    "product": "sizes that are multiples of 64, and one large product in place of many small ones",
    "overlap": "smaller buckets (DDP's bucket_cap_mb), or overlapping the gradient reduction with backward",
    "communication": "larger micro-batches per reduction, a faster link for this axis, or another layout (`plan`)",
    "bubble": "more micro-batches, or an interleaved schedule",
}
SLOW_RANK_FIXES = {
    DATA: "give its loader more workers, or the same storage as the others have",
    HOST: "look at what its host does between launches: other processes, logging, a slower processor",
    COMPUTE: "check its device (clocks, temperature, other processes), and whether it has more work: longer sequences, more tokens, another layer",
}


@dataclass(frozen=True)
class LostTime:
    """A cause of lost time: its name, the seconds of a step that it costs, where it is seen, and what to change if that is not in `FIXES`."""

    cause: str
    seconds: float
    evidence: str
    other_fix: str = ""

    @property
    def fix(self) -> str:
        return self.other_fix or FIXES[self.cause]

    def as_dict(self) -> dict[str, object]:
        return {"cause": self.cause, "seconds": self.seconds, "evidence": self.evidence, "fix": self.fix}


def mean_parts(steps: Sequence[StepAttribution]) -> dict[Part, float]:
    """Seconds of each part in the mean step."""
    out = defaultdict[Part, float](float)
    for step in steps:
        for part, nanoseconds in step.parts.items():
            out[part] += nanoseconds / 1e9 / len(steps)
    return dict(out)


def lost_time(
    run: TracedRun, steps: dict[int, list[StepAttribution]], products: dict[int, list[TracedProduct]]
) -> list[LostTime]:
    """All causes that are worth a change."""
    parts = {rank: mean_parts(of_rank) for rank, of_rank in steps.items()}
    step_s = max(sum(of_rank.values()) for of_rank in parts.values())
    found = [*slow_ranks(run, parts), *host_causes(run, parts), *slow_products(run, products, steps)]
    found += overlap(run, steps, parts)
    bubble, rank = largest(parts, (BUBBLE, "messages"))
    found.append(LostTime("bubble", bubble, f"rank {rank} waits for messages of other stages{uneven_stages(parts)}"))
    kept: dict[str, LostTime] = {}
    for cause in sorted(found, key=lambda c: -c.seconds):
        if cause.seconds >= WORTH * step_s:
            kept.setdefault(cause.cause, cause)  # of one cause where it costs most
    return list(kept.values())


def uneven_stages(parts: dict[int, dict[Part, float]]) -> str:
    """The rank that computes clearly longer than the others, in words: an uneven pipeline waits for it in every micro-batch."""
    compute = {rank: sum(s for (kind, _), s in of_rank.items() if kind == COMPUTE) for rank, of_rank in parts.items()}
    longest, usual = max(compute, key=lambda rank: compute[rank]), float(np.median(list(compute.values())))
    if compute[longest] < UNEVEN * usual:
        return ""
    more = format_seconds(compute[longest] - usual)
    return f"; rank {longest} computes {more} longer than most: its stage has more layers or a slower device"


def largest(parts: dict[int, dict[Part, float]], part: Part) -> tuple[float, int]:
    """The seconds of a part on the rank that has most of it, and this rank."""
    return max((of_rank.get(part, 0.0), -rank) for rank, of_rank in parts.items())[0], max(
        parts, key=lambda rank: (parts[rank].get(part, 0.0), -rank)
    )


def slow_ranks(run: TracedRun, parts: dict[int, dict[Part, float]]) -> list[LostTime]:
    """Ranks for which the others wait, each with the part of its step that is longer than theirs."""
    out = []
    for late in run.late:
        waits = [
            of_rank.get((WAITING, f"rank {late.rank}"), 0.0) for rank, of_rank in parts.items() if rank != late.rank
        ]
        if not waits or late.rank not in parts:
            continue
        seconds = float(np.median(waits))
        others = [of_rank for rank, of_rank in parts.items() if rank != late.rank]
        own = parts[late.rank]
        more = {
            p: s - float(np.median([o.get(p, 0.0) for o in others]))
            for p, s in own.items()
            if p[0] in (COMPUTE, DATA, HOST)
        }
        part = max(more, key=lambda p: more[p], default=(COMPUTE, "other"))
        name = "data loader" if part[0] == DATA else f"slow rank {late.rank}"
        longer = f"{format_seconds(max(more.get(part, 0.0), 0.0))} more than the others in {part_text(part)}"
        text = f"{lateness(late)}; it spends {longer}"
        out.append(LostTime(name, seconds, text, SLOW_RANK_FIXES[part[0]]))
    return out


def lateness(late: LateRank) -> str:
    often = (
        "in every step"
        if late.constant and len(late.by_step) > 1
        else f"most in step {max(late.by_step, key=lambda s: late.by_step[s])}"
    )
    return f"rank {late.rank} arrives last at {late.share:.0%} of the collectives, {format_seconds(late.late_s)} after the others, {often}"


def part_text(part: Part) -> str:
    """A part of compute, of the loader or of the host, in words."""
    kind, name = part
    return {COMPUTE: f"compute ({name})", DATA: "the data loader"}.get(kind, f"the host ({name})")


def host_causes(run: TracedRun, parts: dict[int, dict[Part, float]]) -> list[LostTime]:
    data, on = largest(parts, (DATA, "loader"))
    out = [LostTime("data loader", data, f"rank {on} waits for its next batch")]
    synchronising, on = largest(parts, (HOST, SYNCHRONISING))
    calls = synchronising_calls(run.rank(on))
    out.append(LostTime("synchronising calls", synchronising, calls))
    launches, on = largest(parts, (HOST, LAUNCHES))
    out.append(LostTime("launches", launches, f"on rank {on} kernels wait for their launch"))
    between, on = largest(parts, (HOST, BETWEEN))
    between = max(0.0, between - USUAL_HOST * sum(parts[on].values()))
    text = f"on rank {on} Python and the framework run between operators for longer than a tenth of the step"
    return [*out, LostTime("host", between, text)]


def synchronising_calls(rank: RankInGroup) -> str:
    """How many calls wait for the device per step, and the line of Python from which most come."""
    found, e = rank.found, rank.found.events
    by_name = np.array([bool(SYNCHRONISES.match(n)) for n in e.names], bool)
    calls = np.flatnonzero((e.category == RUNTIME) & by_name[e.name])
    if not len(calls):
        calls = np.flatnonzero(found.names_with("aten::_local_scalar_dense") & (found.phase_of(e.start) != "optimizer"))
    steps = of_spans((s.start, s.end) for s in found.host_steps)
    inside = calls[contains(steps, e.start[calls])]
    text = f"{len(inside) / max(len(found.host_steps), 1):.0f} calls per step on rank {rank.rank}"
    python = np.flatnonzero(e.category == PYTHON)
    where = defaultdict[str, int](int)
    for i in inside[:: len(inside) // SAMPLE + 1].tolist() if len(python) else ():
        before = python[: np.searchsorted(e.start[python], e.start[i], side="right")]
        around = before[(e.end[before] >= e.end[i]) & (e.thread[before] == e.thread[i])]
        lines = [
            e.names[e.name[j]]
            for j in around.tolist()
            if ".py(" in e.names[e.name[j]] and "torch/" not in e.names[e.name[j]]
        ]
        if lines:
            where[lines[-1]] += 1
    return text + (f", most at {max(where, key=lambda line: where[line])}" if where else "")


def slow_products(
    run: TracedRun, products: dict[int, list[TracedProduct]], steps: dict[int, list[StepAttribution]]
) -> list[LostTime]:
    """Products below half of their usual rate, one cause for those with the same reason."""
    out = dict[str, LostTime]()
    for rank, of_rank in products.items():
        by_reason = defaultdict[str, list[TracedProduct]](list)
        for p in of_rank:
            if p.excess_s:
                by_reason[p.reason].append(p)
        for reason, slow in by_reason.items():
            seconds = sum(p.excess_s for p in slow) / max(len(steps[rank]), 1)
            worst = max(slow, key=lambda p: p.excess_s)
            text = f"{worst.shape} in {worst.dtype} runs at {worst.usual_s / worst.typical_s:.0%} of the usual rate: {reason}"
            if seconds > out.get(worst.shape, LostTime("", 0, "")).seconds:
                out[worst.shape] = LostTime("product", seconds, text)
    merged = sorted(out.values(), key=lambda c: -c.seconds)
    if len(merged) < 2:
        return merged
    more = f"{merged[0].evidence}; and {len(merged) - 1} more shapes"
    return [LostTime("product", sum(c.seconds for c in merged), more)]


def overlap(
    run: TracedRun, steps: dict[int, list[StepAttribution]], parts: dict[int, dict[Part, float]]
) -> list[LostTime]:
    """Exposed communication of each axis: what could have been hidden, if it starts only after backward; else all of it."""
    out = []
    axes = dict.fromkeys(name for of_rank in parts.values() for kind, name in of_rank if kind == COMMUNICATION)
    for axis in axes:
        exposed, on = largest(parts, (COMMUNICATION, axis))
        rank = run.rank(on)
        hidden = sum(s.hidden.get(axis, 0) for s in steps[on]) / 1e9 / len(steps[on])
        late, size, count = after_backward(rank, steps[on])
        if late >= AFTER_BACKWARD and exposed > hidden:
            text = (
                f"on rank {on} {late:.0%} of {format_decimal_bytes(size)} in {count:.0f} collectives per step start after backward has ended: "
                f"{format_seconds(exposed)} exposed, {format_seconds(hidden)} hidden"
            )
            out.append(LostTime("overlap", exposed * (1 - 1 / BUCKETS), text))
        else:
            text = f"{axis} on rank {on}: {format_seconds(exposed)} exposed, {format_seconds(hidden)} hidden"
            out.append(LostTime(f"communication {axis}", exposed, text, FIXES["communication"]))
    return out


def after_backward(rank: RankInGroup, steps: Sequence[StepAttribution]) -> tuple[float, float, float]:
    """Share of a rank's bytes whose collective starts after the last compute of backward; bytes and collectives per step."""
    c, late, total, count = rank.collectives, 0, 0, 0
    for step in steps:
        inside = (c.start >= step.start) & (c.start < step.start + step.duration)
        backward = backward_end(rank, step)
        late += int(np.maximum(c.bytes, 1)[inside & (c.start >= backward)].sum())
        total += int(np.maximum(c.bytes, 1)[inside].sum())
        count += int(inside.sum())
    return late / max(total, 1), total / max(len(steps), 1), count / max(len(steps), 1)


def backward_end(rank: RankInGroup, step: StepAttribution) -> int:
    """When the products of backward of a step have ended."""
    found = rank.found
    products = union(
        *(times for (kind, name), times in step.pieces.items() if kind == COMPUTE and name in ("products", "attention"))
    )
    products = clip(products, step.start, step.start + step.duration)
    return (
        int(products[-1, 1]) if len(products) else step.start + step.duration if not len(found.device) else step.start
    )
