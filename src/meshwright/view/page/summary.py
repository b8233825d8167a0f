"""The numbers of a plan in one table: what `meshwright estimate --json` prints."""

from __future__ import annotations

from typing import Any

from meshwright.view.page.subject import Subject


def data(subject: Subject) -> dict[str, Any]:
    """The prediction, and the title of the plan."""
    return {"title": subject.plan.title(), **subject.estimate.prediction.as_dict()}
