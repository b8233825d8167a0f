"""A faithful small copy: the same flags and axes at the smallest sizes that still show every kind of division.

Folding a plan: each axis above 1 becomes 2, virtual stages at most 2, and the batch keeps whether gradients
accumulate. Wrong communication along an axis shows at 2 ranks as well as at 64. Shrinking a model: heads, KV heads
and FFN become small multiples of tp; grouped queries stay grouped, an uneven vocabulary stays uneven, uneven stages
stay uneven, and every flag (norms, biases, tying, positions, windows) stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meshwright.cost.recompute import resolve_recompute
from meshwright.describe.config import Config
from meshwright.describe.layout import Layout
from meshwright.describe.model import Model, Published
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError

AXES = ("replicate", "shard", "tp", "cp", "pp")
HEAD = 8
MOST_BUCKETS = 8
NOT_RUN = ("mxfp8", "fp4")  # precisions of products


@dataclass(frozen=True)
class Small:
    """What is proved in place of a configuration, and what was changed to get there, in words."""

    model: Model
    plan: Plan
    workload: Workload
    order: tuple[str, ...]
    changes: tuple[str, ...]


def small_copy(config: Config, ranks: int) -> Small:
    memory = config.cluster.accelerator.memory
    settled = resolve_recompute(config.model, config.plan, config.workload, config.stack, memory)
    plan, changes = fold(settled, ranks)
    if config.plan.recompute != settled.recompute:
        changes.append(f"recompute {config.plan.recompute} comes to {settled.recompute} in the memory there is")
    if not plan.lossy:
        plan = plan.but(compression="none", comm_dtype=None)
    tiny = shrink(config.model, plan, config.plan)
    workload = shrink_workload(config, plan)
    if tiny != config.model:
        changes.append(f"model of {config.model.total:,.0f} parameters shrunk to {tiny.total:,.0f}, same flags")
    if config.workload.precision in NOT_RUN:
        changes.append(f"products in {config.workload.precision} not exercised: they are planned and costed only")
    changes += [f"not exercised: {part}" for part in config.model.not_run]
    if config.model.dropout:
        changes.append("no dropout masks are kept: what is dropped is computed again")
    tiny = tiny.but(dropout=False)
    plan = plan.but(bucket=small_bucket(config, tiny, plan))
    order = config.plan.order or config.stack.order
    return Small(tiny, plan.check(tiny, workload), workload, order, tuple(changes))


def fold(plan: Plan, ranks: int) -> tuple[Plan, list[str]]:
    # A dtype of communication stays where it is a loss of its own, narrower than the gradients.
    wire = plan.comm_dtype if plan.wire == plan.comm_dtype else None
    plain = {
        "param_dtype": "fp32",
        "grad_dtype": "fp32",
        "state_dtype": "fp32",
        "comm_dtype": wire,
        "master": False,
        "recompute_layers": min(plan.recompute_layers, 1),
        "average_every": min(plan.average_every, 2),
    }
    if plan.world <= ranks:
        uneven = tuple(1 + (n > min(plan.layers_per_stage)) for n in plan.layers_per_stage) if plan.virtual <= 2 else ()
        return plan.but(
            **plain, microbatch=min(plan.microbatch, 2), virtual=min(plan.virtual, 2), layers_per_stage=uneven
        ), []
    sizes: dict[str, int] = {axis: min(getattr(plan, axis), 2) for axis in AXES}
    sizes |= fold_experts(plan, sizes, ranks)
    folded = plan.but(
        **plain,
        **sizes,
        virtual=min(plan.virtual, 2),
        layers_per_stage=(),
        order=plan.order,
        microbatch=min(plan.microbatch, 2),
    )
    if folded.world > ranks:
        above = [axis for axis in AXES if sizes[axis] > 1]
        raise MeshwrightError(
            "MW-VERIFY-001",
            f"{' × '.join(above)} at 2 each needs {folded.world} ranks, more than {ranks}",
            why="Every axis of the plan must stay above 1 for its communication to be proved",
            fix=f"--ranks {folded.world}",
        )
    return folded, [f"plan of {plan.world} ranks folded to {folded.world}: {plan.title()} → {folded.title()}"]


def fold_experts(plan: Plan, sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Experts divide the folded ranks: ep at most 2, and where copies of an expert were on several ranks, on two still,
    if a data axis twice as long fits."""
    if plan.ep == 1 and not plan.expert_tp:
        return {}
    out = {"ep": min(plan.ep, 2), "expert_tp": min(plan.expert_tp, sizes["tp"])}
    others = sizes["tp"] * sizes["cp"] // (out["expert_tp"] or sizes["tp"])
    room = others * sizes["replicate"] * sizes["shard"]
    if room % out["ep"]:  # ep lies on tensor-parallel ranks alone: four show experts split and spread, two only spread
        both = 2 * math.prod(sizes.values()) <= ranks
        return out | ({"tp": 4, "expert_tp": 2} if both else {"expert_tp": 1})
    copied = plan.tp * plan.cp * plan.dp > plan.etp * plan.ep
    long = [axis for axis in ("shard", "replicate") if getattr(plan, axis) >= 4]
    if copied and room == out["ep"] and long and 2 * math.prod(sizes.values()) <= ranks:
        out[long[0]] = 2 * sizes[long[0]]
    return out


