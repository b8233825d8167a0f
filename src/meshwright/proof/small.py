"""A small copy of a configuration: the same flags and axes at the smallest sizes that still show every kind of division.

Heads, KV heads and FFN become small multiples of tp; grouped queries stay grouped, an uneven vocabulary stays uneven, uneven
stages stay uneven, and every flag (norms, biases, tying, positions, windows) stays as it is.

A copy must reach the code that the plan runs, and that code changes with sizes:

    micro-batches   six if the plan has that many. A pipeline of P stages has at least six and at least 2P, enough for its steady state,
                    and one more where P divides them: a last round that is not full
    tokens          at least four in every run of a context-parallel rank, so that masks of blocks are computed; a window of two runs, so
                    that blocks are seen whole, in part and not at all
    KV heads        two on four tensor-parallel ranks, if the plan has fewer than ranks: then the ranks with copies of a head are a part of them
    local SGD       averages as often as the plan, at most every four steps

Each copy lists every field that differs from the configuration as text (`changes`), the folded axes as numbers (`folded`), and its number of
micro-batches.
"""

import math
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from meshwright.describe import legality
from meshwright.describe.base import Described
from meshwright.describe.config import Config
from meshwright.describe.model import Model, Published
from meshwright.describe.optimizer import Optimizer
from meshwright.describe.plan import Plan
from meshwright.describe.variants import ATTENTIONS
from meshwright.describe.variants import SMALL_HEAD as HEAD
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.predict.prediction import resolve_recompute
from meshwright.proof.fold import AXES, axis_sizes, folds
from meshwright.proof.records import SETTINGS

MOST_BUCKETS = 8
MOST_MICROBATCHES = 6  # without a pipeline
MOST_STEPS_APART = 4  # averages of local SGD
RUN = 4  # tokens of a run of a context-parallel rank, at least
SECTIONS = ("workload", "plan", "optimizer")
UNSAID = ("name", "published", "notes", "on_nan", "most_skips")  # of a description, not of what is computed
NARROW = ("bf16", "fp16")
# Of the run, in the copy too.
OWN_SETTINGS = ("betas", "epsilon", "weight_decay", "decay_embeddings", "momentum", "clip", "ema")


@dataclass(frozen=True)
class ProvedCopy:
    """A plan that is proved in place of another: perhaps folded, with the changes as text."""

    plan: Plan
    changes: tuple[str, ...]
    folded: dict[str, tuple[int, int]]  # axis: its size in the plan and in the copy
    microbatches: tuple[int, ...] = ()  # of the plan, and of the copy


@dataclass(frozen=True, kw_only=True)
class SmallCopy(ProvedCopy):
    """A small copy of a configuration. `plan` computes in float32 and float64; `narrow` is the same plan in its 16-bit dtypes, None if it
    has none."""

    model: Model
    workload: Workload
    order: tuple[str, ...]
    narrow: Plan | None = None
    optimizer: Optimizer = SETTINGS
    schedule: Optimizer = SETTINGS  # of the run


def small_copy(config: Config, ranks: int) -> SmallCopy:
    """The copy that keeps every axis of the plan."""
    return small_copies(config, ranks)[0]


def small_copies(config: Config, ranks: int) -> list[SmallCopy]:
    """A copy for each folded plan. A plan that is illegal for this model is left out; the first must be legal."""
    memory = config.cluster.accelerator.memory
    plan = resolve_recompute(config.model, config.plan, config.workload, config.stack, memory)
    first, *further = folds(plan, ranks)
    out = [copy_of(config, plan, first)]
    for folded in further:
        try:
            out.append(copy_of(config, plan, folded))
        except MeshwrightError:
            continue
    return out


def copy_of(config: Config, original: Plan, folded: Plan) -> SmallCopy:
    own = folded.but(
        microbatch=min(folded.microbatch, 2),
        wrap=min(folded.wrap, 2),
        recompute_layers=min(folded.recompute_layers, 1),
        offload_layers=min(folded.offload_layers, 1),
        average_every=min(folded.average_every, MOST_STEPS_APART),
        layers_per_stage=tuple(1 + (n > min(folded.layers_per_stage)) for n in folded.layers_per_stage),
    )
    if not own.lossy:
        own = own.but(compression="none", comm_dtype=own.comm_dtype if own.comm_dtype == own.grad_dtype else None)
    tiny, workload = shrink(config.model, own, original), shrink_workload(config, own)
    own = own.but(bucket=small_bucket(config, tiny, own))
    plan = widened(own)
    legality.check(plan, tiny, workload, trainer=True)
    sizes, before = axis_sizes(plan), axis_sizes(original)
    original_count, count = original.microbatches(config.workload), plan.microbatches(workload)
    changed = {axis: (size, sizes.get(axis, 1)) for axis, size in before.items() if sizes.get(axis, 1) != size}
    model, optimizer = tiny.but(dropout=False), small_optimizer(config.optimizer, tiny, workload)
    copy = replace(config, model=model, plan=plan, workload=workload, optimizer=optimizer)
    return SmallCopy(
        plan,
        tuple(changes_of(config, original, copy, changed, (original_count, count))),
        changed,
        (original_count, count),
        model=model,
        workload=workload,
        order=config.plan.order or config.stack.order,
        narrow=own if own.param_dtype in NARROW else None,
        optimizer=optimizer,
        schedule=config.optimizer.with_steps(config.run.steps),
    )


