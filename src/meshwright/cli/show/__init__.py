"""`meshwright show`: the ideas, drawn. Collectives, pipeline schedules, the tables a lecture would put on the wall.

    meshwright show                                        everything there is to show
    meshwright show all-reduce --ranks 4 --values          the ring, with the numbers of every rank
    meshwright show all-reduce --compare --ranks 64 --cluster dgx-h100
    meshwright show 1f1b --stages 4 --microbatches 8 --compare gpipe,zbv

`--compare` is a flag; the names that may follow it are a second argument, so it reads the same with and without them.
"""

from __future__ import annotations

import typer

from meshwright.cli.show.options import COLLECTIVES, LESSON, PIPELINES

LESSONS = {
    "strategies": "what each parallelism splits, which collective it needs, when, how many bytes, and when to use it",
    "column-parallel": "a matrix product split by columns over two GPUs, with the numbers",
    "row-parallel": "the same product split by rows, with the numbers",
    "formats": "number formats from fp32 to fp4: bits, range, precision, use",
}
COLLECTIVE_PANEL, PIPELINE_PANEL = "Collectives", "Pipeline schedules"


def command(
    context: typer.Context,
    topic: str = typer.Argument("", help="What to show. Default: the list of all topics."),
    names: str = typer.Argument(
        "", help="With --compare: names to compare, such as ring,tree or gpipe,zbv.", show_default=False
    ),
    compare: bool = typer.Option(False, "--compare", help="Put algorithms or schedules side by side."),
    algorithm: str = typer.Option(
        "",
        "--algorithm",
        "-a",
        help="Algorithm. Default: what a library runs on --cluster, else the simplest.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    ranks: int = typer.Option(
        0,
        "--ranks",
        "-r",
        show_default=False,
        help="Default: 4, or 8 where nodes matter.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    size: str = typer.Option(
        "", "--size", help="Bytes of the full buffer, such as 64MiB: adds times.", rich_help_panel=COLLECTIVE_PANEL
    ),
    cluster: str = typer.Option(
        "",
        "--cluster",
        "-c",
        help="A catalog name or a TOML file: whose links to walk.",
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
        help="The numbers of every rank before and after each step.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
    stages: int = typer.Option(4, "--stages", help="Ranks of the pipeline.", rich_help_panel=PIPELINE_PANEL),
    microbatches: int = typer.Option(
        8, "--microbatches", "-m", help="Micro-batches of a step.", rich_help_panel=PIPELINE_PANEL
    ),
    virtual: int = typer.Option(
        0,
        "--virtual",
        show_default=False,
        help="Stages a rank, where the schedule has several.",
        rich_help_panel=PIPELINE_PANEL,
    ),
    trace: str = typer.Option("", "--trace", help="Write a trace for Perfetto.", rich_help_panel=PIPELINE_PANEL),
    html: str = typer.Option("", "--html", help="Write a figure to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show a collective, a pipeline schedule, or a table worth knowing; without a topic, list them all."""
    if not topic:
        from meshwright.cli.show.listing import list_topics

        return list_topics(LESSONS, as_json)
    from meshwright.cli.output import writable
    from meshwright.cli.show.options import refuse_unused

    writable(html, trace)
    topic, names, compare = in_order(topic.lower(), names, compare)
    kind = kind_of(topic)
    refuse_unused(topic, kind, given(context))
    if kind == LESSON:
        import importlib

        module = {"column-parallel": "matrices", "row-parallel": "matrices"}.get(topic, topic)
        return importlib.import_module(f"meshwright.cli.show.{module}").show(topic, as_json=as_json)
    if kind == PIPELINES:
        from meshwright.cli.show import pipelines

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
    from meshwright.cli.show.collectives import Asked, show

    return show(
        Asked(
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


def given(context: typer.Context) -> list[str]:
    """Names of the options on the command line, in order, but for those that every topic has."""
    named = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    return [name for name in context.params if name in named - {"topic", "as_json"}]


def in_order(topic: str, names: str, compare: bool) -> tuple[str, str, bool]:
    """`show --compare ring,tree all-reduce` parses as topic and names the wrong way round; names alone ask to compare."""
    if "," in topic and names:
        topic, names = names.lower(), topic
    return topic, names, compare or bool(names)


def kind_of(topic: str) -> str:
    """Which of the three a topic is; an unknown one is refused with the nearest."""
    from meshwright.errors import unknown
    from meshwright.programs.collectives import OPERATIONS
    from meshwright.programs.pipelines import ALIASES, RULES

    if topic in LESSONS:
        return LESSON
    if topic in OPERATIONS:
        return COLLECTIVES
    if topic in RULES or topic in ALIASES:
        return PIPELINES
    raise unknown("MW-SHOW-001", "topic", topic, [*OPERATIONS, *RULES, *LESSONS], "meshwright show {}")


__all__ = ["command"]
