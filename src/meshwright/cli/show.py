"""`meshwright show`: draw collectives and pipeline schedules, and print reference tables.

    meshwright show                                        the list of all topics
    meshwright show all-reduce --ranks 4 --values          the ring, with the values on every rank
    meshwright show all-reduce --compare --ranks 64 --cluster dgx-h100
    meshwright show 1f1b --stages 4 --microbatches 8 --compare gpipe,zbv

`--compare` is a flag; the names after it are a second positional argument, so that they can be omitted.
"""

from __future__ import annotations

import typer

from meshwright.view.show.options import LESSON, PIPELINES
from meshwright.view.show.topics import LESSONS, kind_of, module_of, sort_arguments

COLLECTIVE_PANEL, PIPELINE_PANEL = "Collectives", "Pipeline schedules"


def command(
    context: typer.Context,
    topic: str = typer.Argument("", help="What to show. Default: the list of all topics."),
    names: str = typer.Argument(
        "", help="With --compare: names to compare, such as ring,tree or gpipe,zbv.", show_default=False
    ),
    compare: bool = typer.Option(False, "--compare", help="Compare algorithms or schedules."),
    algorithm: str = typer.Option(
        "",
        "--algorithm",
        "-a",
        help="Algorithm. Default: the one that the library runs on --cluster, else the simplest.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    ranks: int = typer.Option(
        0,
        "--ranks",
        "-r",
        show_default=False,
        help="Number of ranks. Default: 4, or 8 for node-aware algorithms.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    size: str = typer.Option(
        "", "--size", help="Size of the full buffer, such as 64MiB; also shows times.", rich_help_panel=COLLECTIVE_PANEL
    ),
    cluster: str = typer.Option(
        "",
        "--cluster",
        "-c",
        help="Cluster whose links are simulated: a catalog name or a TOML file.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    elements: int = typer.Option(
        -1,
        "--elements",
        show_default=False,
        help="Elements of the buffer. Default: one per rank.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    root: int = typer.Option(
        -1,
        "--root",
        show_default=False,
        help="Root rank of broadcast, reduce, scatter, gather.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    segments: int = typer.Option(
        0, "--segments", show_default=False, help="Segments of pipelined algorithms.", rich_help_panel=COLLECTIVE_PANEL
    ),
    node: int = typer.Option(
        0,
        "--node",
        show_default=False,
        help="Ranks per node. Default: the cluster's.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    values: bool = typer.Option(
        False,
        "--values",
        help="Show the values on every rank before and after each step.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    stages: int = typer.Option(4, "--stages", help="Number of pipeline ranks.", rich_help_panel=PIPELINE_PANEL),
    microbatches: int = typer.Option(
        8, "--microbatches", "-m", help="Micro-batches per step.", rich_help_panel=PIPELINE_PANEL
    ),
    virtual: int = typer.Option(
        0,
        "--virtual",
        show_default=False,
        help="Stages per rank, for schedules with several.",
        rich_help_panel=PIPELINE_PANEL,
    ),
    trace: str = typer.Option("", "--trace", help="Write a trace for Perfetto.", rich_help_panel=PIPELINE_PANEL),
    html: str = typer.Option("", "--html", help="Write a figure to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show a collective, a pipeline schedule or a reference table. Without a topic: list all topics."""
    if not topic:
        from meshwright.view.show.listing import list_topics

        return list_topics(LESSONS, as_json)
    from meshwright.cli.output import writable
    from meshwright.view.show.options import refuse_unused

    writable(html, trace)
    topic, names, compare = sort_arguments(topic.lower(), names, compare)
    kind = kind_of(topic)
    refuse_unused(topic, kind, explicit_options(context))
    if kind == LESSON:
        return module_of(topic).show(topic, as_json=as_json)
    if kind == PIPELINES:
        from meshwright.view.show import pipelines

        return pipelines.show(
            topic,
            stages=stages,
            microbatches=microbatches,
            virtual=virtual or None,
            compare=names if compare else None,
            html=html or None,
            trace=trace or None,
            json_out=as_json,
        )
    from meshwright.view.show.collectives import Request, show

    return show(
        Request(
            topic,
            algorithm,
            ranks,
            size,
            cluster,
            elements,
            root,
            segments,
            node,
            values,
            compare,
            names,
            html,
            as_json,
        )
    )


def explicit_options(context: typer.Context) -> list[str]:
    """Return the names of the options on the command line, in order, except those that every topic accepts."""
    named = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    return [name for name in context.params if name in named - {"topic", "as_json"}]


__all__ = ["command"]
