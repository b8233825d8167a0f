"""A training in the terminal while it runs, drawn from its run folder alone.

    llama-tiny  dp 2 · tp 2 · micro-batch 4        4 ranks on cpu · running · runs/demo
    ━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━  step 123 of 200  0:00:51 since the start, about 0:00:32 left

                      measured            predicted
    loss              3.4107                               █▇▆▅▄▃▃▂▂▁▁   validation 3.5120 after step 99
    step              410 ms              390 ms  +5%      ▂▁▁▁▂▁▁
    …

The measured column is the median of the last `WINDOW` steps. Whether a run is on this host, on another one or has ended makes no
difference: `train` shows its own run, and `meshwright runs DIR --watch` one that was started elsewhere.
"""

import time
from datetime import timedelta
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.describe.config import Config, load
from meshwright.describe.result import AXES
from meshwright.describe.run_folder import PREDICTION, RunFollower, present_plan, read_json
from meshwright.errors import MeshwrightError
from meshwright.units import counted, format_bytes, format_count, format_seconds
from meshwright.view.tables import heading, sparkline

WINDOW = 20  # steps of which the median is shown
EVENTS = 4  # last events that are shown
SPARK, GAP, WIDE = 16, 2, 140  # width of a trend, of the space between columns, and of a wide terminal
NARROW = 110  # a terminal on which notes are cut
CLOSE, FAR = 0.2, 0.5  # difference from the prediction up to which it is green, and from which it is red
IN_TABLE = ("checkpoint-begun", "checkpoint-finished", "evaluation")  # events that the table shows
EVENT_STYLES = {
    "fault": "red", "checkpoint-failed": "red", "spike": "yellow", "skipped": "yellow", "restart": "yellow", "logger": "yellow",
}  # fmt: skip
COMMUNICATION = (*AXES, "bubble")  # parts of a prediction that a rank measures as time blocked in communication


class LiveRun:
    """The state of a run; `refresh` reads what is new in its folder."""

    def __init__(self, folder: Path, steps: int = 0) -> None:
        self.folder, self.follower = folder, RunFollower(folder)
        self.planned = steps
        self.rows: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.config: Config | None = None
        self.prediction: dict[str, Any] = {}
        self.started = time.time()

    @property
    def unit(self) -> str:
        """Return the unit of the batch."""
        return self.config.model.unit if self.config else "tokens"

    def refresh(self) -> list[dict[str, Any]]:
        """Read on, and return the new rows."""
        new = self.follower.new_steps()
        if new:
            while self.rows and self.rows[-1]["step"] >= new[0]["step"]:
                self.rows.pop()  # steps that are trained again
            self.rows += new
        self.events += self.follower.new_events()
        if self.config is None and (self.folder / PREDICTION).is_file():
            try:
                self.prediction, self.config = read_json(self.folder / PREDICTION), load(present_plan(self.folder))
            except MeshwrightError:  # being written
                self.config = None
        return new

    @property
    def about(self) -> dict[str, Any]:
        return self.follower.about

    @property
    def steps(self) -> int:
        """Planned steps: those of the process that shows its own run, else those that the folder says; 0 if it does not."""
        return int(self.planned or self.about.get("steps") or 0)

    @property
    def done(self) -> int:
        return self.rows[-1]["step"] + 1 if self.rows else 0

    @property
    def comparable(self) -> bool:
        """Whether the run uses the kind of device that the prediction is for."""
        return is_comparable(self.about, self.config)

    def series(self, key: str) -> list[float]:
        return [nan if row[key] is None else float(row[key]) for row in self.rows if key in row]

    def recent(self, key: str) -> float | None:
        """The median of the last steps; None if the run does not have it."""
        values = [row[key] for row in self.rows[-WINDOW:] if isinstance(row.get(key), int | float)]
        return median(values) if values else None

    def exposed(self) -> dict[str, float]:
        """Median seconds that rank 0 was blocked in communication, by part."""
        recent_rows = [row["exposed_s"] for row in self.rows[-WINDOW:] if isinstance(row.get("exposed_s"), dict)]
        parts = dict.fromkeys(part for row in recent_rows for part in row)
        return {part: median(row.get(part, 0.0) for row in recent_rows) for part in parts}

    def elapsed_s(self) -> float:
        began = float(self.about.get("started") or self.started)
        ended = (self.follower.attempts or [{}])[-1].get("ended")
        return max(0.0, (ended or time.time()) - began)

    def left_s(self) -> float | None:
        """Time until the last step at the rate of the last ones, evaluations and checkpoints included; None before two steps of the
        present attempt: the time between two attempts is not time of training."""
        attempt = max(len(self.follower.attempts) - 1, 0)
        rows = [row for row in self.rows[-10 * WINDOW :] if "time" in row and row.get("attempt", 0) == attempt]
        if len(rows) < 2 or not self.steps or rows[-1]["step"] <= rows[0]["step"]:
            return None
        rate = (rows[-1]["time"] - rows[0]["time"]) / (rows[-1]["step"] - rows[0]["step"])
        return max(0.0, rate * (self.steps - self.done))


