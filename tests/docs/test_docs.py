"""What the documents tell a reader to type is legal: commands exist, their files too, and every plan they make."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.cli import COMMANDS
from meshwright.describe.config import load

ROOT = Path(__file__).parents[2]
TYPED = [
    (page.name, line.removeprefix("$ ").partition("   #")[0])
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for line in page.read_text("utf-8").splitlines()
    if line.startswith("$ meshwright ")
]


@pytest.mark.parametrize(("page", "line"), TYPED)
def test_what_is_typed_is_legal(page, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, command, *words = shlex.split(line)
    assert command in COMMANDS
    settings = [value for word, value in pairwise(words) if word == "--set"]
    for file in (word for word in words if word.endswith(".toml")):
        config = load(file, settings)
        if command in ("verify", "train"):
            config.check()


def test_the_fields_that_a_page_names_are_fields_of_a_plan():
    from meshwright.describe.plan import Plan

    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 25
    assert named <= set(Plan.model_fields)


def test_what_stands_alone_is_where_the_page_says():
    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    sources = {path.stem: path.read_text("utf-8") for path in (ROOT / "src/meshwright/parallel").rglob("[a-z]*.py")}
    called = [pair for pair in re.findall(r"`(\w+)\.(\w+)", text) if pair[0] in sources]
    assert len(called) >= 8
    for module, name in called:
        assert re.search(rf"^(?:def |class )?{name}\b", sources[module], re.MULTILINE), f"{module}.{name}"
