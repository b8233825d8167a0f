"""Every code block of README.md and docs/ is executed or parsed, and outputs are those of the commands. After a change: make pages

Blocks labelled `slow` run in `make soak`, and their numbers are compared, except times; those labelled `not run` are checked as far as a parser goes.
"""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from blocks import ROOT, Block, all_blocks, blocks_of, is_repeatable, masked, printed, rewritten, run
from meshwright.cli import COMMANDS, build
from meshwright.describe.config import CLASSES, load
from meshwright.describe.files import parse_toml

BLOCKS = all_blocks()
LANGUAGES = {"console", "python", "toml", "bash", "sh", "json", "yaml", "text", ""}
TOOLS = {
    "make",
    "source",
    "pip",
    "pipx",
    "torchrun",
    "torchfrtrace",
    "mpirun",
    "srun",
    "sbatch",
    "python",
    "kubectl",
    "curl",
    "sudo",
    "cd",
    "git",
    "ray",
    "sky",
}
# Plan files that the reader writes: they do not exist here.
READERS_FILES = re.compile(r"(mine|mixture|run|traced|my-\w+|best|cluster|job|plan)\.toml$")


def of(*languages: str, label: str | None = None) -> list[Block]:
    return [b for b in BLOCKS if b.language in languages and (label is None or b.label.partition(":")[0] == label)]


def test_every_block_has_a_language_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert len(of("console")) > 60


def test_blocks_without_a_language_contain_no_commands() -> None:
    commands = r"^\s*(?:\$ )?(?:meshwright|torchrun|mpirun|srun|make|pip) [a-z-]"
    assert [str(b) for b in of("") if re.search(commands, b.text, re.MULTILINE)] == []


def commands(label: str | None = None) -> Iterator[tuple[Block, str, str]]:
    for block in of("console", label=label):
        for command, output in block.commands:
            yield block, command, output


def test_console_blocks_begin_with_a_command() -> None:
    assert [str(b) for b in of("console") if not b.text.startswith(("$ ", "# "))] == []


def test_commands_that_differ_by_machine_have_a_label() -> None:
    assert [f"{block}: {command}" for block, command, _ in commands("") if not is_repeatable(command)] == []


DAILY = [(str(block), command, output) for block, command, output in commands("")]


