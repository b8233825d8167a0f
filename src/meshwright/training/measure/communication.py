"""Divide measured steps into the parts of a prediction: compute, exposed communication by axis, bubble, optimizer; and what was hidden.

    exposed    seconds that a rank is blocked in collectives, sends and receives of an axis after all ranks have issued their part
    bubble     seconds that it is blocked before that, in groups of several pipeline stages
    waiting    seconds that it is blocked before that, in other groups: for a slower rank, or one that has to share its core
    optimizer  from complete gradients to the end of the step, and the sums of three numbers (tokens, norm, loss) wherever they are
    compute    all other time of the rank: forward and backward, host, data
    hidden     seconds that communication of an axis is in progress while the rank is not blocked by it

Exposed parts sum exactly to the step. A prediction has compute in finer parts; `Result.parts` adds them up. As in a prediction, the
parts are those of the busiest rank, which has the most compute and optimizer time; all ranks are in `communication.json`.

A collective is in progress from when its last rank has issued it. A message is in progress from when both its send and its receive
were issued. gloo does not report when a message arrived before its `wait`: it then counts with the median time of messages of
its size that a rank waited for, and at most until its `wait`.

**Names** (`LoweredNames`). A collective that was issued gets the name and the part of an operation of the step program. A rank knows of a
collective its group, its kind and its bytes. The step program lists the operations of the plan with the same three. The best matches have
the same ranks and kind, then the same bytes, then the same axis, then the nearest bytes (routing decides how many tokens an expert gets).
Several operations may match equally, as the sums after attention and after the feed-forward layer; in a traced step the block and the
order within it decide between them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from math import isnan, log
from statistics import median
from typing import NamedTuple

from meshwright.cost.phase import AXIS_OF
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.result import Prediction
from meshwright.explain.intervals import intersect, length, of_spans
from meshwright.lower.program import Op, StepProgram, scalar
from meshwright.lower.step import step_program
from meshwright.training.hooks import CommEvent, RankReport, RecordedStep
from meshwright.units import Json

AXES = {**AXIS_OF, "shard": "dp", "dp": "dp"}  # group of the mesh → axis under which its time is reported
WITHOUT_LAYOUT = {"kv_copies": "tp", "ends": "pp"}  # groups that are parts of another axis's groups
ONCE = "once"  # phase of the operations that run once per step
PHASES_OF = {"F": "F", "B": "RIW", "I": "RISG", "W": "W"}  # phases of the step program in an action


class Lowered(NamedTuple):
    """An operation of the step program; `part` is that of `Prediction.exposed_s`."""

    name: str
    part: str
    axis: str
    collective: str
    block: str = ""
    phase: str = ONCE
    section: str = ""  # of the block: attention, ffn, …


class LoweredNames:
    """The operations of a configuration by rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layout = Layout(config.plan, config.plan.order or config.stack.order)
        self.members = cache(self._members)
        self._matches = cache(self._find)
        self._of_stage = cache(self._operations)

    @cached_property
    def program(self) -> StepProgram:
        c = self.config
        return step_program(c.model, c.plan, c.workload, c.stack, every_rank=True, stages=True)

    def stage(self, rank: int) -> int:
        return self.layout.coordinates(rank)["pp"]

    def _members(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks of a group of the mesh; only this rank for a group that is not one of the mesh."""
        axis = WITHOUT_LAYOUT.get(axis, axis)
        return tuple(self.layout.group_of(axis, rank)) if axis else (rank,)

    def spans_stages(self, axis: str, rank: int) -> bool:
        """Whether a group has ranks of several pipeline stages: waiting for one another there is part of the bubble."""
        return len({self.stage(member) for member in self.members(axis, rank)}) > 1

    def matches(self, rank: int, event: CommEvent) -> list[Lowered]:
        """The operations that match a collective or message equally well; at least one."""
        kind = "send" if event.operation == "receive" else event.operation
        return self._matches(rank, event.axis, kind, event.bytes)

    def _operations(self, stage: int) -> list[tuple[str, str, Op]]:
        """(block, phase, operation) of everything that the ranks of a pipeline stage send."""
        program = self.program
        issued = [(*key, op) for key, ops in program.blocks.items() for op in ops]
        issued += [("", ONCE, op) for op in program.ranks[stage].closing]
        issued += [("", phase, op) for phase in "FI" for op in program.sync.get(f"boundary-{phase}", ())]
        return [row for row in issued if row[2].axis and scalar(row[2].count) > 0]

    def _find(self, rank: int, axis: str, kind: str, size: int) -> list[Lowered]:
        reported, ranks = AXES.get(axis, "other"), self.members(axis, rank)
        found: dict[tuple, list[Lowered]] = defaultdict(list)
        for block, phase, op in self._of_stage(self.stage(rank)):
            if op.collective == kind and self.members(op.axis, rank) == ranks:
                distance = round(abs(log((scalar(op.message_bytes) + 1) / (size + 1))), 6)
                own = AXIS_OF[op.axis]
                lowered = Lowered(
                    op.name, "optimizer" if op.part == "optimizer" else own, own, kind, block, phase, op.part
                )
                found[distance > 0, own != reported, distance].append(lowered)
        return found[min(found)] if found else [Lowered(kind, reported, reported, kind)]


def narrowed(matches: Sequence[Lowered], action: str, block: str) -> list[Lowered]:
    """Of equal matches those of a kind of action and a block, in the order in which they run: backward visits the sections of a
    block in reverse, and recomputes before it."""
    phases = PHASES_OF.get(action, ONCE)
    inside = [m for m in matches if m.phase in phases and m.block == block] or [m for m in matches if m.phase in phases]
    if action == "F" or not inside:
        return inside or list(matches)
    order = list(dict.fromkeys(m.section for m in inside))
    return sorted(inside, key=lambda m: (m.phase != "R", -order.index(m.section), phases.index(m.phase)))


VERSION = 1
IDLE = ("bubble", "waiting")
SEEN_WAITING_S = 1e-4  # a receive whose wait was shorter had arrived before
Span = tuple[float, float]


@dataclass(frozen=True)
class RankParts:
    """Mean seconds of a step of one rank: exposed by part (they sum to the step), and hidden by axis."""

    rank: int
    stage: int
    exposed_s: dict[str, float]
    hidden_s: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.exposed_s.values())


def by_rank(config: Config, reports: Sequence[RankReport], warmup: int = 0) -> list[RankParts]:
    """The parts of every rank, mean over the recorded steps after `warmup`; empty if no step was recorded."""
    names = LoweredNames(config)
    exposed_s, hidden_s = ([defaultdict[str, float](float) for _ in reports] for _ in range(2))
    recorded = [[step for step in r.recorded if step.step >= warmup] for r in reports]
    count = min(map(len, recorded), default=0)
    for together in zip(*recorded, strict=True):
        steps = {report.rank: step for report, step in zip(reports, together, strict=True)}
        others = Others(names, steps)
        for sums, (rank, step) in zip(zip(exposed_s, hidden_s, strict=True), steps.items(), strict=True):
            for total, found in zip(sums, parts_of_step(names, others, rank, step), strict=True):
                for part, seconds in found.items():
                    total[part] += seconds / count
    parts = zip(reports, exposed_s, hidden_s, strict=True)
    return [RankParts(r.rank, r.stage, dict(exposed), dict(hidden)) for r, exposed, hidden in parts] if count else []


def busiest(ranks: Sequence[RankParts]) -> RankParts:
    return max(ranks, key=lambda r: r.exposed_s["compute"] + r.exposed_s["optimizer"])


def as_json(ranks: Sequence[RankParts], prediction: Prediction, steps: int) -> Json:
    """The content of `communication.json`."""
    worst = busiest(ranks)
    return {
        "version": VERSION,
        "steps": steps,
        "busiest_rank": worst.rank,
        "exposed_s": worst.exposed_s,
        "hidden_s": worst.hidden_s,
        "predicted_exposed_s": prediction.parts,
        "ranks": [asdict(r) for r in ranks],
    }


class Others:
    """Events of the other ranks of each group: when the last one issued a collective, when a message was sent."""

    def __init__(self, names: LoweredNames, steps: dict[int, RecordedStep]) -> None:
        self.names = names
        self.last: dict[tuple, float] = {}
        self.sent: dict[tuple, float] = {}
        self.durations: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.keys: dict[int, list[tuple]] = {}
        for rank, step in steps.items():
            self.keys[rank] = keys = list(self._keys(rank, step.events))
            for key, event in zip(keys, step.events, strict=True):
                if event.operation == "send":
                    self.sent[key] = event.issued
                elif event.operation != "receive":
                    self.last[key] = max(self.last.get(key, event.issued), event.issued)
        for rank, step in steps.items():
            for key, event in zip(self.keys[rank], step.events, strict=True):
                if event.operation == "receive" and event.resumed - event.waited > SEEN_WAITING_S:
                    self.durations[event.axis, event.bytes].append(event.resumed - self.start(key, event))

    def _keys(self, rank: int, events: Iterable[CommEvent]) -> Iterable[tuple]:
        """The same key for the same collective on all its ranks, and for a send and its receive: both are in order."""
        count: dict[tuple, int] = defaultdict(int)
        for event in events:
            ranks = self.names.members(event.axis, rank)
            key: tuple = (event.axis, ranks)
            if event.operation in ("send", "receive") and 0 <= event.peer < len(ranks):
                ends = (rank, ranks[event.peer])
                key = (event.axis, *(ends if event.operation == "send" else ends[::-1]))
            key = (*key, event.operation in ("send", "receive"))
            direction = (key, event.operation == "receive")
            yield (*key, count[direction])
            count[direction] += 1

    def start(self, key: tuple, event: CommEvent) -> float:
        """Return when an operation of a rank could begin: all ranks that it needs have issued it."""
        if event.operation == "receive":
            return max(event.issued, self.sent.get(key, event.issued))
        return self.last.get(key, event.issued)

    def done(self, event: CommEvent, start: float) -> float:
        if not isnan(event.done):
            return event.done
        if event.operation != "receive" or event.resumed - event.waited > SEEN_WAITING_S:
            return event.resumed
        seen = self.durations.get((event.axis, event.bytes))
        return min(event.waited, start + median(seen)) if seen else event.waited


def parts_of_step(
    names: LoweredNames, others: Others, rank: int, step: RecordedStep
) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed seconds by part and hidden seconds by axis of one rank in one step."""
    exposed: dict[str, float] = {"compute": 0.0, "optimizer": 0.0}
    blocked: dict[str, list[Span]] = defaultdict(list)
    progress: dict[str, list[Span]] = defaultdict(list)
    for key, event in zip(others.keys[rank], step.events, strict=True):
        part = names.matches(rank, event)[0].part
        start = others.start(key, event)
        idle_part = "bubble" if names.spans_stages(event.axis, rank) else "waiting"
        for begin, end in ((event.issued, event.returned), (event.waited, event.resumed)):
            idle = idle_seconds(event, start, begin, end, idle_part)
            exposed[idle_part] = exposed.get(idle_part, 0.0) + idle
            exposed[part] = exposed.get(part, 0.0) + end - begin - idle
            blocked[part].append((begin, end))
        if event.operation != "send" and part != "optimizer":
            progress[part].append((start, others.done(event, start)))
    waits = of_spans(span for spans in blocked.values() for span in spans)
    closing = of_spans([(step.gradients, step.ended)])
    exposed["optimizer"] += length(closing) - length(intersect(waits, closing))
    exposed["compute"] = step.ended - step.began - sum(exposed.values())
    hidden = {}
    for part, spans in progress.items():
        busy = of_spans(spans)
        hidden[part] = length(busy) - length(intersect(busy, of_spans(blocked[part])))
    return {part: s for part, s in exposed.items() if s or part not in IDLE}, hidden


def idle_seconds(event: CommEvent, start: float, begin: float, end: float, part: str) -> float:
    """Seconds of a blocked interval before the operation could start.

    A call that returned before the other ranks had issued theirs did not wait for them: it is the cost of the call. Between machines
    whose clocks differ no interval contains the start of the others, so nothing counts as waiting.
    """
    if event.operation == "send" or (part == "waiting" and start > end):
        return 0.0
    return min(max(start - begin, 0.0), end - begin)
