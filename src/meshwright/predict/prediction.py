"""Compute the `Prediction` of one configuration: lower it, cost it, and add the assumptions and the error band."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cost.band import band, beyond_published
from meshwright.cost.checkpoint import checkpoint_memory
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.memory import rank_peaks
from meshwright.cost.step import StepCost, step_cost
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.packing import packed, slowest
from meshwright.describe.plan import Plan, in_framework
from meshwright.describe.result import COMMUNICATION, GIB, USABLE_MEMORY, Prediction
from meshwright.describe.shape_parts import skewed_loads
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.lower.recompute import resolve_recompute_budget
from meshwright.lower.stages import has_unlike_ranks
from meshwright.lower.step import step_program
from meshwright.units import Json, format_bytes, format_flops


def cost_of(config: Config) -> StepCost:
    """Cost one plan on every pipeline rank."""
    c = config
    plan = resolve_recompute(c.model, c.plan, c.workload, c.stack, c.cluster.accelerator.memory)
    return step_cost(step_program(c.model, plan, c.workload, c.stack, every_rank=True), c.cluster)


def predict(config: Config) -> Prediction:
    """Predict the step time, memory and traffic of a configuration."""
    return prediction(cost_of(config), config)


def prediction(cost: StepCost, config: Config, at: int = 0) -> Prediction:
    """The prediction of a configuration whose plan is at index `at` of a costed batch."""
    model, cluster, plan, stack = config.model, config.cluster, config.plan, config.stack

    def one(values: Any) -> float:
        return element(values, at)

    time = one(cost.time)
    peak = cluster.accelerator.peak_for(config.workload.precision)
    exposed = {part: one(s) for part, s in cost.exposed.items()}
    memory = [{part: one(x) / GIB for part, x in parts.items()} for parts in cost.memory]
    blocks = {name: one(sum(groups.values())) for name, groups in cost.program.parameters.items()}
    total = one(cost.peak_memory)
    source = cluster.accelerator.efficiency.source
    hidden = hidden_communication(cost, exposed, at)
    low, high = band(stack, exposed, hidden, plan, cluster)
    return Prediction(
        step_time_s=time,
        step_time_low_s=time * low,
        step_time_high_s=time * high,
        exposed_s={part: s for part, s in exposed.items() if s},
        hidden_s=hidden,
        busy_s={stream: one(s) for stream, s in cost.busy.items()},
        memory_gib=total / GIB,
        memory_by_stage=memory,
        traffic_bytes={axis: one(x) for axis, x in cost.traffic.items() if one(x)},
        traffic_by_level=traffic_by_level(cost, cluster, at),
        mfu=seconds_at_peak(config) / time,
        hfu=one(cost.flops) / (time * peak),
        mfu_denominator=f"{plan.world} × {format_flops(peak)} dense {config.workload.precision} of {cluster.accelerator.name}",
        tokens_per_s=samples_per_step(config) / time,
        bound_by=bound_by(exposed),
        assumed=[
            *config.assumed,
            *model.notes,
            *without_sequence(model),
            *document_lengths(config),
            *expert_load(config),
            *dropped_copies(model, plan),
            *unpublished_network(plan, cluster),
        ],
        fits=bool(total <= cluster.accelerator.memory),
        memory_limit_gib=cluster.accelerator.memory / GIB,
        checkpoint_gib=checkpoint_memory(config, memory, blocks),
        calibrated=source,
        sources={"compute": source, "network": cluster.source, "stack": stack.source or stack.name},
    )


def traffic_by_level(cost: StepCost, cluster: Cluster, at: int = 0) -> list[Json]:
    """Bytes sent per device and step by axis and level, the most first. Those of a collective belong to the slowest level that its group
    crosses, so an axis has a row for each level that its groups reach: with hybrid sharding the gathers and reductions inside a node, and the
    sums between nodes. `ranks`: of the largest of these groups."""
    batch, rows = cost.program.batch, dict[tuple[str, str], Json]()
    network = CollectiveTimes(cluster, batch)
    for (axis, group), values in cost.traffic_by_group.items():
        if size := element(values, at):
            level = cluster.levels[network.level(group, at)].name
            row = rows.setdefault((axis, level), {"axis": axis, "level": level, "ranks": 0, "bytes": 0.0})
            row["ranks"] = max(row["ranks"], int(element(batch.size(group), at)))
            row["bytes"] += size
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def element(values: Any, at: int) -> float:
    """The value of the plan at this index: values of a batch are an array over its plans, or one number for all of them."""
    return float(values[at if len(values) > 1 else 0] if np.ndim(values) else values)


def without_sequence(model: Model) -> list[str]:
    """Say what the counts of a model without a sequence mean."""
    if model.unit == "tokens":
        return []
    return [f"{model.name} has no sequence: workload.seq has no effect, and tokens_per_s counts samples"]


def samples_per_step(config: Config) -> float:
    """Tokens of a step; for a model without a sequence, rows of its batch."""
    return config.workload.tokens_per_step if config.model.kind == "transformer" else config.workload.batch


def seconds_at_peak(config: Config) -> float:
    """Seconds of a step if all devices did nothing but the model's FLOPs, at their peak rate: the MFU is this over the step time."""
    flops = config.model.model_flops(config.workload.attended) * samples_per_step(config)
    return flops / (config.plan.world * config.cluster.accelerator.peak_for(config.workload.precision))


