"""`python -m picture`: write docs/pictures/estimate.svg."""

from picture import FILE, svg

FILE.parent.mkdir(exist_ok=True)
FILE.write_text(svg(), "utf-8")
