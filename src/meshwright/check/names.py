"""Names of parameters and modules of one framework by those of another: a table of patterns."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from meshwright.errors import MeshwrightError


def read_table(path: Path | None) -> dict[str, str]:
    """Patterns of the candidate's names and what replaces them, from a TOML file with a [names] table."""
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text("utf-8"))["names"]
        for pattern in table:
            re.compile(pattern)
        return {str(k): str(v) for k, v in table.items()}
    except (OSError, KeyError, AttributeError, ValueError, re.error) as error:
        raise MeshwrightError(
            "MW-CHECK-013",
            f"cannot read names from {path}: {error}",
            fix="a TOML file with [names] and rows 'pattern' = 'replacement'",
        ) from None


def renamed(names: Iterable[str], table: dict[str, str]) -> dict[str, str]:
    """Each name of the candidate as the reference calls it: the first pattern that matches the whole name."""
    out = {}
    for name in names:
        for pattern, replacement in table.items():
            if match := re.fullmatch(pattern, name):
                out[name] = match.expand(replacement)
                break
    return out
