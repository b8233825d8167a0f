"""Fold a plan to at most 8 ranks without hiding bugs of its axes.

A plan that fits is proved unchanged. A larger plan is proved by several folded plans:

    all axes       every axis above 1 at 2: the composition of the axes
    one axis       that axis at 4, others at 2 as far as the ranks allow: bugs that two ranks cannot show. A ring that receives from
                   the wrong rank, a group of the first two stages instead of the first and the last, and an all-to-all
                   that swaps two peers are correct with 2 ranks and wrong with 4
    experts        ep at 4 on a data axis of 4
    a long ring    cp at 8, without other axes, where the plan has more than 4: later steps of a ring

A plan that another one covers is left out: `tp 4 · dp 2` covers `tp 2 · dp 2`. Virtual stages are at most 3: a first, a middle and a last one.
"""

import math
from typing import Any

from meshwright.describe.layout import Layout
from meshwright.describe.plan import Plan
from meshwright.errors import MeshwrightError

AXES = ("replicate", "shard", "tp", "cp", "pp")
DATA_AXES = ("shard", "replicate", "cp")  # expert parallelism lies on these, the first that is long enough
SMALL, LARGE, LONG = 2, 4, 8
MOST_VIRTUAL = 3
Sizes = dict[str, int]


def axis_sizes(plan: Plan) -> Sizes:
    """Sizes of the axes above 1, ep included."""
    return {axis: getattr(plan, axis) for axis in (*AXES, "ep") if getattr(plan, axis) > 1}


def folds(plan: Plan, ranks: int) -> list[Plan]:
    """Return the plans to prove in place of this one, each on at most this many ranks; the first keeps every axis."""
    if plan.world <= ranks:
        return [plan if plan.virtual <= MOST_VIRTUAL else plan.but(virtual=MOST_VIRTUAL, layers_per_stage=())]
    used = [axis for axis in AXES if getattr(plan, axis) > 1]
    smallest = dict.fromkeys(used, SMALL)
    if math.prod(smallest.values()) > ranks:
        raise MeshwrightError(
            "MW-VERIFY-001",
            f"{' × '.join(used)} at 2 each needs {2 ** len(used)} ranks, more than {ranks}",
            why="Every axis of the plan must stay above 1 for its communication to be proved",
            fix=f"--ranks {2 ** len(used)}",
        )
    all_axes = resized(plan, smallest | fold_experts(plan, smallest, ranks))
    single = [with_one_large(plan, axis, used, ranks) for axis in used if getattr(plan, axis) > SMALL]
    candidates = [all_axes, *(p for p in (*single, with_large_ep(plan, used, ranks)) if p is not None)]
    if plan.cp > LARGE and ranks > LARGE:
        candidates.append(single_axis(plan.but(cp=min(plan.cp, LONG, ranks)), "cp"))
    kept = [p for p in candidates if not any(covers(other, p) for other in candidates if other != p)]
    kept.sort(key=lambda p: -sum(size > 1 for size in axis_sizes(p).values()))  # stable: most axes first
    return list(dict.fromkeys(kept))


def covers(plan: Plan, other: Plan) -> bool:
    """Whether every axis is at least as large as in the other plan, and experts are copied if they are in the other plan."""
    sizes = axis_sizes(other) | {"expert_tp": other.expert_tp}
    return all(getattr(plan, axis) >= size for axis, size in sizes.items()) and has_copies(plan) >= has_copies(other)


def has_copies(plan: Plan) -> bool:
    """Whether each expert is on several ranks."""
    return plan.ep > 1 and plan.tp * plan.cp * plan.dp > plan.etp * plan.ep


