"""Imports point downward, and planning never pays for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "meshwright"
LEVELS = (
    ("units", "errors"), ("describe",), ("programs",), ("lower",), ("cost",), ("calibrate",), ("planner",), ("view",),
    ("models",), ("parallel", "comm"), ("training",), ("proof",), ("api",), ("cli", "web"),
)  # fmt: skip
HEIGHT = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FROM = HEIGHT["models"]
TORCHLESS = [room for room in HEIGHT if HEIGHT[room] < TORCH_FROM] + ["web", "cli"]
ONLY = {"models": {"models", "describe", "units", "errors"}}  # a model knows nothing of parallelism

MODULES = {
    ".".join(("meshwright", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def imported(name: str) -> set[str]:
    """Every module named by an import anywhere in a module, in functions too."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module or "") if part)
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return found


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_module_stands_in_a_room() -> None:
    assert {room(name) for name in MODULES} - {"", "__main__"} <= set(HEIGHT)


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) in HEIGHT])
def test_imports_point_downward(name: str) -> None:
    here = room(name)
    for target in imported(name):
        if target.startswith("meshwright.") and room(target) in HEIGHT:
            assert HEIGHT[room(target)] <= HEIGHT[here], f"{name} imports {target}, which stands above it"
            assert room(target) in ONLY.get(here, HEIGHT), f"{name} imports {target}: {here} may use {ONLY[here]}"


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) in TORCHLESS and room(name) != "cli"])
def test_no_torch_below_the_line(name: str) -> None:
    assert not {target for target in imported(name) if target.split(".")[0] == "torch"}


def loaded(code: str) -> set[str]:
    """Top-level packages in `sys.modules` after running some code."""
    code += "\nimport sys; print('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.split(".")[0] for line in done.stderr.splitlines()}


def test_importing_all_that_plans_loads_no_torch() -> None:
    names = [name for name in MODULES if room(name) in TORCHLESS]
    assert "torch" not in loaded("\n".join(f"import {name}" for name in names))


def test_help_loads_next_to_nothing() -> None:
    code = (
        "from meshwright.cli import main\ntry: main(['--help'])\nexcept SystemExit as leaving: assert not leaving.code"
    )
    assert not loaded(code) & {"torch", "numpy", "pydantic", "rich", "typer"}