def picture(run: LiveRun, width: int = 100, doing: str = "") -> RenderableType:
    """The whole view; `doing` is what happens before the first step."""
    lines: list[RenderableType] = [title(run, width), progress(run, width, doing)]
    if run.rows:
        lines += [Text(""), quantities(run, width)]
        if width < NARROW and run.prediction.get("mfu_denominator"):
            lines.append(Text(f"MFU of {run.prediction['mfu_denominator']}", "dim"))
        if not run.comparable and run.config:
            words = f"The prediction is for {run.config.cluster.accelerator.name}, the run uses CPU processes"
            lines.append(Text(f"{words}: times do not compare", "yellow"))
    lines += event_lines(run)
    return Group(*lines)


def title(run: LiveRun, width: int) -> Text:
    if run.config is None:
        return heading(str(run.folder))
    about, attempts = run.about, run.follower.attempts
    world = attempts[-1]["world"] if attempts else run.config.plan.world
    aside = [f"{counted(world, 'rank')} on {about.get('device', '?')}"]
    aside += [f"attempt {len(attempts)}"] if len(attempts) > 1 else []
    name, where = f"{run.config.model.name}  {run.config.plan.title()}", " · ".join([*aside, str(run.folder)])
    return heading(name, where) if len(name + where) + GAP <= width else heading(name) + Text(f"\n{where}", "dim")


def progress(run: LiveRun, width: int, doing: str) -> RenderableType:
    clock = f"{format_clock(run.elapsed_s())} since the start"
    left = run.left_s()
    if left is not None and run.done < run.steps:
        clock += f", about {format_clock(left)} left"
    words = f"step {run.done:,} of {run.steps:,}" if run.rows or not doing else doing
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=run.steps or 1, completed=run.done, width=max(10, min(40, width - len(words + clock) - 6)))
    row.add_row(bar, Text(words, "bold"), Text(clock, "dim"))
    return row


def quantities(run: LiveRun, width: int) -> Table:
    """The table of measured and predicted values. Trends and notes use the width that these leave, and are left out on narrow terminals."""
    rows = [("", "measured", "predicted", Text(""), [], ""), *rows_of(run)]
    needed = sum(max(len(row[i]) for row in rows) for i in range(4)) + 4 * GAP
    trend = max(0, min(SPARK if width < WIDE else 2 * SPARK, width - needed - GAP))
    room = width - needed - trend - GAP
    out = Table.grid(padding=(0, GAP, 0, 0))
    out.add_column(style="dim", no_wrap=True)
    for _ in range(3):
        out.add_column(justify="right", no_wrap=True)
    for style in ("cyan", "dim"):
        out.add_column(style=style, no_wrap=True)
    for number, (name, now, expected, against, values, note) in enumerate(rows):
        style = "bold" if number else "dim"
        note = note if len(note) <= room else note[: max(0, room - 1)] + "…" if room > 8 else ""
        predicted = Text(expected, "" if number else "dim")
        out.add_row(name, Text(now, style), predicted, against, sparkline(values, trend), note)
    return out


def rows_of(run: LiveRun) -> list[tuple[str, str, str, Text, list[float], str]]:
    """(name, measured, predicted, difference, values by step, note) of each quantity that the run has."""
    p, last = run.prediction, run.rows[-1]
    loss = last.get("loss")
    evaluated = [row for row in run.rows if row.get("validation_loss") is not None]
    note = f"validation {evaluated[-1]['validation_loss']:.4f} after step {evaluated[-1]['step']}" if evaluated else ""
    rows = [("loss", "NaN or infinite" if loss is None else f"{loss:.4f}", "", Text(""), run.series("loss"), note)]

    def add(name: str, key: str, form: Any, expected: float | None, note: str = "") -> None:
        now = run.recent(key)
        if now is not None:
            shown = form(expected) if expected else ""
            rows.append((name, form(now), shown, difference(now, expected, run.comparable), run.series(key), note))

    low, high = p.get("step_time_low_s"), p.get("step_time_high_s")
    bounds = f"predicted {format_seconds(low)} to {format_seconds(high)}" if low and high else ""
    add("step", "seconds", format_seconds, p.get("step_time_s"), bounds)
    add(f"{run.unit}/s", "tokens_per_s", format_count, p.get("tokens_per_s"))
    denominator = f"of {p['mfu_denominator']}" if p.get("mfu_denominator") else ""
    add("MFU", "mfu", lambda x: f"{x:.1%}", p.get("mfu"), denominator)
    exposed = run.exposed()
    if exposed:
        rows.append(exposed_row(run, exposed))
    on_gpu, limit = str(run.about.get("device", "")) != "cpu", p.get("memory_limit_gib")
    where = f"peak of rank 0, of {format_bytes(limit * 2**30)}" if on_gpu and limit else "process of rank 0, peak"
    add("memory", "memory_gib", lambda x: format_bytes(x * 2**30), p.get("memory_gib") if on_gpu else None, where)
    add("gradient norm", "grad_norm", lambda x: f"{x:.3g}", None)
    add("learning rate", "learning_rate", lambda x: f"{x:.3g}", None)
    add("expert balance", "router_entropy", lambda x: f"{x:.2f}", None, "1 = even")
    written = checkpoint_state(run)
    if written:
        rows.append(("checkpoint", written[0], "", Text(""), [], written[1]))
    return rows


