"""One published run: its row, and the objects that it is converted to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshwright.describe.cluster import Cluster
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError


@dataclass
class Case:
    """One published run: its measurements and its configuration."""

    row: dict[str, str]
    model: Model | None = None
    cluster: Cluster | None = None
    stack: Stack = field(default_factory=Stack)
    workload: Workload | None = None
    plan: Plan | None = None
    assumed: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def row_id(self) -> str:
        return self.row.get("row_id", "")

    @property
    def step_time(self) -> float | None:
        """The published step time, or the one that follows from tokens per second and device."""
        published = number(self.row.get("step_time_s", ""))
        rate = number(self.row.get("tokens_per_s_per_gpu", ""))
        if published is None and rate and self.workload and self.cluster:
            return self.workload.tokens_per_step / (rate * self.cluster.world)
        return published

    @property
    def memory(self) -> float | None:
        return number(self.row.get("memory_gib", ""))


def number(text: str | None) -> float | None:
    """The first number in a cell, or None if the cell is blank."""
    match = re.search(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text or "")
    return float(match[0]) if match else None


def integer(text: str | None, default: int = 0) -> int:
    """The first number in a cell as an integer, or `default` if the cell is blank."""
    value = number(text)
    return default if value is None else int(min(value, 2**40))


def refusal(what: str) -> MeshwrightError:
    """The error of a row that cannot be converted."""
    return MeshwrightError("MW-VAL-003", what)
