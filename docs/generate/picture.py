"""The picture of the README: the terminal's output of one command, as SVG. `make pages` writes it; a test compares its text.

rich draws the terminal. The web fonts that it names are left out: a picture loads nothing from the network.
"""

import io
import re
from pathlib import Path

PLAN = Path(__file__).parents[2] / "examples" / "llama3-70b-64xh100.toml"
FILE = Path(__file__).parents[1] / "pictures" / "estimate.svg"
TITLE = "meshwright estimate --plan examples/llama3-70b-64xh100.toml"
WIDTH = 120


def lines() -> list[str]:
    """The text of the picture."""
    return [line.rstrip() for line in recorded().export_text(clear=False).splitlines()]


def recorded():
    """A console that has printed the first part of the estimate, with colours."""
    from rich.console import Console

    import meshwright as mw
    from meshwright.view.estimate import breakdown, header, memory

    out = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    e = mw.estimate(str(PLAN))
    for part in (header(e), breakdown(e), memory(e)):
        out.print(part)
    return out


def svg() -> str:
    from rich.terminal_theme import MONOKAI

    text = recorded().export_svg(title=TITLE, theme=MONOKAI, unique_id="estimate")
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    return text.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    FILE.write_text(svg(), "utf-8")
