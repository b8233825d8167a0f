"""Pipelines of equal stages: bubble, time, activations in flight, traffic, by schedule."""

from meshwright.cost import advice
from meshwright.cost.closed_forms import pipeline_bytes
from meshwright.describe.schedules import SCHEDULES
from meshwright.formulas import arguments
from meshwright.formulas.arguments import Quantity
from meshwright.programs.pipelines import formulas
from meshwright.programs.pipelines.rules import name_of, require

MOST = 2**16  # micro-batches or stages of a closed form


def bubble_fraction(schedule: str, stages: int, microbatches: int, virtual: int = 0) -> float:
    """Idle time over the time of the schedule: (P−1)/(M+P−1) for GPipe and 1F1B, (P−1)/(M·V+P−1) interleaved; forward and both halves of
    backward take equally long. `virtual`: stages per rank (default: the schedule's)."""
    return float(formulas.bubble_fraction(*_request(schedule, stages, microbatches, virtual)))


def bubble_overhead(schedule: str, stages: int, microbatches: int, virtual: int = 0) -> float:
    """Idle time over busy time: (P−1)/M for GPipe and 1F1B."""
    return float(formulas.bubble_overhead(*_request(schedule, stages, microbatches, virtual)))


def pipeline_time(
    schedule: str,
    stages: int,
    microbatches: int,
    forward: Quantity,
    backward: Quantity,
    virtual: int = 0,
    send: Quantity = 0,
) -> float:
    """Seconds of a step: (M+P−1)(t_f + t_b) for GPipe and 1F1B without transfers. `forward` and `backward` are those of one rank and
    micro-batch, `send` of one message behind compute. Schedules that split backward split it into halves."""
    name, p, m, v = _request(schedule, stages, microbatches, virtual)
    f, b, t = (
        arguments.seconds("forward", forward),
        arguments.seconds("backward", backward),
        arguments.latency("send", send),
    )
    return float(formulas.makespan(name, p, m, v, f / v, b / 2 / v, b / 2 / v, t))


def microbatches_in_flight(schedule: str, stages: int, microbatches: int, virtual: int = 0, rank: int = 0) -> float:
    """Micro-batches whose activations a rank holds at its peak: M for GPipe, P − rank for 1F1B; of V stages each counts 1/V."""
    name, p, m, v = _request(schedule, stages, microbatches, virtual)
    return float(formulas.in_flight(name, p, m, v, arguments.whole("rank", rank, least=0, most=p - 1))) / v


def microbatches_for_efficiency(schedule: str, stages: int, efficiency: float, virtual: int = 0) -> int | None:
    """The smallest number of micro-batches whose bubble leaves this efficiency (1 − bubble fraction); None: no number does."""
    name, p, _, v = _request(schedule, stages, MOST // 4, virtual)
    return advice.microbatches_for(name, p, v, arguments.share("efficiency", efficiency))


def stages_for_efficiency(schedule: str, stages: int, microbatches: int, efficiency: float, virtual: int = 0) -> int:
    """The largest number of stages, at most `stages`, that reaches this efficiency with these micro-batches."""
    name, p, m, v = _request(schedule, stages, microbatches, virtual)
    return advice.stages_for(name, p, m, v, arguments.share("efficiency", efficiency))


def stage_bandwidth(message: Quantity, compute: Quantity) -> float:
    """Bytes/s between stages at which sending an activation and its gradient takes no longer than `compute`, a stage's time of a micro-batch."""
    return advice.minimum_stage_bandwidth(arguments.size("message", message), arguments.seconds("compute", compute))


def pipeline_traffic(message: Quantity, microbatches: int, stages: int) -> float:
    """Bytes over all boundaries in one step: 2 · M · (P−1) messages."""
    counts = arguments.whole("microbatches", microbatches), arguments.whole("stages", stages)
    return pipeline_bytes(arguments.size("message", message), *counts)


def _request(schedule: str, stages: int, microbatches: int, virtual: int) -> tuple[str, int, int, int]:
    """The checked arguments of a schedule."""
    name = name_of(str(schedule))
    p, m = arguments.whole("stages", stages, most=MOST), arguments.whole("microbatches", microbatches, most=MOST)
    v = arguments.whole("virtual", virtual, least=0, most=1024) or SCHEDULES[name].virtual
    require(name, p, m, v)
    return name, p, m, v
