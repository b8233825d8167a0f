"""`meshwright show step PLAN`: the step program of a plan, which `estimate` prices and `verify` compares with what a run issues.

One table has the operations of each block in one micro-batch, one those of each pipeline rank, one those that run once per step. `--json`
prints the whole value.
"""

from collections.abc import Iterator

from rich.text import Text

from meshwright.cost.collective import CollectiveTimes
from meshwright.errors import MeshwrightError
from meshwright.lower.program import Op, RankProgram, scalar
from meshwright.predict.estimate import Estimate
from meshwright.units import format_bytes, format_count, format_decimal_bytes, format_flops
from meshwright.view.tables import filled, heading, show, show_json

PHASES = "F forward, I gradients of inputs, W of weights, E of I where backward ends, R recomputed, S and G what a split backward does again"
COLUMNS = ("operation", "kind", ">times", ">FLOPs", ">memory", ">message", "between")


def plan_file(path: str) -> str:
    """The plan file on the command line; without one an error."""
    if not path:
        raise MeshwrightError("MW-SHOW-003", "show step needs a plan file", fix="meshwright show step plan.toml")
    return path


def show_step(e: Estimate, as_json: bool = False) -> None:
    """Print the step program of an estimate."""
    if as_json:
        return show_json({"model": e.model.name, "plan": e.plan.as_dict(), "step": e.program.as_dict()})
    program, network = e.program, e.cost.network
    blocks = [(key, op) for key, ops in program.blocks.items() for op in ops if scalar(op.count)]
    kinds = list(program.ranks[0].counts)
    return show(
        heading("One micro-batch of each block", f"{e.model.name}, {e.plan.title()}"),
        filled(("block", "phase", *COLUMNS), [(*key, *operation(op, network)) for key, op in blocks]),
        heading("Pipeline ranks", "what each holds, sends per micro-batch and keeps for backward"),
        filled(
            ("rank", *(f">{kind}" for kind in kinds), ">parameters", ">sends", ">in flight", ">kept"),
            [rank_row(rank, kinds) for rank in program.ranks],
        ),
        heading("Once per step", "on the rank with the most parameters"),
        filled(COLUMNS, [tuple(operation(op, network)) for op in program.closing if scalar(op.count)]),
        Text(f"{int(program.batch.rounds[0])} micro-batches. Phases: {PHASES}", "dim"),
    )


def operation(op: Op, network: CollectiveTimes) -> Iterator[str]:
    """The cells of one operation."""
    yield from (op.name, op.collective.replace("_", "-") or op.kind, f"{scalar(op.count):g}")
    yield format_flops(flops).removesuffix("/s") if (flops := scalar(op.flops)) else ""
    yield format_decimal_bytes(moved) if (moved := scalar(op.bytes)) else ""
    yield format_decimal_bytes(scalar(op.message_bytes)) if op.axis else ""
    yield (
        f"{scalar(network.batch.size(op.axis)):g} {op.axis}, {network.cluster.levels[network.level(op.axis)].name}"
        if op.axis
        else ""
    )


def rank_row(rank: RankProgram, kinds: list[str]) -> tuple[str, ...]:
    """The cells of one pipeline rank."""
    counts = (f"{scalar(rank.counts[kind]):g}" for kind in kinds)
    sends = sum(scalar(times) * scalar(op.count) for op, times in rank.sends if op.kind == "p2p")
    elements = format_count(sum(scalar(x) for x in rank.elements.values()))
    cells = elements, f"{sends:g}", f"{scalar(rank.in_flight):g}", format_bytes(scalar(rank.kept))
    return f"{scalar(rank.rank):g}", *counts, *cells
