"""The figures of the five texts Meshwright grew from, each recomputed by our own functions: it holds, or what is right.

    python -m meshwright.cost.figures              print the page
    python -m meshwright.cost.figures --write docs/figures.md

Read `figure` for the form of an entry and the rule of its verdict; each other file is the table of one text, or of a part of it.
"""

from meshwright.cost.figures.figure import Figure
from meshwright.cost.figures.page import figures, markdown

__all__ = ["Figure", "figures", "markdown"]
