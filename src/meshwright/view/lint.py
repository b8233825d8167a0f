"""Findings of `lint` in the terminal: the problem, its cost, and the fix."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshwright.describe.config import Config
from meshwright.planner.advice.changes import Change
from meshwright.planner.advice.lint.check import Finding
from meshwright.predict.estimate import Estimate
from meshwright.units import counted, format_seconds

SIGNS = {"error": ("✗", "bold red"), "warning": ("!", "bold yellow"), "note": ("·", "cyan")}


def page(
    config: Config, findings: Sequence[Finding], now: Estimate | None, changes: Sequence[Change] = ()
) -> RenderableType:
    """Return the plan in one line, its findings, what to change first, and a summary."""
    return Group(
        headline(config, now), *map(finding_block, findings), *change_lines(changes), Text(), summary(findings)
    )


def headline(config: Config, now: Estimate | None) -> Text:
    place = f"{config.model.name} on {config.cluster.world} × {config.cluster.accelerator.name} ({config.cluster.name}, stack {config.stack.name})"
    words = Text.assemble((place, "bold"), (f"  {config.plan.title()}", "dim"))
    if now is not None:
        p = now.prediction
        band = f" ({format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)})"
        words.append(f"  step {format_seconds(p.step_time_s)}{band}", "dim")
    return words


def finding_block(f: Finding) -> RenderableType:
    """Return one finding: name and cost, the problem, the fix, and the reason if the plan is still the best."""
    sign, style = SIGNS[f.severity]
    head = Text.assemble((f"{sign} {f.code}  ", style), (f.name, "bold"))
    if f.cost_s:
        head.append(f"   {format_seconds(f.cost_s)}", style)
        head.append(f", {f.share:.1%} of the step" if f.share is not None else "", "dim")
    lines = [Text(f.what)]
    if f.fix:
        lines.append(Text.assemble(("fix  ", "green"), f.fix, (f"   {worth(f)}", "dim")))
    elif f.severity != "error":
        known = f"the alternative is not better: {worth(f)}" if f.saves_s is not None else "no better plan is known"
        lines.append(Text(known, "dim"))
    if f.still_best:
        lines.append(Text.assemble(("still best  ", "green"), f.still_best))
    return Group(Text(), head, Padding(Group(*lines), (0, 0, 0, 4)))


def change_lines(changes: Sequence[Change]) -> Iterator[RenderableType]:
    """The changes that save most, a line each with what its memory becomes."""
    if changes:
        yield Text("\nchange first", "bold")
    for change in changes:
        effect = f"   {saving(change.saved)}, {change.memory_gib:.1f} GiB"
        yield Padding(Text.assemble(change.fix, (effect, "dim")), (0, 0, 0, 4))


def saving(seconds: float) -> str:
    return f"saves {format_seconds(seconds)}" if seconds >= 0 else f"takes {format_seconds(-seconds)} longer"


def worth(f: Finding) -> str:
    if f.saves_s is None:
        return ""
    if "workload.batch" in f.fix:
        return f"saves {format_seconds(f.saves_s)} for the work of a step, and changes the batch"
    return saving(f.saves_s)


def summary(findings: Iterable[Finding]) -> Text:
    counts = {severity: sum(f.severity == severity for f in findings) for severity in SIGNS}
    text = ", ".join(counted(n, severity) for severity, n in counts.items() if n)
    return Text(text or "clean: no anti-pattern found", "bold" if text else "bold green")
