"""The notebooks of the course, one for each part, from the pages of its chapters: prose, pictures, and their Python as cells to change and run.

`make pages` writes them to examples/course. A notebook runs from its own folder. The number that a chapter's command and its Python call give stands
in a comment of the page; it is written first.
"""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.view.page.course.markdown import NUMBER, SAME, chapter, pieces
from meshwright.view.page.learn import CHAPTERS, PARTS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "course"
NAMES = dict(zip(PARTS, ("1-messages", "2-copies", "3-parts", "4-bytes", "5-whole"), strict=True))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def last_value(source: str) -> Any:
    """The value of the last expression of a chapter's Python."""
    tree = ast.parse(source)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {"mw": mw}
    exec(compile(tree, "chapter", "exec"), names)
    return eval(compile(ast.Expression(last.value), "chapter", "eval"), names)


def with_number(text: str) -> str:
    """A page with the present value of its number, where it changed."""
    (block,) = [block for block in chapter(text)["blocks"] if block["kind"] == "number"]
    value = f"{last_value(block['python']):.12g}"
    return NUMBER.sub(lambda m: m[0] if m["value"] == value else f"<!-- number {m['path']} {value} -->", text)


def cells(key: str) -> list[tuple[str, str]]:
    """The cells of a chapter: markdown and code in turn. Outputs of commands stay on the site; the command of the number is named."""
    out: list[tuple[str, str]] = []
    section = ""
    for kind, body in pieces((ROOT / "docs" / "concepts" / f"{key}.md").read_text("utf-8")):
        section = body.lstrip("# ") if kind == "heading" else section
        if kind == "code python":
            out.append(("code", body.replace('"examples/', '"../')))
            continue
        if kind == "code console" and section == SAME:
            command = body.partition("\n")[0].partition(" | ")[0].removeprefix("$ ").replace("examples/", "../")
            body = f"In a terminal: `{command}`"
        elif kind.startswith("code") or kind == "comment":
            continue
        body = re.sub(r"\]\((?!http|#)", "](../../docs/concepts/", body)
        if out and out[-1][0] == "markdown":
            out[-1] = ("markdown", f"{out[-1][1]}\n\n{body}")
        else:
            out.append(("markdown", body))
    return out


def notebook(part: str) -> str:
    """The JSON of a notebook."""
    found: list[dict[str, Any]] = []
    for key in PARTS[part]:
        for kind, text in cells(key):
            cell: dict[str, Any] = {"cell_type": kind, "id": f"{key}-{len(found)}", "metadata": {}}
            if kind == "code":
                cell |= {"execution_count": None, "outputs": []}
            found.append(cell | {"source": text.splitlines(keepends=True)})
    about = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    book = {"cells": found, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.chdir(ROOT)
    for key in CHAPTERS:
        page = ROOT / "docs" / "concepts" / f"{key}.md"
        page.write_text(with_number(page.read_text("utf-8")), "utf-8")
    FOLDER.mkdir(exist_ok=True)
    for part, name in NAMES.items():
        (FOLDER / f"{name}.ipynb").write_text(notebook(part), "utf-8")