@pytest.mark.parametrize(("where", "command", "output"), DAILY, ids=[f"{w} {c[:40]}" for w, c, _ in DAILY])
def test_outputs_are_those_of_the_commands(where: str, command: str, output: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    found = run(command)
    if output.strip():
        assert masked(found) == masked(output), "make pages"


def parse_words(words: list[str]) -> None:
    """Raise if a command line has options or arguments that its command does not have. Nothing is run."""
    name, *rest = words
    command: Any = typer.main.get_command(build(name))
    context = command.make_context(name, rest)
    while hasattr(command, "commands"):  # a group, such as `checkpoint`
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def test_unknown_words_of_a_command_are_found() -> None:
    parse_words(["checkpoint", "prune", "runs/first", "--keep", "1"])
    for words in (["plan", "llama3-8b", "dgx-h100"], ["checkpoint", "prune", "runs/first", "--keeps", "1"]):
        with pytest.raises(typer.BadParameter.__base__):  # the base class of all parser errors
            parse_words(words)


@pytest.mark.parametrize("block", [b for b in of("console") if b.label], ids=str)
def test_commands_that_do_not_run_daily_are_legal(block: Block, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for command, _ in block.commands:
        typed = shlex.split(command.partition(" | ")[0], comments=True)
        words = [word for word in typed if "=" not in word or word.startswith("-")]
        words = words[words.index("meshwright") :] if "meshwright" in words else words
        if words[0] != "meshwright":
            assert words[0].removeprefix(".venv/bin/") in TOOLS, command
            continue
        assert words[1] in (*COMMANDS, "--version", "--help"), command
        if words[1] in COMMANDS:
            parse_words(typed[typed.index("meshwright") + 1 :])
        settings = [value for word, value in pairwise(typed) if word == "--set"]
        for file in (
            word
            for word in words
            if word.endswith(".toml") and not READERS_FILES.search(word) and "settings/" not in word
        ):
            config = load(file, settings)
            if words[1] in ("verify", "train"):
                config.check()


def pages_with_python(label: str, *marks: pytest.MarkDecorator) -> list:
    """The Python blocks with a label, by page: those of a page share their names."""
    found = groupby(of("python", label=label), key=lambda block: block.page)
    return [pytest.param(list(of_page), id=f"{page} {label}", marks=marks) for page, of_page in found]


@pytest.mark.parametrize("found", [*pages_with_python(""), *pages_with_python("slow", pytest.mark.slow)])
def test_python_blocks_run(found: list[Block], monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict = {}
    for block in found:
        exec(compile(block.text, str(block), "exec"), names)


def test_python_blocks_that_do_not_run_parse_and_name_what_exists() -> None:
    import meshwright

    for block in of("python"):
        tree = ast.parse(block.text, str(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw":
                assert node.attr in meshwright.__all__, f"{block}: mw.{node.attr}"


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_blocks_have_known_sections_and_keys(block: Block) -> None:
    document = parse_toml(block.text, str(block))
    for section, value in document.items():
        assert section in (*CLASSES, "extends", "plugins"), f"{block}: {section}"
        if isinstance(value, dict):
            known = {*CLASSES[section].model_fields, "extends"}
            assert set(value) <= known, f"{block}: {set(value) - known}"


def test_json_yaml_and_shell_blocks_parse() -> None:
    for block in of("json"):
        for line in block.text.splitlines() if block.text.count("\n{") else [block.text]:
            json.loads(line)
    for block in of("yaml"):
        assert list(yaml.safe_load_all(block.text)), str(block)
    scripts = of("bash", "sh")
    text = "\n".join(f"f{i}() {{\n{block.text}\n:\n}}" for i, block in enumerate(scripts))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=200, check=False)
    assert done.stderr == ""


def shape(output: str) -> str:
    """An output without numbers, units, bars and times: what stays the same on every machine."""
    text = re.sub(r"[▁▂▃▄▅▆▇█░▒▓]+", "~", output)
    text = re.sub(r"[-+−]?\d[\d.,]*(?:e[-+]?\d+)?k?(?: ?(?:[µm]s|s|[kMG]B|[KMG]iB|B|%|/s)(?!\w)|%)?", "#", text)
    return re.sub(r"[\s─]+", " ", text).strip()


NUMBER = re.compile(r"([-+−]?\d[\d.,]*(?:e[-+]?\d+)?)k?(?: ?([µm]s|s|[kMG]B|[KMG]iB|B|%|/s)(?!\w)|(%))?")
TIMED = ("µs", "ms", "s", "/s", "%")  # units of what depends on the speed of the machine
WITHIN = 0.02  # of shown counts, bytes, ratios and losses; rounding errors (1.8e-15) are at most ten times those shown


def numbers(line: str) -> list[tuple[float, bool]]:
    """The numbers of a line that do not depend on the speed of the machine, and whether each is a rounding error."""
    found = [m for m in NUMBER.finditer(line) if (m[2] or m[3] or "") not in TIMED]
    return [(float(m[1].replace(",", "").replace("−", "-").rstrip(".")), "e-" in m[1]) for m in found]


def differing(shown: str, fresh: str) -> list[str]:
    """The shown lines that a fresh run does not print, in this order and with these numbers. A page may leave lines out."""
    lines = iter(fresh.splitlines())
    out = []
    for line in (line for line in shown.splitlines() if shape(line)):
        printed_line = next((other for other in lines if shape(other) == shape(line)), None)
        pairs = zip(numbers(line), numbers(printed_line or ""), strict=printed_line is not None)
        if printed_line is None or any(
            abs(now) > 10 * abs(then) if error else abs(now - then) > WITHIN * abs(then) + 1e-9
            for (then, error), (now, _) in pairs
        ):
            out.append(f"shown: {line}\nfresh: {printed_line}")
    return out


def test_a_number_that_a_fresh_run_does_not_print_is_found() -> None:
    shown = "step 192 ms  loss 5.381 → 1.960\n 0–3       377 KiB   284 KiB    1.33\n fp64    3.9e-16\n"
    assert (
        differing(shown, shown.replace("192 ms", "350 ms").replace("3.9e-16", "9.1e-16").replace("1.960", "1.962"))
        == []
    )
    for old, new in (
        ("377 KiB", "32.3 MiB"),
        ("377 KiB", "390 KiB"),
        ("1.33", "116"),
        ("3.9e-16", "3.9e-09"),
        (" fp64", " fp32"),
    ):
        assert len(differing(shown, shown.replace(old, new))) == 1, old


def slow_blocks() -> list[Block]:
    return of("console", label="slow")


@pytest.mark.slow
@pytest.mark.parametrize("block", slow_blocks(), ids=str)
def test_slow_blocks_print_what_is_shown(block: Block, monkeypatch, tmp_path) -> None:
    """In a new folder, since these commands write runs; examples are found there too. Numbers are compared (`differing`), except times."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, output in block.commands:
        words = shlex.split(command, comments=True)
        assert words[0] == "meshwright", command
        printed.cache_clear()  # the same command may run twice, in another folder
        fresh = run(command)
        assert not fresh.startswith("MW-"), fresh
        assert differing(output, fresh) == []


def test_an_output_is_written_by_the_same_code(tmp_path: Path) -> None:
    page = "text\n```console\n$ meshwright catalog links nvlink4\nold\n$ meshwright config schema nope\n```\n"
    page += "<!-- slow -->\n```console\n$ meshwright train x\nold\n```\n"
    fresh = rewritten(page)
    assert "old" not in fresh.partition("<!-- slow -->")[0]
    assert "nvlink4" in fresh
    assert fresh.endswith("$ meshwright train x\nold\n```\n")
    file = ROOT / "README.md"
    assert rewritten("no blocks") == "no blocks"
    assert [b.page for b in blocks_of(file)][:1] == ["README.md"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub write them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    missing = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
            file = page.parent / target if target else page
            if "reference/" in target:
                continue
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert missing == []
