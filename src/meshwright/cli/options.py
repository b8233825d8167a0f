"""Options that several commands share: which cluster, and how many nodes or devices of it."""

from __future__ import annotations

from typing import Annotated

import typer

CLUSTER_HELP = "A catalog name, or a TOML file with a [cluster] such as `meshwright calibrate` writes."
ClusterOption = Annotated[str, typer.Option("--cluster", "-c", help=CLUSTER_HELP)]
NodesOption = Annotated[int, typer.Option("--nodes", help="Number of nodes.", min=0, max=10**7, show_default=False)]
GpusOption = Annotated[
    int, typer.Option("--gpus", help="Number of devices, instead of nodes.", min=0, max=10**9, show_default=False)
]