def exposed_row(run: LiveRun, exposed: dict[str, float]) -> tuple[str, str, str, Text, list[float], str]:
    now, step = sum(exposed.values()), run.recent("seconds") or nan
    expected = sum(run.prediction.get("exposed_s", {}).get(part, 0.0) for part in COMMUNICATION)
    values = [sum(row["exposed_s"].values()) for row in run.rows if isinstance(row.get("exposed_s"), dict)]
    parts = ", ".join(f"{part} {format_seconds(s)}" for part, s in sorted(exposed.items(), key=lambda x: -x[1]) if s)
    shown = f"{format_seconds(now)}, {now / step:.0%}"
    against = difference(now, expected, run.comparable)
    return "communication", shown, format_seconds(expected) if expected else "", against, values, f"exposed: {parts}"


def checkpoint_state(run: LiveRun) -> tuple[str, str] | None:
    """The last checkpoint, and how old it is; None if there was none."""
    events = [event for event in run.events if str(event.get("kind", "")).startswith("checkpoint")]
    if not events:
        return None
    finished = [event for event in events if event["kind"] == "checkpoint-finished"]
    last = finished[-1] if finished else None
    note = f"written {format_clock(max(0.0, time.time() - last['time']))} ago" if last else ""
    note += f" in {format_seconds(last['seconds'])}" if last and last.get("seconds") else ""
    if events[-1]["kind"] == "checkpoint-begun":
        return f"writing step {events[-1]['step']}", f"last: step {last['step']}, {note}" if last else ""
    return f"step {last['step']}" if last else "", note


def difference(now: float, expected: float | None, comparable: bool = True) -> Text:
    """Format the difference of a measured and a predicted value."""
    if not expected or not isfinite(now) or not comparable:
        return Text("")
    error = now / expected - 1
    style = "green" if abs(error) <= CLOSE else "yellow" if abs(error) <= FAR else "red"
    return Text(f"{error:+.0%}" if abs(error) >= 0.005 else "0%", style)


def event_lines(run: LiveRun) -> list[Text]:
    """The last events that are not in the table."""
    shown = [event for event in run.events if event.get("kind") not in IN_TABLE][-EVENTS:]
    clocks = [time.strftime("%H:%M:%S  ", time.localtime(event.get("time", 0))) for event in shown]
    lines = [
        Text.assemble((clock, "dim"), (f"{e.get('text', '')}", EVENT_STYLES.get(str(e.get("kind")), "default")))
        for clock, e in zip(clocks, shown, strict=True)
    ]
    return [Text(""), *lines] if lines else []


def line_of(run: LiveRun, row: dict[str, Any]) -> str:
    """One step as a plain line, for logs and pipes."""
    loss, norm = row.get("loss"), row.get("grad_norm")
    words = [f"step {row['step']:>5}", "loss NaN or infinite" if loss is None else f"loss {loss:.4f}"]
    words += [f"norm {norm:.2f}"] if norm is not None else []
    words += [f"{format_count(row['tokens_per_s'])} {run.unit}/s"] if row.get("tokens_per_s") else []
    words += [f"MFU {row['mfu']:.1%}"] if row.get("mfu") and run.comparable else []
    evaluated = [r["validation_loss"] for r in run.rows if r.get("validation_loss") is not None]
    words += [f"validation {evaluated[-1]:.4f}"] if evaluated else []
    words += [expert_balance(row)] if "router_entropy" in row else []
    left = run.left_s()
    words += [f"{format_clock(left)} left"] if left is not None and run.done < run.steps else []
    return "  ".join(words)


def expert_balance(row: dict[str, Any]) -> str:
    """Return how evenly tokens are spread over experts: entropy (1 is even, 0 a single expert) and the busiest expert."""
    text = f"expert balance {row['router_entropy']:.2f} (1 = even), busiest expert {row['router_peak']:.1f}× the mean"
    text += f", {row['router_dropped']:.0%} dropped" if row.get("router_dropped") else ""
    return text + (f", {row['router_idle']:.0%} idle" if row.get("router_idle") else "")


def format_clock(seconds: float) -> str:
    """Hours, minutes and seconds, with days before them if there are any."""
    return str(timedelta(seconds=round(seconds)))


def is_comparable(about: dict[str, Any], config: Config | None) -> bool:
    """Whether a run used the kind of device that its prediction is for."""
    return str(about.get("device", "")) != "cpu" or config is None or config.cluster.accelerator.name == "cpu"
