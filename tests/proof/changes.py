"""Mutants of `parallel`: one operator, number, condition or call of one function changed, and nothing on disk.

    a + b → a - b     a < b → a <= b     n → n + 1     True → False     if x → if not x     f(x) → (dropped)

Each rank parses the module's source, changes one node, compiles it and swaps the function's code object: `changes:tensor_17`
is what a job's `prepare` calls for the 17th mutant of `tensor`. Left alone are texts, assertions and whatever only refuses
(an `if` that raises, a strict `zip`, the functions in `REFUSALS` and calls of them): they compute nothing that is trained;
and what no CPU runs, which `tests/gpu` does: statements about CUDA, the functions `ON_A_GPU`, a module of nothing else.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PARALLEL = Path(importlib.import_module("meshwright.parallel").__file__ or "").parent
LEFT_OUT = {"__init__", "kernels"}  # nothing in it; CUDA's own attention
MODULES = tuple(sorted(path.stem for path in PARALLEL.glob("*.py") if path.stem not in LEFT_OUT))
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
REFUSALS = ("_check", "check_adapter", "fit", "_fewest")
ABOUT_A_GPU = (
    "cuda",
    "pin_memory",
    "_stream",
    "non_blocking=True",
    "self._wait()",
    "out = a.dtype if",
)  # in a statement
ON_A_GPU = ("_send_aside", "has_scaled_product", "on_device")


class Mutant(NamedTuple):
    module: str
    number: int = -1  # below zero: a control, nothing is changed
    function: str = "(control)"
    line: int = 0
    diff: str = ""  # the changed statement, before and after

    @property
    def control(self) -> bool:
        return self.number < 0

    @property
    def prepare(self) -> str:
        return "" if self.control else f"changes:{self.module}_{self.number}"

    @property
    def place(self) -> str:
        return f"{self.module}.py:{self.line} {self.function}"


def source(module: str) -> str:
    return (PARALLEL / f"{module}.py").read_text("utf-8")


def bodies(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """(qualified name, statement) of every function and method, without docstrings and refusals."""
    for node in tree.body:
        owners = [(f"{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else [("", [node])]
        for prefix, statements in owners:
            for function in statements:
                if isinstance(function, ast.FunctionDef) and function.name not in (*REFUSALS, *ON_A_GPU):
                    for statement in function.body:
                        yield prefix + function.name, statement


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed of a statement: not what only refuses, asserts, annotates or is written for people."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and refuses(node.value):
        return
    if isinstance(node, ast.Expr | ast.Assign) and any(word in ast.unparse(node) for word in ABOUT_A_GPU):
        return
    if isinstance(node, ast.With) and "cuda.stream(" in ast.unparse(node.items[0]):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "args" if isinstance(node, ast.FunctionDef) else ""):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes(child)


def refuses(call: ast.Call) -> bool:
    return ast.unparse(call.func) in (*REFUSALS, "check_supported")


def changes(node: ast.AST) -> Iterator[Callable[[Any], None]]:
    """What can be changed of one node, as functions of it."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        swap = SWAPS[type(node.op)]
        yield lambda n: setattr(n, "op", swap())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        first = SWAPS[type(node.ops[0])]
        yield lambda n: n.ops.__setitem__(0, first())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda n: setattr(n, "value", unsaid(n.value))
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Call | ast.UnaryOp
    ):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))


def unsaid(call: ast.Call) -> ast.expr:
    """In the place of a call. One of `super()` is said and not done: without it a method's code would close over nothing."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, call) if "super()" in ast.unparse(call) else ast.Constant(None)


def places(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.AST, Callable[[Any], None]]]:
    for function, statement in bodies(tree):
        for node in nodes(statement):
            for change in list(changes(copy.copy(node))):
                yield function, statement, node, change


@cache
def mutants(module: str) -> list[Mutant]:
    tree = ast.parse(source(module))
    found = []
    for number, (function, statement, node, change) in enumerate(places(tree)):
        before, kept = ast.unparse(statement), copy.deepcopy(node)
        change(node)
        after = ast.unparse(ast.fix_missing_locations(statement))
        node.__dict__.update(kept.__dict__)
        diff = [row for row in difflib.ndiff(before.splitlines(), after.splitlines()) if row[0] in "+-"]
        line = next(n.lineno for n in (node, statement) if hasattr(n, "lineno"))
        found.append(Mutant(module, number, function, line, "\n".join(diff)))
    return found


def changed(module: str, wanted: int) -> tuple[str, ast.Module]:
    """The function that is changed, by name, and the module's tree with the change."""
    tree = ast.parse(source(module))
    for number, (function, _, node, change) in enumerate(places(tree)):
        if number == wanted:
            change(node)
            return function, ast.fix_missing_locations(tree)
    raise IndexError(wanted)


def text(module: str, wanted: int) -> str:
    """The module's source with the change."""
    return ast.unparse(changed(module, wanted)[1])


def mutated(module: str, wanted: int) -> tuple[str, types.CodeType]:
    """The function that is changed, by name, and its new code."""
    function, tree = changed(module, wanted)
    return function, code_of(compile(tree, module, "exec"), function)


def code_of(code: types.CodeType, name: str) -> types.CodeType:
    head, _, rest = name.partition(".")
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == head)
    return code_of(inner, rest) if rest else inner


def __getattr__(name: str) -> Callable[[], None]:
    """`changes:tensor_17`, called in a rank, puts the 17th mutant of `tensor` in place."""
    module, _, number = name.rpartition("_")
    if module not in MODULES:
        raise AttributeError(name)

    def put() -> None:
        function, code = mutated(module, int(number))
        owner: Any = importlib.import_module(f"meshwright.parallel.{module}")
        *path, last = function.split(".")
        for part in path:
            owner = getattr(owner, part)
        found = vars(owner)[last]
        for wrapping in ("__func__", "fget", "func", "__wrapped__"):
            found = getattr(found, wrapping, found)
        found.__code__ = code

    return put
