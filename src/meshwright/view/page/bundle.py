"""Views of one plan as one HTML file that opens from disk: `simulate --html`, `plan --html` and `estimate --html`.

The file holds the page's own modules, its style and the data of the views, so that it draws what the live page draws, without a server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.view.page.frame import offline_page
from meshwright.view.page.registry import CHEAP, VIEWS, view
from meshwright.view.page.subject import Subject

LIVE = "meshwright web"


def document(subject: Subject, names: Iterable[str] = (), first: str = "", title: str = "") -> str:
    """The HTML of the named views (default: all that need no search); `first` is shown when the file opens."""
    names = list(names) or [name for name, entry in VIEWS.items() if entry.kind == CHEAP]
    title = title or f"{subject.model.name} on {subject.plan.world:,} × {subject.cluster.accelerator.name}"
    data = {
        "state": {**state(subject), "page": {"view": first or names[0], "compare": None, "options": {}}},
        "views": {name: answer(subject, name) for name in names},
        "catalog": None,
        "command": LIVE,
    }
    return offline_page(title, data)


def state(subject: Subject) -> dict[str, Any]:
    """The configuration as the page keeps it: a plan file as JSON."""
    return {name: value for name, value in subject.config.to_dict().items() if value}


def answer(subject: Subject, name: str) -> dict[str, Any]:
    """The data of one view; a view that this plan cannot have says why in its place."""
    entry = view(name)
    try:
        return {"title": entry.title, "data": entry.data(subject), "compare_data": None}
    except MeshwrightError as error:
        return {"title": entry.title, "data": None, "compare_data": None, "error": error.as_dict()}
