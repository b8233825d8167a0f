"""A comparison in the terminal: the verdict, the first difference and what it looks like, the network as a strip of modules."""

from collections.abc import Sequence
from math import isnan

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.check.compare import RunComparison
from meshwright.check.expected import CollectiveFinding
from meshwright.check.folder import Recording
from meshwright.proof.page import SIGNS, differences
from meshwright.units import counted
from meshwright.view.tables import table

SHOWN = 12


def page(one: Recording, many: Recording, comparison: RunComparison) -> RenderableType:
    sign, style = SIGNS[comparison.verdict]
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{sign}{comparison.verdict}", style),
            f"  {about(many)} against {about(one)}, {counted(comparison.steps, 'step')}",
        )
    ]
    if comparison.untold:
        lines.append(Text(comparison.untold, "yellow"))
    lines += differences(comparison.differences, comparison.diagnosis, SHOWN)
    lines += [numbers(comparison), strip(comparison)]
    lines += [Text(f"collectives  {finding}", "red") for finding in comparison.collectives[:SHOWN]]
    for step, (reference, candidate) in enumerate(comparison.losses):
        lines.append(Text(f"loss of step {step}: {reference:.6g} there, {candidate:.6g} here", "dim"))
    if comparison.unmapped:
        shown = "; ".join(comparison.unmapped[:4])
        lines.append(Text(f"not compared ({len(comparison.unmapped)}): {shown}", "yellow"))
    return Group(*lines)


def about(recording: Recording) -> str:
    first = recording.ranks[0]
    return f"{counted(recording.world, 'rank')} ({first['framework']}: {first['layout']})"


def numbers(comparison: RunComparison) -> RenderableType:
    rows = table("kind", ">tensors", ">largest error")
    for kind, count in comparison.compared.items():
        rows.add_row(kind, str(count), f"{comparison.errors[kind]:.1e}")
    return rows


def strip(comparison: RunComparison) -> RenderableType:
    """The modules in the order of forward, if one of them differs: from the last that is right to the first few that are not."""
    if comparison.diagnosis is None or not comparison.modules:
        return Text()
    names = [name for name, _, _ in comparison.modules]
    at = names.index(comparison.diagnosis.tensor) if comparison.diagnosis.tensor in names else -1
    if at < 0:
        return Text()
    rows = table("module", ">output", ">gradient of it")
    for name, forward, backward in comparison.modules[max(at - 3, 0) : at + 5]:
        style = "bold red" if name == comparison.diagnosis.tensor else ""
        shown = ("" if isnan(value.error) else f"{value.error:.1e}" for value in (forward, backward))
        rows.add_row(name or "model", *shown, style=style)
    return rows


MISSING_ON_ALL = "A collective that no rank issues is found only with the settings of the run."


def findings_page(
    recording: Recording, step: int, findings: Sequence[CollectiveFinding], settings: str = ""
) -> RenderableType:
    """The collectives of a step beside those of the other ranks, and of the plan of the settings if there are any."""
    serious = [finding for finding in findings if finding.kind != "note"]
    sign, style = SIGNS["differs" if serious else "equal within rounding"]
    complete = "the collectives that must be there are there" if settings else "the ranks issue the same collectives"
    verdict = counted(len(serious), "finding") if serious else complete
    against = settings or "the other ranks"
    lines = [Text.assemble((f"{sign}{verdict}", style), f"  {about(recording)}, step {step}, beside {against}")]
    lines += [Text(f"  {MISSING_ON_ALL}", "dim")] * (not settings)
    lines += [Text(f"  {finding}", "" if finding.kind == "note" else "red") for finding in findings]
    return Group(*lines)
