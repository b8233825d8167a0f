"""Benchmarks that need a GPU or an hour can be imported, and what those of a GPU train is legal."""

import runpy
import sys
from pathlib import Path

import pytest

from meshwright.describe.config import load

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.fixture(autouse=True)
def neighbours(monkeypatch):
    """Let a script import the files in its folder, during the test only."""
    for folder in {file.parent for file in FILES}:
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_it_can_be_imported(file):
    runpy.run_path(str(file), run_name="imported")


def test_the_shapes_of_the_gpu_benchmark_are_legal(tmp_path):
    names = runpy.run_path(str(FOLDER / "gpu" / "run.py"), run_name="imported")
    shapes = [
        *names["SHAPES"].values(),
        names["SMALL"],
        *(shape for pair in names["EXPERTS"].values() for shape in pair),
    ]
    for shape in shapes:
        for precision in ("bf16", "fp8"):
            load(names["run_file"](tmp_path, shape, precision)).check()
    long = names["LONG"] | {"batch": 1, "seq": 524288}
    load(names["run_file"](tmp_path, long, "bf16", plan={"recompute": "full", "offload": "activations"})).check()
