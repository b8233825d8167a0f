"""The notebooks run: its code cells are executed in order, and what a cell ends with shows itself as HTML or text.

Cells with the tag `torch` start ranks: `make soak` runs them. Those of the course are its chapters, and run from their own folder.
"""

import ast
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import course_notebooks

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


class Balanced(HTMLParser):
    """Raises if an element is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(text: str) -> None:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|\bnan\b|\binf\b", text)


def execute(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression, as a notebook would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


def cells(torch: bool) -> list[str]:
    found = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)
    return ["".join(c["source"]) for c in code if ("torch" in c["metadata"].get("tags", ())) == torch]


def shown(sources: list[str]) -> list[Any]:
    names: dict[str, Any] = {}
    return [value for source in sources if (value := execute(source, names)) is not None]


def test_the_cells_run_anywhere_and_their_results_show_themselves(monkeypatch, capsys, tmp_path) -> None:
    """Jupyter starts in the notebook's folder, nbconvert and editors elsewhere: here in an empty folder."""
    monkeypatch.chdir(tmp_path)
    results = shown(cells(torch=False))
    assert [type(result).__name__ for result in results] == ["Config", "Estimate", "Result", "Simulation"]
    for result in results:
        check_html(result._repr_html_())
        assert len(str(result)) > 200
        assert "object at 0x" not in repr(result)
    printed = capsys.readouterr().out
    assert "of 79.1 GiB, bound by " in printed
    estimate, simulation = results[1], results[3]
    page = estimate._repr_html_()
    assert "Where the step goes" in page
    assert f"{estimate.prediction.memory_gib:.1f} of " in page
    assert all(f"rank {rank} " in simulation._repr_html_() for rank in range(simulation.walked.walk.program.ranks))


@pytest.mark.slow
def test_the_cells_that_start_ranks_run(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    proof, training = shown(["import meshwright as mw", *cells(torch=True)])
    assert proof.passed
    for result in (proof, training):
        check_html(result._repr_html_())
        assert len(str(result)) > 200


RUN = """
import json, sys
names = {}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
"""


@pytest.mark.parametrize("part", course_notebooks.PARTS)
def test_a_notebook_of_the_course_has_its_chapters(part: str) -> None:
    text = (course_notebooks.FOLDER / f"{course_notebooks.NAMES[part]}.ipynb").read_text("utf-8")
    assert text == course_notebooks.notebook(part), "make pages"
    cells = json.loads(text)["cells"]
    titles = [
        line for cell in cells for line in cell["source"] if cell["cell_type"] == "markdown" and line.startswith("# ")
    ]
    assert len(titles) == len(course_notebooks.PARTS[part])
    for target in re.findall(r"\]\((\.\./[^)#]+)", text):
        assert (course_notebooks.FOLDER / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("part", course_notebooks.PARTS)
def test_a_notebook_of_the_course_runs_from_its_folder(part: str) -> None:
    name = f"{course_notebooks.NAMES[part]}.ipynb"
    command = [sys.executable, "-c", RUN, name]
    done = subprocess.run(
        command, cwd=course_notebooks.FOLDER, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


def test_every_result_has_a_page() -> None:
    from importlib import import_module

    from meshwright.describe.shown import Shown
    from meshwright.pages import PAGES

    for name in ("doctor", "proof.result", "training.measure.measurement", "planner.result", "predict.estimate"):
        import_module(f"meshwright.{name}")
    assert {cls.__name__ for cls in Shown.__subclasses__()} == set(PAGES)
    assert all(callable(import_module(module).page) for module in PAGES.values())


def test_a_page_becomes_an_element() -> None:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from meshwright.view.html import as_html
    from meshwright.view.tables import FittedTable, filled

    grid = filled(("part", ">time"), [("n<no", Text("5 s", "bold red"))], title="Where the step goes")
    html = as_html(
        Group(Panel(Text("first\nsecond"), title="estimate"), grid, FittedTable(["a", ">b"], [["1<2", "3"]]))
    )
    check_html(html)
    assert "<section><h3>estimate</h3><div>first<br/>second</div></section>" in html
    assert '<th>part</th><th class="n">time</th>' in html
    assert "<td>n&lt;no</td>" in html
    assert "font-weight: bold" in html
    assert "1&lt;2" in html[html.index("<pre>") :]
