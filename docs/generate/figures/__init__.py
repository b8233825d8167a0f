"""The figures of the five texts that Meshwright began with, each recomputed by our own functions and given a verdict.

`python -m figures` writes the page docs/figures.md. Read `figure` for the form of an entry
and the rules of its verdict; each other file is the table of one text or of a part of it.
"""

from figures.figure import Figure
from figures.page import figures, markdown

__all__ = ["Figure", "figures", "markdown"]
