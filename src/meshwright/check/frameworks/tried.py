"""What was tried with each framework, on CPU processes with gloo: `meshwright check frameworks`. The runs are in tests/frameworks."""

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.check.cpu import patches_of
from meshwright.view.tables import table


@dataclass(frozen=True)
class TriedFramework:
    name: str
    versions: str
    runs: str  # the layouts that were recorded and compared
    read_from: str  # where what a rank holds is read from
    patches: str = ""  # the file in `check.cpu`
    not_on_cpu: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"patches": patches_of(self.patches) if self.patches else []}


FILE = Path(__file__).with_name("tried.toml")
FRAMEWORKS_TRIED = tuple(TriedFramework(**row) for row in tomllib.loads(FILE.read_text("utf-8"))["frameworks"])


def frameworks_page() -> RenderableType:
    """The frameworks as a table, and the patches of each."""
    rows = table("!framework", "version", "recorded and compared", "what a rank holds", "not on a CPU")
    for tried in FRAMEWORKS_TRIED:
        rows.add_row(tried.name, tried.versions, tried.runs, tried.read_from, tried.not_on_cpu)
    patches: dict[str, list[str]] = {}
    for tried in FRAMEWORKS_TRIED:
        if tried.patches:
            patches.setdefault(tried.patches, []).append(tried.name)
    lines = [Text("Replaced by `check record --on-cpu`, and by nothing else:", "bold")]
    lines += [
        Text(f"  {' and '.join(names)} (check/cpu/{file}.py): {'; '.join(patches_of(file))}")
        for file, names in patches.items()
    ]
    return Group(rows, *lines)
