"""Plain words: help texts, errors, documentation, docstrings, comments and names must not contain banned words.

The rules are about language: technical English that an engineer understands at first reading. A word list cannot check
that, but it keeps the phrases out that readers stumbled over.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshwright.cli import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"
PHRASES = (
    r"unsaid", r"nearest:", r"\bso many\b", r"tells the rest", r"\bown words\b", r"\bis no (?:value|number|name|multiple)\b",
    r"\bare no (?:whole )?numbers?\b", r"\bmade again\b", r"\btold\b", r"\btells\b", r"\bsaid\b", r"\bunknown to us\b", r"\bof its own\b",
    r"\bof their own\b", r"\bits own data\b", r"\bown way\b", r"\ba fault of ours\b", r"\bin words\b", r"\bthe rest\b", r"\blets go\b",
    r"\bwhat a program can read\b", r"\bplanned and costed\b", r"\bcosted, (?:but )?not\b", r"\bis none of\b", r"\bare none of\b",
    r"\bcannot be said\b", r"\bsomething that is no\b", r"\bfrom a failure to\b", r"\bsuch clusters\b", r"\bkept apart\b", r"\bnobody\b",
    r"\bwhoever\b", r"\bin silence\b", r"\bhardly\b", r"\bat hand\b", r"\bweighs\b", r"\bone's own\b", r"\bmay be given again\b",
    r"\bof whole layers alone\b", r"\bforgets\b", r"\bseeds?' ", r"\bseed 00\d\b",
)  # fmt: skip
BANNED = re.compile("|".join(PHRASES), re.IGNORECASE)
# Phrases that readers stumbled over in docstrings, comments and documents, and in data that commands print.
THING = "(?:step|rank|layer|token|parameter|micro-batch|stage|device|GPU|node|second|direction|message|row|collective|operation)"
PROSE = re.compile(
    "|".join(
        (
            r"\bbeside\b", r"\balike\b", r"\bnobody\b", r"\bwhoever\b", r"\bwhichever\b", r"\bhardly\b", r"\bseldom\b", r"\bfor ever\b",
            r"\btold\b", r"\btells\b", r"\bsaid\b", r"\bunsaid\b", r"\bmade again\b", r"\bin silence\b", r"\bin words\b", r"\bby itself\b",
            r"\ball the same\b", r"\bso many\b", r"\bgives? way\b", r"\bthe rest\b", r"\bof (?:one's|its|their|our) own\b(?!\s+\w)", r"\bone's own\b",
            r"\bseeds?' ", rf"\bonce an? {THING}\b", rf"\b(?:bytes|FLOPs|GB/s|Gb/s|ms|µs|cards|copies|norms|seconds) an? {THING}\b",
        )
    ),
    re.IGNORECASE,
)  # fmt: skip
# Adverbs, pronouns, participles and metaphors that do not name the content of a function, class or file.
NAMES = {
    "told", "said", "known", "put_on", "settle", "settled", "holds", "holding", "Holding", "again", "made_again", "apart", "alone", "Alone",
    "Several", "Apart", "Parted", "give_up", "forget", "spoken", "slopes", "meet", "laid", "lap", "wants", "lay", "others",
    "every", "alike", "held", "beside", "guarded", "obey", "flushed", "heard", "hear", "tell", "showing",
    "once", "nothing", "here", "there", "now", "mine", "ours", "theirs", "Stay", "Journey",
}  # fmt: skip
VARIABLES = {
    "told",
    "said",
    "alike",
    "apart",
    "beside",
    "heard",
    "spoken",
    "laid",
}  # also banned for arguments and variables


def offences(text: str, banned: re.Pattern[str] = BANNED) -> list[str]:
    return [text[max(0, m.start() - 40) : m.end() + 40].replace("\n", " ") for m in banned.finditer(text)]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), parsed(path)


def literals(node: ast.AST) -> Iterator[str]:
    """The literal text in an expression: strings, and the fixed parts of f-strings."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def error_texts() -> Iterator[tuple[str, str]]:
    """Every literal in a call that makes an error: `MeshwrightError(...)`, `unknown(...)` and `fail(...)`-like helpers."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and any(
                isinstance(a, ast.Constant) and str(a.value).startswith("MW-") for a in node.args
            ):
                yield from ((f"{name}:{node.lineno}", text) for text in literals(node))


def test_errors_are_in_plain_words() -> None:
    found = [f"{where}: {offence}" for where, text in error_texts() for offence in offences(text)]
    assert found == []


def test_the_documentation_of_errors_is_in_plain_words() -> None:
    assert offences((ROOT / "docs" / "errors.md").read_text("utf-8")) == []


def test_the_readme_is_in_plain_words() -> None:
    assert offences((ROOT / "README.md").read_text("utf-8")) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_in_plain_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.cli import main

    subcommands = {"config": ["show", "diff", "schema"], "emulate": ["up", "run", "status", "down"]}.get(command, [])
    for arguments in ([command], *([command, sub] for sub in subcommands)):
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        text = capsys.readouterr().out
        assert len(text) > 100
        assert offences(" ".join(text.replace("│", " ").split())) == []


def test_the_overview_is_in_plain_words() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert offences(done.stdout) == []


def python_files() -> list[Path]:
    folders = ("src", "tests", "benchmarks", "docs", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings and comments of a file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_docstrings_and_comments_are_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {offence}"
        for path in python_files()
        if PROSE.search(path.read_text("utf-8"))  # most files are not parsed
        for line, text in prose(path)
        for offence in offences(text, PROSE)
    ]
    assert found == []


def test_documents_and_data_are_in_plain_words() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    data = [path for kind in ("*.toml", "*.html") for path in SOURCE.rglob(kind)]
    examples = (ROOT / "examples").rglob("*.toml")
    found = [
        f"{path.relative_to(ROOT)}: {offence}"
        for path in sorted([*pages, *data, *examples])
        for offence in offences(path.read_text("utf-8"), PROSE)
    ]
    assert found == []


def test_variables_say_their_content() -> None:
    found = set()
    for path in python_files():
        for node in ast.walk(parsed(path)):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            if name in VARIABLES:
                found.add(f"{path.relative_to(ROOT)}: {name}")
    assert sorted(found) == []


def test_names_say_their_content() -> None:
    found = set()
    for name, tree in sources():
        found |= {f"{name}: file" for part in Path(name).with_suffix("").parts if part in NAMES}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name.lstrip("_") in NAMES
            ):
                found.add(f"{name}: {node.name}")
    assert sorted(found) == []
