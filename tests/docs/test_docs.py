"""Commands in the documentation are legal: the commands, their files and the resulting plans exist."""

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
def test_documented_commands_are_legal(page, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, command, *words = shlex.split(line)
    assert command in COMMANDS
    settings = [value for word, value in pairwise(words) if word == "--set"]
    for file in (word for word in words if word.endswith(".toml")):
        config = load(file, settings)
        if command in ("verify", "train"):
            config.check()


def test_plan_fields_in_the_documentation_exist():
    from meshwright.describe.plan import Plan

    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 25
    assert named <= set(Plan.model_fields)


def test_building_blocks_in_the_documentation_exist():
    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    sources = {path.stem: path.read_text("utf-8") for path in (ROOT / "src/meshwright/parallel").rglob("[a-z]*.py")}
    called = [pair for pair in re.findall(r"`(\w+)\.(\w+)", text) if pair[0] in sources]
    assert len(called) >= 8
    for module, name in called:
        assert re.search(rf"^(?:def |class )?{name}\b", sources[module], re.MULTILINE), f"{module}.{name}"
