"""The code blocks of README.md and the pages under docs/: each is executed or parsed by a test, and its output is that of the commands.

    console     `$ meshwright …` and the output under it. `| head -20` keeps the first lines, as a shell would; empty lines are left out
    python      executed; the blocks of a page share their names
    toml        a plan file or a part of one: sections and keys exist
    bash json yaml     parsed

A block whose commands train, need other machines or need rights has a comment on the line before it:

    <!-- slow -->                    it runs in `make soak`
    <!-- not run: needs Slurm -->    it is only checked: the commands exist and their files are legal

Outputs are compared after `masked`: times that depend on the machine, and white space. `make pages` (`python -m blocks`) writes the outputs of all
blocks that run daily; `--slow` also those that train.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Commands whose output is the same on every machine. The others need a label.
REPEATABLE = (
    "estimate",
    "plan",
    "config",
    "catalog",
    "show",
    "simulate",
    "lint",
    "launch",
    "migrate",
    "validate",
    "calibrate",
    "explain",
)
BLOCK = re.compile(r"(?:^<!-- (slow|not run: [^\n]+) -->\n)?^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMING = re.compile(r"\bin [\d.,]+ m?s\b")


@dataclass(frozen=True)
class Block:
    """A code block of a page: its language, its text and its label (empty: it runs daily)."""

    page: str
    line: int
    language: str
    text: str
    label: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(command, output) of a console block; a command may continue over lines that end with a backslash."""
        out: list[tuple[str, str]] = []
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            part = part.replace("\\\n", " ")
            command, _, output = part.partition("\n")
            while command.count("'") % 2:  # a quoted text over several lines
                more, _, output = output.partition("\n")
                command += f" {more}"
            out.append((re.split(r"\s{2,}#", command)[0].strip(), output))
        return out


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for m in BLOCK.finditer(text):
        line = text.count("\n", 0, m.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, m[2], m[3], m[1] or "")


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks_of(page)]


def is_repeatable(command: str) -> bool:
    words = command.split()
    reads_bench = words[1:2] == ["bench"] and "--read" in words
    return words[0] == "meshwright" and (len(words) < 2 or words[1] in (*REPEATABLE, "--help") or reads_bench)


def run(command: str) -> str:
    """The output of a command, as it is piped: without colour, 120 columns wide."""
    typed, _, filtered = command.partition(" | ")
    lines = printed(typed)
    limit = int(re.fullmatch(r"head -(\d+)", filtered)[1]) if filtered else len(lines)  # type: ignore[index]
    return "\n".join(line for line in lines[:limit] if line) + "\n"


@cache
def printed(typed: str) -> list[str]:
    """The lines that a command prints; computed once, since several pages show parts of the same output."""
    from meshwright.cli import dispatch
    from meshwright.errors import MeshwrightError

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            dispatch(shlex.split(typed, comments=True)[1:])
        except SystemExit:
            pass
        except MeshwrightError as error:
            print(error)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def masked(output: str) -> str:
    return re.sub(r"\s+", " ", TIMING.sub("in … s", output)).strip()


def rewritten(text: str, slow: bool = False) -> str:
    """A page with fresh outputs of its console blocks; `slow`: also of those that run in `make soak`."""

    def replace(m: re.Match[str]) -> str:
        label, language, body = m[1] or "", m[2], m[3]
        block = Block("", 0, language, body, label)
        if language != "console" or label.startswith("not run") or (label and not slow):
            return m[0]
        parts = []
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            typed, _, old = part.partition("\n")
            command = Block("", 0, language, f"$ {part}", label).commands[0][0]
            fresh = run(command) if command.startswith("meshwright ") and old.strip() else old
            fresh = old if masked(fresh) == masked(old) else fresh  # a page changes only where an output did
            parts.append(f"$ {typed}\n{fresh}")
        head = m[0][: m[0].index("```")]
        return f"{head}```console\n{''.join(parts)}```" if block.commands else m[0]

    return BLOCK.sub(replace, text)


# Runs of docs/accuracy.md that the README shows: hits and misses, with the name of the GPUs that the page does not give.
SHOWN_RUNS = {
    "gpt3-175b-1536-a100": ("GPT-3 175B, Megatron-LM", "A100"), "gpt-1t-3072-a100": ("GPT 1T, Megatron-LM", "A100"),
    "bloom-176b": ("BLOOM 176B", "A100"), "mt-nlg-530b": ("MT-NLG 530B", "A100"), "deepseek-v3": ("DeepSeek-V3", "H800"),
    "mixtral-8x7b": ("Mixtral 8x7B", "H100"), "torchtitan-8b": ("Llama 3 8B, torchtitan", "H100"),
    "llama3-405b-8k": ("Llama 3 405B", "H100"), "llama3-405b-16k": ("Llama 3 405B", "H100"),
}  # fmt: skip
MISSES = re.compile(r"(?<=<!-- misses: from docs/accuracy.md -->\n).*?(?=\n\n)", re.DOTALL)
RUN_ROW = re.compile(
    r"^\| ([\w.-]+) \| (\d+) GPUs: [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([-+\d.]+)% \|$", re.MULTILINE
)


def misses() -> str:
    """The table of well-known runs in the README, from the rows of docs/accuracy.md."""
    rows = {m[1]: m for m in RUN_ROW.finditer((ROOT / "docs" / "accuracy.md").read_text("utf-8"))}
    lines = ["| run | GPUs | measured | predicted | band | error |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for key, (name, gpu) in SHOWN_RUNS.items():
        m = rows[key]
        error = f"{float(m[6]):+.0f}%".replace("-", "−")
        error = f"**{error}**" if abs(float(m[6])) > 15 else error
        lines.append(f"| {name} | {int(m[2]):,} {gpu} | {m[3]} | {m[4]} | {m[5]} | {error} |")
    return "\n".join(lines)


if __name__ == "__main__":
    os.chdir(ROOT)
    for page in pages():
        text = page.read_text("utf-8")
        fresh = MISSES.sub(lambda m: misses(), rewritten(text, slow="--slow" in sys.argv))
        if fresh != text:
            page.write_text(fresh, "utf-8")
            print(page.relative_to(ROOT))
