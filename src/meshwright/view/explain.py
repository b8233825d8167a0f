"""One part of an estimate: its formula with the numbers inserted."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cost import compute
from meshwright.cost.collective import OPERATIONS, CollectiveTimes
from meshwright.cost.library import library_of
from meshwright.cost.phase import AXIS_OF
from meshwright.errors import unknown
from meshwright.lower.program import PHASES, Op, scalar
from meshwright.predict.estimate import Estimate
from meshwright.programs.collectives.formulas import text as formula
from meshwright.units import format_decimal_bytes, format_flops, format_seconds
from meshwright.view.tables import titled

FORMULAS = {
    "gemm": "t = floor + max(a, m) + c·min(a, m)    a = 2·products·m·n·k / (e·peak), m = bytes / bandwidth",
    "attention": "t = floor + flops / (e · s/(s+700) · peak) + bytes / bandwidth",
    "memory": "t = floor·launches + bytes / (share · bandwidth)",
    "collective": "t = call + formula of the program that the library runs (hop, reached rates) + 2√(ℓ·w)    w: its bandwidth term",
    "p2p": "t = call + hop + n / bandwidth",
}


BUBBLES = (
    "1F1B and GPipe: idle = (P−1)·(f+b);  interleaved: (P−1)·(f+b)/V;  zero-bubble: less, see `meshwright show zb-h1`"
)
STATES = (
    "states = N·(param + grad + master + moments), each divided by the size of the shard group if its ZeRO stage is on"
)
ACTIVATIONS = "activations = saved bytes of a micro-batch × micro-batches in flight on the stage"


def parts(e: Estimate) -> list[str]:
    return [*e.prediction.exposed_s, "memory", "mfu", "roofline"]


def explain(e: Estimate, part: str) -> RenderableType:
    """Return the formula of a part, its operations with their times, and the sum."""
    special = {"memory": explain_memory, "mfu": explain_mfu, "roofline": explain_roofline, "bubble": explain_bubble}
    if part in special:
        return special[part](e)
    if part not in e.prediction.exposed_s:
        raise unknown("MW-EST-001", "part", part, parts(e), "--explain {}")
    return explain_operations(e, part)


def explain_operations(e: Estimate, part: str) -> RenderableType:
    """The formulas of a part, its operations on the slowest stage, and their sum over the micro-batches of a step."""
    rank, exposed = int(e.cost.slowest[0]), e.prediction.exposed_s[part]
    network = e.cost.network
    operations = list(operations_of(e, part, rank))
    lines: list[RenderableType] = [Text(f"{part}: {format_seconds(exposed)} of the step", style="bold")]
    lines += formulas_of([op for *_, op in operations], e, network)
    if operations:
        rows, total = [], 0.0
        for block, times, phase, op in operations:
            seconds, count = seconds_of(op, e, network), scalar(op.count)
            total += times * count * seconds
            row = f"{block} × {times:.0f}", phase, f"{op.name} × {count:g}", shape_of(op, network)
            rows.append((*row, format_seconds(seconds), format_seconds(times * count * seconds)))
        m = e.plan.microbatches(e.workload)
        words = f"{format_seconds(total)} per micro-batch × {m} micro-batches = {format_seconds(total * m)} on the slowest stage ({rank})"
        if abs(total * m - exposed) > 1e-3 * exposed:
            words += f"; exposed {format_seconds(exposed)} after overlap, with the operations that run once per step"
        columns = ("block × count", "phase", "operation", "shape", ">each", ">per micro-batch")
        lines += [titled("", columns, rows), Text(words)]
    closing = once_per_step(e, part, network)
    if closing.row_count:
        lines += [Text("once per step:"), closing]
    elif not operations:
        lines.append(Text("once per step: optimizer and overhead are not micro-batch operations", style="dim"))
    return Group(*lines)


def operations_of(e: Estimate, part: str, rank: int) -> Iterator[tuple[str, float, str, Op]]:
    """(block, number of such blocks, phase, operation) of one part on one pipeline rank."""
    rank_program = e.program.ranks[rank]
    for block in e.program.kinds():
        for phase in PHASES:
            if times := scalar(rank_program.times(block, phase)):
                for op in e.program.blocks.get((block, phase), ()):
                    if part_of(op, phase) == part:
                        yield block, times, phase, op


def formulas_of(ops: list[Op], e: Estimate, network: CollectiveTimes) -> Iterator[Text]:
    """The formulas of these kinds of operations, those of the collectives that the library runs, and the constants in them."""
    kinds = {op.kind for op in ops}
    yield from (Text(FORMULAS[kind], style="cyan") for kind in FORMULAS if kind in kinds)
    run = {(OPERATIONS[op.collective], network.algorithm(op)) for op in ops if op.collective}
    for operation, algorithm in sorted(run):
        words = f"{library_of(e.cluster)} runs {algorithm} for {operation}: {formula(operation, algorithm)}"
        yield Text(words, style="cyan")
    device = e.cluster.accelerator
    peak, eff = format_flops(device.peak_for(e.workload.precision)), device.efficiency
    constants = f"peak {peak}, e {eff.gemm:g}, c {eff.gemm_traffic:g}, floor {format_seconds(eff.floor)}; {device.name}"
    yield Text(constants, style="dim")


def seconds_of(op: Op, e: Estimate, network: CollectiveTimes) -> float:
    """Time of one operation."""
    if op.axis:
        return scalar(network.time(op))
    return scalar(compute.op_time(e.cluster.accelerator, e.workload.precision, e.stack, op))


def once_per_step(e: Estimate, part: str, network: CollectiveTimes) -> Table:
    """Return the collectives of a part that run once per step (gradient reductions, parameter gathers), each with its algorithm."""
    rows = []
    for op in e.program.closing:
        if op.axis and scalar(op.count) and AXIS_OF[op.axis] == part and scalar(e.program.batch.size(op.axis)) > 1:
            seconds, count = scalar(network.time(op)), scalar(op.count)
            shape = shape_of(op, network)
            rows.append((f"{op.name} × {count:g}", shape, format_seconds(seconds), format_seconds(count * seconds)))
    return titled("", ("operation", "shape", ">each", ">per step"), rows)


def part_of(op: Op, phase: str) -> str:
    """Return the part of the step under which an operation is reported."""
    if op.axis:
        return AXIS_OF[op.axis]
    return "recompute" if phase == "R" else op.part


def shape_of(op: Op, network: CollectiveTimes) -> str:
    if op.collective:
        size = format_decimal_bytes(scalar(op.message_bytes))
        return f"{OPERATIONS[op.collective]} of {size} over {op.axis}, {network.algorithm(op)}"
    if op.shape:
        return " × ".join(f"{scalar(x):,.0f}" for x in op.shape)
    return format_decimal_bytes(scalar(op.bytes))


def explain_bubble(e: Estimate) -> RenderableType:
    p, m, v = e.plan.pp, e.plan.microbatches(e.workload), e.plan.virtual
    f, i, w = (sum(scalar(getattr(r, k)) for r in e.cost.ranks) / len(e.cost.ranks) for k in ("f", "i", "w"))
    idle, step = (format_seconds(s) for s in (e.prediction.exposed_s.get("bubble", 0.0), e.prediction.step_time_s))
    fraction = f"bubble fraction, over all ranks: {e.bubble_fraction:.1%} of the simulated schedule"
    times = f"mean f = {format_seconds(f)}, input gradient {format_seconds(i)}, weight gradient {format_seconds(w)}"
    equal = f"bubble overhead (P−1)/(V·M) = {100 * (p - 1) / (v * m):.1f}%, "
    equal += f"bubble fraction (P−1)/(V·M+P−1) = {100 * (p - 1) / (v * m + p - 1):.1f}%"
    return Group(
        Text(f"bubble of the busiest rank: {idle} of {step}; {fraction}", style="bold"),
        Text(BUBBLES, style="cyan"),
        Text(f"{e.plan.schedule}: P = {p}, M = {m}, V = {v};  {times}"),
        Text(f"(P−1)·(f+b)/V = {format_seconds((p - 1) * (f + i + w) / v)};  on equal stages: {equal}"),
    )


def explain_memory(e: Estimate) -> RenderableType:
    worst = e.prediction.fullest_stage
    stage = e.prediction.memory_by_stage[worst]
    table = titled("", ("part", ">GiB"), [(part, f"{size:.2f}") for part, size in stage.items()])
    saved = {b: {k: scalar(v) / 2**20 for k, v in parts.items() if scalar(v)} for b, parts in e.program.saved.items()}
    lines = [Text(f"fullest stage {worst}: {sum(stage.values()):.1f} GiB", style="bold")]
    lines += [Text(words, style="cyan") for words in (STATES, ACTIVATIONS)]
    for block, by_part in saved.items():
        if by_part:
            sizes = ", ".join(f"{k} {v:,.0f} MiB" for k, v in by_part.items())
            lines.append(Text(f"saved by one {block}: {sizes}", style="dim"))
    return Group(*lines, table)


def explain_mfu(e: Estimate) -> RenderableType:
    p = e.prediction
    per_token, unit = e.model.model_flops(e.workload.seq), e.model.unit
    return Group(
        Text(f"MFU {100 * (p.mfu or 0):.1f}%", style="bold"),
        Text(f"MFU = FLOPs of the model per {unit[:-1]} × {unit} per second / (devices × dense peak)", style="cyan"),
        Text(
            f"{per_token:.4g} FLOP/{unit[:-1]} × {p.tokens_per_s:,.0f} {unit}/s / ({p.mfu_denominator})"
            + ("; causal attention counts half of s²" if e.model.causal and unit == "tokens" else "")
        ),
        Text(f"HFU {100 * (p.hfu or 0):.1f}% also counts recomputed and padded arithmetic", style="dim"),
    )


def explain_roofline(e: Estimate) -> RenderableType:
    place = e.roofline
    rows = []
    for c in place.ceilings:
        ccr = f"{c.ccr:,.0f}" if c.bytes else "none"
        sent, rate = format_decimal_bytes(c.bytes), f"{c.bandwidth / 1e9:,.1f} GB/s"
        ceiling = f"{100 * c.efficiency:.0f}%"
        rows.append((c.level, sent, rate, format_seconds(c.seconds), ccr, f"{c.ridge:,.0f}", ceiling))
    return Group(
        Text(f"{place.regime}: {place.level} allows {100 * place.efficiency:.0f}% of the peak", style="bold"),
        Text(
            "by level: CCR = FLOPs per device / bytes sent by a device at this level;  CCR* = peak / bandwidth;  ceiling = min(1, CCR / CCR*)",
            style="cyan",
        ),
        titled("", ("level", "sent by a device", "bandwidth of a device", "time", "CCR", "ridge", "ceiling"), rows),
        Text(f"critical batch {e.critical_batch.reason}"),
        Text("; ".join(place.advice), style="dim"),
    )
