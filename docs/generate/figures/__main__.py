"""Write the page of figures: `python -m figures`."""

from pathlib import Path

from figures.page import markdown

Path(__file__).parents[2].joinpath("figures.md").write_text(markdown(), encoding="utf-8")
