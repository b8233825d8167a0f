"""What the five texts describe, one row for each thing, with the command, the Python call and the view that do it: `python -m texts` writes the page.

The rows are in texts.toml. Of a row with a number of the text (`says`) the verdict follows from our value: it holds within 3% (or `within`), else
it differs and the row has the reason. tests/docs/test_texts.py runs every row.
"""

import math
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import meshwright as mw
from figures.page import TEXTS
from meshwright import formulas
from meshwright.describe import catalog

PAGE, DATA = Path(__file__).parents[1] / "texts.md", Path(__file__).with_name("texts.toml")
WITHIN = 0.03
NAMES = {"mw": mw, "f": formulas, "catalog": catalog}
INTRODUCTION = """# What the five texts describe, thing by thing

Meshwright began with five texts on distributed training. Each row is one thing that they describe: the section, the command that shows it, the
Python call that gives the number (after `import meshwright as mw`; `catalog` is `meshwright.describe.catalog`), and the
[view of the page](page.md) that draws it. Where a text prints a number, it stands beside ours, which is computed by the call. Where the two
differ by more than rounding, the last column has the reason; [all 336 figures of the texts](figures.md) have stricter verdicts.

Every row is run by a test: the Python call, the command, and the numbers of the texts. Commands that train or measure are parsed only.
`make pages` writes this page from `docs/generate/texts.toml`.
"""


class Row(NamedTuple):
    at: str
    thing: str
    py: str = ""
    says: float | None = None
    unit: str = ""
    why: str = ""
    within: float = WITHIN
    cmd: str = ""
    prints: str = ""
    view: str = ""
    does: str = ""

    @property
    def holds(self) -> bool:
        """Whether the number of the text is ours, within its rounding."""
        return self.says is None or math.isclose(float(value_of(self.py)), self.says, rel_tol=self.within)


@cache
def texts() -> dict[str, list[Row]]:
    tables = tomllib.loads(DATA.read_text("utf-8"))["text"]
    return {table["key"]: [Row(**row) for row in table["rows"]] for table in tables}


@cache
def value_of(py: str) -> Any:
    return eval(py, dict(NAMES)) if py else None


def call(py: str) -> str:
    """The Python call as a user types it."""
    return re.sub(r"\bf\.(?=[a-z_]+\()", "mw.formulas.", py)


def shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if value == 0 or abs(value) >= 1e9:
        return f"{value:.4g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def line(row: Row) -> str:
    ours = f"{shown(value_of(row.py))} {row.unit}".strip() if row.py else ""
    says = "" if row.says is None else shown(row.says)
    remark = "" if row.holds else f"**differs**: {row.why}"
    code = f"`{call(row.py)}`" if row.py else ""
    cells = [row.at, row.thing, says, ours, f"`{row.cmd}`", code, row.view, remark]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown() -> str:
    rows = [row for listed in texts().values() for row in listed]
    wrong = sum(not row.holds for row in rows)
    printed = sum(row.says is not None for row in rows)
    counts = f"**{len(rows)} things; {printed} with a number of the text, of which {printed - wrong} hold and {wrong} differ.**"
    parts = [INTRODUCTION, f"{counts}\n"]
    for key, listed in texts().items():
        head = [
            "| section | thing | text | ours | command | Python | view | |",
            "| --- | --- | ---: | ---: | --- | --- | --- | --- |",
        ]
        parts.append("\n".join([f"## {TEXTS[key][0]}\n", *head, *map(line, listed)]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(markdown(), "utf-8")
