"""Collectives that are missing, repeated or in the wrong group, before any number differs.

Two rules, of which the first needs no settings:

    members     all ranks of a group issue the same collectives: the same number of each operation and size
    the plan    from the framework's settings our step program says what must be there (`lower.rank`)

Frameworks send the same sums in different ways: an all-reduce may be a reduce-scatter and an all-gather, gradients travel in buckets of any
size, gathered activations are kept or gathered again. What every one of them must do is to *reduce* what has to be reduced:

    tensor and context parallelism   in forward and backward, as many reductions of each message as the program has
    pipeline                         as many messages to other stages
    experts                          exchanges of tokens in forward and in backward
    data parallelism                 every gradient once; or once per micro-batch, which is noted

A message of activations is recognised by its size, gradients by their number of elements. Messages of numbers (norms, losses) are left out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.check.folder import RankStep, Recording
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.sharding import boxes
from meshwright.errors import MeshwrightError
from meshwright.lower.rank import Sent, messages_of_rank, stages_of
from meshwright.lower.step import step_program
from meshwright.programs.pipelines import build
from meshwright.units import counted, format_bytes

NUMBERS = 64  # bytes: at most this is a norm, a loss or a count
REDUCING = ("all_reduce", "reduce_scatter")
MEMBERS = ("send", "receive", "all_to_all", "gather", "scatter")  # their bytes, or the operations, differ among members
PADDING = 0.1  # of the elements of gradients: buckets and shards are padded
ALIGNED = 0.02
SAME_SIZE = 1.5  # of models: biases, padded vocabularies
LOSSES = ("loss-maximum", "loss-sums", "sum-partial", "count-tokens", "norm-and-loss")


@dataclass(frozen=True)
class CollectiveFinding:
    """Something about the collectives of a step; a `note` is no mistake."""

    kind: str  # missing | repeated | group | members | note
    axis: str
    text: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        over = f" over {self.axis}" if self.axis else ""
        return f"{self.kind}{over}: {self.text} ({ranks_text(self.ranks)})"


@dataclass(frozen=True)
class Issued:
    """A collective that a rank issued."""

    operation: str
    ranks: tuple[int, ...]
    bytes: int
    elements: int
    backward: bool


def issued_by(recording: Recording, step: RankStep) -> list[Issued]:
    groups = recording.ranks[step.rank]["groups"]
    return [
        Issued(c["operation"], tuple(groups.get(c["group"], ())), c["bytes"], c.get("elements", 0), c["backward"])
        for c in step.collectives
    ]


def between_members(recording: Recording, steps: list[RankStep]) -> Iterator[CollectiveFinding]:
    """Groups whose ranks did not issue the same collectives."""
    seen: dict[tuple[int, ...], dict[int, Counter[tuple[str, int]]]] = {}
    for step in steps:
        for c in issued_by(recording, step):
            if len(c.ranks) > 1 and c.operation not in MEMBERS:
                seen.setdefault(c.ranks, {}).setdefault(step.rank, Counter())[c.operation, c.bytes] += 1
    for ranks, by_rank in seen.items():
        counts = {rank: by_rank.get(rank, Counter()) for rank in ranks}
        usual, _ = Counter(map(frozenset, (c.items() for c in counts.values()))).most_common(1)[0]
        for rank, count in counts.items():
            if frozenset(count.items()) != usual:
                missing, more = Counter(dict(usual)) - count, count - Counter(dict(usual))
                parts = [
                    f"{n} {name} of {format_bytes(size)} {word}"
                    for word, rows in (("missing", missing), ("more", more))
                    for (name, size), n in rows.items()
                ]
                text = f"not the collectives of the other ranks in the group {listed(ranks)}: {'; '.join(parts[:3])}"
                yield CollectiveFinding("members", "", text, (rank,))


def against_plan(recording: Recording, steps: list[RankStep], config: Config) -> list[CollectiveFinding]:
    """What a step issued beside what the plan of its settings needs; the same finding of several ranks is one."""
    if config.plan.world != recording.world:
        raise MeshwrightError(
            "MW-CHECK-017", f"the settings are for {counted(config.plan.world, 'rank')}, the recording has {recording.world}",
            fix="give the settings of the recorded run",
        )  # fmt: skip
    check_same_model(steps, config)
    plan = config.plan
    program = step_program(config.model, plan, config.workload, config.stack)
    layout = Layout(plan, plan.order or config.stack.order)
    merged: dict[tuple[str, str, str], list[int]] = {}
    for step in steps:
        rank = RankPlan(config, layout, step.rank, messages_of_rank(program, plan, step.rank, layout.order), issued_by(recording, step))  # fmt: skip
        for finding in rank.findings():
            merged.setdefault((finding.kind, finding.axis, finding.text), []).append(step.rank)
    return [CollectiveFinding(*key, tuple(ranks)) for key, ranks in merged.items()]


def check_same_model(steps: list[RankStep], config: Config) -> None:
    """Raise if the settings are for a model of another size than the one that was recorded: no count of theirs would fit."""
    shapes = {entry.name: entry.shape for step in steps for entry in step.of("parameter") if entry.shape is not None}
    recorded, described = sum(map(prod, shapes.values())), config.model.total
    if recorded and not 1 / SAME_SIZE < recorded / described < SAME_SIZE:
        raise MeshwrightError(
            "MW-CHECK-018", f"the settings are for a model of {described:,.0f} parameters, the recorded one has {recorded:,}",
            why="The sizes of its messages follow from the model", fix="give the recorded model's shape with --model",
        )  # fmt: skip


@dataclass(frozen=True)
class RankPlan:
    """One rank: the messages that its plan needs, and those that it issued."""

    config: Config
    layout: Layout
    rank: int
    needed: list[Sent]
    issued: list[Issued]

    def findings(self) -> Iterator[CollectiveFinding]:
        yield from self.wrong_groups()
        for axis in ("tp", "cp"):
            for backward in (False, True):
                yield from self.reductions(axis, backward)
        yield from self.sends()
        yield from self.exchanges()
        yield from self.gradients()

    def group(self, axis: str) -> tuple[int, ...]:
        return tuple(sorted(self.layout.group_of(axis, self.rank)))

    def over(self, ranks: tuple[int, ...], operations: Iterable[str], backward: bool | None = None) -> list[Issued]:
        chosen = [c for c in self.issued if c.ranks == ranks and c.operation in operations and c.bytes > NUMBERS]
        return [c for c in chosen if backward is None or c.backward == backward]

    def finding(self, kind: str, axis: str, text: str) -> CollectiveFinding:
        return CollectiveFinding(kind, axis, text, (self.rank,))

    def wrong_groups(self) -> Iterator[CollectiveFinding]:
        """Groups that no axis has: not all ranks that differ along some axes, and equal along the others."""
        experts = (
            {self.group(a) for a in ("ep", "expert_tp", "expert_dp", "stage")} if self.config.model.experts else set()
        )
        for ranks in dict.fromkeys(c.ranks for c in self.issued if len(c.ranks) > 1 and c.bytes > NUMBERS):
            places = [self.layout.coordinates(rank) for rank in ranks]
            varied = {axis: {place[axis] for place in places} for axis in places[0]}
            size = 1
            for axis, values in varied.items():
                size *= len(values) if axis == "pp" else (1 if len(values) == 1 else getattr(self.config.plan, axis))
            if size != len(ranks) and ranks not in experts:
                text = f"the group {listed(ranks)} is none of this plan; dp is {listed(self.group('dp'))}"
                yield self.finding("group", "", text)

    def reductions(self, axis: str, backward: bool) -> Iterator[CollectiveFinding]:
        """Of each message as many as the program has, where messages of its size are seen at all."""
        if getattr(self.config.plan, axis) == 1:
            return
        rows = [
            row for row in self.needed if row.axis == axis and row.collective in REDUCING and row.name not in LOSSES
        ]
        rows = [row for row in rows if (row.phase != "F") == backward and row.phase]
        needed: Counter[int] = Counter()
        for row in rows:
            needed[round(row.bytes / row.times)] += round(row.times)
        seen = self.over(self.group(axis), REDUCING, backward)
        where = "backward" if backward else "forward"
        if needed and not seen:
            total = sum(needed.values())
            yield self.finding("missing", axis, f"all {total} reductions of {where} ({names_of(rows)})")
        for size, count in needed.items():
            found = sum(c.bytes == size for c in seen)
            if 0 < found < count:
                some = [row for row in rows if round(row.bytes / row.times) == size]
                text = f"{count - found} of {count} reductions of {format_bytes(size)} in {where} ({names_of(some)})"
                yield self.finding("missing", axis, text)
            elif found >= 2 * count:
                yield self.finding(
                    "repeated", axis, f"{found} reductions of {format_bytes(size)} in {where} where {count} are needed"
                )
            elif found > count:
                yield self.finding(
                    "note", axis, f"{found} reductions of {format_bytes(size)} in {where} where {count} would do"
                )

    def sends(self) -> Iterator[CollectiveFinding]:
        needed = sum(row.times for row in self.needed if row.collective == "send")
        found = sum(c.operation == "send" and c.bytes > NUMBERS for c in self.issued)
        if needed and found < needed:
            yield self.finding("missing", "pp", f"{round(needed) - found} of {round(needed)} messages to other stages")

    def exchanges(self) -> Iterator[CollectiveFinding]:
        if self.config.plan.ep == 1:
            return
        rows = [row for row in self.needed if row.axis == "ep"]
        for backward in (False, True):
            some = [row for row in rows if row.phase and (row.phase != "F") == backward]
            if some and not self.over(self.group("ep"), ("all_to_all", "all_gather", *REDUCING), backward):
                where = "backward" if backward else "forward"
                yield self.finding("missing", "ep", f"all exchanges of tokens in {where} ({names_of(some)})")

    def gradients(self) -> Iterator[CollectiveFinding]:
        """Elements of gradients that are reduced over the ranks with the same weights, beside those that the rank computes."""
        for axis, expert in (("dp_cp", False), ("expert_dp", True)):
            elements = sum(box.size for box in self.boxes() if box.learns and box.expert == expert)
            ranks = self.group(axis) if elements else ()
            if len(ranks) < 2:
                continue
            groups = {ranks, self.group("expert_shard" if expert else "shard_cp")}
            if len(ranks) == len(self.group("tp")) and ranks == self.group("tp"):
                continue
            reduced = max(sum(c.elements for c in self.over(g, (*REDUCING, "reduce"))) for g in groups if len(g) > 1)
            share, rounds = reduced / elements, self.config.plan.microbatches(self.config.workload)
            name = "gradients of experts" if expert else "gradients"
            if share < 1 - ALIGNED:
                text = f"all {name}" if share == 0 else f"{1 - share:.0%} of the elements of {name}"
                yield self.finding("missing", "dp", f"{text} ({elements:,} elements on this rank)")
            elif rounds > 1 and rounds * (1 - ALIGNED) < share < rounds * (1 + PADDING):
                yield self.finding("note", "dp", f"{name} are reduced in each of {rounds} micro-batches")
            elif share > 2 - ALIGNED:
                yield self.finding("repeated", "dp", f"{name} are reduced {share:.2g} times")

    def boxes(self) -> list[Any]:
        c = self.config
        schedule = (
            build(c.plan.schedule, c.plan.pp, c.plan.microbatches(c.workload), c.plan.virtual)
            if c.plan.pp > 1
            else None
        )
        stages = stages_of(c.model, c.plan, schedule, self.layout.coordinates(self.rank)["pp"])
        return [box for stage in stages for box in boxes(c.model, c.plan, self.layout, self.rank, stage.layers)]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + " …" * (len(ranks) > 8)


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def names_of(rows: Iterable[Sent]) -> str:
    """What the program calls these messages, with their number."""
    numbers: Counter[str] = Counter()
    for row in rows:
        numbers[row.name] += round(row.times)
    return ", ".join(f"{name} × {n}" if n > 1 else name for name, n in numbers.items())
