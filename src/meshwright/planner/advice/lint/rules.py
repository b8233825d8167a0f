"""The rules of `lint` for plans that are legal: placement, batch, memory, messages.

The anti-patterns of "A Guide to Distributed Training" and "Distributed Training Basics". Each finding has its cost for this plan:

- tensor parallelism over a slow link: "GPUs wait 80% of the time". The cost is the time its collectives take beyond what they would
  inside one node.
- small batch with large dp: "global batch 64 on 128 GPUs". What a rank computes no longer hides its gradient reduction.
- groups against the topology: a busy axis crosses nodes though another order would keep it inside.
- pipeline with few micro-batches: M < 4P, "15/4 = 375% overhead". The cost is the bubble.
- accumulation when the batch fits: smaller products, more launches; one larger micro-batch does the same work.
- ring attention below s/P ≥ kv·bytes·F / (heads·B): K and V arrive later than they are used up.
- ZeRO-3 on a slow network: the weights of every layer cross it two or three times per micro-batch.
- an oversubscribed fabric: the cost is the step's time beyond that on a non-blocking one.
- out of memory at a checkpoint: one rank or every rank collects the full state. Shards need no more memory than a step.
- overlap switched off: most frameworks have it off by default.
- buckets below α/β: the texts' rule. A ring cuts its bucket in P chunks, so the real bound is P·α/β.
"""

import math
from dataclasses import replace

from meshwright.cost import advice
from meshwright.describe import catalog
from meshwright.describe.cluster import Cluster
from meshwright.describe.plan import Plan, divisors
from meshwright.describe.result import Prediction
from meshwright.describe.stack import Stack
from meshwright.interop import frameworks
from meshwright.interop.keys import INVALID
from meshwright.planner.advice.alternatives import (
    USABLE_MEMORY,
    changed,
    exposed,
    interleavings,
    microbatches,
    moves,
    orders,
    settings,
    step,
)
from meshwright.planner.advice.lint.finding import Finding, Rule, Seen, Severity, finding, larger_batch
from meshwright.units import counted, format_decimal_bytes, format_rate, format_seconds

ENOUGH_ROUNDS = 4  # M ≥ 4·P
LARGEST_BUCKET = 4e9  # bytes
SLOW = 12.5e9  # bytes/s a device: "on a 100G link ZeRO-3 is unusable"
DP_SHARE = 0.05  # exposed data-parallel communication above which the batch is too small


def crosses(seen: Seen, axis: str) -> int:
    """The highest level the axis's groups span; 0: inside a node."""
    b = seen.now.program.batch
    size = float(b.size(axis)[0])
    inside = (k for k, span in enumerate(seen.now.cluster.spans) if float(b.members(axis, span)[0]) >= size)
    return next(inside, len(seen.now.cluster.levels) - 1)


def level_words(cluster: Cluster, level: int) -> str:
    return f"{cluster.levels[level].name} ({format_rate(cluster.device_bandwidth(level))} per device)"


def as_one_node(cluster: Cluster, size: int) -> Cluster:
    """The cluster with nodes enlarged to `size` devices."""
    first = cluster.levels[0]
    return cluster.but(levels=[first.but(size=max(size, first.size)), *cluster.levels[1:]])


def tensor_across(seen: Seen) -> Finding | None:
    """001: a tensor-parallel group spans nodes."""
    level = crosses(seen, "tp")
    if seen.plan.tp == 1 or level == 0:
        return None
    ideal = seen.trial.with_changes(seen.plan, cluster=as_one_node(seen.now.cluster, seen.plan.world))
    cost = exposed(seen.now, "tp") - (exposed(ideal, "tp") if ideal else 0.0)
    tries = [*moves(seen.plan, "tp", seen.config.workload, seen.config.stack), *orders(seen.plan)]
    inside = [p for p in tries if p and p.tp <= seen.now.cluster.node_size and (not p.order or p.order[0] == "tp")]
    what = (
        f"tensor parallel groups of {seen.plan.tp} span {level_words(seen.now.cluster, level)}, "
        f"{format_rate(seen.now.cluster.device_bandwidth(0))} inside a node of {seen.now.cluster.node_size}"
    )
    return finding(seen, "MW-LINT-001", "tensor parallel across a slow link", what, cost, seen.trial.fastest(inside))


