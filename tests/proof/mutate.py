"""Automatic mutants of `parallel`: change one operator, number or call in one function, train, and see who notices.

    python tests/proof/mutate.py [count] [seed]

A mutant is *killed* when training fails or the comparison with one device finds a difference; what lives is listed
with its line, to be judged: some change nothing that can be computed (a message's size, an order of two sums, a check
that only refuses), others are gaps. Nothing is written to disk: each rank compiles the changed module and swaps the
function's code object, so a mutant costs one set of forked ranks.
"""

from __future__ import annotations

import ast
import copy
import importlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

Z3, SP = {"shard": 2, "zero": 3}, {"tp": 2, "sp": True}
# What exercises each module, of few ranks and many of its paths.
KILLERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tensor": [("gpt", SP), ("qwen", {"tp": 2}), ("mlp", {"tp": 2})],
    "vocabulary": [("llama", {"tp": 2}), ("gpt", SP)],
    "exchange": [("gpt", SP), ("qwen", {"tp": 2}), ("mlp", {"tp": 2})],
    "regather": [("gpt", SP), ("gpt", {**SP, "recompute": "full"})],
    "zero": [("llama", {"replicate": 2, "bucket": 2000, "microbatch": 2}), ("gpt", {**Z3, "microbatch": 2}),
             ("qwen-moe", {**Z3, "ep": 2}), ("llama", {"shard": 2, "zero": 1, "microbatch": 2})],
    "apply": [("qwen", {"pp": 2}), ("qwen", {"tp": 2, "microbatch": 2}), ("five", {"pp": 2, "schedule": "zbv", "virtual": 2}),
              ("gpt", {"cp": 2}), ("mlp", {"pp": 2})],
    "pieces": [("qwen", {"pp": 2}), ("gpt", SP), ("llama", Z3), ("qwen-moe", {"replicate": 2, "ep": 2})],
    "pipeline": [("qwen", {"pp": 2}), ("five", {"pp": 2, "schedule": "zbv", "virtual": 2})],
    "expert": [("qwen-moe", {"replicate": 2, "ep": 2, "overlap": ("ep",)}), ("qwen-moe", {"tp": 2}),
               ("mixtral", {**SP, "expert_tp": 1, "ep": 2})],
    "context": [("llama", {"cp": 2}), ("gpt", {"cp": 2, "cp_kind": "all-gather"}), ("one-kv", {"cp": 2, "cp_kind": "ulysses"})],
    "ring": [("llama", {"cp": 2}), ("gemma", {"cp": 2, "cp_kind": "all-gather"}), ("llama", {"cp": 4})],
    "blocks": [("llama", {"cp": 2}), ("gemma", {"cp": 2, "cp_kind": "all-gather"}), ("bert", {"cp": 2})],
    "ulysses": [("llama", {"cp": 2, "cp_kind": "ulysses"}), ("one-kv", {"cp": 2, "cp_kind": "ulysses"})],
    "recompute": [("gpt", {**SP, "recompute": "full"}), ("llama", {"cp": 2, "recompute": "selective"})],
    "mesh": [("qwen", {"pp": 2}), ("llama", Z3), ("gpt", {"cp": 2}), ("qwen-moe", {"replicate": 2, "ep": 2})],
}  # fmt: skip
# Before whom a mutant stands that its own killers let go: combinations, all in one set of ranks.
ZB = {"pp": 2, "schedule": "zb-h1"}
JURY: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gemma", {**Z3, "cp": 2, "microbatch": 2}, {}), ("gpt", {**SP, "cp": 2, "cp_kind": "all-gather"}, {}),
    ("qwen", {**SP, "pp": 2}, {}), ("llama", {"cp": 2, "pp": 2}, {}), ("five", {"replicate": 2, **ZB, "bucket": 2000}, {}),
    ("llama", {**Z3, "pp": 2, "schedule": "zbv", "virtual": 2, "recompute": "full"}, {}),
    ("qwen", {"replicate": 2, **Z3, "microbatch": 2}, {}), ("qwen", {"replicate": 2, "tp": 2, "order": ("dp", "pp", "cp", "tp")}, {}),
    ("mixtral", {"replicate": 2, "tp": 2, "ep": 2, "microbatch": 4}, {"capacity": 0.75, "aux": 0.1}),
    ("qwen-moe", {"shard": 4, "zero": 3, "ep": 2}, {}), ("mixtral", {"replicate": 4, "ep": 2}, {}),
    ("qwen-moe", {"cp": 2, **Z3, "ep": 2, "microbatch": 4}, {"choice": "expert"}), ("one-kv", {"cp": 4, "cp_kind": "ulysses"}, {}),
    ("mixtral", {"replicate": 2, **Z3, "ep": 2, "recompute": "full"}, {}), ("qwen-moe", {"tp": 2, **ZB}, {}),
]  # fmt: skip
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
REFUSALS = ("_check", "check_adapter", "fit", "_fewest")  # they refuse or count; they compute nothing that is trained


