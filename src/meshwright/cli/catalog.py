"""`meshwright catalog`: list and show the entries of the catalog, with sources."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import JsonOption
from meshwright.describe import catalog
from meshwright.errors import unknown
from meshwright.view import catalog as view
from meshwright.view.tables import show, show_json


def command(
    kind: Annotated[
        str, typer.Argument(help="models, clusters, accelerators, links or stacks. Default: all of them.")
    ] = "",
    name: Annotated[str, typer.Argument(help="The name of one entry, or a cluster file, to show it in full.")] = "",
    json: JsonOption = False,
) -> None:
    """List the models, clusters, accelerators, links and stacks in the catalog, with sources."""
    if kind and kind not in catalog.KINDS:
        raise unknown("MW-CAT-001", "catalog", kind, catalog.KINDS, "meshwright catalog {}")
    if json:
        kinds = [kind] if kind else list(catalog.KINDS)
        if name:
            show_json(view.as_json(kind, name))
        else:
            show_json({k: {n: view.as_json(k, n) for n in catalog.names(k)} for k in kinds})
    elif name:
        show(view.card(kind, name))
    else:
        show(view.listing(kind) if kind else view.overview())