def unpublished_network(plan: Plan, cluster: Cluster) -> list[str]:
    """Say that a network is known at smaller sizes only."""
    if not beyond_published(plan, cluster):
        return []
    known = f"on more than {cluster.published} GPUs" if cluster.published else "on several nodes"
    return [
        f"network of {cluster.name}: no run or collective is published {known}; the band holds twice the time of communication between nodes, "
        "and `meshwright bench` with `calibrate` measures it"
    ]


def document_lengths(config: Config) -> list[str]:
    """Say what attention computes in sequences of several documents."""
    work, dp = config.workload, config.plan.dp
    if not work.lengths:
        return []
    above = float(slowest(packed(work.lengths, work.seq).deviation, [dp], np.array([work.batch / dp]))[0]) - 1
    words = f"attention in a packed sequence of {work.seq:,} tokens is that of one of {work.attended:,.0f}"
    return [f"document lengths: {words}; on the slowest of {dp} data-parallel ranks {above:.0%} more"]


def expert_load(config: Config) -> list[str]:
    """Say which load of experts was assumed, where it is not even."""
    model, loads = config.model, config.workload.loads
    busiest = float(np.max(model.router.busiest(config.workload.imbalance, loads, config.plan.ep)))
    if not model.experts or busiest == 1 or not (loads or config.workload.imbalance != 1):
        return []
    ranks = f"of {config.plan.ep} expert-parallel ranks the busiest" if config.plan.ep > 1 else "a rank"
    dropped = model.router.dropped(loads or skewed_loads(model.experts, config.plan.ep, config.workload.imbalance))
    drops = f"; capacity {model.router.capacity:g} drops {dropped:.1%} of the token copies" if dropped else ""
    if drops and not loads:
        drops += ", if loads fall as a power of an expert's place"
    return [f"expert load: {ranks} has {busiest:.3g} times the mean, in each layer{drops}"]


def dropped_copies(model: Model, plan: Plan) -> list[str]:
    """Say what is assumed about dropped tokens, if a router's capacity drops copies that go to other ranks."""
    sent = plan.ep > 1 or plan.etp > 1
    if not sent or not model.experts or not model.router.can_drop(model.experts, model.top_k):
        return []
    words = (
        f"router capacity {model.router.capacity:g} keeps at most {100 * model.router.travelling:.0f}% of token copies"
    )
    return [f"expert traffic is an upper bound: {words}, the tokens decide how many"]


def hidden_communication(cost: StepCost, exposed: dict[str, float], at: int = 0) -> dict[str, float]:
    """Return seconds of hidden communication of the slowest rank by axis: total minus exposed."""
    out = {}
    for axis in COMMUNICATION:
        total = cost.busy.get(f"comm:{axis}", 0.0) + (cost.reduce if axis == "dp" else 0.0)
        hidden = element(total, at) - exposed.get(axis, 0.0)
        if hidden > 0:
            out[axis] = hidden
    return out