def small_batch(seen: Seen) -> Finding | None:
    """002: backward does not hide the gradient reduction, even with buckets of the best size."""
    plan, workload = seen.plan, seen.config.workload
    if plan.dp == 1 or plan.zero == 3 or exposed(seen.now, "dp") < DP_SHARE * seen.step:
        return None
    best = seen.trial.fastest([plan, *larger_buckets(plan)]) or seen.now
    cost = exposed(best, "dp")
    if cost < DP_SHARE * step(best):
        return None
    name = "small batch with large data parallelism"
    local = workload.batch // plan.dp
    per_rank = f"{counted(local, 'sequence')} for each of {plan.dp} data-parallel ranks"
    what = f"the reduction of gradients takes longer than the backward pass that hides it: {per_rank}"
    fewer = seen.faster(moves(best.plan, "dp", workload, seen.config.stack, ("tp", "pp")))
    if fewer is not None:
        return finding(seen, "MW-LINT-002", name, what, cost, fewer)
    words, saves = larger_batch(seen, lambda e: exposed(e, "dp") < DP_SHARE * step(e))
    return finding(seen, "MW-LINT-002", name, what, cost, None, words, saves)


def larger_buckets(plan: Plan) -> list[Plan | None]:
    return [changed(plan, bucket=plan.bucket * 2**k) for k in range(1, 11) if plan.bucket * 2**k <= LARGEST_BUCKET]


def against_topology(seen: Seen) -> Finding | None:
    """003: another order of the axes is faster on these levels."""
    if (best := seen.faster(orders(seen.plan))) is None:
        return None
    order = seen.plan.order or seen.now.stack.order
    far = [axis for axis in ("tp", "cp", "ep") if crosses(seen, axis) and seen.now.program.batch.size(axis)[0] > 1]
    what = f"order {', '.join(order)} places {' and '.join(far) or 'busy groups'} across nodes where another order keeps them nearer"
    return finding(seen, "MW-LINT-003", "groups against the topology", what, seen.step - step(best), best)


def few_microbatches(seen: Seen) -> Finding | None:
    """004: M < 4·P leaves a long bubble."""
    plan, workload = seen.plan, seen.config.workload
    m = plan.microbatches(workload)
    if plan.pp == 1 or m >= ENOUGH_ROUNDS * plan.pp:
        return None
    near = (*microbatches(plan, workload), *moves(plan, "pp", workload, seen.config.stack))
    enough = [p for p in near if p and (p.microbatches(workload) >= min(ENOUGH_ROUNDS * p.pp, 2 * m) or p.pp == 1)]
    fixed = seen.faster([*enough, *interleavings(plan, seen.config.model)])
    name, cost = "too few micro-batches", exposed(seen.now, "bubble")
    what = f"{m} micro-batches for {plan.pp} stages (at least {ENOUGH_ROUNDS * plan.pp} wanted): bubble fraction {seen.now.bubble_fraction:.0%}"
    if fixed is not None:
        return finding(seen, "MW-LINT-004", name, what, cost, fixed)
    words, saves = larger_batch(seen, lambda e: e.plan.microbatches(e.workload) >= ENOUGH_ROUNDS * e.plan.pp)
    return finding(seen, "MW-LINT-004", name, what, cost, None, words, saves)


def needless_accumulation(seen: Seen) -> Finding | None:
    """005: a larger micro-batch fits and does the same work in fewer, larger products."""
    plan = seen.plan
    if plan.pp > 1 or plan.microbatches(seen.config.workload) == 1:
        return None
    larger = [p for p in microbatches(plan, seen.config.workload) if p and p.microbatch > plan.microbatch]
    if (best := seen.faster(larger, USABLE_MEMORY)) is None:
        return None
    rounds = plan.microbatches(seen.config.workload)
    what = f"{rounds} micro-batches of {plan.microbatch} are accumulated though {best.plan.microbatch} at once fit"
    return finding(seen, "MW-LINT-005", "accumulation when the batch fits", what, seen.step - step(best), best)


