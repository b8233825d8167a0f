"""The timeline of a traced step, and the seconds of a profiled one by group of kernels.

**A traced step** of all ranks is drawn as spans, in the streams, names and categories of the simulated step (`view.simulate`).

    schedule    actions: forward, backward, input gradients, weight gradients of a stage and micro-batch
    compute     the blocks of the model inside an action, and the optimizer
    comm:AXIS   collectives and received messages, from when the rank issued them (a message: from when it was sent) until complete
    host        what follows the update

A simulated step counts three small sums (count-tokens, norm-and-loss, worst-load) in its optimizer; the measured one shows them. Times start
with the step of the earliest rank. Ranks of one host share a clock.

**A profiled step** on a GPU is divided into groups of kernels, each with its seconds, the prediction and the floor.

    group       kernels                                      floor
    products    cuBLAS, CUTLASS, grouped and fp8 products    FLOPs over the rate that large products reach on this device
    attention   FlashAttention, cuDNN                        FLOPs over the rate of its attention kernel
    loss        softmax over the vocabulary                  bytes over the bandwidth of copies
    optimizer   update, norm of gradients                    bytes over the bandwidth of copies
    other       norms, activations, rotations, quantisation, bytes over the bandwidth of copies
                sums of gradients
    copies      between host and device                      none
    comm        NCCL                                         none
    idle        no kernel runs                               0

Rates are those of the device in the prediction: the catalog's, or measured (`meshwright bench`, `calibrate`). Kernels on several streams at
the same time count each; `idle` is the time of the step in which none ran.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan

from meshwright.describe.config import Config
from meshwright.explain.expected import expected
from meshwright.explain.intervals import length, of_spans
from meshwright.explain.kernels import GROUPS, group_of
from meshwright.predict.estimate import estimate
from meshwright.programs.pipelines.program import Action
from meshwright.training.hooks import CommEvent, Interval, RankReport, TracedStep
from meshwright.training.measure.communication import ONCE, Lowered, LoweredNames, Others, narrowed
from meshwright.units import Json
from meshwright.view.simulate import CLOSING, spans
from meshwright.view.trace import TraceSpan, as_json

ON_DEVICE = ("kernel", "comm", "gpu_memcpy", "gpu_memset")  # categories of a trace


@dataclass(frozen=True)
class GroupTime:
    """Seconds of a step in one group of kernels."""

    group: str
    measured_s: float
    predicted_s: float | None = None
    floor_s: float | None = None


def of_trace(trace: Json) -> dict[str, float]:
    """Seconds per step by group in the trace of a rank that `profile` wrote; empty if no kernel took time."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_DEVICE]
    kernels = [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]
    first, last = trace["otherData"]["steps"]
    return by_group(kernels, last - first + 1)


def by_group(kernels: Sequence[tuple[str, float, float]], steps: int = 1) -> dict[str, float]:
    """Seconds per step by group of kernels that ran from one time to another."""
    found, busy = dict.fromkeys(GROUPS, 0.0), of_spans((start, end) for _, start, end in kernels)
    if not len(busy):
        return {}
    for name, start, end in kernels:
        found[group_of(name)] += (end - start) / steps
    found["idle"] = float(busy[-1, 1] - busy[0, 0] - length(busy)) / steps
    return found


def compare(config: Config, seconds: dict[str, float]) -> list[GroupTime]:
    """Measured seconds by group, and what is expected of them."""
    known = expected(config)
    return [
        GroupTime(g, seconds.get(g, 0.0), *known.get(g, (None, None))) for g in GROUPS if seconds.get(g) or g in known
    ]


def median_step(reports: Sequence[RankReport]) -> dict[int, TracedStep]:
    """Of the traced steps the one of median length, on every rank; empty if none was traced."""
    if not reports or not reports[0].traced:
        return {}
    lengths = [step.recorded.ended - step.recorded.began for step in reports[0].traced]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
    return {report.rank: report.traced[middle] for report in reports}