def bound_by(exposed: dict[str, float]) -> str:
    """The largest of compute, each axis's communication, bubble and host."""
    named = {
        **COMMUNICATION,
        "bubble": "the pipeline bubble",
        "host": "the host's launches",
        "optimizer": "the optimizer",
        "offload": "copies to and from the host",
        "overhead": "step overhead",
    }
    groups: dict[str, float] = {}
    for part, seconds in exposed.items():
        name = named.get(part, "compute")
        groups[name] = groups.get(name, 0.0) + seconds
    return max(groups, key=lambda k: groups[k])


# --- `recompute = "auto"` without a budget: the smallest number of recomputed layers with which the plan fits in device memory.
#
#     states + gradients + (1 + slack) · (activations(c) + gathered + working) + context  ≤  0.95 · memory
#
# with c recomputed layers per stage. The memory model is that of `estimate`, so the resulting plan fits there too. While a layer is
# recomputed, all its tensors are in memory, so c = 1 may need more than c = 0; every further layer saves memory. A `recompute_budget`
# limits only the saved activations, takes precedence, and is resolved by `lower.recompute`.


def resolve_recompute(model: Model, plan: Plan, workload: Workload, stack: Stack, device_memory: float) -> Plan:
    """The plan with `recompute=auto` replaced by the fewest recomputed layers that fit devices of this much memory."""
    if plan.recompute != "auto" or plan.recompute_budget:
        return resolve_recompute_budget(model, plan, workload, stack)
    limit = USABLE_MEMORY * device_memory
    (count,) = fewest_recomputed(model, [plan], workload, stack, limit)
    if count is None:
        least = peak(model, recomputing(plan, max(plan.stage_layers(model.layers))), workload, stack)
        raise MeshwrightError(
            "MW-PAR-003",
            f"{format_bytes(least)} per device with every layer recomputed, more than {format_bytes(limit)}",
            why=f"recompute=auto uses at most {USABLE_MEMORY:.0%} of a device's {format_bytes(device_memory)}",
            valid=["smaller micro-batches", "more ranks for the states"],
            fix=f"--set plan.{'microbatch=1' if plan.microbatch > 1 else 'recompute=full'}",
        )
    return recomputing(plan, count)


def recomputing(plan: Plan, layers: int) -> Plan:
    """The plan with so many recomputed layers per stage."""
    return plan.model_copy(update={"recompute": "full" if layers else "none", "recompute_layers": layers})


TRIED = 16  # numbers of layers that one batch tries; at least 4 of each plan


def fewest_recomputed(
    model: Model,
    plans: Sequence[Plan],
    workload: Workload,
    stack: Stack,
    limit: float,
    workloads: Sequence[Workload] = (),
) -> list[int | None]:
    """For each plan the fewest recomputed layers per stage with which its fullest rank needs at most `limit` bytes; None where all are too few.
    All plans are searched together: a batch has several numbers of layers of each. `workloads` as in `Batch.of`."""
    plans = [in_framework(plan, model, stack) for plan in plans]
    most = [max(plan.stage_layers(model.layers)) for plan in plans]
    low, high, tried = [0] * len(plans), [stage + 1 for stage in most], max(4, TRIED // len(plans))
    every = has_unlike_ranks(model, plans)
    while trials := [
        (k, count)
        for k, (first, end) in enumerate(zip(low, high, strict=True))
        for count in range(first, end, -(-(end - first) // tried) or 1)
    ]:
        chosen, works = [recomputing(plans[k], n) for k, n in trials], [workloads[k] for k, _ in trials if workloads]
        program = step_program(model, chosen, workload, stack, every_rank=every, workloads=works)
        peaks = rank_peaks(program).max(axis=0)
        for (k, count), peak_bytes in zip(trials, peaks.tolist(), strict=True):
            if peak_bytes <= limit:
                high[k] = min(high[k], count)
            else:
                low[k] = max(low[k], count + 1)
    return [count if count <= stage else None for count, stage in zip(high, most, strict=True)]


def peak(model: Model, plan: Plan, workload: Workload, stack: Stack) -> float:
    """Peak bytes on the fullest rank."""
    return float(rank_peaks(step_program(model, plan, workload, stack, every_rank=True)).max())
