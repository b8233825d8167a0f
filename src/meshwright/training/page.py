"""A training in the terminal: progress while it runs, and at the end the measurement and the prediction.

Progress goes by time: on a terminal a live bar, otherwise a line at least every two seconds (less often after the
first minute), also while processes start or while one step takes long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from meshwright.cost.predict import COMMUNICATION
from meshwright.describe.result import MEASURED_PARTS, Difference, part_label
from meshwright.training.records import StepRecord
from meshwright.training.run import Training, predicted
from meshwright.units import format_bytes, format_count, format_decimal_bytes, format_seconds
from meshwright.view.tables import console, filled, heading

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK, BAR = 32, 16
STEP_S, SILENCE_S = 1.0, 1.8  # in the first minute, between lines about steps; at most between any two lines
PARTS = ("compute", *MEASURED_PARTS, "other")
PART_NAMES = {axis: f"{axis}: {name}" for axis, name in COMMUNICATION.items()} | {
    "bubble": "bubble: waits for other stages",
    "other": "other groups",
}
BACK_OFF = 33.0  # later, a line after 1/33 of the time since the start


def sparkline(values: list[float], width: int = SPARK) -> str:
    """A series of numbers as one line of blocks, each the mean of an equal run of values; × marks NaN and infinity."""
    if not values:
        return ""
    edges = (
        [round(i * len(values) / width) for i in range(width + 1)] if len(values) > width else range(len(values) + 1)
    )
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, list(edges)[1:], strict=False)]
    finite = [m for m in means if isfinite(m)] or [0.0]
    low, span = min(finite), max(finite) - min(finite) or 1.0
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] if isfinite(m) else "×" for m in means)


def expert_balance(router: dict[str, float]) -> str:
    """How evenly tokens are spread over experts: entropy (1 is even, 0 a single expert) and the busiest expert."""
    text = f"expert balance {router['entropy']:.2f} (1 = even), busiest expert {router['peak']:.1f}× the mean"
    text += f", {router['dropped']:.0%} dropped" if router["dropped"] else ""
    return text + (f", {router['idle']:.0%} idle" if router["idle"] else "")


class ProgressDisplay:
    """Shows each finished step: in a live bar on a terminal, otherwise as lines by time."""

    def __init__(self, steps: int, out: Console, progress: Progress | None) -> None:
        self.steps, self.out, self.progress = steps, out, progress
        self.losses: list[float] = []
        self.validation = ""  # the last validation loss
        self.started = self.printed = time.monotonic()
        self.task: Any = progress.add_task("", total=steps, words="starting processes") if progress else None
        self.lock = threading.Lock()
        self.doing = "starting processes"

    def __call__(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        rate = format_count(record.tokens / record.seconds)
        words = f"loss {record.loss:.4f}  norm {record.gradient_norm:.2f}  {rate} tokens/s"
        if record.validation_loss is not None:
            self.validation = f"  validation {record.validation_loss:.4f}"
        words += self.validation
        words += f"  {expert_balance(record.router)}" if record.router else ""
        if self.progress is not None:
            # Rich would cut the bar before the words, so the words are cut here.
            room = self.out.width - BAR - len(f" {self.steps}/{self.steps} 00:00:00 00:00:00 ")
            width = min(SPARK, room - len(words) - 2)
            words = f"{words}  {sparkline(self.losses, width)}" if width >= 8 else words[:room]
            self.progress.update(self.task, advance=1, words=words)
        elif self.is_due(STEP_S) or record.step in (0, self.steps - 1):
            self.print(f"step {record.step:>5}  {words}")

    def announce(self, text: str) -> None:
        """Show what happens before the first step."""
        self.doing = text
        if self.progress is not None:
            self.progress.update(self.task, words=text)

    def is_due(self, interval: float) -> bool:
        """Whether the last line is `interval` seconds old, or more after the first minute."""
        now = time.monotonic()
        return now - self.printed >= max(interval, (now - self.started) / BACK_OFF)

    def print(self, line: str) -> None:
        with self.lock:
            self.out.print(line)
            self.printed = time.monotonic()

    def fill_silence(self, stop: threading.Event) -> None:
        """Print what the run waits for, while no step finishes."""
        while not stop.wait(0.1):
            if self.is_due(SILENCE_S):
                self.print(f"{self.activity()} ({time.monotonic() - self.started:.0f} s since the start)")

    def activity(self) -> str:
        if not self.losses:
            return self.doing
        done = len(self.losses)
        return (
            f"step {done} of {self.steps} is running" if done < self.steps else "tracing and observing a few more steps"
        )


@contextmanager
def progress_display(steps: int) -> Iterator[ProgressDisplay]:
    """Show the progress of a run; the value is called with the record of each finished step."""
    out = console()
    if out.is_terminal:
        counts = MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(BarColumn(BAR), *counts, TextColumn("{task.fields[words]}"), console=out) as progress:
            yield ProgressDisplay(steps, out, progress)
        return
    display, stop = ProgressDisplay(steps, out, None), threading.Event()
    thread = threading.Thread(target=display.fill_silence, args=(stop,), daemon=True)
    thread.start()
    try:
        yield display
    finally:
        stop.set()
        thread.join()


def page(training: Training, folder: str) -> RenderableType:
    """The result of a run: loss, step time, expert balance, and the table of predicted and measured values."""
    m, p = training.measurement, training.prediction
    low, high = format_seconds(m.step_time_low_s), format_seconds(m.step_time_high_s)
    fp8 = ", matrix products in fp8" if training.config.workload.precision == "fp8" else ""
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
    lines = [title, *(Text(f"not run: {part}", "yellow") for part in training.config.model.not_run), loss, step]
    evaluated = [loss for _, loss in m.validation_loss]
    if evaluated:
        change = f"{evaluated[0]:.3f} → {evaluated[-1]:.3f}  "
        lines.insert(-1, Text.assemble(("validation loss ", "dim"), change, (sparkline(evaluated), "cyan")))
    if training.diverged_at is not None:
        lines.append(Text(f"Loss is NaN or infinite from step {training.diverged_at} on", "bold red"))
    if training.interference is not None:
        lines += [Text(sentence, "yellow") for sentence in training.interference.sentences()]
    if not training.comparable:
        name = training.config.cluster.accelerator.name
        lines.append(Text(f"The prediction is for {name}, the run used CPU processes: times do not compare", "yellow"))
    routers = [record.router for record in training.steps if record.router]
    if routers:
        entropy = sparkline([router["entropy"] for router in routers])
        lines += [
            Text.assemble(("first step ", "dim"), expert_balance(routers[0])),
            Text.assemble(("last step  ", "dim"), expert_balance(routers[-1]), "  ", (entropy, "cyan")),
        ]
    lines += compression_savings(training)
    tables = [difference_table(training.differences), *parts_table(training)]
    return Group(*lines, *tables, Text(f"written to {folder}", "dim"))


def compression_savings(training: Training) -> list[Text]:
    """Bytes that gradient compression saves on the data-parallel links. `benchmarks/compress.py` measures its time."""
    plan, sent = training.config.plan, training.measurement.traffic_bytes.get("dp", 0.0)
    if not plan.lossy or not sent:
        return []
    exact = predicted(replace(training.config, plan=plan.but(compression="none", comm_dtype=None)))
    uncompressed = exact.traffic_bytes["dp"]
    words = (
        f"{format_decimal_bytes(sent)} per step over dp, {format_decimal_bytes(uncompressed)} without {plan.wire}: "
        f"{uncompressed / sent:.3g}× fewer"
    )
    return [Text.assemble(("sent ", "dim"), words)]


def parts_table(training: Training) -> list[RenderableType]:
    """The step of the busiest rank by part: exposed seconds sum to the step; hidden communication ran behind compute."""
    m, p = training.measurement, training.prediction
    if not m.exposed_s:
        return []
    predicted_parts, parts = p.parts, m.parts
    cells: list[list[object]] = []
    for part in PARTS:
        row = [predicted_parts.get(part, 0.0), parts.get(part, 0.0)]
        behind = [result.hidden_s.get(part, 0.0) for result in (p, m)]
        if any((*row, *behind)):
            share = f"{parts.get(part, 0.0) / m.step_time_s:.0%}"
            hidden = [format_seconds(s) if s else "" for s in behind] if part in COMMUNICATION else ["", ""]
            cells.append([PART_NAMES.get(part, part), *(format_seconds(s) if s else "–" for s in row), share, *hidden])
    total = Text(format_seconds(sum(predicted_parts.values())), "bold"), Text(format_seconds(m.step_time_s), "bold")
    cells.append([Text("step", "bold"), *total, "", "", ""])
    columns = ("", ">predicted", ">measured", ">of the step", ">hidden, predicted", ">hidden, measured")
    return [filled(columns, cells, title="Step of the busiest rank by part")]


def difference_table(rows: list[Difference]) -> RenderableType:
    """All rows but those of the parts, which have their table."""
    parts = {part_label(part) for part in PARTS}
    cells = []
    for row in rows:
        if row.what in parts:
            continue
        error = Text(percent(row.error), "green" if abs(row.error) <= 0.2 else "yellow")
        cells.append([row.what, format_value(row.predicted, row.unit), format_value(row.measured, row.unit), error])
    return filled(("", ">predicted", ">measured", ">error"), cells, title="Prediction and measurement")


def percent(error: float) -> str:
    """A signed percentage; "—" if there is none, because the measured value is zero."""
    if not isfinite(error):
        return "—"
    return f"{100 * error:+.0f}%" if abs(error) >= 0.005 else "0%"


def format_value(value: float, unit: str) -> str:
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
