"""What the ranks of a module's proof are given, and what the reference returns: plain data, so that the parent process needs no torch."""

from dataclasses import dataclass, field
from typing import Any

from meshwright.describe.plan import Plan
from meshwright.proof.records import Trace

FACTORY = "def make(): return MyModule(…), at the top level of a file"


@dataclass(frozen=True)
class ModuleJob:
    """A training of a user's module. `make`, `example`, `loss` and `table` are values, or places (`code.Named`)."""

    name: str  # of the factory
    make: Any
    example: Any
    loss: Any
    table: Any
    plan: Plan
    layers: str | None = None
    batch_first: bool | None = None
    reduction: str = "mean"
    check: bool = True  # `parallelize` refuses what it can see is wrong
    steps: int = 5
    seed: int = 0


@dataclass
class Reference:
    """One device in float64, and in float32 if a part of the module computes in float32 for any input."""

    double: Trace
    notes: list[str] = field(default_factory=list)
    single: Trace | None = None
