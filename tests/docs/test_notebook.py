"""The notebook runs: its code cells are executed in order, and what a cell ends with shows itself as HTML or text.

Cells with the tag `torch` start ranks: `make soak` runs them.
"""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
VOID = {"i", "rect", "polyline", "br"}


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
    assert f"{estimate.prediction.memory_gib:.1f} GiB" in page
    assert simulation._repr_html_().count("<rect") == len(simulation.walked.walk.program)


@pytest.mark.slow
def test_the_cells_that_start_ranks_run(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    proof, training = shown(["import meshwright as mw", *cells(torch=True)])
    assert proof.passed
    for result in (proof, training):
        check_html(result._repr_html_())
        assert len(str(result)) > 200


def test_the_pages_of_results_exist() -> None:
    """Pages are named by text, since they stand above their results."""
    from importlib import import_module

    from meshwright.describe.shown import Shown, function_of

    for name in ("doctor", "proof.result", "training.measure.measurement", "api", "cost.estimate"):
        import_module(f"meshwright.{name}")
    shown = {cls.__name__ for cls in Shown.__subclasses__()}
    assert shown >= {"Config", "Estimate", "Simulation", "Proof", "Training", "Checkup"}
    for cls in Shown.__subclasses__():
        assert callable(function_of(cls.shown_by))
        assert callable(function_of(cls.drawn_by))


def test_a_training_and_a_proof_show_their_numbers() -> None:
    """The elements of the results that need ranks, with numbers of a made-up run."""
    from types import SimpleNamespace

    from meshwright.describe.result import Difference, Measurement
    from meshwright.view.notebook import proof_html, training_html

    m = Measurement(0.2, 0.1, 0.3, loss=[5.0, float("nan"), 2.5], steps=3)
    p = SimpleNamespace(step_time_s=0.1)
    parts = SimpleNamespace(model=SimpleNamespace(name="n<no"), plan=SimpleNamespace(title=lambda: "dp 2"))
    rows = [Difference("step time", "s", 0.1, 0.2), Difference("traffic dp", "bytes", 0.0, 0.0)]
    page = training_html(SimpleNamespace(measurement=m, prediction=p, config=parts, differences=rows))
    check_html(page)
    assert "n&lt;no" in page
    assert "-50%" in page
    found = {
        "passed": False,
        "plan": "dp 2",
        "errors": {"fp64": {"loss": None, "parameters": 1e-3}},
        "collectives_compared": {"equal": 3, "unexplained": 0},
    }
    page = proof_html(SimpleNamespace(as_dict=lambda: found))
    check_html(page)
    assert "does not train" in page
    assert "1.0e-03" in page
    assert "3 equal" in page
