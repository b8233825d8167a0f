"""Recipes in a JSON Lines file: each row understood, checked, and, where GPUs and hardware are given, its memory computed.

A row has `framework`, `settings` (flat keys), perhaps `args`, `shape`, `model`, `gpus` and `hardware`. A row with `before` and `after` is a
published mistake and its correction: both are checked.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.describe.files import read_text
from meshwright.errors import MeshwrightError
from meshwright.interop.frameworks import find
from meshwright.interop.keys import SettingsProblem
from meshwright.interop.memory import MemoryFit, fit
from meshwright.interop.reading import SettingsReading, understand
from meshwright.interop.shapes import hardware_in

MOST_ROWS, MOST_BYTES = 100_000, 100_000_000


@dataclass
class RecipeVerdict:
    """The line of `lint --recipes` for one recipe."""

    id: str
    framework: str
    read: bool
    unknown: list[str] = field(default_factory=list)
    legal: bool | None = None
    fits: bool | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    memory_gib: float | None = None
    reading: SettingsReading | None = None
    slow: bool = False  # a finding names a pattern that costs time, with its seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "read": self.read,
            "unknown": self.unknown,
            "legal": self.legal,
            "fits": self.fits,
            "slow": self.slow,
            "findings": self.findings,
        }


def rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The recipes of a file, one by one, with an `id` each."""
    for number, line in enumerate(read_text(Path(path), MOST_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        if number > MOST_ROWS:
            raise MeshwrightError("MW-SET-010", f"{path} has more than {MOST_ROWS:,} lines")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise MeshwrightError(
                "MW-SET-010", f"line {number} of {path} is not a JSON object", fix="one recipe per line"
            )
        if "before" in row:
            name = f"{(row.get('mistake') or {}).get('n', number)}.{number}"
            for kind in ("before", "after"):
                if isinstance(row.get(kind), dict):
                    yield {**row[kind], "id": f"{name} {kind}"}
        else:
            yield {**row, "id": str(row.get("id", number))}


def _texts(row: dict[str, Any]) -> str:
    """What a recipe says besides its settings: path, name, notes, and settings that name a machine."""
    settings = row.get("settings")
    named = settings.items() if isinstance(settings, dict) else ()
    machine = (value for key, value in named if re.search(r"cluster|gpu_type|hardware|accelerator", key))
    return " ".join(str(text) for text in (row.get("path"), row.get("name"), row.get("notes"), *machine))


def check(row: dict[str, Any]) -> RecipeVerdict:
    """The verdict on one recipe. A recipe that cannot be read has `read` false, and the reason among its findings."""
    identity, name = str(row["id"]), str(row.get("framework", ""))
    framework = find(name)
    if framework is None:
        problem = SettingsProblem("MW-SET-012", f"settings of {name or 'no framework'} are not read", severity="note")
        return RecipeVerdict(identity, name, False, findings=[problem.as_dict()])
    path = str(row.get("path") or row.get("source") or "")
    framework = framework.at(path)
    settings, args = row.get("settings") or {}, row.get("args") or []
    try:
        reading = understand(
            framework,
            settings if isinstance(settings, dict) else {},
            [str(a) for a in args] if isinstance(args, list) else [],
            gpus=row["gpus"] if isinstance(row.get("gpus"), int) else 0,
            hardware=str(row.get("hardware") or "") or hardware_in(_texts(row)),
            model=str(row.get("model") or ""),
            shape=row.get("shape") if isinstance(row.get("shape"), dict) else None,
        )
    except MeshwrightError as error:
        return RecipeVerdict(
            identity,
            name,
            False,
            [error.what],
            findings=[SettingsProblem(error.code, error.what, error.why, error.fix).as_dict()],
        )
    reading.gpus_are_least = reading.assembled.has_least_gpus and framework.names_least_gpus(path)
    memory = fit(reading) if not reading.errors else MemoryFit()
    problems = [*reading.problems, *memory.problems]
    return RecipeVerdict(
        identity,
        name,
        not reading.understood.unknown,
        reading.understood.unknown,
        not reading.errors,
        memory.fits,
        [p.as_dict() for p in problems],
        memory.gib,
        reading,
    )
