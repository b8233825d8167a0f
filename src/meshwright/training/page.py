"""A training to look at: a bar with the loss as it falls, and at the end measured against predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from meshwright.describe.result import Difference
from meshwright.training.records import StepRecord
from meshwright.training.run import Training, predicted
from meshwright.units import format_bytes, format_count, format_decimal_bytes, format_seconds
from meshwright.view.tables import console, filled, heading

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK, BAR = 32, 16


def sparkline(values: list[float], width: int = SPARK) -> str:
    """The course of a number in one line: means of `width` runs of it, from the lowest block to the highest; a cross
    where it is no number."""
    if not values:
        return ""
    edges = (
        [round(i * len(values) / width) for i in range(width + 1)] if len(values) > width else range(len(values) + 1)
    )
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, list(edges)[1:], strict=False)]
    finite = [m for m in means if isfinite(m)] or [0.0]
    low, span = min(finite), max(finite) - min(finite) or 1.0
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] if isfinite(m) else "×" for m in means)


def load(router: dict[str, float]) -> str:
    """How evenly experts are used: 1 is even and 0 a collapse, the busiest over the mean, and what was lost."""
    lost = f", {router['dropped']:.0%} dropped" if router["dropped"] else ""
    lost += f", {router['idle']:.0%} idle" if router["idle"] else ""
    return f"experts {router['entropy']:.2f} even, busiest {router['peak']:.1f}×{lost}"


class Show:
    """Hears steps; draws a live bar on a terminal, else a line now and then."""

    def __init__(self, steps: int, out: Console, progress: Progress | None) -> None:
        self.steps, self.out, self.progress = steps, out, progress
        self.losses: list[float] = []
        self.every = max(1, steps // 10)
        self.task: Any = progress.add_task("", total=steps, words="starting ranks") if progress else None

    def __call__(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        rate = format_count(record.tokens / record.seconds)
        words = f"loss {record.loss:.4f}  norm {record.gradient_norm:.2f}  {rate} tokens/s"
        words += f"  {load(record.router)}" if record.router else ""
        if self.progress is not None:
            # Rich would cut the bar as soon as the words, so what is too long is cut here.
            room = self.out.width - BAR - len(f" {self.steps}/{self.steps} 00:00:00 ")
            course = min(SPARK, room - len(words) - 2)
            words = f"{words}  {sparkline(self.losses, course)}" if course >= 8 else words[:room]
            self.progress.update(self.task, advance=1, words=words)
        elif record.step % self.every == 0 or record.step == self.steps - 1:
            self.out.print(f"step {record.step:>5}  {words}")


@contextmanager
def showing(steps: int) -> Iterator[Show]:
    out = console()
    if not out.is_terminal:
        yield Show(steps, out, None)
        return
    columns = BarColumn(BAR), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[words]}")
    with Progress(*columns, console=out) as progress:
        yield Show(steps, out, progress)


def page(training: Training, folder: str) -> RenderableType:
    m, p = training.measurement, training.prediction
    low, high = format_seconds(m.step_time_low_s), format_seconds(m.step_time_high_s)
    fp8 = ", products in fp8" if training.config.workload.precision == "fp8" else ""
    title = heading(training.config.plan.title(), f"{m.steps} steps, {m.warmup} of them warm-up{fp8}")
    loss = Text.assemble(("loss ", "dim"), f"{m.loss[0]:.3f} → {m.loss[-1]:.3f}  ", (sparkline(m.loss), "cyan"))
    step = Text.assemble(
        ("step ", "dim"),
        (format_seconds(m.step_time_s), "bold"),
        (f"  ({low} to {high})", "dim"),
        ("   predicted ", "dim"),
        format_seconds(p.step_time_s),
        (f"  ({format_seconds(p.step_time_low_s)} to {format_seconds(p.step_time_high_s)})", "dim"),
    )
    lost = next((record.step for record in training.steps if not isfinite(record.loss)), None)
    if lost is not None:
        loss += Text(f"  no number from step {lost} on: it diverged", "bold red")
    lines = [title, *(Text(f"not run: {part}", "yellow") for part in training.config.model.not_run), loss, step]
    routers = [record.router for record in training.steps if record.router]
    if routers:
        course = sparkline([router["entropy"] for router in routers])
        lines.append(Text.assemble(("load ", "dim"), f"{load(routers[0])} → {load(routers[-1])}  ", (course, "cyan")))
    lines += saved(training)
    return Group(*lines, difference(training.differences), Text(f"written to {folder}", "dim"))


def saved(training: Training) -> list[Text]:
    """What compressed gradients spare the data-parallel links; what they cost in time is `benchmarks/compress.py`'s."""
    plan, sent = training.config.plan, training.measurement.traffic_bytes.get("dp", 0.0)
    if not plan.lossy or not sent:
        return []
    exact = predicted(replace(training.config, plan=plan.but(compression="none", comm_dtype=None)))
    whole = exact.traffic_bytes["dp"]
    words = f"{format_decimal_bytes(sent)} a step over dp, {format_decimal_bytes(whole)} without {plan.wire}: {whole / sent:.3g}× fewer"
    return [Text.assemble(("sent ", "dim"), words)]


def difference(rows: list[Difference]) -> RenderableType:
    cells = []
    for row in rows:
        error = Text(percent(row.error), "green" if abs(row.error) <= 0.2 else "yellow")
        cells.append([row.what, told(row.predicted, row.unit), told(row.measured, row.unit), error])
    return filled(("", ">predicted", ">measured", ">error"), cells, title="Prediction against measurement")


def percent(error: float) -> str:
    """Signed, but for what rounds to nothing, and for what was there and not predicted, or predicted and not there."""
    if not isfinite(error):
        return "—"
    return f"{100 * error:+.0f}%" if abs(error) >= 0.005 else "0%"


def told(value: float, unit: str) -> str:
    match unit:
        case "s":
            return format_seconds(value)
        case "GiB":
            return format_bytes(value * 2**30)
        case "bytes":
            return format_decimal_bytes(value)
        case "tokens/s":
            return f"{format_count(value)} /s"
    return f"{value:.3g} {unit}"
