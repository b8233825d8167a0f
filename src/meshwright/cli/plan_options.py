"""Arguments and options of `meshwright plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import at_least_one

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A catalog name, a plan file, a Hugging Face config.json or a settings file of another framework."
    ),
]
BatchOption = Annotated[
    int, typer.Option("--batch", help="Global batch in sequences.", min=0, show_default=False, callback=at_least_one)
]
SeqOption = Annotated[
    int, typer.Option("--seq", help="Sequence length in tokens.", min=0, show_default=False, callback=at_least_one)
]
TokensOption = Annotated[
    str, typer.Option("--tokens", help="Token budget, such as 15T: adds days, GPU-hours and cost.")
]
DaysOption = Annotated[
    str, typer.Option("--days", metavar="N", help="Find the fewest GPUs that train --tokens within N days.")
]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget", metavar="DOLLARS", help="Find the fewest GPUs that train --tokens within this price, such as 2M$."
    ),
]
StackOption = Annotated[
    str,
    typer.Option("--stack", help="The training stack: megatron-core, torchtitan, …; see `meshwright catalog stacks`."),
]
FrameworkOption = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="FRAMEWORK",
        help="The framework that will run the plan; limits the search: meshwright, torchtitan, megatron-lm, deepspeed, …",
    ),
]
SettingsFileOption = Annotated[
    str,
    typer.Option(
        "--write", metavar="FILE", help="Write the winner as settings of the framework: TOML, YAML, JSON or flags."
    ),
]
FixOption = Annotated[
    list[str],
    typer.Option("--fix", metavar="FIELD=VALUE", help="Fix a field: --fix tp=8, --fix schedule=1f1b."),
]
MaxOption = Annotated[list[str], typer.Option("--max", metavar="FIELD=N", help="Upper bound of a field: --max pp=4.")]
MinOption = Annotated[
    list[str], typer.Option("--min", metavar="FIELD=N", help="Lower bound of a field: --min microbatch=2.")
]
WithoutOption = Annotated[
    list[str],
    typer.Option(
        "--without",
        metavar="WORD",
        help="Exclude zero3, hsdp, tp, pp, cp, ep, recompute, interleaved, uneven, reorder, …",
    ),
]
AllowOption = Annotated[
    list[str],
    typer.Option(
        "--allow", metavar="FIELD=A,B", help="Widen the search: --allow grad_dtype=bf16, --allow overlap=dp+tp."
    ),
]
SetOption = Annotated[list[str], typer.Option("--set", help="Override any field: --set cluster.price=2.5.")]
RobustOption = Annotated[
    bool, typer.Option("--robust", help="Take the plan with the best worst case instead of the fastest.")
]
HeadroomOption = Annotated[str, typer.Option("--memory-headroom", help="Share of the device memory to leave free.")]
CaseOption = Annotated[
    str,
    typer.Option(
        "--case", metavar="NAME", help="Compare a published training with its prediction: gpt3, llama3-405b, …"
    ),
]
CompareOption = Annotated[
    str,
    typer.Option(
        "--compare", metavar="FILE", help="Compare your own plan, or settings of another framework, with the winner."
    ),
]
MtbfOption = Annotated[
    str,
    typer.Option(
        "--mtbf", metavar="TIME", help="Time between failures of the whole cluster, such as 3h: adds goodput."
    ),
]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", metavar="TIME", help="Time a checkpoint blocks training, such as 60s.")
]
RestartOption = Annotated[
    str, typer.Option("--restart", metavar="TIME", help="Restart time after a failure, such as 5min.")
]
SitesOption = Annotated[
    int,
    typer.Option(
        "--sites",
        help="Number of clusters (sites), connected by --line.",
        min=0,
        max=10**6,
        show_default=False,
        callback=at_least_one,
    ),
]
LineOption = Annotated[str, typer.Option("--line", metavar="RATE", help="Bandwidth between sites, such as 100Gb/s.")]
GuidesOption = Annotated[bool, typer.Option("--guides", help="Show the reason and the source of every decision guide.")]
TopOption = Annotated[int, typer.Option("--top", help="Number of leaders to show.", min=1, max=1000)]
OutOption = Annotated[
    str, typer.Option("--out", "-o", help="Write the winner as a plan file, with the reasons in comments.")
]
HtmlOption = Annotated[
    str, typer.Option("--html", help="Write the page of the winner, with all views, to one HTML file.")
]
