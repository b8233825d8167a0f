"""The published training runs that come with Meshwright: facts of public tables, each row with its source and its licence.

`published.csv.xz` has the columns of `rows`, and `licence`: the licence of the repository that a table stands in, or "facts of a
paper" where it was transcribed from one. Blank cells were not published. `benchmarks/publish_rows.py` writes the file.
"""

from __future__ import annotations

import csv
import lzma
from functools import cache
from importlib.resources import files

FAILED = "_failed"  # ending of the sources whose runs crashed or ran out of memory


@cache
def _rows() -> tuple[dict[str, str], ...]:
    data = files("meshwright.calibrate.runs").joinpath("published.csv.xz").read_bytes()
    return tuple(csv.DictReader(lzma.decompress(data).decode("utf-8").splitlines()))


def runs() -> list[dict[str, str]]:
    """The runs that finished."""
    return [dict(row) for row in _rows() if not row["file"].endswith(FAILED)]


def failed() -> list[dict[str, str]]:
    """The runs that crashed or ran out of memory."""
    return [dict(row) for row in _rows() if row["file"].endswith(FAILED)]


def licences() -> dict[str, str]:
    """The licence of each source."""
    return {row["file"].removesuffix(FAILED): row["licence"] for row in _rows()}
