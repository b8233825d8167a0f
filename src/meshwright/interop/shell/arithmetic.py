"""Arithmetic of the shell, `$((N * 2))`: the value of an expression, with names in place of variables."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Protocol

from meshwright.interop.shell.open_values import OPEN

ARITHMETIC: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: lambda a, b: a << min(b, 64), ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Div: lambda a, b: int(a / b) if abs(a) < 2**50 else a // b,
    ast.Mod: lambda a, b: a - b * int(a / b), ast.Pow: lambda a, b: a ** min(b, 64), ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip


class ShellNames(Protocol):
    """The variables of a script."""

    variables: dict[str, str | dict[str, str]]

    def text(self, raw: str) -> str: ...

    def as_text(self, name: str) -> str: ...


def arithmetic(text: str, names: ShellNames) -> int | None:
    """The value of an arithmetic expression; None if it is open or not understood."""
    change = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))", text, re.DOTALL)
    if change:
        name, step, sign, rest = change.groups()
        value = arithmetic(f"{name} {step[0]} 1" if step else f"{name} {sign} ({rest})" if sign else rest, names)
        if value is not None:
            names.variables[name] = str(value)
        return value
    plain = names.text(text.replace('"', "")).strip()
    if OPEN in plain or len(plain) > 500:
        return None
    choice = re.fullmatch(r"([^?]+)\?([^:]+):(.+)", plain, re.DOTALL)
    if choice:
        test = arithmetic(choice[1], names)
        return None if test is None else arithmetic(choice[2] if test else choice[3], names)
    plain = re.sub(r"!(?!=)", " not ", plain.replace("&&", " and ").replace("||", " or "))
    try:
        plain = re.sub(r"(?<![\w.])0(\d+)", lambda found: str(int(found[1], 8)), plain)
        return evaluate(ast.parse(plain or "0", mode="eval").body, names)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def evaluate(node: ast.AST, names: ShellNames) -> int:
    match node:
        case ast.Constant(value=int(number)) if abs(number) < 2**63:
            return int(number)
        case ast.Name(id=name):
            value = names.as_text(name)
            known = 0 if value == "" and name not in names.variables else arithmetic(value, names)
            if known is None or name not in names.variables:
                raise ValueError(name)
            return known
        case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
            number = int(ARITHMETIC[type(sign)](evaluate(left, names), evaluate(right, names)))
            if abs(number) >= 2**63:
                raise OverflowError
            return number
        case ast.UnaryOp(op=sign, operand=operand):
            return int(ARITHMETIC[type(sign)](evaluate(operand, names)))
        case ast.BoolOp(op=sign, values=values):
            found = [bool(evaluate(each, names)) for each in values]
            return int(all(found) if isinstance(sign, ast.And) else any(found))
    raise ValueError(ast.dump(node))
