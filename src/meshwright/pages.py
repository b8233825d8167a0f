"""The page of each kind of result, found when the result is shown: the pages of proofs and trainings import torch."""

from importlib import import_module
from typing import Any

from meshwright.describe.shown import Form

PAGES = {
    "Config": "meshwright.view.config",
    "Estimate": "meshwright.view.estimate",
    "Simulation": "meshwright.view.simulate",
    "Result": "meshwright.view.plan",
    "Proof": "meshwright.proof.page",
    "Training": "meshwright.training.page",
    "Checkup": "meshwright.doctor",
}


def show_as(result: Any, form: Form) -> Any:
    """A result as a page of rich, as plain text, or as an HTML element."""
    from meshwright.view.html import as_html
    from meshwright.view.tables import as_text

    page = import_module(PAGES[type(result).__name__]).page(result)
    return {"page": lambda thing: thing, "text": as_text, "html": as_html}[form](page)
