"""An estimate as a page of tables for the terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.cost.checkpoint import checkpoint_words
from meshwright.describe import legality
from meshwright.describe.result import COMMUNICATION, part_name
from meshwright.describe.workload import FP8
from meshwright.planner.advice.explain import training
from meshwright.predict.estimate import Estimate
from meshwright.units import format_count, format_decimal_bytes, format_rate, format_seconds
from meshwright.view.tables import titled

BAR = 28
FILL = {"communication": "▒", "waiting": "░", "compute": "█", "once per step": "▓"}  # readable without colour
FIT_COLOURS = {"fits": "green", "probably fits": "green", "may not fit": "yellow", "does not fit": "red"}
COLOURS = {"communication": "magenta", "waiting": "yellow", "compute": "cyan", "once per step": "green"}
SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "acts", "working": "work"}
KIND = {
    **dict.fromkeys(COMMUNICATION, "communication"),
    "bubble": "waiting",
    "host": "waiting",
    "interference": "waiting",
    "offload": "communication",
    "optimizer": "once per step",
    "overhead": "once per step",
}


def page(e: Estimate) -> RenderableType:
    """Return the full page."""
    return Group(*sections(e))


def sections(e: Estimate) -> Iterator[RenderableType]:
    yield header(e)
    yield breakdown(e)
    yield memory(e)
    yield Text(checkpoint_words(e.prediction, e.stack), "dim")
    if e.prediction.traffic_bytes:
        yield traffic(e)
    yield verdicts(e)
    yield notes(e)


def header(e: Estimate) -> Panel:
    p = e.prediction
    count = format_count(e.model.total)
    active = f", {format_count(e.model.active)} active" if e.model.experts else ""
    colour = f"bold {FIT_COLOURS[p.fit_word]}"
    pairs = (
        (e.model.name, f"  {count} parameters{active}{e.model.describe_trained()}: {e.model.describe_shape()}"),
        (f"{e.plan.world} × {e.cluster.accelerator.name}", f"  {e.cluster.name}, stack {e.stack.name}"),
        (e.plan.title(), f"  {e.model.describe_batch(e.workload, '')}, {e.workload.precision}"),
    )
    lines = [Text.assemble((what, "bold"), (aside, "dim")) for what, aside in pairs]
    lines += [Text(""), main_numbers(e, colour), *on_own_trainer(e), *uncalibrated(e)]
    if p.fit_word in ("may not fit", "does not fit"):
        spare = p.memory_limit_gib - (p.memory_gib or 0)
        words = f"{spare:.1f} GiB free" if p.fits else f"{-spare:.1f} GiB over the limit"
        lines.append(Text(f"{p.memory_fit}: {words} on the fullest stage", style=colour))
    if cost := training(e):
        price = f", ${cost.dollars:,.0f}" if cost.price else ""
        days = f"{cost.days:,.1f} days, {cost.gpu_hours:,.0f} GPU-hours{price}"
        lines.append(Text(f"{format_count(cost.tokens)} {e.model.unit}: {days}"))
    return Panel(Group(*lines), title="estimate", title_align="left", border_style="blue")


def main_numbers(e: Estimate, memory_style: str = "bold") -> Text:
    """Step time with its band, MFU, memory and throughput in one line."""
    p = e.prediction
    low, high = format_seconds(p.step_time_low_s), format_seconds(p.step_time_high_s)
    return Text.assemble(
        ("step ", "dim"),
        (format_seconds(p.step_time_s), "bold"),
        (f"  ({low} to {high})", "dim"),
        ("   MFU ", "dim"),
        (f"{100 * (p.mfu or 0):.1f}%", "bold"),
        ("   memory ", "dim"),
        (f"{p.memory_gib:.1f} of {p.memory_limit_gib:.0f} GiB", memory_style),
        (f"   {e.model.unit}/s ", "dim"),
        (format_count(p.tokens_per_s or 0), "bold"),
    )


def on_own_trainer(e: Estimate) -> list[Text]:
    """Return the prediction on our own trainer in one line, if the plan names no stack."""
    return [Text(e.own_trainer.sentence, "dim")] if e.own_trainer else []


def uncalibrated(e: Estimate) -> list[Text]:
    """Return a warning for the top of the page if the accelerator was never measured."""
    device, p = e.cluster.accelerator, e.prediction
    if device.efficiency.measured:
        return []
    low, high = (100 * x / p.step_time_s - 100 for x in (p.step_time_low_s, p.step_time_high_s))
    words = f"uncalibrated: {device.name} was never measured; the constants are medians of the measured chips"
    return [Text(f"{words}, the band is wider ({low:+.0f}% to {high:+.0f}%)", "yellow")]


def breakdown(e: Estimate) -> Table:
    p = e.prediction
    rows: list[tuple[str | Text, ...]] = []
    longest = max(p.exposed_s.values())
    for part, seconds in sorted(p.exposed_s.items(), key=lambda item: -item[1]):
        kind = KIND.get(part, "compute")
        bar = Text(FILL[kind] * max(1, round(BAR * seconds / longest)), style=COLOURS[kind])
        rows.append((part_name(part), format_seconds(seconds), f"{100 * seconds / p.step_time_s:.1f}%", bar))
    rows.append(("[bold]step[/]", f"[bold]{format_seconds(p.step_time_s)}[/]", "100%", ""))
    return titled("Where the step goes", ("part", ">time", ">share", ""), rows, legend())


def legend() -> str:
    return "  ".join(f"[{colour}]{2 * FILL[kind]}[/] {kind}" for kind, colour in COLOURS.items())


def shown_stages(count: int) -> list[int]:
    """Return the stages to list: all of a short pipeline, the first and last of a long one."""
    return list(range(count)) if count <= 6 else [0, 1, 2, count // 2, count - 2, count - 1]


def memory(e: Estimate) -> Table:
    limit, fullest = e.prediction.memory_limit_gib, e.prediction.memory_gib or 0.0
    # In GiB the values of a small model would be mostly zeros.
    unit_name, factor = ("GiB", 1.0) if fullest >= 1 else ("MiB", 1024.0)
    stages = [{part: factor * size for part, size in stage.items()} for stage in e.prediction.memory_by_stage]
    unit = "stage" if e.plan.pp > 1 else ""
    parts = [p for p in stages[0] if any(s[p] >= 0.005 for s in stages)]
    columns = (unit, *(f">{SHORT.get(part, part)}" for part in parts), ">total", f"of {factor * limit:,.0f}")
    rows: list[tuple[str | Text, ...]] = []
    for s in shown_stages(len(stages)):
        total = sum(stages[s].values())
        share = total / (factor * limit)
        style = "red" if share > 1 else "yellow" if share > 0.9 else "green"
        bar = Text("█" * min(20, max(1, round(12 * share))), style=style)
        cells = (f"{stages[s][p]:.1f}" for p in parts)
        rows.append((str(s) if e.plan.pp > 1 else "", *cells, f"[{style}]{total:.1f}[/]", bar))
    return titled(f"Memory by {unit or 'part'}, {unit_name}", columns, rows)


def traffic(e: Estimate) -> Table:
    """Bytes by axis and level; the exposed time is that of the axis, in its first row."""
    p, rows, timed = e.prediction, [], set()
    for row in p.traffic_by_level:
        axis, exposed = row["axis"], p.exposed_s.get(row["axis"], 0.0)
        # Pipeline messages that do not block only lengthen the fill and drain phases, so their time is part of the bubble.
        hidden = "in bubble" if axis == "pp" else "hidden"
        time = "" if axis in timed else format_seconds(exposed) if exposed > 0 else hidden
        rows.append((axis, str(row["ranks"]), format_decimal_bytes(row["bytes"]), row["level"], time))
        timed.add(axis)
    return titled("Traffic, sent per GPU and step", ("axis", ">degree", ">bytes", "over", ">exposed"), rows)


def verdicts(e: Estimate) -> Table:
    rows = [
        ("[green]✓[/]" if v.good else "[yellow]✗[/]", v.name, f"{100 * v.value:.1f}%", f"[dim]{v.target}[/]")
        for v in e.verdicts
    ]
    return titled("Targets", ("", "", "", ""), rows)


def notes(e: Estimate) -> Group:
    p, place = e.prediction, e.roofline
    rows: list[tuple[str, str | Text | tuple[str, str]]] = [("bound by", (p.bound_by, "bold"))]
    if place.ccr != float("inf"):
        by_level = "; ".join(
            f"{c.level} {c.ccr:,.0f} of {c.ridge:,.0f} ({format_decimal_bytes(c.bytes)} at {format_rate(c.bandwidth)})"
            for c in place.ceilings
            if c.bytes
        )
        allows = Text(f"{place.regime}: {place.level} allows {100 * place.efficiency:.0f}% of the peak")
        rows.append(("roofline", allows.append(f"; FLOP per byte and ridge by level: {by_level}", "dim")))
        rows.append(("advice", "; ".join(place.advice)))
    if e.workload.precision in FP8:
        rows.append((f"{e.workload.precision} traffic", fp8_traffic(e)))
    rows.append(("critical batch", e.critical_batch.reason))
    rows += [("MFU over", (p.mfu_denominator, "dim")), ("constants", (p.calibrated, "dim"))]
    assumed = (Text(f"assumed: {item}", style="dim") for item in p.assumed)
    return Group(*(Text.assemble((f"{name} ", "dim"), words) for name, words in rows), *assumed)


def fp8_traffic(e: Estimate) -> str:
    """Return which traffic fp8 halves and which it does not."""
    unchanged = "not reductions (reduce-scatter and all-reduce add in 16 bits or more) or pipeline sends"
    activations = "sequence-parallel activations and of " if e.stack.fp8_activation_gathers else ""
    weights = "experts' ZeRO-3 weights" if e.workload.scaling == "row" else "ZeRO-3 weights"
    halves = f"all-gathers of {activations}{weights}"
    if not e.plan.gathers:
        return f"no traffic is halved: this plan has no {halves}"
    if e.plan.gather_dtype == "fp8":
        support = "" if e.stack.fp8_gathers else f"; {e.stack.name} is not known to support this (stack.fp8_gathers)"
        return f"halved: {halves}; {unchanged}{support}"
    if refused := legality.not_trained(e.plan.but(gather_dtype="fp8"), e.model, e.workload, e.stack):
        return f"no traffic is halved; plan.gather_dtype=fp8 is refused: {refused.why}"
    return f"no traffic is halved; --set plan.gather_dtype=fp8 halves {halves}, {unchanged}"
