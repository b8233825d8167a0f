"""Results that show themselves: a page in the terminal, text in `print`, an HTML element in a notebook.

The pages stand above the results, so the results do not import them: `meshwright/__init__.py` sets `Shown.show_as`, which finds the page of
a result (`meshwright/pages.py`), and every result calls it.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

Form = Literal["page", "text", "html"]


class Shown:
    """A result that has a page."""

    show_as: ClassVar[Callable[[Any, Form], Any]]

    def __rich__(self) -> Any:
        return type(self).show_as(self, "page")

    def __str__(self) -> str:
        text: str = type(self).show_as(self, "text")
        return text

    def _repr_html_(self) -> str:
        html: str = type(self).show_as(self, "html")
        return html