def source(module: str) -> str:
    return Path(importlib.import_module(f"meshwright.parallel.{module}").__file__ or "").read_text("utf-8")


def bodies(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """(qualified name, statement) of every function and method, without docstrings and refusals."""
    for node in tree.body:
        owners = [(f"{node.name}.", node.body)] if isinstance(node, ast.ClassDef) else [("", [node])]
        for prefix, statements in owners:
            for function in statements:
                if isinstance(function, ast.FunctionDef) and function.name not in REFUSALS:
                    for statement in function.body:
                        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                            yield prefix + function.name, statement


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """What can be changed of one node, in words and as a function of its copy."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        swap = SWAPS[type(node.op)]
        yield f"{type(node.op).__name__} → {swap.__name__}", lambda n: setattr(n, "op", swap())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        first = SWAPS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} → {first.__name__}", lambda n: n.ops.__setitem__(0, first())  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", lambda n: setattr(n, "value", not n.value)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} → {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call dropped", lambda n: setattr(n, "value", ast.Constant(None))


def mutants(module: str) -> list[tuple[str, int, str, int]]:
    """(function, line, change, number) of every mutant of a module."""
    found, number = [], 0
    for function, statement in bodies(ast.parse(source(module))):
        if isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise):
            continue
        for node in ast.walk(statement):
            for words, _ in changes(node):
                found.append((function, node.lineno, words, number))  # type: ignore[attr-defined]
                number += 1
    return found


def mutated(module: str, wanted: int) -> tuple[str, types.CodeType]:
    tree, number = ast.parse(source(module)), 0
    for function, statement in bodies(tree):
        if isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Raise):
            continue
        for node in ast.walk(statement):
            for _, change in list(changes(copy.copy(node))):
                if number == wanted:
                    change(node)
                    return function, code_of(compile(ast.fix_missing_locations(tree), module, "exec"), function)
                number += 1
    raise IndexError(wanted)


def code_of(code: types.CodeType, name: str) -> types.CodeType:
    head, _, rest = name.partition(".")
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == head)
    return code_of(inner, rest) if rest else inner


def __getattr__(name: str) -> Callable[[], None]:
    """`mutate:tensor_17`, called in a rank, puts the 17th mutant of `tensor` in place."""
    module, _, number = name.rpartition("_")
    if module not in KILLERS:
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


def survives(module: str, number: int) -> bool:
    """Whether no layout notices: the module's own, one by one, then the jury's."""
    fault = f"mutate:{module}_{number}"
    alone = [[(model, said, {})] for model, said in KILLERS[module]]
    return not any(noticed(fault, trial) for trial in [*alone, JURY])


def noticed(fault: str, trials: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> bool:
    import layouts

    import ranks
    from meshwright.describe.plan import Plan
    from meshwright.errors import MeshwrightError
    from meshwright.verify.compare import compare

    these = [layouts.Layout(model, Plan(**said), fault, tuple(router.items())) for model, said, router in trials]
    silence = 30 if len(these) == 1 else 90
    try:
        by_rank = ranks.run(these[0].plan.world, layouts.train_all, [layout.job() for layout in these],
                            silence=silence, group_timeout=silence / 2)  # fmt: skip
    except MeshwrightError as error:
        if ", in put\n" in str(error):
            raise  # the mutant itself could not be put in place
        return True
    expected = [reference(layout._replace(prepare="").reference) for layout in these]
    return any(compare(one, [rank[i] for rank in by_rank]).breaks for i, one in enumerate(expected))


@cache
def reference(layout: Any) -> Any:
    import layouts

    import ranks

    return ranks.run(1, layouts.train_all, [layout.job()], silence=60)[0][0]


def main(count: int, seed: int) -> None:
    everything = [(module, *mutant) for module in KILLERS for mutant in mutants(module)]
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    print(f"{len(everything)} mutants, {len(chosen)} tried", flush=True)
    killed = 0
    for module, function, line, words, number in chosen:
        alive = survives(module, number)
        killed += not alive
        if alive:
            print(f"lives: {module}.py:{line} {function}: {words}", flush=True)
    print(f"{killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
