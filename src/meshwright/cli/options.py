"""What several commands share: the options for a cluster and its size, --json, and the settings of a command with subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

CLUSTER_HELP = "A catalog name, or a TOML file with a [cluster] such as `meshwright calibrate` writes."
ClusterOption = Annotated[str, typer.Option("--cluster", "-c", help=CLUSTER_HELP)]


def at_least_one(context: typer.Context, parameter: typer.CallbackParam, value: int) -> int:
    """Refuse a number of 0 that was typed: 0 stands for an option that was not given."""
    source = context.get_parameter_source(str(parameter.name))
    if value == 0 and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("at least 1 is needed")
    return value


NodesOption = Annotated[
    int,
    typer.Option("--nodes", help="Number of nodes.", min=0, max=10**7, show_default=False, callback=at_least_one),
]
GpusOption = Annotated[
    int,
    typer.Option(
        "--gpus",
        help="Number of devices, instead of nodes.",
        min=0,
        max=10**9,
        show_default=False,
        callback=at_least_one,
    ),
]
DifferencesOption = Annotated[
    str,
    typer.Option(
        "--allow-differences",
        metavar="NAMES",
        help="Parts of the model, by name, that may be computed in another way: a list with commas, or all. The error MW-BUILD-005 names them.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def command_group(help: str | None = None) -> typer.Typer:
    """A command with subcommands."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_NAMES, help=help)
