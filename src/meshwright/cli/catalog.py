"""`meshwright catalog`: list and show the entries of the catalog, with sources."""

from meshwright.cli.options import described
from meshwright.describe import catalog
from meshwright.errors import unknown
from meshwright.view import catalog as view
from meshwright.view.tables import present, show, show_json


@described
def command(
    kind: str = "",
    name: str = "",
    json: bool = False,
) -> None:
    """List the models, clusters, accelerators, links and stacks in the catalog, with sources."""
    if kind == "frameworks":
        present(view.frameworks(), {kind: view.frameworks_json()}, json)
        return
    if kind and kind not in catalog.KINDS:
        raise unknown("MW-CAT-001", "catalog", kind, [*catalog.KINDS, "frameworks"], "meshwright catalog {}")
    if name:
        present(view.card(kind, name), view.as_json(kind, name), json)
    elif json:
        kinds = [kind] if kind else catalog.KINDS
        show_json({k: {n: view.as_json(k, n) for n in catalog.names(k)} for k in kinds})
    else:
        show(view.listing(kind) if kind else view.overview())
