"""Switches of overlap and of checkpoints, from the facts of settings to the plan and the stack, and back.

A fact has three values: on, off, and unknown, where the framework has no such switch: then the entry of the catalog decides.

    overlap_dp       gradients are reduced during backward          plan.overlap
    overlap_tp       tensor-parallel messages behind products       plan.overlap
    overlap_ep       expert exchange behind other micro-batches     plan.overlap
    overlap_gather   parameters are gathered ahead                  plan.prefetch
    prefetch         the same of ZeRO-3; forward: not in backward   plan.prefetch
    overlap_p2p      interleaved pipeline messages do not block     stack.blocking_p2p
    async_linears    a collective behind one product of its layer   stack.async_linears
    saves, loads     who collects the state of a checkpoint         stack.saves, stack.loads

The entries of the catalog are stacks with the overlap that their frameworks' tuned recipes switch on. A framework's table has the
defaults of its argument parser, which are mostly off: settings that name no switch get another plan than the catalog's stack.
"""

from __future__ import annotations

from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.interop.keys import Facts

SWITCHED = ("dp", "tp", "ep")
AXES = ("dp", "tp", "cp", "pp", "ep")


def switch_plan(facts: Facts, plan: dict[str, Any], stack: Stack) -> list[str]:
    """Set `overlap` and `prefetch` of a plan where the settings differ from the stack, and return the axes that overlap in the stack only."""
    degrees = {"dp": plan["replicate"] * plan["shard"] * plan["cp"], **{a: plan.get(a, 1) for a in AXES if a != "dp"}}
    used = [axis for axis in AXES if degrees[axis] > 1]
    ring = plan.get("cp_kind", "ring") == "ring"
    by_stack = {axis: bool(stack.overlaps(axis, plan["sp"], plan["zero"], ring)) for axis in used}
    stated = {a: bool(facts[f"overlap_{a}"]) for a in SWITCHED if a in used and facts.get(f"overlap_{a}") is not None}
    if any(on != by_stack[axis] for axis, on in stated.items()):
        plan["overlap"] = tuple(axis for axis, on in {**by_stack, **stated}.items() if on)
    ahead = facts.get("prefetch", True) if plan["zero"] == 3 else True
    if facts.get("overlap_gather") is False and plan["zero"] and (plan["zero"] == 3 or stack.gathers_ahead):
        ahead = False
    if ahead is not True:
        plan["prefetch"] = ahead
    return [axis for axis, on in stated.items() if not on and axis in stack.overlap]


def switch_stack(facts: Facts, plan: dict[str, Any], stack: Stack) -> dict[str, Any]:
    """The fields of the stack that the settings change."""
    stated = {name: facts[name] for name in ("saves", "loads") if facts.get(name)}
    if facts.get("overlap_p2p") is not None and plan["pp"] > 1 and plan.get("virtual", 1) > 1:
        stated["blocking_p2p"] = not facts["overlap_p2p"]
    if facts.get("async_linears") is False and plan["tp"] > 1:
        stated["async_linears"] = "none"
    return {name: value for name, value in stated.items() if getattr(stack, name) != value}


def switch_facts(config: Config) -> Facts:
    """The switches of a configuration: the inverse of both."""
    plan, stack = config.plan, config.stack
    axes = used_overlap(plan, stack, config.cluster.node_size)
    return {
        "overlap_dp": "dp" in axes,
        "overlap_tp": "tp" in axes,
        "overlap_ep": "ep" in axes,
        "overlap_gather": bool(gathers_ahead(plan, stack, axes)),
        "prefetch": plan.prefetch if plan.zero == 3 else None,
        "overlap_p2p": not stack.blocking_p2p if plan.virtual > 1 else None,
        "async_linears": stack.async_linears == "own-shard" and plan.sp and plan.tp > 1,
        "saves": stack.saves,
        "loads": stack.loads,
    }


def used_overlap(plan: Plan, stack: Stack, node_size: int) -> tuple[str, ...]:
    """The axes of the plan that communicate and overlap, in a fixed order."""
    degrees = {"dp": plan.dp * plan.cp, "tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "ep": plan.ep}
    return tuple(a for a in AXES if degrees[a] > 1 and a in plan.overlapped(stack, node_size))


def gathers_ahead(plan: Plan, stack: Stack, axes: tuple[str, ...]) -> bool | str:
    """Whether ZeRO gathers parameters ahead of their use, where that has an effect."""
    if not plan.zero or "dp" not in axes:
        return False
    return plan.prefetch if plan.zero == 3 else plan.prefetch is not False and stack.gathers_ahead


def switch_differences(config: Config, plan: Plan, stack: Stack) -> dict[str, tuple[Any, Any]]:
    """Switches of which settings that were read back give another value: ours and theirs."""
    node = config.cluster.node_size
    ours, theirs = used_overlap(config.plan, config.stack, node), used_overlap(plan, stack, node)
    pairs = {
        "plan.overlap": (ours, theirs),
        "plan.prefetch": (gathers_ahead(config.plan, config.stack, ours), gathers_ahead(plan, stack, theirs)),
    }
    if config.plan.zero:
        pairs["stack.saves"] = (config.stack.saves, stack.saves)
    if config.plan.virtual > 1:
        pairs["stack.blocking_p2p"] = (config.stack.blocking_p2p, stack.blocking_p2p)
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}
