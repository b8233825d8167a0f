"""Imports point downward, and planning never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "meshwright"
LEVELS = (
    ("units", "errors", "version", "host"), ("describe",), ("programs",), ("lower",), ("cost",), ("calibrate",), ("interop",), ("planner",),
    ("view",), ("models",), ("comm",), ("parallel",), ("training",), ("proof",), ("api", "doctor"), ("cli", "web"),
)  # fmt: skip
HEIGHT = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FROM = HEIGHT["models"]
TORCHLESS = [room for room in HEIGHT if HEIGHT[room] < TORCH_FROM] + ["web", "cli"]
ONLY = {"models": {"models", "describe", "units", "errors"}}  # a model knows nothing of parallelism

MODULES = {
    ".".join(("meshwright", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


@cache
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


# The files of `parallel`, top to bottom: each imports only from its own level or lower ones.
PARALLEL = (
    ("apply", "user_module"),
    ("stages", "kernels"),
    ("expert",),
    ("recompute", "compile"),
    ("tensor",),
    ("pipeline",),
    ("data",),
    ("numerics", "context"),
    ("pieces",),
    ("mesh", "exchange", "saved_tensors"),
    ("operators",),
)
PARALLEL_HEIGHT = {part: -depth for depth, parts in enumerate(PARALLEL) for part in parts}


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_module_belongs_to_a_room() -> None:
    assert {room(name) for name in MODULES} - {"", "__main__"} <= set(HEIGHT)


def is_upward(name: str, target: str) -> bool:
    """Whether an import points to a room, or to a part of `parallel`, that stands above the importing module."""
    here, there = room(name), room(target)
    if here not in HEIGHT or there not in HEIGHT or not target.startswith("meshwright."):
        return False
    if here == there == "parallel" and min(name.count("."), target.count(".")) > 1:
        return PARALLEL_HEIGHT[target.split(".")[2]] > PARALLEL_HEIGHT[name.split(".")[2]]
    return HEIGHT[there] > HEIGHT[here] or there not in ONLY.get(here, HEIGHT)


def test_imports_point_downward() -> None:
    assert is_upward("meshwright.cost.step", "meshwright.planner.result")
    assert is_upward("meshwright.parallel.mesh", "meshwright.parallel.apply")
    assert is_upward("meshwright.models.moe", "meshwright.cost.step")
    assert not [f"{name} imports {target}" for name in MODULES for target in imported(name) if is_upward(name, target)]


def import_cycles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of two or more modules that all import each other, directly or through others (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in arrows[name]:
            if target not in order:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.add(frozenset(group))

    for name in arrows:
        if name not in order:
            visit(name)
    return found


def test_a_cycle_is_found() -> None:
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


def test_there_is_no_import_cycle() -> None:
    """Not even through other modules, inside functions, or for type checking only."""
    found = import_cycles({name: {t for t in imported(name) if t in MODULES and t != name} for name in MODULES})
    assert not [sorted(group) for group in found]


def test_no_torch_below_the_line() -> None:
    below = [name for name in MODULES if room(name) in TORCHLESS and room(name) != "cli"]
    assert not [name for name in below for target in imported(name) if target.split(".")[0] == "torch"]


def loaded(code: str) -> set[str]:
    """Top-level packages in `sys.modules` after running some code."""
    code += "\nimport sys; print('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.split(".")[0] for line in done.stderr.splitlines()}


def test_importing_the_planning_code_loads_no_torch() -> None:
    names = [name for name in MODULES if room(name) in TORCHLESS]
    assert "torch" not in loaded("\n".join(f"import {name}" for name in names))


def test_help_loads_few_modules() -> None:
    code = (
        "from meshwright.cli import main\ntry: main(['--help'])\nexcept SystemExit as leaving: assert not leaving.code"
    )
    assert not loaded(code) & {"torch", "numpy", "pydantic", "rich", "typer"}
