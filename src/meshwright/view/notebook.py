"""Results as HTML elements for a notebook: tables, bars and small figures in SVG, without scripts and without network.

The functions take the results of `meshwright.api`: a configuration, an estimate, a simulation, a proof, a training. The first three are known here;
of the other two, whose classes are above this room, only the numbers of `as_dict` and `describe.result` are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite
from typing import Any

from meshwright.cost.estimate import Estimate, Simulation
from meshwright.describe.config import Config
from meshwright.programs.pipelines.program import KIND_NAMES
from meshwright.units import format_seconds, format_value
from meshwright.view import plan_html
from meshwright.view.config import values
from meshwright.view.estimate import traffic_rows
from meshwright.view.pipelines import colour
from meshwright.view.plan_html import cards, element, section, table

WIDTH, ROW = 1060, 18  # of figures, in pixels
MOST_RANKS = 16  # drawn of a simulation
MOST_CELLS = 4000


def config_html(config: Config) -> str:
    """The values of a configuration that are not defaults, by section, with their origin."""
    rows = [
        (
            f"<b>[{name}]</b> {escape(path.partition('.')[2])}",
            escape(text),
            f"<span class=soft>{escape(config.origin(path))}</span>",
        )
        for name, part in config.parts().items()
        for path, text in values(part, name)
        if config.origin(path) != "default" and not path.endswith(".source")
    ]
    title = (
        f"{config.model.name} on {config.cluster.world:,} × {config.cluster.accelerator.name}: {config.plan.title()}"
    )
    return element(section(title, table(["value", "", "from"], rows)))


def estimate_html(e: Estimate) -> str:
    """Step time, memory, traffic and verdicts of one plan."""
    p = e.prediction
    sent = [tuple(map(escape, row)) for row in traffic_rows(p)]
    traffic = (
        table(["axis", ">degree", ">bytes", "over", ">exposed"], sent)
        if sent
        else "<p class=soft>one device sends nothing</p>"
    )
    judged = [
        (escape(v.name), f"{100 * v.value:.1f}%", escape(v.target), "✓" if v.good else "<span class=bad>✗</span>")
        for v in e.verdicts
    ]
    verdicts = table(["", ">value", "target", ""], judged)
    two = f'<div class="two">{section("Traffic, sent per GPU and step", traffic)}{section("Targets", verdicts)}</div>'
    return element(plan_html.predicted(e), plan_html.step(p), plan_html.memory(p), two, assumptions(p.assumed))


def assumptions(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return section("Assumed", "".join(f"<div class=soft>{escape(line)}</div>" for line in lines))


def simulation_html(s: Simulation) -> str:
    """The walked step: a row for each pipeline rank, a cell for each action."""
    e, walk = s.estimate, s.walked.walk
    shown = cards(
        ("step", format_seconds(s.walked.time), f"schedule {format_seconds(walk.makespan)}"),
        ("bubble", f"{100 * e.bubble_fraction:.1f}%", "of the schedule"),
        ("in flight", f"{float(walk.peak_memory.max()):g}", "micro-batches on the rank with the most"),
    )
    head = f"<section><h2>{escape(e.model.name)}</h2><div class=title>{escape(e.plan.title())}</div>{shown}</section>"
    return element(head, section("One step, by pipeline rank", timeline_svg(s)))


def timeline_svg(s: Simulation) -> str:
    """The actions as coloured rectangles. Of many ranks the first ones are drawn, and of many actions those that begin first."""
    walk = s.walked.walk
    flow, ranks = walk.program, min(walk.program.ranks, MOST_RANKS)
    scale = (WIDTH - 60) / walk.makespan if walk.makespan else 0.0
    order = [i for i in walk.start.argsort(kind="stable").tolist() if int(flow.rank[i]) < ranks][:MOST_CELLS]
    cells = []
    for i in order:
        action = flow.action(i)
        fill = "rgb({},{},{})".format(*colour(action.kind, action.stage // flow.ranks, flow.virtual, action.microbatch))
        x, width = 56 + scale * float(walk.start[i]), scale * float(walk.end[i] - walk.start[i])
        y = ROW * int(flow.rank[i])
        cells.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.3):.2f}" height="{ROW - 3}" fill="{fill}"><title>{action}</title></rect>'
        )
    labels = "".join(f'<text x="0" y="{ROW * r + 12}">rank {r}</text>' for r in range(ranks))
    height = ROW * ranks + 4
    present = {flow.action(i).kind for i in order[:200]}
    notes = [f"{name} {what}" for name, what in KIND_NAMES.items() if name in present]
    if walk.program.ranks > ranks or len(order) == MOST_CELLS:
        notes.append(f"the first {ranks} ranks and {len(order):,} actions of {len(flow):,} are drawn")
    key = " · ".join(notes)
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="timeline">{labels}{"".join(cells)}</svg>'
    return f"{svg}<p class=soft>{escape(key)}</p>"


def proof_html(proof: Any) -> str:
    """The verdict, the largest differences by dtype, and the collectives that were compared."""
    found = proof.as_dict()
    passed, counts = found["passed"], found["collectives_compared"]
    verdict = "trains what one device trains" if passed else "does not train what one device trains"
    mark = "✓" if passed else "✗"
    rows = [
        (escape(dtype), *(("–" if error is None else f"{error:.1e}") for error in errors.values()))
        for dtype, errors in found["errors"].items()
    ]
    first: dict[str, Any] = next(iter(found["errors"].values()), {})
    columns = ["dtype", *(f">{name}" for name in first)]
    head = f'<section><h2 class="{"" if passed else "bad"}">{mark} {escape(verdict)}</h2><div class=title>{escape(found["plan"])}</div></section>'
    compared = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return element(
        head,
        section("Largest relative difference from one device in float64", table(columns, rows)),
        section("Collectives of one step, lowered against issued", f"<p>{escape(compared)}</p>"),
    )


def training_html(training: Any) -> str:
    """The loss curve, and predicted against measured values."""
    m, p = training.measurement, training.prediction
    band = f"{format_seconds(m.step_time_low_s)} to {format_seconds(m.step_time_high_s)}"
    shown = cards(
        ("loss", f"{m.loss[-1]:.3f}", f"{m.loss[0]:.3f} at first, {m.steps} steps"),
        ("step", format_seconds(m.step_time_s), band),
        ("predicted", format_seconds(p.step_time_s), f"{100 * (p.step_time_s / m.step_time_s - 1):+.0f}%"),
    )
    rows = [
        (
            escape(d.what),
            escape(format_value(d.predicted, d.unit)),
            escape(format_value(d.measured, d.unit)),
            f"{100 * d.error:+.0f}%" if isfinite(d.error) else "–",
        )
        for d in training.differences
    ]
    head = f"<section><h2>{escape(training.config.model.name)}</h2><div class=title>{escape(training.config.plan.title())}</div>{shown}</section>"
    compared = section("Prediction and measurement", table(["", ">predicted", ">measured", ">error"], rows))
    return element(head, section("Loss", curve_svg(m.loss)), compared)


def curve_svg(numbers: Sequence[float], height: int = 160) -> str:
    """A line through finite numbers, with its lowest and highest value."""
    points = [(i, x) for i, x in enumerate(numbers) if isfinite(x)]
    if len(points) < 2:
        return "<p class=soft>fewer than two finite values</p>"
    low, high = min(x for _, x in points), max(x for _, x in points)
    spread = (high - low) or 1.0
    last = max(1, len(numbers) - 1)
    line = " ".join(
        f"{56 + (WIDTH - 66) * i / last:.1f},{6 + (height - 24) * (high - x) / spread:.1f}" for i, x in points
    )
    texts = f'<text x="0" y="14">{high:.3g}</text><text x="0" y="{height - 14}">{low:.3g}</text>'
    path = f'<polyline points="{line}" fill="none" stroke="var(--compute)" stroke-width="2"/>'
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="loss by step">{texts}{path}</svg>'
