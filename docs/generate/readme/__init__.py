"""The console blocks of README.md: each shows a command and its real output.

A block is a command after `$` and the output under it. `| head -20` in the command keeps the first 20 lines, as a shell
would; empty lines are left out. `make pages` writes all blocks; a test compares those whose output is the same on every machine (`REPEATABLE`).
Timings in the output of `plan` are masked.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

README = Path(__file__).parents[3] / "README.md"
REPEATABLE = ("estimate", "plan", "config", "catalog")
BLOCK = re.compile(r"```console\n\$ (meshwright [^\n]+)\n(.*?)```", re.DOTALL)
TIMING = re.compile(r"\bin [\d.,]+ m?s\b")


def blocks(text: str) -> list[tuple[str, str]]:
    """(command, output) of every block with a Meshwright command."""
    return [(m[1], m[2]) for m in BLOCK.finditer(text)]


def is_repeatable(command: str) -> bool:
    return command.split()[1] in REPEATABLE


def run(command: str) -> str:
    """The output of a command, as it is piped: without colour, 120 columns wide."""
    from meshwright.cli import dispatch
    from meshwright.errors import MeshwrightError

    typed, _, filtered = command.partition(" | ")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            dispatch(shlex.split(typed)[1:])
        except SystemExit:
            pass
        except MeshwrightError as error:
            print(error)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    limit = int(re.fullmatch(r"head -(\d+)", filtered)[1]) if filtered else len(lines)  # type: ignore[index]
    return "\n".join(line for line in lines[:limit] if line) + "\n"


def masked(output: str) -> str:
    return re.sub(r"\s+", " ", TIMING.sub("in … s", output))


def rewritten(text: str, repeatable_only: bool = True) -> str:
    """The README with fresh outputs."""

    def replace(m: re.Match[str]) -> str:
        if repeatable_only and not is_repeatable(m[1]):
            return m[0]
        return f"```console\n$ {m[1]}\n{run(m[1])}```"

    return BLOCK.sub(replace, text)