def order_matters(plan: Plan) -> bool:
    """Whether more than two ranks sum 16-bit numbers on the wire: what they get depends on the order."""
    if not plan.lossy or plan.wire not in ("fp16", "bf16"):
        return False
    layout, sharded = Layout(plan), plan.zero > 0 and plan.shard * plan.cp > 1
    copied = sharded and layout.size("expert_shard") > 1
    axes = "shard_cp" if sharded else "dp_cp", "expert_shard" if copied else "expert_dp"
    return max(layout.size(axis) for axis in axes) > 2


def shrink(model: Model, plan: Plan, asked: Plan) -> Model:
    layers = small_layers(model, plan, asked)
    if model.kind != "transformer":
        return model.but(hidden=HEAD * plan.tp, layers=layers, published=Published())
    tp, whole = plan.tp, plan.cp if plan.cp_kind == "ulysses" else 1  # Ulysses divides a rank's heads once more
    kv = tp * min(max(1, model.kv_groups // tp), max(2, whole))
    if asked.tp > model.kv_groups:  # fewer KV heads than ranks stay fewer
        kv = max(1, tp * model.kv_groups // asked.tp)
    heads = kv * min(model.heads // model.kv_groups, 2)
    heads = math.lcm(heads, kv, tp * whole)
    own_width = bool(model.head_dim) and model.head_dim * model.heads != model.hidden
    hidden = heads * HEAD + (HEAD if own_width else 0)
    uneven = 1 if model.padded_vocab % tp else 0
    return model.but(
        hidden=hidden,
        heads=heads,
        kv_heads=kv if model.kv_heads else 0,
        head_dim=HEAD if own_width else 0,
        ffn=tp * max(1, round(min(model.ffn / model.hidden, 4) * hidden / tp)) if model.ffn else 0,
        layers=layers,
        vocab=32 * tp + uneven,
        vocab_multiple=1,
        max_positions=small_seq(plan),
        window=3 if model.window else 0,
        published=Published(),
        **small_experts(model, plan),
        **small_latents(model),
    )


def small_experts(model: Model, plan: Plan) -> dict[str, Any]:
    """Few experts, yet more than a token visits; two or more a rank where there are as many. Groups of them become two,
    each with as many as a token visits."""
    if not model.experts:
        return {}
    k, router = min(model.top_k, 2), model.router
    each = min(model.experts // plan.ep, max(2, -(-(k + 1) // plan.ep)))
    if router.groups > 1:
        each = max(each, -(-2 * k // plan.ep))
        each += plan.ep * each % 2
        router = router.but(groups=2, groups_kept=min(router.groups_kept, 1))
    width = plan.tp * max(1, 12 // plan.tp)
    return {
        "experts": plan.ep * each,
        "top_k": min(k, plan.ep * each),
        "expert_ffn": width if model.expert_ffn else 0,
        "shared_experts": min(model.shared_experts, 2),
        "shared_ffn": width if model.shared_ffn else 0,
        "dense_layers": min(model.dense_layers, 1),
        "moe_every": min(model.moe_every, 2),
        "router": router,
    }


def small_latents(model: Model) -> dict[str, int]:
    if model.attention != "mla":
        return {}
    small = {"q_rank": 6, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    return {field: min(size, getattr(model, field)) for field, size in small.items()}


def small_layers(model: Model, plan: Plan, asked: Plan) -> int:
    if plan.layers_per_stage:
        return sum(plan.layers_per_stage)
    chosen = plan.recompute_every > 1 or plan.recompute_layers  # then some layers are recomputed and some are not
    per_stage = 2 if plan.stages == 1 or chosen else 1
    uneven = 1 if model.layers % asked.stages else 0
    both = min(model.dense_layers, 1) + min(model.moe_every, 2) if model.experts else 0  # one with experts at least
    return min(model.layers, max(plan.stages * per_stage + uneven, model.full_every if model.window else 0, both))


def small_seq(plan: Plan) -> int:
    """Eight tokens a rank or more: what every axis, and both runs of a zigzag, divide."""
    unit = plan.tp * plan.cp * (2 if plan.cp > 1 else 1)
    return -(-8 * max(1, plan.tp * plan.cp // 4) // unit) * unit


def shrink_workload(config: Config, plan: Plan) -> Workload:
    """Enough micro-batches for the schedule to reach its steady state, or to accumulate if the plan does."""
    if plan.pp > 1:
        count = 2 * plan.pp * max(1, plan.virtual // 2)
    else:
        count = 2 if config.plan.microbatches(config.workload) > 1 else 1
    precision = "fp8" if config.workload.precision == "fp8" else "fp32"
    return config.workload.but(
        batch=plan.microbatch * plan.dp * count, seq=small_seq(plan), precision=precision, tokens=0
    )


def small_bucket(config: Config, tiny: Model, plan: Plan) -> float:
    """As many buckets as the plan has, up to a few: a message that spans parameters must be proved too."""
    buckets = min(MOST_BUCKETS, max(1.0, config.model.total * 4 / config.plan.world / config.plan.bucket))
    return max(256.0, tiny.total * 4 / (plan.tp * plan.pp) / buckets)