def ring_not_free(seen: Seen) -> Finding | None:
    """006: a block's attention is shorter than the transfer of the next block."""
    plan, model, cluster = seen.plan, seen.config.model, seen.now.cluster
    if plan.cp == 1 or plan.cp_kind != "ring":
        return None
    level = crosses(seen, "cp")
    device = cluster.accelerator
    reached = device.peak_for("bf16") * device.efficiency.flash
    heads, kv = model.heads / plan.tp, max(model.kv_groups / plan.tp, 1)
    need = advice.ring_free_block(heads, kv, reached, cluster.device_bandwidth(level), causal=model.causal)  # type: ignore[arg-type]
    block = seen.config.workload.seq / plan.cp
    if block >= need:
        return None
    other_kinds = [changed(plan, cp_kind=kind) for kind in ("ulysses", "all-gather")]
    fixed = seen.trial.fastest([*other_kinds, *moves(plan, "cp", seen.config.workload, seen.config.stack)])
    what = f"blocks of {block:,.0f} tokens over {level_words(cluster, level)}: ring attention hides its transfers from {need:,.0f} on"
    return finding(seen, "MW-LINT-006", "ring attention out of its free regime", what, exposed(seen.now, "cp"), fixed)


def sharded_over_slow(seen: Seen) -> Finding | None:
    """007: ZeRO-3 gathers weights over a network that cannot keep up."""
    plan, cluster = seen.plan, seen.now.cluster
    level = crosses(seen, "shard")
    cost = exposed(seen.now, "dp")
    slow = level > 0 and cluster.device_bandwidth(level) <= SLOW
    if plan.zero != 3 or plan.shard == 1 or not (slow or cost >= DP_SHARE * seen.step):
        return None
    node = math.gcd(plan.shard, cluster.node_size)
    hybrid = changed(plan, shard=node, replicate=plan.dp // node) if 1 < node < plan.shard else None
    lighter = [changed(plan, zero=stage) for stage in (1, 2)]
    unsharded = changed(plan, reshard=False)
    bigger = [p for p in microbatches(plan, seen.config.workload) if p and p.microbatch > plan.microbatch]
    split = [p for p in moves(plan, "dp", seen.config.workload, seen.config.stack, ("tp", "pp")) if p]
    lighter_split = [changed(p, zero=1) for p in split]
    fixed = seen.trial.fastest([hybrid, unsharded, *lighter, *bigger, *split, *lighter_split])
    name = "ZeRO-3 on a slow network" if slow else "gathers of ZeRO-3 are exposed"
    what = f"compute waits {format_seconds(cost)} for gathers of weights over {level_words(cluster, level)}"
    return finding(seen, "MW-LINT-007", name, what, cost, fixed)


def oversubscribed(seen: Seen) -> Finding | None:
    """008: traffic crosses a level with fewer uplinks than downlinks."""
    cluster = seen.now.cluster
    top = max((crosses(seen, axis) for axis in ("tp", "cp", "pp", "dp", "ep")), default=0)
    thin = [k for k in range(1, top + 1) if cluster.levels[k].oversubscription > 1]
    if not thin:
        return None
    free = cluster.but(levels=[level.but(oversubscription=1.0) for level in cluster.levels])
    ideal = seen.trial.with_changes(seen.plan, cluster=free)
    cost = seen.step - step(ideal) if ideal else 0.0
    unit = cluster.spans[thin[0] - 1]
    shards = [s for s in {math.gcd(seen.plan.dp, unit), math.gcd(seen.plan.dp, cluster.node_size)} if s > 1]
    hybrids = [changed(seen.plan, zero=max(seen.plan.zero, 1), shard=s, replicate=seen.plan.dp // s) for s in shards]
    fixed = seen.faster([p for p in (*hybrids, *orders(seen.plan)) if p != seen.plan])
    ratio = max(cluster.levels[k].oversubscription for k in thin)
    what = f"{ratio:g}:1 oversubscription at {cluster.levels[thin[0]].name}: groups that span it share {level_words(cluster, thin[0])}"
    return finding(seen, "MW-LINT-008", "oversubscribed fabric", what, cost, fixed)


def experts_over_slow(seen: Seen) -> Finding | None:
    """009: tokens are dispatched to experts across nodes."""
    level = crosses(seen, "ep")
    if seen.plan.ep == 1 or level == 0:
        return None
    near = as_one_node(seen.now.cluster, seen.plan.ep * seen.plan.etp)
    ideal = seen.trial.with_changes(seen.plan, cluster=near)
    cost = exposed(seen.now, "ep") - (exposed(ideal, "ep") if ideal else 0.0)
    node = seen.now.cluster.node_size
    pairs = [
        (ep, etp) for etp in divisors(seen.plan.tp) for ep in divisors(seen.config.model.experts) if ep * etp <= node
    ]
    fixed = seen.trial.fastest([changed(seen.plan, ep=ep, expert_tp=etp) for ep, etp in pairs])
    what = f"experts of a layer are spread over {seen.plan.ep} ranks across {level_words(seen.now.cluster, level)}"
    return finding(seen, "MW-LINT-009", "experts over a slow all-to-all", what, cost, fixed)


def small_buckets(seen: Seen) -> Finding | None:
    """010: gradient buckets so small that latency dominates."""
    plan, cluster = seen.plan, seen.now.cluster
    ranks = plan.dp * plan.cp
    if ranks == 1:
        return None
    level = crosses(seen, "dp_cp")
    least = advice.minimum_bucket(cluster.levels[level].link.alpha, 1 / cluster.device_bandwidth(level))
    if plan.bucket >= least * ranks:
        return None
    if (best := seen.faster(larger_buckets(plan))) is None:
        return None
    small = f"{'n* =' if plan.bucket < least else f'P·n* = {ranks} ×'} {format_decimal_bytes(least)}"
    what = f"buckets of {format_decimal_bytes(plan.bucket)} are below {small} of the {cluster.levels[level].name}: latency rules them"
    return finding(seen, "MW-LINT-010", "buckets below α/β", what, seen.step - step(best), best)


def thin_memory(seen: Seen) -> Finding | None:
    """013: the plan does not fit, or leaves little memory free."""
    used, limit = seen.now.prediction.memory_gib or 0.0, seen.now.prediction.memory_limit_gib
    if used <= USABLE_MEMORY * limit:
        return None
    plan, workload = seen.plan, seen.config.workload
    recomputed = [changed(plan, recompute=r) for r in ("selective", "full")]
    smaller = [p for p in microbatches(plan, workload) if p and p.microbatch < plan.microbatch]
    sharded = {} if plan.zero else {"replicate": 1, "shard": plan.dp}
    stages = [changed(plan, zero=z, **sharded) for z in (1, 2, 3) if z > plan.zero]
    split = [p for axis in ("tp", "pp") for p in moves(plan, "dp", workload, seen.config.stack, (axis,))]
    tried = [p for p in (*recomputed, *smaller, *stages, *split) if p is not None]
    full = [changed(p, recompute="full") for p in (*smaller, *stages, *split) if p is not None]
    fixed = seen.trial.fastest([*tried, *full], USABLE_MEMORY)
    severity: Severity = "error" if used > limit else "note"
    what = f"{used:.1f} of {limit:.1f} GiB leave {1 - used / limit:.1%} for what no model foresees"
    what = f"{used:.1f} GiB on devices of {limit:.1f}" if used > limit else what
    thin = Finding(
        "MW-LINT-013", "memory headroom thin", severity, f"{what}: {seen.now.prediction.memory_fit}", 0.0, 0.0
    )
    if fixed is None:
        return thin
    return replace(thin, fix=settings(plan, fixed.plan), saves_s=seen.step - step(fixed), fixed=fixed.plan)


def needless_recompute(seen: Seen) -> Finding | None:
    """014: activations are computed twice though they would fit."""
    plan = seen.plan
    if plan.recompute == "none":
        return None
    lighter = ("none",) if plan.recompute == "selective" else ("none", "selective")
    if (best := seen.faster([changed(plan, recompute=r) for r in lighter], USABLE_MEMORY)) is None:
        return None
    room = f"{best.prediction.memory_gib:.1f} of {best.prediction.memory_limit_gib:.1f} GiB"
    what = f"recompute {plan.recompute} though {best.plan.recompute} needs {room}"
    return finding(seen, "MW-LINT-014", "recompute without need", what, seen.step - step(best), best)


def heavy_checkpoint(seen: Seen) -> Finding | None:
    """015: a save or a load needs more memory than a device or a host has."""
    before = seen.now.prediction
    over = _beyond_memory(before)
    if not over:
        return None
    words, keys = "", ""
    stack = seen.config.stack
    usual: Stack = catalog.load("stacks", stack.name if stack.name in catalog.names("stacks") else "default")
    for saves, loads in ((usual.saves, usual.loads), ("sharded", "sharded")):
        other = seen.trial.with_changes(seen.plan, stack=stack.but(saves=saves, loads=loads))
        if other is not None and not _beyond_memory(other.prediction):
            changes = [("saves", saves)] * (saves != stack.saves) + [("loads", loads)] * (loads != stack.loads)
            words = " ".join(f"--set stack.{name}={value}" for name, value in changes)
            keys = _framework_keys(stack, dict(changes))
            break
    known = bool(seen.now.cluster.host_memory) or any("device" in what for what in over)
    assumed = "" if known else " (assumed: set cluster.host_memory)"
    what = f"{'; '.join(over)}{assumed}: a step may fit, a checkpoint does not{keys}"
    severity: Severity = "error" if known else "warning"
    return Finding("MW-LINT-015", "out of memory at a checkpoint", severity, what, 0.0, 0.0, words)


def _framework_keys(stack: Stack, changes: dict[str, str]) -> str:
    """The same changes as keys of the framework that a stack describes, for users who edit its settings; nothing if it has no such keys."""
    framework = frameworks.find(stack.can.framework)
    keys = [key for key in framework.table.keys if key.fact in changes] if framework else []
    values = [(key.name, key.encode(changes[key.fact])) for key in keys]
    spelled = [f"{name}: {value}" for name, value in values if value is not INVALID]
    return f". In {framework.title}: {', '.join(spelled)}" if framework and spelled else ""


def _beyond_memory(p: Prediction) -> list[str]:
    """Describe what does not fit at a save or at a load."""
    sizes = p.checkpoint_gib
    limits = {"device": p.memory_limit_gib, "host": sizes["host_limit"]}
    return [
        f"a {moment} needs {sizes[f'{moment}_{place}']:,.1f} GiB on a {place} of {limit:,.1f}"
        for moment in ("save", "load")
        for place, limit in limits.items()
        if sizes[f"{moment}_{place}"] > limit
    ]


def no_overlap(seen: Seen) -> Finding | None:
    """016: communication waits although the stack can overlap it."""
    plan, stack = seen.plan, seen.config.stack
    if plan.overlap is None:
        return None
    possible = plan.but(overlap=None).overlapped(stack, seen.now.cluster.node_size)
    off = tuple(axis for axis in possible if axis not in plan.overlap and getattr(plan, axis) > 1)
    best = seen.trial.of(plan.but(overlap=(*plan.overlap, *off), prefetch=True)) if off else None
    if best is None or step(best) >= seen.step:
        return None
    what = f"the communication of {', '.join(off)} waits, and {stack.name} can run it behind compute"
    return finding(seen, "MW-LINT-016", "overlap switched off", what, seen.step - step(best), best)


BY_CODE: dict[str, Rule] = {
    "MW-LINT-001": tensor_across,
    "MW-LINT-002": small_batch,
    "MW-LINT-003": against_topology,
    "MW-LINT-004": few_microbatches,
    "MW-LINT-005": needless_accumulation,
    "MW-LINT-006": ring_not_free,
    "MW-LINT-007": sharded_over_slow,
    "MW-LINT-008": oversubscribed,
    "MW-LINT-009": experts_over_slow,
    "MW-LINT-010": small_buckets,
    "MW-LINT-013": thin_memory,
    "MW-LINT-014": needless_recompute,
    "MW-LINT-015": heavy_checkpoint,
    "MW-LINT-016": no_overlap,
}
RULES = tuple(BY_CODE.values())
