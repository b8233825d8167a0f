"""`meshwright tune`: measure the most promising plans, one after the other, until none is expected to be faster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rich.markup import escape

from meshwright import api
from meshwright.cli.options import SearchOptions, described
from meshwright.cli.output import patient
from meshwright.describe.own_stack import own_stack
from meshwright.errors import MeshwrightError
from meshwright.interop.files import target_framework
from meshwright.interop.logs import compiled
from meshwright.units import parse_seconds

if TYPE_CHECKING:
    from meshwright.planner.tune.run import Command
    from meshwright.planner.tune.session import Tuning


@described
def command(
    plan: str,
    command: list[str] = [],
    framework: str = "",
    steps: int = 10,
    runs: int = 12,
    gain: str = "1%",
    timeout: str = "30min",
    pattern: str = "",
    candidates: int = 32,
    out: Path = Path("tune"),
    device: str = "auto",
    cluster: str = "",
    as_json: bool = False,
    **asked: Unpack[SearchOptions],
) -> None:
    """Find the fastest plan by a few measured runs.

    The planner's leaders are the candidates. Each run is the candidate with the largest expected gain: predictions, how uncertain they are, and what
    earlier runs say of similar plans. It ends when no run is expected to save 1% of a step. Without a command our trainer runs the candidates;
    otherwise the words after --, with {settings}, {arguments}, {steps}, {folder} and {world} filled in. A run that fails or ends at its time limit
    is a result too: one that runs out of memory says how far memory predictions can be trusted. The same call continues an earlier one."""
    from meshwright.planner.question import read_share
    from meshwright.planner.tune import session
    from meshwright.planner.tune.candidates import candidates as candidates_of
    from meshwright.planner.tune.candidates import configuration
    from meshwright.planner.tune.run import Command
    from meshwright.view import tune as view
    from meshwright.view.tables import show, show_json

    target = target_framework(framework, plan)
    if pattern:
        compiled(pattern)
    read_share(gain, "--gain")  # raises before anything runs
    runner = Command(tuple(command) or own_command(device), target, steps, parse_seconds(timeout), pattern).checked()
    question: dict[str, Any] = {**asked}
    if not target and not asked["stack"]:
        question["stack"] = stack_of(plan, cluster, asked)
    with session.exclusive(out):
        if session.begun(out):
            tuning, unfinished = session.resume(configuration(plan, cluster, target, **question), out, runner)
            report(as_json, f"[dim]continued: {len(tuning.trials)} runs are in {escape(str(out))}[/]")
        else:
            with patient("searching") as progress:
                config, plans = candidates_of(plan, cluster, target, candidates, progress, **question)
            tuning, unfinished = session.begin(config, plans, out, runner), []
        reason = measure(tuning, unfinished, runner, runs, gain, as_json)
        tuning.write_results()
    if as_json:
        show_json(tuning.as_dict() | {"stopped": reason})
    else:
        show(view.page(tuning, reason))
    if tuning.best is None:
        raise MeshwrightError(
            "MW-TUNE-008",
            "no run has a step time",
            why=f"{len(tuning.trials)} runs failed, the last one: {tuning.trials[-1].why}; outputs are in {out}/run-N",
            fix="run the command by hand with the settings of run-1",
        )


def measure(tuning: Tuning, unfinished: list[int], runner: Command, runs: int, gain: str, as_json: bool) -> str:
    """Run candidates until none is expected to gain enough; why it ended."""
    from meshwright.planner.question import read_share
    from meshwright.planner.tune import session
    from meshwright.view import tune as view

    while len(tuning.trials) < runs:
        interrupted = bool(unfinished)
        proposed = (unfinished.pop(), 0.0) if interrupted else tuning.proposed()
        if proposed is None:
            return "all candidates were run"
        number, expected = proposed
        if expected < read_share(gain, "--gain") and tuning.best and not interrupted:
            return f"no run is expected to gain {gain} (largest: {expected:.2%})"
        report(as_json, view.before(tuning, number, expected))
        with patient(f"run {len(tuning.trials) + 1}", measurable=False):
            trial = session.step(tuning, runner, number, expected)
        report(as_json, view.after(trial))
    return f"{runs} runs were made"


def report(as_json: bool, line: str) -> None:
    """Print a line, unless one document of JSON will be printed."""
    from meshwright.view.tables import show

    if not as_json:
        show(line)
        sys.stdout.flush()


def own_command(device: str) -> tuple[str, ...]:
    """Our trainer on this machine."""
    words = (sys.executable, "-m", "meshwright", "train", "{settings}", "--steps", "{steps}", "--device", device)
    return (*words, "--no-calibrate", "--out", "{folder}/run", "--json")


def stack_of(plan: str, cluster: str, asked: Any) -> str:
    """The stack of the plan file, else that of our trainer."""
    config = api.load(
        plan, cluster=cluster, set=[word for word in asked["set"] if not word.strip().startswith("plan.")]
    )
    return "" if "stack.name" in config.origins else own_stack(config.cluster.accelerator.name).name