def with_one_large(plan: Plan, axis: str, used: list[str], ranks: int) -> Plan | None:
    """One axis at 4 (or its size, if smaller), and the following axes at 2 while there are ranks."""
    sizes = {axis: min(LARGE, getattr(plan, axis))}
    if sizes[axis] > ranks:
        return None
    at = used.index(axis)
    for other in (*used[at + 1 :], *used[:at]):
        if math.prod(sizes.values()) * SMALL <= ranks:
            sizes[other] = SMALL
    room = math.prod(sizes.get(data, 1) for data in DATA_AXES)
    spare = 2 if has_copies(plan) and room > SMALL else 1  # ranks for copies of an expert
    ep = min(plan.ep, LARGE, room // spare)
    return resized(plan, sizes | {"ep": 1 if room % ep else ep})


def with_large_ep(plan: Plan, used: list[str], ranks: int) -> Plan | None:
    """ep at 4, on the first data axis of at least 4 ranks; None where ep is smaller or no axis is long enough."""
    long = [axis for axis in DATA_AXES if getattr(plan, axis) >= LARGE]
    if plan.ep < LARGE or not long or ranks < LARGE:
        return None
    sizes = {long[0]: LARGE}
    for other in (axis for axis in used if axis != long[0]):
        if math.prod(sizes.values()) * SMALL <= ranks:
            sizes[other] = SMALL
    return resized(plan, sizes | {"ep": LARGE})


def fold_experts(plan: Plan, sizes: Sizes, ranks: int) -> Sizes:
    """Sizes of expert parallelism on axes of 2: ep at most 2. Where each expert was on several ranks, it still is on two if
    a data axis of 4 fits."""
    if plan.ep == 1 and not plan.expert_tp:
        return {}
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    out = {"ep": min(plan.ep, SMALL), "expert_tp": min(plan.expert_tp, tp)}
    room = tp * cp // (out["expert_tp"] or tp) * sizes.get("replicate", 1) * sizes.get("shard", 1)
    if room % out["ep"]:  # ep lies on tensor-parallel ranks only: four of them show experts both split and spread
        both = 2 * math.prod(sizes.values()) <= ranks
        return out | ({"tp": 4, "expert_tp": 2} if both else {"expert_tp": 1})
    long = [axis for axis in ("shard", "replicate") if getattr(plan, axis) >= LARGE]
    if has_copies(plan) and room == out["ep"] and long and 2 * math.prod(sizes.values()) <= ranks:
        out[long[0]] = 2 * sizes[long[0]]
    return out


def resized(plan: Plan, sizes: Sizes) -> Plan:
    """The plan with these sizes, and 1 for every other axis. Settings that need an axis above 1 are reset if it is 1."""
    full = dict.fromkeys(AXES, 1) | {"ep": 1} | sizes
    changed: dict[str, Any] = {
        **full,
        "expert_tp": min(sizes.get("expert_tp", plan.expert_tp), full["tp"]),
        "sp": plan.sp and full["tp"] > 1,
        "zero": plan.zero if full["shard"] > 1 or (plan.shard == 1 and full["cp"] > 1) else 0,
        "average_every": plan.average_every if full["replicate"] > 1 else 0,
        "virtual": min(plan.virtual, MOST_VIRTUAL) if full["pp"] > 1 else 1,
        "layers_per_stage": plan.layers_per_stage if full["pp"] == plan.pp and plan.virtual <= MOST_VIRTUAL else (),
    }
    if full["pp"] == 1:
        changed["schedule"] = "1f1b"
    return plan.but(**changed)


def single_axis(plan: Plan, axis: str) -> Plan:
    """The plan with every axis but one at 1; ep adds no ranks, so it gets data parallelism of its size."""
    if axis == "ep":
        return resized(plan, {"ep": plan.ep, "replicate": plan.ep, "expert_tp": 0})
    return resized(plan, {axis: getattr(plan, axis), "expert_tp": 0} if axis else {"expert_tp": 0})


def order_matters(plan: Plan) -> bool:
    """Whether more than two ranks sum in 16 bits, so that the result depends on the order."""
    if not plan.lossy or plan.wire not in ("fp16", "bf16"):
        return False
    layout, sharded = Layout(plan), plan.zero > 0 and plan.shard * plan.cp > 1
    copied = sharded and layout.size("expert_shard") > 1
    axes = "shard_cp" if sharded else "dp_cp", "expert_shard" if copied else "expert_dp"
    return max(layout.size(axis) for axis in axes) > 2
