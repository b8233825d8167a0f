"""The README is true: its commands, files and targets exist. `tests/docs/test_blocks.py` compares its outputs."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.cli import COMMANDS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def test_commands_exist() -> None:
    named = set(re.findall(r"(?:\$|`)\s*meshwright ([a-z]+)", TEXT))
    assert named
    assert named <= set(COMMANDS)


def test_files_exist() -> None:
    named = set(re.findall(r"\b(?:examples|docs)/[\w./-]+\w", TEXT))
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = re.findall(r"\$ make ([a-z]+)", TEXT)
    assert named[:2] == ["demo", "test"]
    assert set(named) <= targets


def test_the_environment_and_the_license_are_named() -> None:
    assert "source .venv/bin/activate" in TEXT
    assert ".venv/bin/meshwright" in TEXT
    assert "[Apache License 2.0](LICENSE)" in TEXT
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text("utf-8")
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_legends_are_readable_without_colour() -> None:
    """Each kind of time in `estimate` has a different fill character, in the bars and in the legend."""
    from meshwright.view.estimate import COLOURS, FILL, legend

    assert len(set(FILL.values())) == len(FILL) == len(COLOURS)
    plain = re.sub(r"\[.*?\]", "", legend())
    assert all(f"{2 * fill} {kind}" in plain for kind, fill in FILL.items())


def test_the_picture_shows_what_the_command_prints() -> None:
    """After a change: make pages"""
    import html

    from picture import FILE, lines

    text = html.unescape(FILE.read_text("utf-8")).replace("\u00a0", " ")
    drawn = re.sub(r"\s+", "", re.sub(r"<[^>]+>", "", text.partition('clip-path="url(#estimate-clip-terminal)">')[2]))
    assert re.sub(r"\s+", "", "".join(lines())) in drawn
    assert str(FILE.relative_to(ROOT)) in TEXT
    assert "@font-face" not in text


def test_the_misses_are_those_of_the_page_of_accuracy() -> None:
    """After a change: make pages"""
    from blocks import MISSES, misses

    found = MISSES.search(TEXT)
    assert found is not None
    assert found[0] == misses()
