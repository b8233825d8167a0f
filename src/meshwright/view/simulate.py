"""The step as a timeline: the compute and communication streams of every rank, from the step program and the simulated schedule.

Each action of the schedule (forward or backward of a stage and micro-batch) contains the operations of its stage: compute
on the compute stream, a collective on the stream of its axis. An overlapped collective runs in parallel with compute and
delays it only by its exposed time; the others run in sequence with compute. After the last action come gradient
reduction, optimizer and overhead. A long step is drawn by layers (and collectives) or by actions, so that a trace stays small.
"""

from dataclasses import dataclass
from functools import cache

from rich.console import Console, ConsoleOptions, RenderResult

from meshwright.cost import compute
from meshwright.cost.phase import AXIS_OF, SPLIT_ONLY
from meshwright.cost.pieces import axis_overlap
from meshwright.cost.walked import WalkedStep
from meshwright.lower.offload import TO_HOST
from meshwright.lower.program import PHASES, Op, scalar
from meshwright.predict.estimate import Estimate, Simulation
from meshwright.programs.pipelines import KINDS
from meshwright.units import format_seconds
from meshwright.view.pipelines import explained_timeline
from meshwright.view.trace import TraceSpan

DETAILS = ("operations", "layers", "actions")
MOST_SPANS = 120_000
PHASES_OF = {"F": ("F",), "B": ("R", "I", "E", "W"), "I": ("R", "S", "G", "I", "E"), "W": ("W",)}
ORDER = ("embedding", "dense", "moe", "head")
CLOSING = {  # part of the end of a step → its stream and name
    "dp": ("comm:dp", "reduce gradients"),
    "sums": ("comm:tp", "sum partial gradients"),
    "optimizer": ("compute", "optimizer"),
    "overhead": ("host", "step overhead"),
}


@dataclass(frozen=True)
class SimulationPage:
    """The simulated step in the terminal, as wide as the console."""

    simulation: Simulation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        e, walked = self.simulation.estimate, self.simulation.walked
        yield f"[bold]{e.model.name}[/] on {e.plan.world} × {e.cluster.accelerator.name} (stack {e.stack.name}): {e.plan.title()}"
        yield explained_timeline(walked.walk, console, seconds=True)
        closing = ", ".join(f"{name} {format_seconds(s)}" for name, s in walked.closing.items() if s > 0)
        yield f"step {format_seconds(walked.time)}: schedule {format_seconds(walked.walk.makespan)}, then {closing}"
        closed = e.prediction.step_time_s
        yield f"[dim]closed form {format_seconds(closed)} ({100 * (closed / walked.time - 1):+.1f}%)[/]"


def page(simulation: Simulation) -> SimulationPage:
    return SimulationPage(simulation)


