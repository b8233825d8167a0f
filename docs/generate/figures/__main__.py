"""Print the page of figures, or write it: `python -m figures [--write docs/figures.md]`."""

from __future__ import annotations

import sys
from pathlib import Path

from figures.page import markdown


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--write":
        Path(arguments[1]).write_text(markdown(), encoding="utf-8")
        return 0
    if arguments:
        sys.stderr.write("usage: python -m figures [--write FILE]\n")
        return 2
    sys.stdout.write(markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