def changes_of(
    config: Config, original: Plan, copy: Config, folded: dict[str, tuple[int, int]], microbatches: tuple[int, int]
) -> list[str]:
    """Every difference between a configuration and its copy."""
    out = []
    if folded:
        out.append("folded: " + ", ".join(f"{axis} {before} → {now}" for axis, (before, now) in folded.items()))
    if microbatches[0] != microbatches[1]:
        out.append(f"{microbatches[1]} micro-batches instead of {microbatches[0]}")
    if config.plan.recompute != original.recompute:
        out.append(f"recompute {config.plan.recompute} is {original.recompute} in the memory available")
    if fields := differences(config.model, copy.model):
        sizes = f"model of {config.model.total:,.0f} parameters shrunk to {copy.model.total:,.0f}, same flags"
        out.append(f"{sizes}: {', '.join(fields)}")
    if fields := [d for s in SECTIONS for d in differences(getattr(config, s), getattr(copy, s), f"{s}.")]:
        out.append(", ".join(fields))
    out += [f"not exercised: {part}" for part in config.model.not_run]
    if config.precision_note:
        out.append(config.precision_note)
    if config.model.resnet.stages:
        out.append("batch norm by the statistics of a rank's micro-batch, on one device too")
    if config.model.dropout:
        out.append("dropout masks are not kept: they are computed again")
    if config.workload.precision == "fp8":
        out.append("products in fp8, on one device too")
    return out


def differences(before: Described, after: Described, prefix: str = "") -> list[str]:
    """The fields in which two values differ, as `field before → after`; folded axes are listed elsewhere."""
    out = []
    for name in type(before).model_fields:
        a, b = getattr(before, name), getattr(after, name)
        if a == b or name in (*UNSAID, *AXES, "ep"):
            continue
        if isinstance(a, Described):
            out += differences(a, b, f"{prefix}{name}.")
        else:
            out.append(f"{prefix}{name} {shown(a)} → {shown(b)}")
    return out


def shown(value: Any) -> str:
    """A value of a field in few characters."""
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value[:4]))}{', …' if len(value) > 4 else ''})"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool | None)
        else str(value)
    )


def widened(plan: Plan) -> Plan:
    """The plan as float32 and float64 run it: no masters; the dtype of communication is kept if it is lossy."""
    wire = plan.comm_dtype if plan.wire == plan.comm_dtype else None
    return plan.but(param_dtype="fp32", grad_dtype="fp32", state_dtype="fp32", comm_dtype=wire, master=False)


