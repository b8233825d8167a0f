"""A proof as a page: the verdict first, then what was proved, how far apart the two were, and what was said on the
wire."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.proof.prove import Proof
from meshwright.proof.records import Row
from meshwright.units import format_bytes, format_decimal_bytes
from meshwright.view.tables import filled, heading

SHOWN_BREAKS = 5
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def page(proof: Proof) -> RenderableType:
    parts: list[RenderableType] = [verdict(proof), *notes(proof), agreement(proof), *convergence(proof)]
    if not proof.parity:
        parts.append(breaks(proof))
    return Group(*parts, collectives(proof), memory(proof))


def verdict(proof: Proof) -> Text:
    world = proof.small.plan.world
    if proof.passed:
        words = f"trains what one device trains: {counted(proof.steps, 'step')} on {counted(world, 'rank')}"
        return Text.assemble(
            ("✓ ", "bold green"), (proof.small.plan.title(), "bold"), f"  {words}", (f"  {proof.seconds:.1f} s", "dim")
        )
    what = (
        "does not train what one device trains"
        if not proof.parity
        else "communicates what the step program does not say"
    )
    return Text.assemble(
        ("✗ ", "bold red"),
        (proof.small.plan.title(), "bold"),
        (f"  {what}", "bold red"),
        (f"  {proof.seconds:.1f} s", "dim"),
    )


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def notes(proof: Proof) -> list[Text]:
    alike = ["products in fp8, on one device too"] if proof.small.workload.precision == "fp8" else []
    return [Text(f"  {note}", "dim") for note in (*proof.small.changes, *alike)]


def agreement(proof: Proof) -> RenderableType:
    rows = []
    for a in proof.agreements:
        bad = {b.what for b in a.breaks}
        cells = [
            Text(f"{a.errors[k]:.1e}", "bold red" if k in bad else "")
            for k in ("loss", "norm", "gradient", "parameter")
        ]
        rows.append([a.dtype, *cells])
    columns = ("dtype", ">loss", ">gradient norm", ">gradients", ">parameters")
    return filled(columns, rows, title="Largest relative difference from one device in float64")


def convergence(proof: Proof) -> list[Text]:
    """What the plan's own loss costs, which both sides of the comparison have."""
    told = proof.convergence
    if not told:
        return []
    line = (
        f"  Loss of step {proof.steps}: {told['loss']:.6g} as the plan trains, {told['exact_loss']:.6g} exactly "
        f"({told['difference']:+.2e})"
    )
    return [Text(line)]


def breaks(proof: Proof) -> RenderableType:
    found = [b for a in proof.agreements for b in a.breaks]
    lines = [heading("What broke first", f"axis {proof.blamed}")]
    lines += [Text(f"  {b}", "red" if i == 0 else "dim") for i, b in enumerate(found[:SHOWN_BREAKS])]
    if len(found) > SHOWN_BREAKS:
        lines.append(Text(f"  … and {len(found) - SHOWN_BREAKS} more", "dim"))
    return Group(*lines)


def collectives(proof: Proof) -> RenderableType:
    """Ranks that say the same are told once; what only the step's own data explain is told below."""
    same: dict[tuple, list[int]] = {}
    first: dict[tuple, Row] = {}
    for rank, row in proof.rows:
        key = (row.axis, row.operation, row.lowered, row.observed, tuple(row.explained), row.unexplained)
        same.setdefault(key, []).append(rank)
        first[key] = row
    reasons = list(dict.fromkeys("; ".join(row.explained) for row in first.values() if row.explained))
    rows = []
    for key, ranks in sorted(same.items(), key=lambda item: (item[0][:2], item[1])):
        row = first[key]
        mark = f" {MARKS[reasons.index('; '.join(row.explained)) % len(MARKS)]}" if row.explained else ""
        verdict = Text("unexplained", "bold red") if row.unexplained else Text(f"equal{mark}", "dim")
        said = amount(row.lowered), amount(row.observed)
        rows.append([row.axis, row.operation.replace("_", "-"), joined(ranks), *said, verdict])
    n = proof.collectives
    counted = f"{n['equal']} equal" + (f", {n['explained']} of them by the step's own data" if n["explained"] else "")
    counted += f", {n['unexplained']} unexplained" if n["unexplained"] else ""
    title = f"Collectives of one step, lowered against issued: {counted}"
    table = filled(("axis", "collective", "ranks", ">lowered", ">issued", ""), rows, title=title)
    return Group(table, *(Text(f"  {mark} {reason}", "dim") for mark, reason in zip(MARKS, reasons, strict=False)))


def joined(ranks: list[int]) -> str:
    return (
        f"{ranks[0]}–{ranks[-1]}"
        if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
        else ",".join(map(str, ranks))
    )


def amount(said: tuple[float, float]) -> str:
    """How many, and their bytes in all."""
    return f"{said[0]:g}, {format_decimal_bytes(said[1])}"


def memory(proof: Proof) -> RenderableType:
    same: dict[tuple[float, float], list[int]] = {}
    for trace in proof.traces:
        if trace.observed is not None:
            same.setdefault((trace.predicted_bytes, trace.observed.peak_bytes), []).append(trace.rank)
    rows = [
        [joined(ranks), format_bytes(predicted), format_bytes(peak), f"{predicted / max(peak, 1):.2f}"]
        for (predicted, peak), ranks in same.items()
    ]
    return filled(("ranks", ">predicted", ">peak", ">ratio"), rows, title="Memory of tensors in that step")