def measured_spans(config: Config, traced: dict[int, TracedStep]) -> list[TraceSpan]:
    """A traced step of every rank."""
    names = LoweredNames(config)
    others = Others(names, {rank: step.recorded for rank, step in traced.items()})
    found = [s for rank, step in traced.items() for s in rank_spans(names, others, rank, step)]
    zero = min(step.recorded.began for step in traced.values())
    zero = min(zero, *(s.start for s in found))
    return [replace(s, start=s.start - zero) for s in found]


def rank_spans(names: LoweredNames, others: Others, rank: int, step: TracedStep) -> list[TraceSpan]:
    out = []
    for action in step.actions:
        args = {"stage": action.stage, "micro-batch": action.microbatch}
        name = str(Action(action.stage, action.name, action.microbatch))
        out.append(TraceSpan(rank, "schedule", name, action.start, action.end - action.start, action.name, args))
        inside = [b for b in step.blocks if action.start <= b.start < action.end]
        out += [
            TraceSpan(rank, "compute", f"{b.name} {number}", b.start, b.end - b.start, b.name)
            for number, b in enumerate(inside)
        ]
    recorded = step.recorded
    updated = recorded.gradients if isnan(step.updated) else step.updated
    for part, start, end in (("optimizer", recorded.gradients, updated), ("overhead", updated, recorded.ended)):
        stream, name = CLOSING[part]
        out.append(TraceSpan(rank, stream, name, start, end - start, part))
    return out + list(communication_spans(names, others, rank, step))


def communication_spans(names: LoweredNames, others: Others, rank: int, step: TracedStep) -> Iterable[TraceSpan]:
    """Spans of a stream do not overlap: a collective that queues behind another one begins at its end."""
    free: dict[str, float] = {}
    seen: dict[tuple, int] = defaultdict(int)
    keyed = zip(others.keys[rank], step.recorded.events, strict=True)
    for key, event in sorted(keyed, key=lambda pair: pair[1].issued):
        if event.operation == "send":
            continue  # shown where it is received
        if event.axis == "pp":  # the action that uses a message between stages: the first one after its arrival
            action, block = next((a for a in step.actions if a.start >= event.resumed), None), None
        else:
            action, block = at(step.actions, event.issued), at(step.blocks, event.issued)
        matches = narrowed(names.matches(rank, event), action.name if action else "", block.name if block else "")
        number = seen[action, block, matches[0]]
        seen[action, block, matches[0]] += 1
        ready = others.start(key, event)
        stream, name, category = labels(matches[number % len(matches)])
        begin = max(event.issued if event.operation != "receive" else ready, free.get(stream, 0.0))
        end = max(begin, others.done(event, ready))
        free[stream] = end
        yield TraceSpan(rank, stream, name, begin, end - begin, category, arguments(event, ready))


def labels(known: Lowered) -> tuple[str, str, str]:
    """Stream, name and category of a collective in a simulated step."""
    stream = f"comm:{known.axis}"
    if known.phase != ONCE or known.part == "optimizer":
        return stream, known.name, known.collective
    part = "dp" if known.axis == "dp" else "sums"
    return stream, CLOSING[part][1], part


def arguments(event: CommEvent, ready: float) -> Json:
    """Facts that a viewer shows of a selected span."""
    blocked = event.returned - event.issued + event.resumed - event.waited
    return {
        "operation": event.operation,
        "bytes": event.bytes,
        "exposed_s": blocked,
        "waits_for_other_ranks_s": max(0.0, ready - event.issued),
    }


def at(intervals: Sequence[Interval], time: float) -> Interval | None:
    """The action or block that runs at a time; None between them."""
    return next((x for x in intervals if x.start <= time <= x.end), None)


def both_steps(config: Config, reports: Sequence[RankReport]) -> Json | None:
    """The content of `timeline.json`: a measured step, and the one that `simulate --detail layers` draws; None if no step was traced."""
    traced = median_step(reports)
    if not traced:
        return None
    step, simulated = next(iter(traced.values())).recorded.step, estimate(config)
    return as_json(step, measured_spans(config, traced), spans(simulated, simulated.walked, "layers"))
