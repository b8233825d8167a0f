"""Imports point downward, and planning never imports torch."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "meshwright"
LEVELS = (
    ("units", "errors", "version", "host", "pickle_data"), ("describe",), ("programs",), ("lower",), ("cost",), ("predict",), ("calibrate",),
    ("interop",), ("formulas",), ("planner",), ("explain",), ("view",), ("models",), ("comm",), ("parallel",), ("training",), ("proof",), ("check",),
    ("api", "doctor", "pages"), ("cli", "web"),
)  # fmt: skip
HEIGHT = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FROM = HEIGHT["models"]
TORCHLESS = [room for room in HEIGHT if HEIGHT[room] < TORCH_FROM] + ["web", "cli"]
ONLY = {"models": {"models", "describe", "units", "errors"}}  # a model knows nothing of parallelism

MODULES = {
    ".".join(("meshwright", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


NOT_IMPORTS = {"files", "getLogger"}  # calls whose text names a folder of data or a logger


def module_named(text: str) -> set[str]:
    """The module that a text names: "meshwright.view.plan", or "meshwright.proof.trace:record"."""
    name = text.partition(":")[0]
    return {name} if name in MODULES and name != "meshwright" else set()


def imports_in(code: str, name: str, package: str) -> set[str]:
    """Every module that some code imports, in functions too: by a statement, or by a text that names one of our modules, as arguments of
    `import_module`, `__import__` and processes do. Of a name made at run time (f"meshwright.cli.{name}"), the package."""
    targets: set[str] = set()
    tree = ast.parse(code)
    skipped = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in NOT_IMPORTS
        for argument in call.args
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                targets |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                base = ".".join(part for part in (base, node.module or "") if part)
                targets |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
            case ast.Constant(value=str(text)) if id(node) not in skipped:
                targets |= module_named(text)
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                targets |= module_named(text.rpartition(".")[0])
    return targets - {name}


@cache
def imported(name: str) -> set[str]:
    """Every module that a module imports."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return imports_in(path.read_text("utf-8"), name, package)


def test_imports_by_text_are_seen() -> None:
    code = """
importlib.import_module("meshwright.view.plan").page(1)
__import__("meshwright.proof.page")
shown_by = "meshwright.view.estimate:page"
import_module(f"meshwright.web.{name}")
files("meshwright.cli")
"""
    seen = {"meshwright.view.plan", "meshwright.proof.page", "meshwright.view.estimate", "meshwright.web"}
    assert imports_in(code, "meshwright.cost.step", "meshwright.cost") == seen


# The files of `parallel`, top to bottom: each imports only from its own level or lower ones.
PARALLEL = (
    ("apply", "user_module"),
    ("sharded",),
    ("stages", "kernels"),
    ("expert", "adapters"),
    ("recompute", "compile"),
    ("tensor",),
    ("pipeline",),
    ("data",),
    ("numerics", "context"),
    ("pieces",),
    ("mesh", "exchange", "saved_tensors"),
    ("operators", "on_host"),
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


def test_cost_reads_the_step_program_and_never_lowers() -> None:
    """Of `lower`, `cost` imports the types of its result alone: what it prices is plain data."""
    of_lower = {t for name in MODULES if room(name) == "cost" for t in imported(name) if room(t) == "lower"}
    assert of_lower == {"meshwright.lower.program"}


def test_measured_communication_is_named_by_the_step_program() -> None:
    """What a run issued is compared with the lowered value: the reader of its events asks `lower` for nothing else."""
    of_lower = {t for t in imported("meshwright.training.measure.communication") if room(t) == "lower"}
    assert of_lower == {"meshwright.lower.program", "meshwright.lower.step"}


def has_hidden_state(code: str) -> bool:
    """Whether code rebinds a variable of its module, or keeps values by context or thread."""
    return bool(re.search(r"^ *global \w+$|\bcontextvars\b|\bthreading.local\b", code, re.MULTILINE))


def test_values_pass_by_signatures_except_in_the_step_context() -> None:
    """`models.step_context` is the one variable that carries values past signatures where torch runs."""
    assert has_hidden_state("from contextvars import ContextVar\nnow = ContextVar('now')")
    assert has_hidden_state("import threading\nnow = threading.local()")
    assert not has_hidden_state("import threading\nthreading.Lock()")
    wing = [name for name in MODULES if TORCH_FROM <= HEIGHT.get(room(name), 0) < HEIGHT["cli"]]
    hidden = {name for name in wing if has_hidden_state(MODULES[name].read_text("utf-8"))}
    assert hidden == {"meshwright.models.step_context"}


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


def test_a_proof_loads_torch_in_its_ranks_only() -> None:
    """The process that starts ranks, compares and prints needs two seconds less without it."""
    assert "torch" not in loaded("import meshwright.proof.whole, meshwright.proof.page")


def test_help_loads_few_modules() -> None:
    code = (
        "from meshwright.cli import main\ntry: main(['--help'])\nexcept SystemExit as leaving: assert not leaving.code"
    )
    assert not loaded(code) & {"torch", "numpy", "pydantic", "rich", "typer"}


def test_one_class_has_one_name():
    """A class name means one thing in the whole package; private classes may share a name."""
    files: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(name)
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_no_module_hides_a_function_of_its_package():
    """Importing `package.name` replaces what the package itself calls `name`."""
    hidden = []
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            defined = {
                n.name for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.FunctionDef | ast.ClassDef)
            }
            hidden += [f"{name}.{d}" for d in defined if f"{name}.{d}" in MODULES]
    assert hidden == []
