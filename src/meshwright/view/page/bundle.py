"""Views of one plan as one HTML file that opens from disk: `estimate --html`, `simulate --html`, `plan --html`.

The file holds the page's own modules, its style and the data of the views, so that it draws what the live page draws, without a server.
"""

from collections.abc import Iterable
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.view.page.frame import offline_page
from meshwright.view.page.registry import CHEAP, VIEWS, view
from meshwright.view.page.subject import Subject

LIVE = "meshwright web"


def document(subject: Subject, first: str = "", names: Iterable[str] = ()) -> str:
    """The HTML of the named views (default: those of the overview, all that follow from the estimate, and `first`, which is shown first)."""
    names = list(names) or [name for name, entry in VIEWS.items() if entry.kind == CHEAP or name in ("advice", first)]
    title = f"{subject.model.name} on {subject.plan.world:,} × {subject.cluster.accelerator.name}"
    return written({name: answer(subject, name) for name in names}, title, first, state(subject))


def written(
    views: dict[str, dict[str, Any]],
    title: str,
    first: str = "",
    plan_file: dict[str, Any] | None = None,
    bare: bool = False,
    **more: Any,
) -> str:
    """One HTML file with the data of some views, by name. `bare`: views that belong to no plan, without inputs and verdict."""
    state = {**(plan_file or {}), "page": {"view": first or next(iter(views)), "options": {}}}
    return offline_page(title, {"state": state, "views": views, "catalog": None, "command": LIVE, "bare": bare, **more})


def written_view(name: str, title: str, data: dict[str, Any]) -> str:
    """One HTML file with one view that belongs to no plan."""
    return written({name: {"title": title, "data": data}}, title, bare=True)


def state(subject: Subject) -> dict[str, Any]:
    """The configuration as the page keeps it: a plan file as JSON."""
    return {name: value for name, value in subject.config.to_dict().items() if value}


def answer(subject: Subject, name: str) -> dict[str, Any]:
    """The data of one view; a view that this plan cannot have says why in its place."""
    entry = view(name)
    try:
        return {"title": entry.title, "data": entry.data(subject), "error": None}
    except MeshwrightError as error:
        return {"title": entry.title, "data": None, "error": error.as_dict()}
