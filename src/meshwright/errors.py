"""Errors in one shape: a stable code, what is wrong, why, the valid values, and the fix.

    MW-PLAN-004: tp=6 does not divide 64 attention heads of llama3-70b. Valid: 1, 2, 4, 8. Fix: --set plan.tp=8

Every code has its line in `docs/errors.md`; a test holds the two together. Bad input raises `MeshwrightError`, never a
bare exception: the command line prints it and exits with its `exit_code` (2 for bad input, 3 for "nothing fits").
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MeshwrightError(ValueError):
    """One clear error. `code` is `MW-AREA-NNN`; the rest are sentences or values for a person.

    A `ValueError`, so that a validator may raise it inside pydantic and it comes out whole (`describe.base`).
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        why: str = "",
        valid: Iterable[object] = (),
        fix: str = "",
        exit_code: int = 2,
    ) -> None:
        self.code, self.what, self.why, self.fix = code, what.rstrip("."), why.rstrip("."), fix
        self.valid = [str(v) for v in valid]
        self.exit_code = exit_code
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.code}: {self.what}."
        if self.why:
            text += f" {self.why}."
        if self.valid:
            text += f" Valid: {listed(self.valid)}."
        if self.fix:
            text += f" Fix: {self.fix}"
        return text

    def as_dict(self) -> dict[str, object]:
        return {"code": self.code, "what": self.what, "why": self.why, "valid": self.valid, "fix": self.fix}


def listed(values: Sequence[str], limit: int = 24) -> str:
    """Values joined for a message; a long list is cut with its count told."""
    if len(values) <= limit:
        return ", ".join(values)
    return ", ".join(values[:limit]) + f", … ({len(values)} in all)"


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice a person most likely meant, or "" when none is close."""
    choices = list(choices)
    folded = {c.lower().replace("_", "-"): c for c in reversed(choices)}
    close = difflib.get_close_matches(str(word)[:100].lower().replace("_", "-"), list(folded), n=1, cutoff=0.5)
    return folded[close[0]] if close else ""


def unknown(code: str, what: str, word: str, choices: Iterable[str], fix: str = "{}") -> MeshwrightError:
    """An error for a word that is none of `choices`; `fix` is a template around the nearest one."""
    choices = list(choices)
    near = nearest(word, choices)
    shown = str(word) if len(str(word)) <= 60 else str(word)[:57] + "..."
    return MeshwrightError(code, f"{what} '{shown}' is not known", valid=choices, fix=fix.format(near) if near else "")


def nearest_number(value: float, choices: Iterable[int]) -> int:
    """The legal number closest to `value`; a tie goes to the larger."""
    return min(choices, key=lambda c: (abs(c - value), -c))


def cannot_write(path: object, error: OSError) -> MeshwrightError:
    """An error for a file or stream that cannot be written: a full disk, a missing folder, no permission."""
    return MeshwrightError("MW-CLI-004", f"cannot write '{path}'", why=error.strerror or str(error))
