"""Results that show themselves: a page in the terminal, an HTML element with tables and figures in a notebook.

The pages are in `view`, which is above the results, so the module is imported when a result is shown, by the name in `shown_by`.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar


class Shown:
    """A result with a page. `shown_by` is the function that makes the terminal's page, `drawn_by` the one that makes the notebook's."""

    shown_by: ClassVar[str] = ""  # such as "meshwright.view.estimate:page"
    drawn_by: ClassVar[str] = ""  # such as "meshwright.view.notebook:estimate_html"

    def __rich__(self) -> Any:
        return function_of(self.shown_by)(self)

    def __str__(self) -> str:
        text: str = function_of("meshwright.view.tables:as_text")(self.__rich__())
        return text

    def _repr_html_(self) -> str:
        html: str = function_of(self.drawn_by)(self)
        return html


def function_of(name: str) -> Any:
    """The function at "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
