"""The file of fitted numbers (`describe/catalog/fit.toml`): the numbers of every stack of the catalog, and the bands of predictions.

A stack with published runs has the mean of its posterior; a stack without has the typical numbers. The band of a stack with fewer than five runs
is that of a typical one: so few runs do not show how far others are from them. Stacks on CPUs are measured on the
machine itself, so they have no entry.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from meshwright.calibrate.runs.bands import LEVELS, Band
from meshwright.calibrate.runs.left_out import SEEN
from meshwright.calibrate.runs.response import fields_of
from meshwright.calibrate.runs.stack_fit import Fit
from meshwright.describe import catalog
from meshwright.describe.entries import base_of
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError

NOTE = "# Written by `meshwright calibrate --runs`: do not edit by hand.\n"
MEASURED = ("gloo-cpu", "meshwright")  # our trainer: its rates are those that `bench` measures, on CPUs and on GPUs


def stack_numbers(fit: Fit) -> dict[str, dict[str, float | str]]:
    """The fitted fields of every stack of the catalog that is not measured."""
    runs = Counter[str]()
    for leaf in fit.leaves:
        runs[leaf.family] += len(leaf.runs)
    found: dict[str, dict[str, float | str]] = {}
    for name in catalog.names("stacks"):
        if name in MEASURED:
            continue
        base = base_of("stacks", name)
        x = (fit.family(base) if base in runs else fit.population()).mean
        evidence = "published" if runs[base] >= SEEN[-1] else "typical"
        found[name] = {**rounded(x, catalog.load("stacks", name)), "evidence": evidence}
    return found


def rounded(x: np.ndarray, stack: Stack) -> dict[str, float]:
    """The fields of the stack with these coordinates, to three digits."""
    return {name: float(f"{float(value):.3g}") for name, value in fields_of(x, stack).items()}


def to_toml(fit: Fit, bands: dict[str, Band]) -> str:
    missing = [level for level in LEVELS if level not in bands]
    if missing:
        raise MeshwrightError(
            "MW-CALIB-005",
            f"the runs give no band of a stack that is {' or '.join(missing)}",
            why="published: two sources must share stacks with others; calibrated: two sources need more than five runs of one stack",
        )
    lines = [NOTE]
    for level, band in bands.items():
        lines.append(f"[bands.{level}]\nlow = {band.low:.4f}\nhigh = {band.high:.4f}\n")
    for name, fields in stack_numbers(fit).items():
        lines.append(f"[stacks.{name}]")
        lines += [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value!r}" for key, value in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)
