"""The course: chapters in order, one text at a time, and the figures in it.

The text of a chapter is a page of docs/concepts, which the package has below `course/chapters`. Numbers in it are the documentation's: tests run
its code blocks, and compare what the command and the Python call of each chapter give.
"""

from functools import cache
from importlib.resources import files

from meshwright.units import Json
from meshwright.view.page.course import copies, markdown, messages, pieces, storage, whole
from meshwright.view.page.course.drawing import drawn
from meshwright.view.page.subject import Subject

PARTS = {
    "Messages": ("alpha-beta", "collectives", "roofline"),
    "Copies of the model": ("data-parallel", "overlap", "zero"),
    "Parts of the model": ("tensor-parallel", "sequence-parallel", "pipeline", "context-parallel", "expert-parallel"),
    "Bytes": ("precision", "compression", "recompute"),
    "A whole training": ("combining", "topology", "goodput", "scaling-laws", "case-studies"),
}
FIGURES = {**messages.FIGURES, **copies.FIGURES, **pieces.FIGURES, **storage.FIGURES, **whole.FIGURES}
CHAPTERS = [key for keys in PARTS.values() for key in keys]


@cache
def chapter(key: str) -> Json:
    """The title and the blocks of a chapter."""
    text = files("meshwright.view.page.course").joinpath("chapters", f"{key}.md").read_text("utf-8")
    return markdown.chapter(text)


@cache
def contents() -> list[Json]:
    """The parts with the titles of their chapters."""
    return [
        {"part": part, "chapters": [{"key": key, "title": chapter(key)["title"]} for key in keys]}
        for part, keys in PARTS.items()
    ]


def data(subject: Subject) -> Json:
    """A chapter of the course; with the option `figure`, one figure with the chosen values."""
    name = subject.option("figure", "", ["", *FIGURES])
    if name:
        return {"figure": drawn(name, FIGURES[name], subject, subject.option("values", {}))}
    key = subject.option("chapter", CHAPTERS[0], CHAPTERS)
    return {"contents": contents(), "chapter": {"key": key, **chapter(key)}}
