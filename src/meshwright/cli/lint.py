"""`meshwright lint`: anti-patterns of a plan, with their cost in seconds; and mistakes in recipes of other frameworks."""

import json
from collections.abc import Sequence
from typing import Any, Unpack

import typer

from meshwright.cli.options import Overrides, described
from meshwright.cli.output import patient
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.interop.files import configure, is_settings_file, read_settings
from meshwright.interop.recipes import rows
from meshwright.planner.advice.alternatives import PlanTrials
from meshwright.planner.advice.changes import first_changes
from meshwright.planner.advice.lint.check import check
from meshwright.planner.advice.lint.recipes import judge_all
from meshwright.view import settings as view
from meshwright.view.lint import page
from meshwright.view.tables import present, show, show_json


@described
def command(
    file: str = "", model: str = "", recipes: str = "", as_json: bool = False, **asked: Unpack[Overrides]
) -> None:
    """Find anti-patterns in a plan, each with its cost in seconds and a fix, and the changes that save most. Exit code 1 if one is significant."""
    if bool(file) == bool(recipes):
        raise MeshwrightError("MW-CLI-003", "lint takes a file or --recipes", fix="meshwright lint PLAN.toml")
    if recipes:
        lint_recipes(recipes, as_json)
        return
    reading = read_settings(file, gpus=asked["gpus"], model=model) if is_settings_file(file) else None
    if reading is not None and lint_settings(reading, file, as_json, asked["set"]):
        raise typer.Exit(1)
    lint_plan(configure(model, plan=file, **asked), as_json, reading)


def lint_plan(config: Config, as_json: bool, reading: Any) -> None:
    """Print the findings of one plan; exit with 1 if one is significant."""
    now = PlanTrials(config).of(config.plan)
    changes = first_changes(config) if now else []
    findings = check(config, now, changes)
    read = {"settings": view.as_dict(reading)} if reading else {}
    step = now.prediction.step_time_s if now else None
    first = [change.as_dict() for change in changes]
    data = {"step_time_s": step, "findings": [f.as_dict() for f in findings], "change_first": first, **read}
    present(page(config, findings, now, changes), data, as_json)
    if any(f.weighs for f in findings):
        raise typer.Exit(1)


def lint_settings(reading: Any, file: str, as_json: bool, overrides: Sequence[str]) -> bool:
    """Print what was read of a settings file; whether its own contradictions end the check here."""
    if not as_json:
        show(view.page(reading, file))
    if not reading.blocking(overrides):
        return False
    if as_json:
        findings = [problem.as_dict() for problem in reading.problems]
        show_json({"step_time_s": None, "findings": findings, "settings": view.as_dict(reading)})
    return True


def lint_recipes(file: str, as_json: bool) -> None:
    """Print a verdict per recipe: a JSON object per line with --json, else a table."""
    recipes_read, verdicts = list(rows(file)), []
    with patient("checking recipes") as progress:
        for verdict in judge_all(recipes_read):
            verdicts.append(verdict)
            progress(len(verdicts) / len(recipes_read))
    if as_json:
        for verdict in verdicts:
            print(json.dumps(verdict.as_dict()))
    else:
        show(view.recipes(verdicts))