class Filler:
    """Places the operations of a stage inside its actions, as spans from the start of the action; each (stage, kind) is computed once."""

    def __init__(self, e: Estimate, detail: str) -> None:
        self.e, self.detail = e, detail
        self.network = e.cost.network
        self.pieces = cache(self._operations)

    def _operations(self, stage: int, kind: str) -> list[TraceSpan]:
        stage_blocks = self.e.program.stages[stage]
        blocks = [b for b in ORDER if b in stage_blocks.counts for _ in range(round(scalar(stage_blocks.counts[b])))]
        if kind != "F":
            blocks.reverse()
        out: list[TraceSpan] = []
        free: dict[str, float] = {}  # when each communication stream becomes idle
        keys = [(block, phase) for block in stage_blocks.counts for phase in PHASES]
        left = {key: scalar(stage_blocks.times(*key)) for key in keys}  # runs of a phase; a share of S and G
        at = 0.0
        for number, block in enumerate(blocks):
            began = at
            inner: list[TraceSpan] = []
            ends = left[block, "I"] <= 0
            for phase in PHASES_OF[kind]:
                if left[block, phase] > 0 and (phase != "E" or ends):
                    at = self._phase(block, phase, at, free, inner)
                    left[block, phase] -= phase not in SPLIT_ONLY
            if self.detail == "layers":  # compute as one span; collectives are few
                whole = TraceSpan(0, "compute", f"{block} {number}", began, at - began, block)
                inner = [whole, *(piece for piece in inner if piece.stream != "compute")]
            out += inner
        return out

    def _phase(self, block: str, phase: str, at: float, free: dict[str, float], out: list[TraceSpan]) -> float:
        ops = self.e.program.blocks.get((block, phase), [])
        computing = [op for op in ops if not op.axis and op.kind != "host"]
        room = self.e.stack.hides * sum(scalar(op.count) * self.seconds(op) for op in computing)
        for op in ops:
            length = scalar(op.count) * self.seconds(op)
            if length <= 0:
                continue
            if not op.axis and op.kind != "host":
                out.append(TraceSpan(0, "compute", op.name, at, length, op.part))
                at += length
                continue
            axis = AXIS_OF[op.axis] if op.axis else "host"
            asynchronous = axis_overlap(self.e.program.batch, axis, self.e.cluster) if op.axis else op.name == TO_HOST
            hidden = min(length, room) if scalar(asynchronous) else 0.0
            room -= hidden
            begins = max(at, free.get(axis, 0.0))
            out.append(TraceSpan(0, f"comm:{axis}", op.name, begins, length, op.collective))
            free[axis] = begins + length
            at += length - hidden
        return at

    def seconds(self, op: Op) -> float:
        if op.axis:
            return scalar(self.network.time(op))
        return scalar(compute.op_time(self.e.cluster.accelerator, self.e.workload.precision, self.e.stack, op))


def choose_detail(e: Estimate, walked: WalkedStep) -> str:
    """The finest level of detail that keeps a trace below `MOST_SPANS` spans."""
    actions = len(walked.walk.program)
    layers = e.model.layers / max(1, e.plan.stages) if e.model.layers else 1
    ops = [op for (block, _), ops in e.program.blocks.items() if block == e.model.kinds[0] for op in ops]
    if actions * layers * len(ops) / 2 < MOST_SPANS:
        return "operations"
    collectives = sum(bool(op.axis) for op in ops)
    return "layers" if actions * layers * (1 + collectives / 2) < MOST_SPANS else "actions"


def spans(e: Estimate, walked: WalkedStep, detail: str = "") -> list[TraceSpan]:
    """The spans of every rank and stream over one step."""
    detail = detail or choose_detail(e, walked)
    filler = Filler(e, detail)
    flow, walk = walked.walk.program, walked.walk
    out: list[TraceSpan] = []
    rank = flow.rank.tolist()
    for index in range(len(flow)):
        action = flow.action(index)
        kind = action.kind if isinstance(action.kind, str) else KINDS[action.kind]
        start, length = float(walk.start[index]), float(walk.end[index] - walk.start[index])
        about = {"stage": action.stage, "micro-batch": action.microbatch}
        out.append(TraceSpan(rank[index], "schedule", str(action), start, length, kind, about))
        if detail == "actions":
            continue
        pieces = filler.pieces(action.stage, kind)
        whole = max((p.start + p.duration for p in pieces), default=0.0)
        scale = min(1.0, length / whole) if whole else 1.0
        for p in pieces:
            at, took = start + p.start * scale, p.duration * scale
            out.append(TraceSpan(rank[index], p.stream, p.name, at, took, p.category))
    return out + closing_spans(walked)


def closing_spans(walked: WalkedStep) -> list[TraceSpan]:
    """The spans after the last action, on every rank: all ranks wait for the slowest."""
    out, at = [], walked.walk.makespan
    for part, seconds in walked.closing.items():
        if seconds > 0:
            stream, name = CLOSING[part]
            out += [TraceSpan(r, stream, name, at, seconds, part) for r in range(walked.walk.program.ranks)]
            at += seconds
    return out
