"""Follow a run in the terminal until it ends: a live picture on a terminal, otherwise lines by time.

`train` shows its own run so, and `meshwright runs --watch` one that another process writes, on this host or on another one.
Without a terminal there is at least a line every two seconds (less often after the first minute), also while processes start or while
one step takes long.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from meshwright.describe.run_folder import state
from meshwright.errors import MeshwrightError
from meshwright.view.live import LiveRun, line_of, picture
from meshwright.view.tables import console

STEP_S, SILENCE_S = 1.0, 1.8  # in the first minute, between lines about steps; at most between any two lines
BACK_OFF = 33.0  # later, a line after 1/33 of the time since the start
POLL_S = 0.1
QUIET_EVENTS = ("checkpoint-begun", "evaluation")  # the end of a checkpoint has a line, and so has every evaluated step


class ProgressDisplay:
    """Shows a run from its folder: as a live picture on a terminal, otherwise as lines by time."""

    def __init__(self, run: LiveRun, out: Console) -> None:
        self.run, self.out = run, out
        self.started = self.printed = time.monotonic()
        self.doing = "starting processes"
        self.earlier = 0  # rows that were there before this process began to train

    def announce(self, text: str) -> None:
        """Show what happens before the first step."""
        self.doing = text

    def refresh(self) -> list[dict[str, Any]]:
        """Read what is new; a file that is being replaced is read the next time."""
        try:
            return self.run.refresh()
        except (OSError, MeshwrightError):
            return []

    def picture(self) -> RenderableType:
        self.refresh()
        return picture(self.run, self.out.width, self.doing)

    def print_new(self) -> None:
        """Print lines about new steps and events, or what the run waits for if nothing happened for a while."""
        seen = len(self.run.events)
        rows = self.refresh()
        for event in self.run.events[seen:]:
            if event.get("kind") not in QUIET_EVENTS:
                self.print(f"{event.get('text', '')} (step {event.get('step', '?')})")
        for row in rows:
            first_or_last = row["step"] == 0 or row["step"] == self.run.steps - 1
            if first_or_last or self.is_due(STEP_S):
                self.print(line_of(self.run, row))
        if self.is_due(SILENCE_S):
            self.print(f"{self.activity()} ({time.monotonic() - self.started:.0f} s since the start)")

    def is_due(self, interval: float) -> bool:
        """Whether the last line is `interval` seconds old, or more after the first minute."""
        now = time.monotonic()
        return now - self.printed >= max(interval, (now - self.started) / BACK_OFF)

    def print(self, line: str) -> None:
        self.out.print(line, markup=False)
        self.printed = time.monotonic()

    def activity(self) -> str:
        done, steps = self.run.done, self.run.steps
        if len(self.run.rows) <= self.earlier:
            return self.doing
        return f"step {done} of {steps} is running" if done < steps else "tracing and observing a few more steps"

    def print_until(self, stop: threading.Event) -> None:
        while not stop.wait(POLL_S):
            self.print_new()
        self.print_new()


@contextmanager
def progress_display(steps: int, folder: Path) -> Iterator[ProgressDisplay]:
    """Show the progress of the run that writes to `folder`. On a terminal the picture disappears when the run has ended well, since
    the result follows; after an error it stays."""
    out = console()
    display = ProgressDisplay(LiveRun(folder, steps), out)
    display.refresh()  # steps before a resume are not news
    display.earlier = len(display.run.rows)
    if out.is_terminal:
        live = Live(console=out, get_renderable=display.picture, refresh_per_second=4)
        with live:
            yield display
            live.transient = True
        return
    stop = threading.Event()
    thread = threading.Thread(target=display.print_until, args=(stop,), daemon=True)
    thread.start()
    try:
        yield display
    finally:
        stop.set()
        thread.join()


def watch_run(folders: Sequence[Path]) -> None:
    """Show the newest run until it ends; one that has ended is shown as it ended."""
    if not folders:
        fix = "meshwright train PLAN.toml --out runs/NAME"
        raise MeshwrightError("MW-REP-001", "there is no run to watch", fix=fix)
    folder = folders[0]
    out = console()
    display = ProgressDisplay(LiveRun(folder), out)
    if not out.is_terminal:
        display.refresh()
        while state(folder) == "running":
            display.print_new()
            time.sleep(POLL_S)
        display.print_new()
        out.print(picture(display.run, out.width))
        return
    with Live(console=out, get_renderable=display.picture, refresh_per_second=4):
        while state(folder) == "running":
            time.sleep(POLL_S)
