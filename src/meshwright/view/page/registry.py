"""The views of the page, in the order of its navigation: one line per view.

A view is a module of this folder with `data(subject) -> dict` and a module of the same name below `static/js/views/` that draws the data.
`cheap` views follow from the estimate of one plan and are repainted at once; `search` views need the planner or many estimates, and appear
first provisionally. Modules are imported when a view is first asked for.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import unknown
from meshwright.view.page.subject import Subject

CHEAP: Literal["cheap"] = "cheap"
SEARCH: Literal["search"] = "search"


@dataclass(frozen=True)
class View:
    """One view: its name, its title, the module with its `data` function, and how long that takes."""

    name: str
    title: str
    module: str
    kind: Literal["cheap", "search"] = CHEAP

    def data(self, subject: Subject) -> dict[str, Any]:
        out: dict[str, Any] = importlib.import_module(self.module).data(subject)
        return out


def _view(name: str, title: str, kind: Literal["cheap", "search"] = CHEAP) -> tuple[str, View]:
    return name, View(name, title, f"meshwright.view.page.{name}", kind)


VIEWS: dict[str, View] = dict(
    [
        _view("verdict", "The verdict"),
        _view("advice", "The best next changes", SEARCH),
        _view("memory", "Memory per GPU"),
        _view("leaders", "The best plans", SEARCH),
        _view("waterfall", "Where the step's time goes"),
        _view("timeline", "Pipeline timeline", SEARCH),
        _view("stages", "Between stages", SEARCH),
        _view("roofline", "Communication roofline"),
        _view("ranks", "Grid of ranks"),
        _view("goodput", "Goodput"),
        _view("heatmap", "tp × pp heat map", SEARCH),
        _view("pareto", "Time against memory", SEARCH),
        _view("scaling", "Scaling", SEARCH),
        _view("batch", "Efficiency against batch", SEARCH),
        _view("sensitivity", "Sensitivity", SEARCH),
        _view("published", "Published runs", SEARCH),
        _view("collectives", "Collectives", SEARCH),
        _view("strategies", "Strategies"),
        _view("zero", "ZeRO and the memory wall", SEARCH),
        _view("overlap", "Buckets and prefetching", SEARCH),
        _view("learn", "Lessons"),
        _view("modeler", "Bandwidth and efficiency modeler"),
    ]
)


def view(name: str) -> View:
    """The view of a name."""
    if name not in VIEWS:
        raise unknown("MW-WEB-007", "view", str(name), VIEWS)
    return VIEWS[name]
