"""Mutants that compute the same, each with its reason: judged by a person, named by module, function and changed line."""

from __future__ import annotations

from changes import Mutant

# (module, function, the line as changed) → why no result can differ
EQUIVALENT: dict[tuple[str, str, str], str] = {}


def reason_of(mutant: Mutant) -> str:
    changed = next((row[1:].strip() for row in mutant.diff.splitlines() if row.startswith("+")), "")
    return EQUIVALENT.get((mutant.module, mutant.function, changed), "")
