"""A plan that was simulated: its step time, memory and how much there is to set up."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.describe.plan import Plan


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at closely."""

    plan: Plan
    strategy: str
    time: float  # seconds, simulated
    closed: float  # seconds by the closed forms
    memory: float  # bytes of the fullest rank
    shape: int
    complexity: float
    proved: bool = True  # best of its strategy for certain

    @property
    def key(self) -> tuple[float, float]:
        return self.time, self.complexity
