"""`meshwright catalog`: list and show the entries of the catalog, with sources."""

from meshwright.cli.options import described
from meshwright.describe import catalog
from meshwright.errors import unknown
from meshwright.view import catalog as view
from meshwright.view.tables import show, show_json


@described
def command(
    kind: str = "",
    name: str = "",
    json: bool = False,
) -> None:
    """List the models, clusters, accelerators, links and stacks in the catalog, with sources."""
    if kind == "frameworks":
        show_json({kind: view.frameworks_json()}) if json else show(view.frameworks())
        return
    if kind and kind not in catalog.KINDS:
        raise unknown("MW-CAT-001", "catalog", kind, [*catalog.KINDS, "frameworks"], "meshwright catalog {}")
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