def shrink(model: Model, plan: Plan, original: Plan) -> Model:
    layers = small_layers(model, plan, original)
    if model.resnet.stages:
        small = model.resnet.but(stages=(1, 2), width=4, image=16, classes=10)
        return model.but(layers=3, resnet=small, published=Published())
    if model.kind != "transformer":
        return model.but(hidden=HEAD * plan.tp, layers=layers, published=Published())
    tp, whole = plan.tp, plan.cp if plan.cp_kind == "ulysses" else 1  # Ulysses divides a rank's heads once more
    most = max(2 if tp < 4 else 1, whole)  # KV heads of a rank: two while that keeps the copy small
    kv = tp * min(max(1, model.kv_groups // tp), most)
    if original.tp > model.kv_groups:  # fewer KV heads than ranks stay fewer
        kv = max(min(2, model.kv_groups) if tp >= 4 else 1, tp * model.kv_groups // original.tp)
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
        window=small_window(model, plan) if model.window else 0,
        full_layers=(0,) if model.full_layers else (),
        nope_layers=(0,) if model.nope_layers else (),
        temperature_floor=2 if model.temperature_scale else model.temperature_floor,
        # Scores, logits and embeddings of a small model are near 1: smaller constants keep their effect.
        attention_softcap=min(model.attention_softcap, 1.0),
        logit_softcap=min(model.logit_softcap, 1.0),
        embedding_scale=min(model.embedding_scale, 4.0),
        published=Published(),
        **small_experts(model, plan),
        **small_rotation(model, small_seq(plan)),
    )


def small_experts(model: Model, plan: Plan) -> dict[str, Any]:
    """Few experts, but more than a token visits; at least two per rank if there are that many. Groups become two, each with as many experts
    as a token visits."""
    if not model.experts:
        return {}
    k, router = min(model.top_k, 3), model.router
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


def small_rotation(model: Model, seq: int) -> dict[str, Any]:
    """Narrow heads; scaled rotary positions stay scaled, because the sequence is longer than the original positions."""
    small = ATTENTIONS.part(model.attention, "small")(model)
    pairs = (small.get("rope_dim", 0) or (HEAD if ATTENTIONS[model.attention].reads("head_dim") else 0)) // 2
    factors = {field: _cycled(getattr(model.rope, field), pairs) for field in ("short_factor", "long_factor")}
    rope = model.rope.but(original_positions=seq // 2 if model.rope.original_positions else 0, **factors)
    return small | {"rope": rope, "max_positions": seq // 2 if rope.kind == "dynamic" else seq}


def _cycled(numbers: tuple[float, ...], count: int) -> tuple[float, ...]:
    return tuple(islice(cycle(numbers), count)) if numbers else ()


def small_layers(model: Model, plan: Plan, original: Plan) -> int:
    if plan.layers_per_stage:
        return sum(plan.layers_per_stage)
    # Then some layers are recomputed, or offloaded, and some are not.
    chosen = plan.recompute_every > 1 or plan.recompute_layers or plan.offload_layers
    per_stage = 2 if plan.stages == 1 or chosen else 1
    # ZeRO gathers more than one group of layers.
    per_stage = max(per_stage, plan.wrap + 1) if plan.wrap > 1 else per_stage
    uneven = 1 if model.layers % original.stages else 0
    both = min(model.dense_layers, 1) + min(model.moe_every, 2) if model.experts else 0  # one with experts at least
    # one layer with a window or without rotary positions, and one that is not so
    windows = max(model.full_every, 2 if model.full_layers else 0) if model.window else 0
    rotations = max(model.nope_every, 2 if model.nope_layers else 0)
    return min(model.layers, max(plan.stages * per_stage + uneven, windows, rotations, both))


def small_seq(plan: Plan) -> int:
    """At least eight tokens per rank, and `RUN` in both runs of a zigzag: a number that every axis divides."""
    runs = 2 * plan.cp if plan.cp > 1 else 1
    unit = plan.tp * runs
    return -(-max(8 * max(1, plan.tp * plan.cp // 4), RUN * runs) // unit) * unit


def small_window(model: Model, plan: Plan) -> int:
    """A window of three positions; under context parallelism of two runs, chunks of one and a half."""
    if plan.cp == 1:
        return 3
    run = small_seq(plan) // (2 * plan.cp)
    return run * 3 // 2 if model.window_kind == "chunk" else 2 * run


def shrink_workload(config: Config, plan: Plan) -> Workload:
    """Enough micro-batches for a pipeline to reach its steady state, with a remainder; without a pipeline those of the plan, at most six."""
    count = min(config.plan.microbatches(config.workload), MOST_MICROBATCHES)
    if plan.pp > 1:
        count = max(MOST_MICROBATCHES, 2 * plan.pp)
        count += count % plan.pp == 0
    precision = "fp8" if config.workload.precision == "fp8" else "fp32"
    # The emulation of lossy reductions on one device scales whole tensors.
    scaling = "tensor" if plan.lossy else config.workload.scaling
    return config.workload.but(
        batch=plan.microbatch * plan.dp * count,
        seq=small_seq(plan),
        precision=precision,
        scaling=scaling,
        tokens=0,
    )


def small_optimizer(settings: Optimizer, tiny: Model, workload: Workload) -> Optimizer:
    """The moments, decays and scalings of the run, at the rates of the first steps of a default run, which keep rounding errors small."""
    own = {name: getattr(settings, name) for name in OWN_SETTINGS}
    own |= {"scale_with_batch": 2 * workload.batch} if settings.scale_with_batch else {}
    own |= {"scale_with_width": -(-tiny.hidden // 2)} if settings.scale_with_width else {}
    return SETTINGS.but(**own)


def small_bucket(config: Config, tiny: Model, plan: Plan) -> float:
    """As many buckets as the plan has, up to a few, so that messages span several parameters."""
    buckets = min(MOST_BUCKETS, max(1.0, config.model.total * 4 / config.plan.world / config.plan.bucket))
    return max(256.0, tiny.total * 4 / (plan.tp * plan.pp) / buckets)
