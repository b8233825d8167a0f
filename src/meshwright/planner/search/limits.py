"""The choices that a training framework leaves: those of the question, narrowed to what the stack's `can` says it runs.

A constraint that asks for something else (`--fix schedule=dualpipev` for Megatron) leaves no value, which is an error that names the framework.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.describe.base import MOST
from meshwright.describe.stack import Stack
from meshwright.errors import MeshwrightError
from meshwright.planner.search.choices import Choices

DEGREES = ("tp", "cp", "pp", "ep", "expert_tp")


def limited(choices: Choices, stack: Stack) -> Choices:
    """The choices that the framework of a stack can run; all of them if the stack names no limits."""
    can = stack.can
    words, most = dict(choices.words), dict(choices.most)
    wanted: dict[str, tuple[Any, ...]] = {
        "schedule": can.schedules,
        "zero": can.zero,
        "cp_kind": can.cp_kinds,
        "recompute": can.recomputes,
    }
    for word in can.without:
        if word in DEGREES:
            most[word] = min(1, most.get(word, MOST))
        elif word == "order":
            wanted["order"] = (tuple(stack.order),)
        elif word != "hsdp":
            wanted[word] = {"sp": (False,), "reshard": (True,), "reduce": ("auto",)}[word]
    for name, allowed in wanted.items():
        if allowed:
            words[name] = _kept(choices, name, allowed, stack)
    for name in DEGREES:
        if choices.least.get(name, 0) > most.get(name, MOST):
            raise _refused(choices, name, stack)
    hybrid = choices.hybrid and "hsdp" not in can.without
    uneven = choices.uneven and not can.even_stages
    return replace(choices, words=words, most=most, hybrid=hybrid, uneven=uneven)


def _kept(choices: Choices, name: str, allowed: tuple[Any, ...], stack: Stack) -> tuple[Any, ...]:
    found = tuple(word for word in choices.words[name] if word in allowed)
    if not found:
        raise _refused(choices, name, stack)
    return found


def _refused(choices: Choices, name: str, stack: Stack) -> MeshwrightError:
    options = [c.option for c in choices.constraints if c.field == name]
    named = " and ".join(options) or f"{name}={', '.join(map(str, choices.words.get(name, ())))}"
    return MeshwrightError(
        "MW-PLANNER-003",
        f"{named}: {stack.can.framework or stack.name} does not run it",
        why=stack.can.source,
        fix=f"drop {options[-1]}" if options else "",
    )
