"""`meshwright config`: show a resolved configuration and the origin of each value."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import ClusterOption, GpusOption, JsonOption, NodesOption, command_group
from meshwright.describe.config import CLASSES, configure, diff
from meshwright.errors import unknown
from meshwright.view import config as view
from meshwright.view.tables import show, show_json

command = command_group()

File = Annotated[str, typer.Argument(help="A plan file (TOML).")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="A.B=C", help="Override a field, such as --set plan.tp=8. Repeatable.")
]


@command.command("show")
def show_command(
    file: File,
    cluster: ClusterOption = "",
    nodes: NodesOption = 0,
    gpus: GpusOption = 0,
    settings: Set = [],
    everything: Annotated[
        bool, typer.Option("--all", help="Also show sources and the defaults of every section.")
    ] = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print the configuration as one TOML file.")] = False,
    json: JsonOption = False,
) -> None:
    """Check the plan, and print the resolved configuration with the origin of each value."""
    config = configure(plan=file, cluster=cluster, nodes=nodes, gpus=gpus, overrides=settings).check()
    if json:
        show_json(view.as_json(config))
    elif toml:
        print(config.to_toml(), end="")
    else:
        show(view.page(config, everything))


@command.command("diff")
def diff_command(
    first: File,
    second: File,
    cluster: ClusterOption = "",
    nodes: NodesOption = 0,
    gpus: GpusOption = 0,
    settings: Set = [],
    json: JsonOption = False,
) -> None:
    """Print the values in which two plan files differ; --cluster, --nodes, --gpus and --set apply to both."""
    changed = diff(
        *(configure(plan=file, cluster=cluster, nodes=nodes, gpus=gpus, overrides=settings) for file in (first, second))
    )
    if json:
        show_json({path: {"first": a, "second": b} for path, (a, b) in changed.items()})
    else:
        show(view.difference(changed, (first, second)))


@command.command("schema")
def schema_command(
    section: Annotated[str, typer.Argument(help="A section. Default: the whole file.")] = "",
    output: Annotated[
        str,
        typer.Option(
            "--output", help="The schema of what a command prints with --json instead: estimate, plan, …, or error."
        ),
    ] = "",
) -> None:
    """Print the JSON Schema of a plan file, or of what a command prints with --json."""
    from meshwright.describe.schema import schema

    if output:
        from meshwright.view.json_schema import OUTPUTS, output_schema

        if output not in OUTPUTS:
            raise unknown("MW-CONF-010", "output", output, OUTPUTS, "meshwright config schema --output {}")
        show_json(output_schema(output))
        return
    if section and section not in CLASSES:
        raise unknown("MW-CONF-010", "section", section, CLASSES, "meshwright config schema {}")
    show_json(schema(section))
