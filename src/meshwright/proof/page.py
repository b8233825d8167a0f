"""A proof as a page: the verdict, the small copies, the differences, the collectives and the memory."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.proof.diagnosis import Diagnosis
from meshwright.proof.records import Row
from meshwright.proof.result import CopyProof, Proof
from meshwright.units import counted, format_bytes, format_decimal_bytes
from meshwright.view.tables import filled, heading

SHOWN_BREAKS = 5
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"
KINDS = ("loss", "norm", "gradient", "parameter")
SIGNS = {
    "equal within rounding": ("✓ ", "bold green"),
    "differs": ("✗ ", "bold red"),
    "cannot be told": ("? ", "bold yellow"),
}


def page(proof: Proof) -> RenderableType:
    """Show the failed copy in full, else the first one; for the others only the differences."""
    shown = proof.decisive
    parts: list[RenderableType] = [verdict(proof), *notes(proof), agreement(proof), *convergence(proof)]
    if not proof.parity:
        parts.append(breaks(shown))
    parts += oracles(proof)
    if not shown.traces:
        return Group(*parts, Text("  Collectives and memory are not compared: your module has no step program", "dim"))
    warnings = [Text(f"! {warning}", "bold yellow") for warning in proof.warnings]
    return Group(*parts, collectives(proof, shown), memory(shown), *warnings)


def verdict(proof: Proof) -> Text:
    if proof.passed:
        sizes = sorted({copy.small.plan.world for copy in proof.copies})
        on = f"on {' and '.join(map(str, sizes))} {'rank' if sizes == [1] else 'ranks'}"
        words = f"  trains what one device trains: {counted(proof.copies[0].steps, 'step')} {on}"
        verdict, style = "equal within rounding", ""
        if any(first.untold for copy in proof.copies for first in copy.agreements[:1]):
            words, verdict = "  no difference was found, but not all can be told", "cannot be told"
    else:
        words = (
            "  does not train what one device trains"
            if not proof.parity
            else "  issues collectives that were not lowered"
        )
        verdict, style = "differs", "bold red"
    return Text.assemble(SIGNS[verdict], (proof.title, "bold"), (words, style), (f"  {proof.seconds:.1f} s", "dim"))


def notes(proof: Proof) -> list[Text]:
    """The changes of the small copies; changes that all copies share are listed once."""
    several = len(proof.copies) > 1
    common = [c for c in proof.small.changes if all(c in copy.small.changes for copy in proof.copies)]
    lines = list(common)
    for i, copy in enumerate(proof.copies):
        own = [change for change in copy.small.changes if change not in common]
        if own:
            lines.append((f"copy {i + 1}: {copy.small.plan.title()}; " if several else "") + "; ".join(own))
    return [Text(f"  {line}", "dim") for line in lines]


def agreement(proof: Proof) -> RenderableType:
    rows = []
    for i, copy in enumerate(proof.copies):
        for a in copy.agreements:
            bad = {b.what for b in a.breaks}
            cells = [Text(f"{a.errors[k]:.1e}", "bold red" if k in bad else "") for k in KINDS]
            label = a.phase or (f"one device from {a.oracle}" if a.oracle else f"{a.dtype} from one device")
            rows.append([*([str(i + 1)] if len(proof.copies) > 1 else []), label, *cells])
    columns = ["difference of", ">loss", ">gradient norm", ">gradients", ">parameters"]
    columns = ["copy", *columns] if len(proof.copies) > 1 else columns
    return filled(columns, rows, title="Largest relative differences")


def oracles(proof: Proof) -> list[Text]:
    """What each part was compared with, and what could not be compared."""
    pairs = [f"{part} with {oracle}" for part, oracle in proof.copies[0].oracles.items()]
    lines = [Text(f"  Compared: {'; '.join(pairs)}", "dim")] if pairs else []
    untold = [a for copy in proof.copies for a in copy.agreements if a.untold]
    reasons = dict.fromkeys(f"{a.dtype} gradients and parameters, because {a.untold}" for a in untold)
    return lines + [Text(f"  Cannot be told: {reason}", "yellow") for reason in reasons]


def convergence(proof: Proof) -> list[Text]:
    """The effect of lossy arithmetic on the training loss; both sides of the comparison have it."""
    found = proof.convergence
    if not found:
        return []
    line = (
        f"  Loss of step {proof.copies[0].steps}: {found['loss']:.6g} as the plan trains, {found['exact_loss']:.6g} exactly "
        f"({found['difference']:+.2e})"
    )
    return [Text(line)]


def breaks(copy: CopyProof) -> RenderableType:
    first = heading("First difference", f"axis {copy.blamed}; {copy.small.plan.title()}")
    return Group(first, *differences((b for a in copy.agreements for b in a.breaks), copy.diagnosis))


def differences(found: Iterable[object], diagnosis: Diagnosis | None, most: int = SHOWN_BREAKS) -> list[Text]:
    """The first differences of two trainings, and what the very first means."""
    lines = [Text(f"  {difference}", "dim" if i else "red") for i, difference in enumerate(found)]
    if len(lines) > most:
        lines[most:] = [Text(f"  … and {len(lines) - most} more", "dim")]
    if diagnosis is not None:
        lines.append(Text.assemble("  ", ("What it means  ", "dim"), str(diagnosis)))
        lines += [Text(f"  usual cause: {cause}", "dim") for cause in diagnosis.causes]
    return lines


def collectives(proof: Proof, copy: CopyProof) -> RenderableType:
    """One row for all ranks with equal amounts; data-dependent reasons are below the table."""
    same: dict[tuple, list[int]] = {}
    first: dict[tuple, Row] = {}
    for rank, row in copy.rows:
        key = (row.axis, row.operation, row.lowered, row.observed, tuple(row.explained), row.unexplained)
        same.setdefault(key, []).append(rank)
        first[key] = row
    reasons = list(dict.fromkeys("; ".join(row.explained) for row in first.values() if row.explained))
    rows = []
    for key, ranks in sorted(same.items(), key=lambda item: (item[0][:2], item[1])):
        row = first[key]
        mark = f" {MARKS[reasons.index('; '.join(row.explained)) % len(MARKS)]}" if row.explained else ""
        result = Text("unexplained", "bold red") if row.unexplained else Text(f"equal{mark}", "dim")
        amounts = amount(row.lowered), amount(row.observed)
        rows.append([row.axis, row.operation.replace("_", "-"), joined(ranks), *amounts, result])
    n = proof.collectives
    counts = f"{n['equal']} equal" + (f", {n['explained']} of them data-dependent" if n["explained"] else "")
    counts += f", {n['unexplained']} unexplained" if n["unexplained"] else ""
    several = f" (of {len(proof.copies)} copies)" if len(proof.copies) > 1 else ""
    title = f"Collectives of one step, lowered against issued: {counts}{several}"
    table = filled(("axis", "collective", "ranks", ">lowered", ">issued", ""), rows, title=title)
    return Group(table, *(Text(f"  {mark} {reason}", "dim") for mark, reason in zip(MARKS, reasons, strict=False)))


def joined(ranks: list[int]) -> str:
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if whole else ",".join(map(str, ranks))


def amount(count_and_bytes: tuple[float, float]) -> str:
    """Number and total bytes."""
    return f"{count_and_bytes[0]:g}, {format_decimal_bytes(count_and_bytes[1])}"


def memory(copy: CopyProof) -> RenderableType:
    same: dict[tuple[float, float], list[int]] = {}
    for trace in copy.traces:
        if trace.observed is not None:
            same.setdefault((trace.predicted_bytes, trace.observed.peak_bytes), []).append(trace.rank)
    rows = [
        [joined(ranks), format_bytes(predicted), format_bytes(peak), f"{predicted / max(peak, 1):.2f}"]
        for (predicted, peak), ranks in same.items()
    ]
    return filled(("ranks", ">predicted", ">peak", ">ratio"), rows, title="Memory of tensors in that step")
