"""Names in the documentation exist: fields of a plan, building blocks, commands and keys in the generated reference."""

import re
from pathlib import Path

from meshwright.cli import COMMANDS
from meshwright.describe.config import CLASSES
from reference import PAGES

ROOT = Path(__file__).parents[2]


def test_plan_fields_in_the_documentation_exist():
    from meshwright.describe.plan import Plan

    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 25
    assert named <= set(Plan.model_fields)


def test_building_blocks_in_the_documentation_exist():
    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    sources = {path.stem: path.read_text("utf-8") for path in (ROOT / "src/meshwright/parallel").rglob("[a-z]*.py")}
    called = [pair for pair in re.findall(r"`(\w+)\.(\w+)", text) if pair[0] in sources]
    assert len(called) >= 8
    for module, name in called:
        assert re.search(rf"^(?:def |class )?{name}\b", sources[module], re.MULTILINE), f"{module}.{name}"


def test_the_reference_lists_every_command_key_and_function():
    commands, keys, python = (PAGES[name]() for name in ("commands.md", "keys.md", "python.md"))
    assert re.findall(r"^## (\S+)$", commands, re.MULTILINE) == list(COMMANDS)
    assert "| `--slurm` |  | A batch script for sbatch. |" in commands
    assert "### config show" in commands
    for section, cls in CLASSES.items():
        part = keys.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        assert [name for name in cls.model_fields if f"| `{name}` |" not in part] == []
    assert "| `tp` | whole number | `1` |" in keys
    import meshwright

    assert [name for name in meshwright.__all__ if name[0] != "_" and f"### mw.{name}\n" not in python] == []


def test_the_site_lists_every_page():
    import yaml

    loader = type("Loader", (yaml.SafeLoader,), {})
    nav = str(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), loader)["nav"])
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert [
        page for page in sorted(pages) if f"'{page}'" not in nav and "cases/" not in page and "reference/" not in page
    ] == []


def test_the_page_of_benchmarks_keeps_the_sections_that_did_not_run():
    from performance import INTRODUCTION, merged, purpose, scripts, section

    first, second = scripts()[:2]
    page = merged("", {second: section(second, "old", 1.0, 0)})
    page = merged(page, {first: section(first, "new", 2.0, 1)})
    assert page.startswith(INTRODUCTION)
    assert page.index("new") < page.index("old")
    assert "exit code 1" in page
    assert all(purpose(name) for name in scripts())


def test_the_pages_of_trouble_are_for_users_of_other_frameworks_too():
    """A user finds them by the message, and each has its sources."""
    folder = ROOT / "docs" / "trouble"
    index = (folder / "index.md").read_text("utf-8")
    pages = [path for path in folder.glob("*.md") if path.name != "index.md"]
    assert len(pages) == 7
    for path in pages:
        text = path.read_text("utf-8")
        assert f"]({path.name}" in index, path.name
        assert [name for name in ("| Megatron-LM |", "| DeepSpeed |", "FSDP", "Sources: ") if name not in text] == [], (
            path.name
        )
    for message in (
        "CUDA out of memory",
        "Watchdog caught collective operation timeout",
        "waiting for clients",
        "exitcode: -9",
    ):
        assert message in index
