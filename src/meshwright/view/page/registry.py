"""The views of the page, in the order of its navigation: one line per view.

A view is a module of this folder with `data(subject) -> dict`: its parts (`view.page.sheet`), or data that a module of the same name below
`static/js/views/` draws.
`cheap` views follow from the estimate of one plan and are repainted at once; `slow` ones need many estimates; `search` views need the planner
and appear first provisionally (the timeline with the schedule of the plan alone). Modules are imported when a view is first asked for.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import unknown
from meshwright.view.page.subject import Subject

Kind = Literal["cheap", "slow", "search"]
CHEAP: Kind = "cheap"
SLOW: Kind = "slow"
SEARCH: Kind = "search"


@dataclass(frozen=True)
class View:
    """One view: its name, its title, the module with its `data` function, and how long that takes."""

    name: str
    title: str
    module: str
    kind: Kind = CHEAP
    first: Kind = SEARCH  # how long a provisional answer takes

    def data(self, subject: Subject) -> dict[str, Any]:
        out: dict[str, Any] = importlib.import_module(self.module).data(subject)
        return out


TITLES = {
    "verdict": "The verdict", "advice": "What to change first", "memory": "Memory per GPU", "leaders": "The best plans",
    "waterfall": "Where the step's time goes", "timeline": "Pipeline timeline",
    "overlap": "The step with other overlap",
    "roofline": "Communication roofline", "ranks": "Grid of ranks", "goodput": "Goodput", "heatmap": "tp × pp heat map",
    "pareto": "Time against memory", "scaling": "Scaling", "batch": "Efficiency against batch", "sensitivity": "Sensitivity",
    "experts": "Load of experts", "published": "Published runs", "collectives": "Collectives", "strategies": "Strategies",
    "learn": "Course", "modeler": "Bandwidth and efficiency modeler",
}  # fmt: skip
FOLLOW_FROM_THE_ESTIMATE = (
    "verdict", "memory", "waterfall", "overlap", "roofline", "ranks", "goodput", "experts", "strategies", "modeler",
)  # fmt: skip
WITHOUT_A_SEARCH = ("advice", "published", "learn")
KINDS = dict.fromkeys(FOLLOW_FROM_THE_ESTIMATE, CHEAP) | dict.fromkeys(WITHOUT_A_SEARCH, SLOW)
FIRST_KINDS = {"timeline": CHEAP}
VIEWS: dict[str, View] = {
    name: View(name, title, f"meshwright.view.page.{name}", KINDS.get(name, SEARCH), FIRST_KINDS.get(name, SEARCH))
    for name, title in TITLES.items()
}


def view(name: str) -> View:
    """The view of a name."""
    if name not in VIEWS:
        raise unknown("MW-WEB-007", "view", str(name), VIEWS)
    return VIEWS[name]
