"""Do our costs prefer one field too much? Published runs of one training that differ in that field alone (data parallelism follows).

    python benchmarks/plan_fields.py

Same source, table, model, GPUs, sequence, batch, precision and stack. *Measured* and *predicted*: the median change of the step time from the smaller
to the larger value. A choice of ours that experts did not make is supported where runs gain at least as much by it as we predict. Runs of nanotron's
playbook, which has stalls, count only where their twins agree (`pair_ratio` below 1.3).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from meshwright.calibrate.runs.accuracy import runs
from meshwright.calibrate.runs.validate import Outcome, predict_rows
from meshwright.describe.plan import Plan

FOLLOWS = {"replicate", "shard", "sp"}  # of the degrees that a change of one axis changes with it
FIELDS = {
    "micro-batch": {"microbatch"}, "tp": {"tp"}, "pp": {"pp"}, "tp in place of pp": {"tp", "pp"}, "virtual stages": {"virtual", "schedule"},
    "schedule": {"schedule"}, "ZeRO stage": {"zero"}, "recompute": {"recompute"},
}  # fmt: skip
SAME = (
    "source",
    "table",
    "model",
    "gpu_type",
    "interconnect",
    "gpus",
    "seq_len",
    "global_batch",
    "dtype",
    "stack",
    "graphs",
    "dispatch",
    "overlap",
)
STALLS, FEWEST = 1.3, 4
STALLED = "ultrascale_playbook"


@dataclass(frozen=True)
class FieldRow:
    """Pairs of one source that differ in one field; changes are ratios of step times, the larger value over the smaller one."""

    field: str
    source: str
    pairs: int
    measured: float
    predicted: float
    right: float  # share of pairs with the right sign


def results() -> list[FieldRow]:
    """A row for each field and source with enough pairs."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for field, source, measured, predicted in all_pairs(predict_rows(runs())):
        pairs[field, source].append((measured, predicted))
    return [
        FieldRow(
            field, source, len(some), math.exp(median(m for m, _ in some)), math.exp(median(p for _, p in some)),
            sum((m > 0) == (p > 0) for m, p in some) / len(some),
        )
        for field in FIELDS
        for (name, source), some in sorted(pairs.items())
        if name == field and len(some) >= FEWEST
    ]  # fmt: skip


def all_pairs(outcomes: Iterable[Outcome]) -> Iterator[tuple[str, str, float, float]]:
    """Of each pair: the field, the source, and the logarithms of the measured and of the predicted ratio."""
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        twins = outcome.pair_ratio or (math.inf if outcome.source == STALLED else 1.0)
        if outcome.error is not None and twins < STALLS:
            groups[tuple(outcome.case.row.get(name, "") for name in SAME)].append(outcome)
    for some in groups.values():
        for a, b in combinations(some, 2):
            assert a.plan is not None
            assert b.plan is not None
            field = field_of(a.plan, b.plan)
            if field:
                a, b = sorted((a, b), key=lambda o: rank_of(o.plan, field))
                yield field, a.source, math.log(measured(b) / measured(a)), math.log(seconds(b) / seconds(a))


def field_of(a: Plan, b: Plan) -> str:
    """The field in which two plans differ; "" if there are several or none."""
    ours, theirs = a.as_dict(), b.as_dict()
    differ = {name for name in {*ours, *theirs} - FOLLOWS if ours.get(name) != theirs.get(name)}
    return next((field for field, names in FIELDS.items() if differ == names), "") if a.world == b.world else ""


def rank_of(plan: Plan | None, field: str) -> tuple[object, ...]:
    """What orders two plans that differ in a field: tp rises where pp falls."""
    return tuple(getattr(plan, name) for name in sorted(FIELDS[field], reverse=True))


def seconds(outcome: Outcome) -> float:
    assert outcome.prediction is not None
    return outcome.prediction.step_time_s


def measured(outcome: Outcome) -> float:
    assert outcome.case.step_time is not None
    return outcome.case.step_time


def section(rows: list[FieldRow]) -> str:
    """The part of the page about single fields."""
    lines = [
        "## One field at a time\n",
        "Is it our costs that make us prefer other values than experts did? Published runs of one training that differ in one field alone (data "
        "parallelism follows): the median change of the step time from the smaller to the larger value. Where a larger micro-batch gains at least "
        "what we predict, and more tensor parallelism costs at least what we predict, our choices ask for too little of it, not for too much.\n",
        "| field | source | pairs | measured | predicted | sign right |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        lines.append(
            f"| {r.field} | {r.source} | {r.pairs:,} | {r.measured - 1:+.1%} | {r.predicted - 1:+.1%} | {r.right:.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(section(results()))
