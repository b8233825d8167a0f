"""Case studies as pages: one Markdown page per case, which the terminal shows too.

`make pages` (`python -m meshwright.view.cases docs/cases`) writes every page; a test compares the pages with this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.markdown import Markdown

from meshwright.cost.estimate import Estimate
from meshwright.describe.result import part_name
from meshwright.planner.advice.alternatives import step
from meshwright.planner.advice.guides.textbook import differences
from meshwright.planner.cases import studies
from meshwright.planner.cases.studies import Evaluated, Row
from meshwright.units import format_count, format_seconds

SHARE = 0.01  # parts of a step below this share are not listed


def page(r: Evaluated) -> str:
    """Return the page of a case in Markdown."""
    return (
        "\n".join([*head(r), *published(r), *evaluated(r), *compared(r), *choice(r), *corrections(r)]).rstrip() + "\n"
    )


def terminal_page(r: Evaluated) -> RenderableType:
    """Return the page as the terminal prints it."""
    return Markdown(page(r))


def head(r: Evaluated) -> Iterator[str]:
    c = r.case.config
    active = f" ({format_count(c.model.active)} active)" if c.model.experts else ""
    yield f"# {r.case.title}"
    yield ""
    yield f"{r.case.by}. {r.case.story}"
    yield ""
    yield f"{format_count(c.model.total)} parameters{active}: {c.model.describe_shape()}."
    yield ""


def published(r: Evaluated) -> Iterator[str]:
    yield "## What was published, and what is assumed"
    yield ""
    yield from bullets(r.case.settings)
    yield from bullets(f"*assumed:* {word}" for word in r.case.assumed)
    yield ""
    yield f"Sources: {'; '.join(r.case.sources)}."
    yield ""


def evaluated(r: Evaluated) -> Iterator[str]:
    e, p = r.estimate, r.estimate.prediction
    yield "## Our estimate"
    yield ""
    work = f"{e.model.describe_batch(e.workload)}, {e.workload.precision}"
    yield f"{e.plan.title()} on {e.plan.world:,} × {e.cluster.accelerator.name}, {work}:"
    yield ""
    band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
    fit = "" if p.fits else ", which does not fit according to our memory model"
    yield f"- step {format_seconds(p.step_time_s)} ({band}), MFU {p.mfu:.1%}, HFU {p.hfu:.1%}"
    yield f"- memory {p.memory_gib:.1f} of {p.memory_limit_gib:.1f} GiB{fit}"
    if e.workload.tokens:
        yield f"- {format_count(e.workload.tokens)} {e.model.unit}: {r.days:.1f} days, {format_count(studies.gpu_hours(e))} GPU-hours"
    yield f"- constants: {p.calibrated}"
    yield ""
    yield "| part of the step | time | share |"
    yield "| --- | ---: | ---: |"
    for part, seconds in sorted(p.exposed_s.items(), key=lambda item: -item[1]):
        if seconds >= SHARE * p.step_time_s:
            yield f"| {part_name(part)} | {format_seconds(seconds)} | {seconds / p.step_time_s:.1%} |"
    yield ""


def compared(r: Evaluated) -> Iterator[str]:
    yield "## Comparison with the published figures"
    yield ""
    if r.rows:
        yield "| figure | published | ours | ours / published | in our band | source |"
        yield "| --- | ---: | ---: | ---: | --- | --- |"
        for row in r.rows:
            band = "yes" if row.within else "no"
            yield f"| {row.unit} | {figure(row, row.published)} | {figure(row, row.ours)} | {row.ratio:.2f} | {band} | {row.source} |"
        yield ""
    yield r.case.difference
    yield ""


def figure(row: Row, value: float) -> str:
    if row.what in ("mfu", "hfu"):
        return f"{value:.1%}"
    if row.what == "flops":
        return f"{value:.2e}"
    return format_count(value, 4) if value >= 1e5 else f"{value:,.4g}"


def choice(r: Evaluated) -> Iterator[str]:
    yield "## The planner's choice"
    yield ""
    if r.choice is None:
        yield "The planner was not run for this case."
        yield ""
        return
    p = r.choice.prediction
    yield f"On the same devices, with the same batch and stack: {r.choice.plan.title()}. It may use features that the software of that"
    yield "run did not support, such as a zero-bubble schedule or sharding with a pipeline."
    yield ""
    yield f"- step {format_seconds(p.step_time_s)} against {format_seconds(step(r.estimate))}; {studies.verdict(r.estimate, r.choice)}"
    yield f"- MFU {p.mfu:.1%}, memory {p.memory_gib:.1f} of {p.memory_limit_gib:.1f} GiB"
    yield f"- what differs: {differences(r.estimate.plan, r.choice.plan)}"
    yield f"- where the time goes: {moved(r.estimate, r.choice)}"
    yield ""


def moved(was: Estimate, now: Estimate) -> str:
    """Return the parts of the step that take less or more time in the second estimate."""
    parts = [
        f"{part_name(part)} {format_seconds(-s) if s < 0 else format_seconds(s)} {'more' if s < 0 else 'less'}"
        for part, s in studies.gains(was, now)
    ]
    return ", ".join(parts) or "the same"


def corrections(r: Evaluated) -> Iterator[str]:
    if r.case.corrections:
        yield "## Corrections to introductory texts"
        yield ""
        yield from bullets(r.case.corrections)


def bullets(words: Iterable[str]) -> Iterator[str]:
    return (f"- {word}" for word in words)


def index(results: Iterable[Evaluated]) -> str:
    """Return the table of all cases."""
    lines = [
        "# Case studies",
        "",
        "Published training runs, estimated as published, and the plan that the planner chooses for the same devices. Each page lists what was",
        "published and what was assumed. `meshwright plan --case NAME` shows one.",
        "",
        "| case | GPUs | plan | step | MFU | GiB | ours / published | planner |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for r in results:
        p = r.estimate.prediction
        ratios = ", ".join(f"{row.unit} {row.ratio:.2f}" for row in r.rows) or "nothing published"
        chosen = f"{format_seconds(step(r.choice))}: {r.choice.plan.title()}" if r.choice else ""
        used = f"{p.memory_gib:.0f}" + ("" if p.fits else " (over)")
        lines.append(
            f"| [{r.case.title}]({r.case.name}.md) | {r.estimate.plan.world:,} | {r.estimate.plan.title()} | "
            f"{format_seconds(p.step_time_s)} | {p.mfu:.1%} | {used} | {ratios} | {chosen} |"
        )
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return all pages by file name."""
    results = [studies.evaluate(name) for name in studies.CASES]
    return {"README.md": index(results), **{f"{r.case.name}.md": page(r) for r in results}}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
