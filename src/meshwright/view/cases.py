"""Case studies as pages: one Markdown page per case, which the terminal shows too.

`make pages` (`python -m meshwright.view.cases docs/cases`) writes every page; a test compares the pages with this module.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.markdown import Markdown

from meshwright.describe.result import part_name
from meshwright.planner.advice.alternatives import step
from meshwright.planner.advice.guides.textbook import differences
from meshwright.planner.cases import studies
from meshwright.planner.cases.studies import Evaluated, FigureRow
from meshwright.predict.estimate import Estimate
from meshwright.units import format_count, format_seconds
from meshwright.view.tables import markdown_table

SHARE = 0.01  # parts of a step below this share are not listed


def page(r: Evaluated) -> str:
    """Return the page of a case in Markdown. Each function yields the blocks of a section, between which lines are blank."""
    return "\n\n".join([*head(r), *published(r), *evaluated(r), *compared(r), *choice(r), *corrections(r)]) + "\n"


def terminal_page(r: Evaluated) -> RenderableType:
    """Return the page as the terminal prints it."""
    return Markdown(page(r))


def head(r: Evaluated) -> Iterator[str]:
    c = r.case.config
    active = f" ({format_count(c.model.active)} active)" if c.model.experts else ""
    yield f"# {r.case.title}"
    yield f"{r.case.by}. {r.case.story}"
    yield f"{format_count(c.model.total)} parameters{active}: {c.model.describe_shape()}."


def published(r: Evaluated) -> Iterator[str]:
    yield "## What was published, and what is assumed"
    yield bullets([*r.case.settings, *(f"*assumed:* {word}" for word in r.case.assumed)])
    yield f"Sources: {'; '.join(r.case.sources)}."


def evaluated(r: Evaluated) -> Iterator[str]:
    e, p = r.estimate, r.estimate.prediction
    yield "## Our estimate"
    work = f"{e.model.describe_batch(e.workload)}, {e.workload.precision}"
    yield f"{e.plan.title()} on {e.plan.world:,} × {e.cluster.accelerator.name}, {work}:"
    band = f"{format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)}"
    fit = "" if p.fits else ", which does not fit according to our memory model"
    facts = [
        f"step {format_seconds(p.step_time_s)} ({band}), MFU {p.mfu:.1%}, HFU {p.hfu:.1%}",
        f"memory {p.memory_gib:.1f} of {p.memory_limit_gib:.1f} GiB{fit}",
    ]
    if e.workload.tokens:
        hours = format_count(studies.gpu_hours(e))
        facts.append(f"{format_count(e.workload.tokens)} {e.model.unit}: {r.days:.1f} days, {hours} GPU-hours")
    yield bullets([*facts, f"constants: {p.calibrated}"])
    rows = [
        (part_name(part), format_seconds(seconds), f"{seconds / p.step_time_s:.1%}")
        for part, seconds in sorted(p.exposed_s.items(), key=lambda item: -item[1])
        if seconds >= SHARE * p.step_time_s
    ]
    yield markdown_table(("part of the step", ">time", ">share"), rows)


def compared(r: Evaluated) -> Iterator[str]:
    yield "## Comparison with the published figures"
    if r.rows:
        rows = []
        for row in r.rows:
            values = (figure(row, row.published), figure(row, row.ours), f"{row.ratio:.2f}")
            rows.append((row.unit, *values, "yes" if row.within else "no", row.source))
        yield markdown_table(("figure", ">published", ">ours", ">ours / published", "in our band", "source"), rows)
    yield r.case.difference


def figure(row: FigureRow, value: float) -> str:
    if row.what in ("mfu", "hfu"):
        return f"{value:.1%}"
    if row.what == "flops":
        return f"{value:.2e}"
    return format_count(value, 4) if value >= 1e5 else f"{value:,.4g}"


def choice(r: Evaluated) -> Iterator[str]:
    yield "## The planner's choice"
    if r.choice is None:
        yield "The planner was not run for this case."
        return
    p = r.choice.prediction
    yield (
        f"On the same devices, with the same batch and stack: {r.choice.plan.title()}. It may use features that the software of that\n"
        "run did not support, such as a zero-bubble schedule or sharding with a pipeline."
    )
    times = f"{format_seconds(p.step_time_s)} against {format_seconds(step(r.estimate))}"
    yield bullets(
        (
            f"step {times}; {studies.verdict(r.estimate, r.choice)}",
            f"MFU {p.mfu:.1%}, memory {p.memory_gib:.1f} of {p.memory_limit_gib:.1f} GiB",
            f"what differs: {differences(r.estimate.plan, r.choice.plan)}",
            f"where the time goes: {moved(r.estimate, r.choice)}",
        )
    )


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
        yield bullets(r.case.corrections)


def bullets(words: Iterable[str]) -> str:
    return "\n".join(f"- {word}" for word in words)


INDEX = """# Case studies

Published training runs, estimated as published, and the plan that the planner chooses for the same devices. Each page lists what was
published and what was assumed. `meshwright plan --case NAME` shows one.

"""
COLUMNS = ("case", ">GPUs", "plan", ">step", ">MFU", ">GiB", "ours / published", "planner")


def index(results: Iterable[Evaluated]) -> str:
    """Return the table of all cases."""
    rows = []
    for r in results:
        p, plan = r.estimate.prediction, r.estimate.plan
        ratios = ", ".join(f"{row.unit} {row.ratio:.2f}" for row in r.rows) or "nothing published"
        chosen = f"{format_seconds(step(r.choice))}: {r.choice.plan.title()}" if r.choice else ""
        used = f"{p.memory_gib:.0f}" + ("" if p.fits else " (over)")
        numbers = (f"{plan.world:,}", plan.title(), format_seconds(p.step_time_s), f"{p.mfu:.1%}", used)
        rows.append((f"[{r.case.title}]({r.case.name}.md)", *numbers, ratios, chosen))
    return INDEX + markdown_table(COLUMNS, rows) + "\n"


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
