"""`meshwright plan`: which plan is the fastest that fits, and why?"""

from pathlib import Path
from typing import Any, Unpack

import typer
from rich.console import Group

from meshwright import api, planner
from meshwright.cli.options import SearchOptions, described
from meshwright.cli.output import patient, writable
from meshwright.describe.config import load_plan
from meshwright.describe.files import write_text
from meshwright.describe.own_stack import OURS, own_stack
from meshwright.errors import MeshwrightError
from meshwright.interop.files import is_settings_file, load_user_plan, read_settings, target_framework
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.interop.keys import Framework
from meshwright.view import settings
from meshwright.view.tables import present, show, show_json


@described
def command(
    context: typer.Context,
    model: str = "",
    cluster: str = "",
    days: str = "",
    budget: str = "",
    framework: str = "",
    from_measure: list[str] = [],
    settings_file: str = "",
    robust: bool = False,
    headroom: str = "5%",
    case: str = "",
    compare: str = "",
    mtbf: str = "",
    checkpoint: str = "",
    restart: str = "",
    sites: int = 0,
    line: str = "",
    guides: bool = False,
    top: int = 10,
    out: str = "",
    html: str = "",
    as_json: bool = False,
    **asked: Unpack[SearchOptions],
) -> None:
    """Find the fastest plan that fits in memory, and explain the choice. Searches every legal plan; needs no GPU.

    With --days or --budget: find the number of GPUs, and the best plan for them.
    """
    check_given(context)
    if case:
        show_case(case, as_json)
        return
    target = target_framework(framework, model)
    if settings_file and not target:
        raise cannot_write_settings(settings_file, framework)
    user_plan = UserPlan(compare) if compare else None
    writable(out, html, settings_file)
    question: dict[str, Any] = {name: value for name, value in context.params.items() if name not in NOT_ASKED}
    if target:
        question["framework"] = target
    if from_measure:
        from meshwright.calibrate.runs.from_rank import measured_stack

        question["stack"] = measured_stack(from_measure, asked["stack"])
    elif not target and framework and not asked["stack"]:
        question["stack"] = own_stack_name(model, cluster, asked["set"])
    with patient("searching") as progress:
        sizing, result = search(model, cluster, days, budget, question, progress)
    compared = result.compare(user_plan.for_gpus(result.config.cluster.world)) if user_plan else None
    written = write(result, out, html, target if settings_file else None, settings_file)
    if as_json:
        show_as_json(sizing or result, compared, result if guides else None, user_plan.reading if user_plan else None)
        return
    if user_plan and user_plan.reading:
        show(settings.page(user_plan.reading, compare))
    show_result(result, compared, Path(compare).name, guides, sizing)
    print("".join(f"{what} written to {where}\n" for what, where in written.items()), end="")


NOT_ASKED = (
    "model", "cluster", "case", "compare", "guides", "out", "html", "as_json", "days", "budget", "framework", "settings_file",
    "from_measure",
)  # fmt: skip


def search(
    model: str, cluster: str, days: str, budget: str, question: dict[str, Any], progress: Any
) -> tuple[Any, Any]:
    """The number of GPUs with its table of sizes if days or dollars limit it, else None; and the result of the search."""
    if days or budget:
        sizing = planner.size(model, cluster, days=days, budget=budget, progress=progress, **question)
        return sizing, sizing.result

    return None, api.plan(model, cluster, progress=progress, **question)


def cannot_write_settings(file: str, framework: str) -> MeshwrightError:
    """The error of --write without a framework that has settings."""
    if framework:
        what, why = f"--write has no settings for {OURS}", "Our own trainer reads plan files"
        return MeshwrightError("MW-CLI-003", what, why=why, fix=f"--out {file}")
    why, fix = "The settings are those of a framework", "--for torchtitan"
    return MeshwrightError("MW-CLI-003", "--write needs --for", why=why, valid=list(FRAMEWORKS), fix=fix)


def own_stack_name(model: str, cluster: str, settings: list[str]) -> str:
    """The stack of our own trainer on the cluster of the question."""
    described = [word for word in settings if not word.strip().startswith("plan.")]
    return own_stack(api.load(model, cluster=cluster, set=described).cluster.accelerator.name).name


