"""`meshwright plan`: which plan is the fastest that fits, and why?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.describe.plan import Plan


def command(
    model: str = typer.Argument("", help="A catalog name, a plan file or a Hugging Face config.json."),
    cluster: str = typer.Option("", "--cluster", "-c", help="A catalog name or a TOML file."),
    nodes: int = typer.Option(0, "--nodes", help="Nodes of the cluster.", min=0, max=10**7),
    gpus: int = typer.Option(0, "--gpus", help="Devices, instead of nodes.", min=0, max=10**9),
    batch: int = typer.Option(0, "--batch", help="Global batch in sequences.", min=0),
    seq: int = typer.Option(0, "--seq", help="Sequence length.", min=0),
    tokens: str = typer.Option("", "--tokens", help="Token budget, such as 15T: adds days, GPU-hours and cost."),
    stack: str = typer.Option("", "--stack", help="The training stack."),
    fix: list[str] = typer.Option(
        [], "--fix", metavar="FIELD=VALUE", help="Demand a value: --fix tp=8, --fix schedule=1f1b."
    ),
    most: list[str] = typer.Option([], "--max", metavar="FIELD=N", help="At most: --max pp=4."),
    least: list[str] = typer.Option([], "--min", metavar="FIELD=N", help="At least: --min microbatch=2."),
    without: list[str] = typer.Option(
        [],
        "--without",
        metavar="WORD",
        help="Leave out: zero3, hsdp, tp, pp, cp, ep, recompute, interleaved, uneven, reorder, …",
    ),
    allow: list[str] = typer.Option(
        [], "--allow", metavar="FIELD=A,B", help="Widen the search: --allow grad_dtype=bf16, --allow overlap=dp+tp."
    ),
    headroom: str = typer.Option("5%", "--memory-headroom", help="Memory to leave free."),
    case: str = typer.Option(
        "", "--case", metavar="NAME", help="A published training beside ours: gpt3, llama3-405b, mixtral, …"
    ),
    compare: str = typer.Option("", "--compare", metavar="FILE", help="Put a plan of your own beside the winner."),
    mtbf: str = typer.Option(
        "", "--mtbf", metavar="TIME", help="Between failures of the whole machine, such as 3h: adds goodput."
    ),
    checkpoint: str = typer.Option("", "--checkpoint", metavar="TIME", help="A save that blocks training: 60s."),
    restart: str = typer.Option("", "--restart", metavar="TIME", help="From a failure to training on, such as 5min."),
    sites: int = typer.Option(0, "--sites", help="So many such clusters, joined by --line.", min=0, max=10**6),
    line: str = typer.Option("", "--line", metavar="RATE", help="Between sites, such as 100Gb/s."),
    guides: bool = typer.Option(False, "--guides", help="Why each decision guide says what it says, with its source."),
    top: int = typer.Option(10, "--top", help="How many leaders to show.", min=1, max=1000),
    out: str = typer.Option("", "--out", "-o", help="Write the winner as a plan file, reasons in comments."),
    html: str = typer.Option("", "--html", help="Write the answer as a page."),
    settings: list[str] = typer.Option([], "--set", help="Override any field: --set cluster.price=2.5."),
    as_json: bool = typer.Option(False, "--json", help="Print what a program can read."),
) -> None:
    """Which plan is the fastest that fits, and why? Searches every legal plan, without a GPU."""
    if case:
        show_case(case, as_json)
        return
    from meshwright import api
    from meshwright.cli.output import patient, writable

    own = own_plan(compare) if compare else None
    writable(out, html)
    problem: dict[str, Any] = {
        "nodes": nodes,
        "gpus": gpus,
        "batch": batch,
        "seq": seq,
        "tokens": tokens,
        "stack": stack,
    }
    narrowed: dict[str, Any] = {
        "fix": fix,
        "most": most,
        "least": least,
        "without": without,
        "allow": allow,
        "headroom": headroom,
    }
    beyond: dict[str, Any] = {"mtbf": mtbf, "checkpoint": checkpoint, "restart": restart, "sites": sites, "line": line}
    with patient("searching") as progress:
        result = api.plan(model, cluster, **problem, **narrowed, **beyond, set=settings, top=top, progress=progress)
    compared = result.compare(own) if own else None
    written = write(result, out, html)
    if as_json:
        from meshwright.view.tables import show_json

        show_json(result.as_dict() | ({"compare": compared.as_dict()} if compared else {}))
        return
    show_result(result, compared, Path(compare).name, guides)
    print("".join(f"{what} written to {where}\n" for what, where in written.items()), end="")


def write(result: Any, out: str, html: str) -> dict[str, str]:
    """The answer as the files that were asked for, by what they are."""
    from meshwright.describe.files import write_text

    if out:
        write_text(out, result.to_toml())
    if html:
        from meshwright.view.plan_html import document

        write_text(html, document(result))
    return {what: where for what, where in (("plan file", out), ("page", html)) if where}


def show_result(result: Any, compared: Any, name: str, guides: bool) -> None:
    """The page of an answer, or of the answer beside the user's own plan."""
    from meshwright.view import plan as view
    from meshwright.view.tables import show

    if compared:
        own = view.comparison(result, compared, name)
        show(view.header(result), own, view.leaders(result), view.strategies(result), view.notes(result))
    else:
        show(view.page(result), beside_the_guides(result, guides), findings(result))


def own_plan(path: str) -> Plan:
    """The plan of a file; its other sections need not be there, since the question has said them."""
    from meshwright.describe.draft import Draft
    from meshwright.describe.plan import Plan

    draft = Draft()
    draft.lay_file(Path(path))
    if "plan" not in draft.tables:
        raise MeshwrightError(
            "MW-CONF-002", f"no [plan] is in '{path}'", why="There is nothing to compare", fix="[plan]\ntp = 8"
        )
    return Plan(**draft.opened("plan"))


def show_case(name: str, as_json: bool) -> None:
    """A case study: the published configuration evaluated, the planner's choice beside it."""
    from meshwright.planner.cases import studies
    from meshwright.view.cases import shown
    from meshwright.view.tables import show, show_json

    evaluated = studies.evaluate(name)
    if as_json:
        show_json(evaluated.as_dict())
    else:
        show(shown(evaluated))


def beside_the_guides(result: Any, why: bool = False) -> Any:
    """What the decision guides would have chosen, and what following them costs."""
    from rich.console import Group

    from meshwright.planner.advice.guides import textbook
    from meshwright.view.textbook import reasons, table

    e = result.estimate
    compared = textbook.compare(textbook.recommend(e.model, e.cluster, e.workload, e.stack), e)
    # Guides without a plan for this training still have something to say: of inference, say.
    return Group(
        table(compared, e), reasons(compared if why else [c for c in compared if c.estimate is None], sources=why)
    )


def findings(result: Any) -> Any:
    """What `lint` says of the winner, each with why it is still best."""
    from meshwright.describe.config import Config
    from meshwright.planner.advice.lint import check as lint
    from meshwright.view.lint import one

    e = result.estimate
    found = lint.check(Config(e.model, e.cluster, e.stack, e.workload, e.plan), e)
    if not found:
        return "[dim]lint has nothing to say of the winner[/]"
    from rich.console import Group

    return Group("[bold]What lint says of the winner[/]", *map(one, lint.justify(found, e)))
