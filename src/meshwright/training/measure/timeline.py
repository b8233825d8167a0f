"""A traced step of all ranks as spans, in the streams, names and categories of the simulated step (`view.simulate`).

    schedule    actions: forward, backward, input gradients, weight gradients of a stage and micro-batch
    compute     the blocks of the model inside an action, and the optimizer
    comm:AXIS   collectives and received messages, from when the rank issued them (a message: from when it was sent) until complete
    host        what follows the update

A simulated step counts three small sums (count-tokens, norm-and-loss, worst-load) in its optimizer; the measured one shows them. Times start
with the step of the earliest rank. Ranks of one host share a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

from meshwright.cost.estimate import estimate
from meshwright.describe.config import Config
from meshwright.programs.pipelines.program import Action
from meshwright.training.measure.communication import Others
from meshwright.training.measure.lowered_names import ONCE, Lowered, LoweredNames, narrowed
from meshwright.training.records import CommEvent, Interval, RankReport, TracedStep
from meshwright.view.simulate import CLOSING, spans
from meshwright.view.timeline import as_json
from meshwright.view.trace import Span


def median_step(reports: Sequence[RankReport]) -> dict[int, TracedStep]:
    """Of the traced steps the one of median length, on every rank; empty if none was traced."""
    if not reports or not reports[0].traced:
        return {}
    lengths = [step.recorded.ended - step.recorded.began for step in reports[0].traced]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
    return {report.rank: report.traced[middle] for report in reports}


def measured_spans(config: Config, traced: dict[int, TracedStep]) -> list[Span]:
    """A traced step of every rank."""
    names = LoweredNames(config)
    others = Others(names, {rank: step.recorded for rank, step in traced.items()})
    found = [s for rank, step in traced.items() for s in rank_spans(names, others, rank, step)]
    zero = min(step.recorded.began for step in traced.values())
    zero = min(zero, *(s.start for s in found))
    return [replace(s, start=s.start - zero) for s in found]


def rank_spans(names: LoweredNames, others: Others, rank: int, step: TracedStep) -> list[Span]:
    out = []
    for action in step.actions:
        args = {"stage": action.stage, "micro-batch": action.microbatch}
        name = str(Action(action.stage, action.name, action.microbatch))
        out.append(Span(rank, "schedule", name, action.start, action.end - action.start, action.name, args))
        inside = [b for b in step.blocks if action.start <= b.start < action.end]
        out += [
            Span(rank, "compute", f"{b.name} {number}", b.start, b.end - b.start, b.name)
            for number, b in enumerate(inside)
        ]
    recorded = step.recorded
    updated = recorded.gradients if isnan(step.updated) else step.updated
    for part, start, end in (
        ("optimizer", recorded.gradients, updated),
        ("overhead", updated, recorded.ended),
    ):
        stream, name = CLOSING[part]
        out.append(Span(rank, stream, name, start, end - start, part))
    return out + list(communication_spans(names, others, rank, step))


def communication_spans(names: LoweredNames, others: Others, rank: int, step: TracedStep) -> Iterable[Span]:
    """Spans of a stream do not overlap: a collective that queues behind another one begins at its end."""
    free: dict[str, float] = {}
    seen: dict[tuple, int] = defaultdict(int)
    keyed = zip(others.keys[rank], step.recorded.events, strict=True)
    for key, event in sorted(keyed, key=lambda pair: pair[1].issued):
        if event.operation == "send":
            continue  # shown where it is received
        action = consumer(step.actions, event) if event.axis == "pp" else at(step.actions, event.issued)
        block = at(step.blocks, event.issued) if event.axis != "pp" else None
        matches = narrowed(names.matches(rank, event), action.name if action else "", block.name if block else "")
        number = seen[action, block, matches[0]]
        seen[action, block, matches[0]] += 1
        ready = others.start(key, event)
        stream, name, category = labels(matches[number % len(matches)])
        begin = max(event.issued if event.operation != "receive" else ready, free.get(stream, 0.0))
        end = max(begin, others.done(event, ready))
        free[stream] = end
        yield Span(rank, stream, name, begin, end - begin, category, arguments(event, ready))


def labels(known: Lowered) -> tuple[str, str, str]:
    """Stream, name and category of a collective in a simulated step."""
    stream = f"comm:{known.axis}"
    if known.phase != ONCE or known.part == "optimizer":
        return stream, known.name, known.collective
    part = "dp" if known.axis == "dp" else "sums"
    return stream, CLOSING[part][1], part


def arguments(event: CommEvent, ready: float) -> dict[str, Any]:
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


def consumer(actions: Sequence[Interval], event: CommEvent) -> Interval | None:
    """The action that uses a message between stages: the first one after its arrival."""
    return next((a for a in actions if a.start >= event.resumed), None)


def simulated_spans(config: Config) -> list[Span]:
    """The step that `simulate --detail layers` draws for a configuration."""
    found = estimate(config.model, config.cluster, config.plan, config.workload, config.stack)
    return spans(found, found.walked, "layers")


def both_steps(config: Config, reports: Sequence[RankReport]) -> dict[str, Any] | None:
    """The content of `timeline.json`; None if no step was traced."""
    traced = median_step(reports)
    if not traced:
        return None
    step = next(iter(traced.values())).recorded.step
    return as_json(step, measured_spans(config, traced), simulated_spans(config))
