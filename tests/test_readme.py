"""The README is short and true: its targets exist, its table and picture are fresh. `tests/docs/test_blocks.py` runs its commands."""

import html
import re
from pathlib import Path

from blocks import MISSES, misses
from meshwright.cli import COMMANDS
from picture import FILE, lines

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def test_it_fits_on_150_lines() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_commands_and_make_targets_exist() -> None:
    assert set(re.findall(r"(?:\$|`)\s*meshwright ([a-z]+)", TEXT)) <= set(COMMANDS)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = re.findall(r"[`$]\s*make ([a-z]+)", TEXT)
    assert named[:2] == ["demo", "test"]
    assert set(named) <= set(targets)


def test_the_license_is_named() -> None:
    assert "[Apache License 2.0](LICENSE)" in TEXT
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text("utf-8")
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_picture_shows_what_the_command_prints() -> None:
    """After a change: make pages"""
    text = html.unescape(FILE.read_text("utf-8")).replace("\u00a0", " ")
    drawn = re.sub(r"\s+", "", re.sub(r"<[^>]+>", "", text.partition('clip-path="url(#estimate-clip-terminal)">')[2]))
    assert re.sub(r"\s+", "", "".join(lines())) in drawn
    assert str(FILE.relative_to(ROOT)) in TEXT
    assert "@font-face" not in text


def test_the_misses_are_those_of_the_page_of_accuracy() -> None:
    """After a change: make pages"""
    table = MISSES.search(TEXT)
    assert table is not None
    assert table[0] == misses()
