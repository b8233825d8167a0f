"""The answer of a decision guide: a plan (or none), the reason with this problem's figures, and the guide's source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.describe.plan import Plan


@dataclass(frozen=True)
class Recommendation:
    """The answer of a guide. `plan` is legal for the problem, or None if the guide advises against its strategy or is not about training."""

    guide: str
    plan: Plan | None
    reason: str
    source: str
    wording: str = ""
    correction: str = ""  # what is wrong in the wording

    def as_dict(self) -> dict[str, Any]:
        return {
            "guide": self.guide,
            "plan": self.plan.as_dict() if self.plan else None,
            "reason": self.reason,
            "source": self.source,
            "wording": self.wording,
            "correction": self.correction,
        }
