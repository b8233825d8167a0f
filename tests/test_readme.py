"""The README names only what exists, and opens with the two commands."""

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
