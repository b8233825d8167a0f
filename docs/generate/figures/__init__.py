"""The figures of the five texts Meshwright grew from, each recomputed by our own functions: it holds, or what is right.

    python -m figures              print the page
    python -m figures --write docs/figures.md

Read `figure` for the form of an entry and the rule of its verdict; each other file is the table of one text, or of a part of it.
"""

from figures.figure import Figure
from figures.page import figures, markdown

__all__ = ["Figure", "figures", "markdown"]