class UserPlan:
    """The plan to compare: of a plan file, or of settings, whose data parallelism follows from the number of GPUs."""

    def __init__(self, path: str) -> None:
        self.path, self.plan, self.reading = path, None, None
        if is_settings_file(path):
            self.reading = read_settings(path)  # raises now, not after the search
        else:
            self.plan = load_plan(path)

    def for_gpus(self, gpus: int) -> Any:
        """The plan on so many GPUs, which the settings need not state."""
        if self.reading is not None:
            self.reading = read_settings(self.path, gpus=gpus)
        return self.plan or load_user_plan(self.path, gpus)


def check_given(context: typer.Context) -> None:
    """Raise if an option has no value, or is combined with --case, which sets model, cluster and plan."""
    sources = {p.name: context.get_parameter_source(p.name or "") for p in context.command.params}
    typed = [p for p in context.command.params if getattr(sources[p.name], "name", "") == "COMMANDLINE"]
    for parameter in typed:
        if context.params[parameter.name or ""] == "":
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
            raise MeshwrightError("MW-CLI-003", f"{name} is empty", fix=f"drop {name}, or give it a value")
    if context.params["case"]:
        extra_options = [p.opts[0] for p in typed if p.name not in ("case", "as_json")]
        if extra_options:
            raise MeshwrightError(
                "MW-CLI-003",
                f"{', '.join(extra_options)} cannot be combined with --case",
                why="A case study is evaluated as published, with its own model, cluster and plan",
                fix=f"--case {context.params['case']} alone, or drop --case",
            )


def show_as_json(answer: Any, compared: Any, guided: Any, reading: Any = None) -> None:
    """Print the result as JSON, with the comparison, the settings that were compared and the guides if requested."""
    out = answer.as_dict() | ({"compare": compared.as_dict()} if compared else {})
    if reading:
        out["settings"] = settings.as_dict(reading)
    show_json(out | ({"guides": [c.as_dict() for c in recommended(guided)]} if guided else {}))


def write(result: Any, out: str, html: str, target: Framework | None = None, settings_file: str = "") -> dict[str, str]:
    """Write the requested files and return their paths by content."""
    if out:
        write_text(out, result.to_toml())
    if html:
        from meshwright.view.page.bundle import document
        from meshwright.view.page.registry import VIEWS
        from meshwright.view.page.subject import Subject

        write_text(html, document(Subject.of_result(result), first="overview", names=VIEWS))
    if target:
        from meshwright.interop.write import write_file

        write_file(result.config, target, settings_file)
    what = f"settings of {target.title} (tried with {target.versions})" if target else "settings"
    return {what: where for what, where in (("plan file", out), ("page", html), (what, settings_file)) if where}


def show_result(result: Any, compared: Any, name: str, guides: bool, sizing: Any = None) -> None:
    """Print the result, or its comparison with the user's plan; with `sizing`, first the table of GPU counts."""
    from meshwright.view import plan as view

    if sizing:
        show(view.sizes_page(sizing))
    if compared:
        user_plan = view.comparison(result, compared, name)
        show(view.header(result), user_plan, view.leaders(result), view.strategies(result), view.notes(result))
        if guides:
            show(guide_comparison(result, guides))
    else:
        show(view.page(result), guide_comparison(result, guides), findings(result))


def show_case(name: str, as_json: bool) -> None:
    """Print a case study: the estimate of the published configuration and the planner's choice."""
    from meshwright.planner.cases import studies
    from meshwright.view.cases import terminal_page

    evaluated = studies.evaluate(name)
    present(terminal_page(evaluated), evaluated.as_dict(), as_json)


def guide_comparison(result: Any, why: bool = False) -> Any:
    """The plans that the decision guides recommend, compared with the winner."""
    from meshwright.view.textbook import reasons, table

    compared = recommended(result)
    # Guides without a plan for this training may still give advice, for example about inference.
    shown = compared if why else [c for c in compared if c.estimate is None]
    return Group(table(compared, result.estimate), reasons(shown, sources=why))


def recommended(result: Any) -> Any:
    """The recommendations of all decision guides, compared with the winner."""
    from meshwright.planner.advice.guides import textbook

    e = result.estimate
    return textbook.compare(textbook.recommend(e.config), e)


def findings(result: Any) -> Any:
    """The findings of `lint` for the winner, each with the reason why the winner is still the best plan."""
    from meshwright.planner.advice.lint import check as lint
    from meshwright.view.lint import finding_block

    e = result.estimate
    problems = lint.check(e.config, e, changes=())  # the search has costed every change
    if not problems:
        return "[dim]lint: no anti-pattern in the winner[/]"

    return Group("[bold]Findings of lint for the winner[/]", *map(finding_block, lint.justify(problems, e)))
