"""Arguments and options of `meshwright show`, by panel."""

from __future__ import annotations

from typing import Annotated

import typer

COLLECTIVE_PANEL, PIPELINE_PANEL = "Collectives", "Pipeline schedules"
TopicArgument = Annotated[str, typer.Argument(help="What to show. Default: the list of all topics.")]
NamesArgument = Annotated[
    str, typer.Argument(help="With --compare: names to compare, such as ring,tree or gpipe,zbv.", show_default=False)
]
CompareOption = Annotated[bool, typer.Option("--compare", help="Compare algorithms or schedules.")]
AlgorithmOption = Annotated[
    str,
    typer.Option(
        "--algorithm",
        "-a",
        help="Algorithm. Default: the one that the library runs on --cluster, else the simplest.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
]
RanksOption = Annotated[
    int,
    typer.Option(
        "--ranks",
        "-r",
        show_default=False,
        help="Number of ranks. Default: 4, or 8 for node-aware algorithms.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
]
SizeOption = Annotated[
    str,
    typer.Option(
        "--size", help="Size of the full buffer, such as 64MiB; also shows times.", rich_help_panel=COLLECTIVE_PANEL
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="Cluster whose links are simulated: a catalog name or a TOML file.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
]
ElementsOption = Annotated[
    int,
    typer.Option(
        "--elements",
        show_default=False,
        help="Elements of the buffer. Default: one per rank.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
]
RootOption = Annotated[
    int,
    typer.Option(
        "--root",
        show_default=False,
        help="Root rank of broadcast, reduce, scatter, gather.",
        rich_help_panel=COLLECTIVE_PANEL,
    ),
]
SegmentsOption = Annotated[
    int,
    typer.Option(
        "--segments", show_default=False, help="Segments of pipelined algorithms.", rich_help_panel=COLLECTIVE_PANEL
    ),
]
NodeOption = Annotated[
    int,
    typer.Option(
        "--node", show_default=False, help="Ranks per node. Default: the cluster's.", rich_help_panel=COLLECTIVE_PANEL
    ),
]
ValuesOption = Annotated[
    bool,
    typer.Option(
        "--values", help="Show the values on every rank before and after each step.", rich_help_panel=COLLECTIVE_PANEL
    ),
]
StagesOption = Annotated[
    int, typer.Option("--stages", help="Number of pipeline ranks.", rich_help_panel=PIPELINE_PANEL)
]
MicrobatchesOption = Annotated[
    int, typer.Option("--microbatches", "-m", help="Micro-batches per step.", rich_help_panel=PIPELINE_PANEL)
]
VirtualOption = Annotated[
    int,
    typer.Option(
        "--virtual",
        show_default=False,
        help="Stages per rank, for schedules with several.",
        rich_help_panel=PIPELINE_PANEL,
    ),
]
TraceOption = Annotated[
    str, typer.Option("--trace", help="Write a trace for Perfetto.", rich_help_panel=PIPELINE_PANEL)
]
HtmlOption = Annotated[str, typer.Option("--html", help="Write a figure to this file.")]
