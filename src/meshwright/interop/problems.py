"""What is wrong with settings, found before a plan is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SettingsProblem:
    """One contradiction in settings. `error`: the framework refuses them, or trains something else; `note`: worth knowing."""

    code: str
    what: str
    why: str = ""
    fix: str = ""
    severity: Literal["error", "warning", "note"] = "error"

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "severity": self.severity, "what": self.what, "why": self.why, "fix": self.fix}
