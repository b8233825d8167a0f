"""`meshwright show` without a topic: the list of all topics."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from meshwright.programs.collectives import ALGORITHMS, OPERATIONS
from meshwright.programs.collectives.formulas import text as formula
from meshwright.programs.pipelines import SCHEDULES
from meshwright.view.tables import filled, heading, show, show_json


def data(lessons: dict[str, str]) -> dict[str, Any]:
    """Return what `--json` prints."""
    found = {name: {"about": OPERATIONS[name], "algorithms": list(named)} for name, named in ALGORITHMS.items()}
    return {
        "collectives": found,
        "pipelines": {name: rule.about for name, rule in SCHEDULES.items()},
        "lessons": lessons,
    }


def list_topics(lessons: dict[str, str], as_json: bool = False) -> None:
    """Print the collectives with their algorithms and costs, the schedules and the lessons."""
    if as_json:
        show_json(data(lessons))
        return
    rows = []
    for operation, named in ALGORITHMS.items():
        for k, name in enumerate(named):
            first = (Text(operation, "bold"), Text(OPERATIONS[operation], "dim")) if k == 0 else ("", "")
            rows.append((*first, Text(name, "cyan"), Text(formula(operation, name), "dim")))
    collectives = filled(["operation", "what", "algorithm", "time on a uniform network"], rows)
    schedules = filled(
        ["schedule", "what"], [(Text(name, "bold"), Text(rule.about, "dim")) for name, rule in SCHEDULES.items()]
    )
    table = filled(["lesson", "what"], [(Text(name, "bold"), Text(about, "dim")) for name, about in lessons.items()])
    show(
        heading(
            "Collectives", "meshwright show all-reduce --algorithm ring --ranks 4 [--values] [--html F] [--compare]"
        ),
        collectives,
        Text(
            "n: bytes of the full buffer, P = N·g ranks in N nodes, k segments, α latency, β = 1/bandwidth, γ time to add a byte\n",
            "dim",
        ),
        heading(
            "Pipeline schedules", "meshwright show 1f1b --stages 4 --microbatches 8 [--compare gpipe,zbv] [--html F]"
        ),
        schedules,
        heading("Lessons", "meshwright show strategies"),
        table,
    )
