"""From facts to a plan and a workload, with what contradicts it.

    data parallelism   dp = GPUs / (tp · cp · pp); where their number is not given, the fewest that the degrees need
    ZeRO               shard = dp / replicate where it is not given
    batch              batch = micro-batch × accumulation × dp, from any two of them

A quantity that no key states takes a value that breaks no rule, so that the rules of `describe.legality` judge only what was stated; `assumed`
lists them. A quantity that cannot be reconciled with another (8 × 2 degrees on 8 GPUs) becomes a `Problem`, and the plan takes the nearest
value that has a meaning.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.stack import Stack
from meshwright.describe.workload import Workload
from meshwright.interop.keys import Facts, Framework, SettingsProblem
from meshwright.interop.stages import stages

# --- Switches of overlap and of checkpoints, from the facts of settings to the plan and the stack, and back.
#
# A fact has three values: on, off, and unknown, where the framework has no such switch: then the entry of the catalog decides.
#
#     overlap_dp       gradients are reduced during backward          plan.overlap
#     overlap_tp       tensor-parallel messages behind products       plan.overlap
#     overlap_ep       expert exchange behind other micro-batches     plan.overlap
#     overlap_gather   parameters are gathered ahead                  plan.prefetch
#     prefetch         the same of ZeRO-3; forward: not in backward   plan.prefetch
#     overlap_p2p      interleaved pipeline messages do not block     stack.blocking_p2p
#     async_linears    a collective behind one product of its layer   stack.async_linears
#     eager            attention in torch operators stores scores     stack.attention, stack.fused
#     fused_loss       the loss needs no full logits                  stack.fused
#     fused_norm       norms are one kernel; fused_activation alike   stack.fused
#     cuda_graphs      parts of a layer, or steps, are replayed       stack.graphs
#     wrapped_ends     the embedding and the head are units           stack.root_unit
#     saves, loads     who collects the state of a checkpoint         stack.saves, stack.loads
#
# The entries of the catalog are stacks with the overlap that their frameworks' tuned recipes switch on. A framework's table has the
# defaults of its argument parser, which are mostly off: settings that name no switch get another plan than the catalog's stack.

SWITCHED = ("dp", "tp", "ep")
AXES = ("dp", "tp", "cp", "pp", "ep")
GRAPHED = {"attention": r"attn|mamba", "router": r"moe", "ffn": r"mlp"}


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


def graphed_parts(facts: Facts) -> tuple[str, ...]:
    """What CUDA graphs replay, by the modules that the settings of Megatron-Core name; whole layers where they name none."""
    names = str(facts.get("graph_scope") or "")
    if "full_iteration" in names or facts["cuda_graphs"] == "step":
        return ("step",)
    return tuple(part for part, modules in GRAPHED.items() if re.search(modules, names)) or tuple(GRAPHED)


def switch_stack(facts: Facts, plan: dict[str, Any], stack: Stack) -> dict[str, Any]:
    """The fields of the stack that the settings change."""
    stated = {name: facts[name] for name in ("saves", "loads") if facts.get(name)}
    # Parts of a sequence attend by flash, flex or scaled-dot-product kernels.
    eager = facts.get("eager") and plan.get("cp", 1) == 1
    if eager:
        stated["attention"] = "stored"
    parts = {part: facts.get(f"fused_{part}") for part in ("loss", "norm", "activation")}
    split = {part for part, on in parts.items() if on is False and part != "loss"}  # `memory` counts an unfused loss
    split |= {"softmax"} if eager else set()
    kept = tuple(part for part in stack.fused if part not in split)
    stated["fused"] = (*kept, *(part for part, on in parts.items() if on and part not in kept))
    if facts.get("cuda_graphs"):
        stated["graphs"] = graphed_parts(facts)
    if facts.get("wrapped_ends"):
        stated["root_unit"] = False
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


STAGES = ("none", "optimizer", "gradients", "parameters")
OFFLOADS = ("none", "states", "activations", "both")


@dataclass
class Assembled:
    """A plan and a workload made of facts, the number of GPUs (0: not given), and what was assumed or is wrong."""

    plan: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    gpus: int = 0
    stack_name: str = ""  # entry of the catalog: the framework's, or DeepSpeed's where that shards
    stack: dict[str, Any] = field(default_factory=dict)  # what the settings change of it
    exposed: list[str] = field(default_factory=list)  # axes that the settings do not overlap and the framework could
    assumed: list[str] = field(default_factory=list)
    problems: list[SettingsProblem] = field(default_factory=list)
    has_least_gpus: bool = False  # the number of GPUs that was given is the smallest that the degrees allow
    fit_is_known: bool = True  # False: a part of the memory is not modelled

    def refuse(self, code: str, what: str, why: str = "", fix: str = "") -> None:
        """Note what contradicts the facts."""
        self.problems.append(SettingsProblem(code, what, why, fix))

    def plan_object(self) -> Plan:
        return Plan(**self.plan)

    def workload_object(self) -> Workload:
        return Workload(**self.workload)


def assemble(
    facts: Facts, framework: Framework, gpus: int = 0, layers: int | None = None, experts: bool | None = None
) -> Assembled:
    """The plan and the workload that facts state; `layers` and `experts` are the model's where it is known."""
    out = Assembled(gpus=gpus or _given_gpus(facts))
    degrees = _degrees(facts, framework, out, experts)
    _data_parallel(facts, degrees, out)
    _pipeline(facts, framework, layers, out)
    _batch(facts, out)
    _memory(facts, out)
    _numerics(facts, out)
    _accumulate(facts, framework, out)
    out.stack_name = "deepspeed" if facts.get("by_deepspeed") and out.plan["zero"] else framework.stack
    stack = catalog.load("stacks", out.stack_name)
    out.exposed = switch_plan(facts, out.plan, stack)
    out.stack = switch_stack(facts, out.plan, stack)
    return out


def _given_gpus(facts: Facts) -> int:
    if facts.get("gpus"):
        return int(facts["gpus"])
    nodes, each = facts.get("nodes"), facts.get("gpus_per_node")
    return int(nodes * each) if nodes and each else 0


def _degrees(facts: Facts, framework: Framework, out: Assembled, experts: bool | None) -> dict[str, int]:
    found = {axis: int(facts.get(axis) or 1) for axis in ("tp", "cp", "pp", "ep")}
    rest = found["tp"] * found["cp"] * found["pp"]
    given = facts.get("expert_tp")
    etp = int(given) if given else found["tp"] if framework.expert_tp == "tp" else 1
    grid = etp * found["ep"] * found["pp"]
    least = math.lcm(rest, grid) // rest if found["ep"] > 1 else 1
    least = rest * math.lcm(least, max(1, int(facts.get("replicate") or 1)))
    out.has_least_gpus = out.gpus == least
    if not out.gpus:
        explicit = facts.get("dp") or (facts.get("shard", -1) > 0 and facts.get("replicate", 1) * facts["shard"])
        out.gpus = -(rest * int(explicit) if explicit else least)  # negative: not given
        out.assumed.append(f"GPUs: {-out.gpus}")
    world = abs(out.gpus)
    if world % rest:
        out.problems.append(_world(found, world))
    elif found["ep"] > 1 and world % grid:
        named = f"expert tp × ep × pp = {etp} × {found['ep']} × {found['pp']} = {grid}"
        unset = "" if given else f" (expert tp is not set, which means {etp})"
        out.refuse(
            "MW-SET-002",
            f"{named} does not divide {world} GPUs{unset}",
            why="The experts of every stage use all of its ranks",
            fix="expert tensor parallelism 1" if etp > 1 and world % (grid // etp) == 0 else "",
        )
    plan = out.plan
    plan |= {axis: found[axis] for axis in ("tp", "cp", "pp")}
    plan["sp"] = bool(facts.get("sp")) and found["tp"] > 1
    if facts.get("cp_kind") and found["cp"] > 1:
        plan["cp_kind"] = facts["cp_kind"]
    if not experts and found["ep"] == 1:
        return found
    ranks = found["tp"] * found["cp"] * max(1, world // rest)
    if found["tp"] % etp or ranks % (etp * found["ep"]):
        out.fit_is_known = out.fit_is_known and found["ep"] == 1 and not given
        return found  # legal in the framework perhaps, but not a plan of ours
    plan["ep"] = found["ep"]
    if etp != found["tp"]:
        plan["expert_tp"] = etp
    return found


def _world(found: dict[str, int], world: int) -> SettingsProblem:
    shown = {axis: found[axis] for axis in ("tp", "cp", "pp") if found[axis] > 1}
    rest = math.prod(shown.values())
    total = f" = {rest}" if len(shown) > 1 else ""
    return SettingsProblem(
        "MW-SET-001",
        f"{' × '.join(shown)} = {' × '.join(map(str, shown.values()))}{total} does not divide {world} GPUs",
        why="Data parallelism takes the GPUs that the other degrees leave",
        fix=f"{-(-world // rest) * rest} GPUs",
    )


def _data_parallel(facts: Facts, found: dict[str, int], out: Assembled) -> None:
    rest, world = found["tp"] * found["cp"] * found["pp"], abs(out.gpus)
    dp = max(1, world // rest)
    sharding = facts.get("sharding", "none")
    replicate, shard = int(facts.get("replicate") or 1), facts.get("shard") or -1
    if replicate < 0:  # the ranks that the shards leave
        replicate = dp // shard if shard > 0 and dp % shard == 0 else 1
    stated = facts.get("dp") or (replicate * shard if shard > 0 else 0)
    if facts.get("shard_with_cp") and shard > 0 and found["cp"] > 1 and shard % found["cp"] == 0:
        shard //= found["cp"]
        stated = replicate * shard
    if stated and stated != dp and world % rest == 0:
        named = f"dp × tp × cp × pp = {stated} × {found['tp']} × {found['cp']} × {found['pp']} = {stated * rest}"
        out.refuse(
            "MW-SET-001",
            f"{named} ≠ {world} GPUs",
            why="The degrees must multiply to the GPUs",
            fix=f"{stated * rest} GPUs",
        )
        dp = int(stated)
        out.gpus = dp * rest if out.gpus > 0 else -dp * rest
    if dp % replicate:
        out.refuse(
            "MW-SET-001",
            f"{replicate} replicas do not divide {dp} data-parallel ranks",
            fix=f"{dp} or a divisor of it",
        )
        replicate = 1
    zero = STAGES.index(sharding)
    shard = dp // replicate
    if zero == 0 or shard * found["cp"] == 1:
        zero, replicate, shard = 0, dp, 1
    out.plan |= {"replicate": replicate, "shard": shard, "zero": zero}


def _pipeline(facts: Facts, framework: Framework, layers: int | None, out: Assembled) -> None:
    if out.plan["pp"] == 1:
        return
    schedule = facts.get("schedule") or "1f1b"
    virtual, each, problem = stages(facts, layers, framework)
    if schedule in ("zbv", "dualpipev"):
        virtual = 2
    elif schedule in ("interleaved", "looped-bfs", "interleaved-zb") and virtual == 1:
        virtual = 1 if facts.get("layers_per_chunk") or facts.get("virtual") else 2
        schedule = schedule if virtual > 1 or schedule != "interleaved" else "1f1b"
    elif schedule == "1f1b" and virtual > 1:
        schedule = "interleaved"
    elif schedule in ("gpipe", "naive", "zb-h1", "zb-h2"):
        virtual = 1
    out.problems += [problem] if problem else []
    ends = 2 if framework.ends_are_layers or facts.get("counts_embedding") or facts.get("scripted") else 0
    # The embedding or the head fills a stage alone.
    if layers is not None and layers < virtual * out.plan["pp"] <= layers + ends:
        virtual, schedule, out.fit_is_known = 1, "1f1b", False
    out.plan |= {"virtual": virtual, "schedule": schedule}
    if each and len(each) == virtual * out.plan["pp"]:
        out.plan["layers_per_stage"] = each


def _batch(facts: Facts, out: Assembled) -> None:
    dp = out.plan["replicate"] * out.plan["shard"]
    pp = out.plan["pp"]
    local, micro = facts.get("local_batch"), facts.get("microbatch")
    if pp > 1 and local and facts.get("pipeline_microbatch"):
        micro = facts["pipeline_microbatch"]
    micro = int(micro or local or 0)
    steps = facts.get("accumulation") or facts.get("pipeline_microbatches")
    batch = facts.get("batch")
    if batch and micro and facts.get("accumulation") and batch != micro * facts["accumulation"] * dp and out.gpus > 0:
        product = f"{micro} × {facts['accumulation']} × {dp} = {micro * facts['accumulation'] * dp}"
        out.refuse(
            "MW-SET-004",
            f"the batch {batch} is not micro-batch × accumulation × data parallelism = {product}",
            why="The framework computes one of the three from the others and refuses another value",
            fix=f"a batch of {micro * facts['accumulation'] * dp}",
        )
        batch = micro * facts["accumulation"] * dp
    if not micro:
        micro = 1
        out.assumed.append("micro-batch: 1")
    if not batch:
        share = local if pp > 1 and local else micro
        batch = share * (steps or (2 * pp if pp > 1 and not local else 1)) * dp
        out.assumed.append(f"batch: {batch}")
    seq = facts.get("seq") or facts.get("packed_seq")
    if not seq:
        out.assumed.append("sequence length: 4096")
    out.plan["microbatch"] = micro
    out.workload |= {"batch": int(batch), "seq": int(seq or 4096)}


def _memory(facts: Facts, out: Assembled) -> None:
    plan, recompute = out.plan, facts.get("recompute") or "none"
    plan["recompute"] = recompute
    if recompute == "full":
        if isinstance(facts.get("recompute_every"), int) and facts["recompute_every"] > 1:
            plan["recompute_every"] = facts["recompute_every"]
        if facts.get("recompute_layers"):
            plan["recompute_layers"] = int(facts["recompute_layers"])
    if plan["zero"] == 3 and facts.get("reshard") is False:
        plan["reshard"] = False
    states = bool(facts.get("offload_states") or facts.get("offload_parameters"))
    activations = bool(facts.get("offload_activations"))
    plan["offload"] = OFFLOADS[states + 2 * activations]
    if activations and facts.get("offload_layers"):
        plan["offload_layers"] = int(facts["offload_layers"])
    bucket = facts.get("bucket") or facts.get("bucket_mb", 0) * 10**6 or facts.get("bucket_elements", 0) * 2
    if isinstance(bucket, int | float) and bucket:
        plan["bucket"] = float(bucket)


def _numerics(facts: Facts, out: Assembled) -> None:
    half, eight = facts.get("half") or "bf16", facts.get("eight")
    out.plan["param_dtype"] = half
    out.workload["precision"] = eight or half
    out.plan |= {name: facts[name] for name in ("grad_dtype", "state_dtype") if facts.get(name)}
    if facts.get("optimizer"):
        out.workload["optimizer"] = facts["optimizer"]
    if half == "fp32" or facts.get("master") is False:
        out.plan["master"] = False


def _accumulate(facts: Facts, framework: Framework, out: Assembled) -> None:
    """Set when FSDP reduces gradients. Most trainers switch its reduction off until the last micro-batch of a step (`no_sync`,
    `set_requires_gradient_sync`): until then every rank holds whole gradients, in the dtype of the reduction. The number of micro-batches must be
    stated, or follow from a stated number of GPUs."""
    plan = out.plan
    by_fsdp = plan["zero"] == 3 and plan["pp"] == 1 and not facts.get("by_deepspeed")
    is_known = facts.get("accumulation") or (facts.get("batch") and out.gpus > 0)
    several = out.workload["batch"] > plan["microbatch"] * plan["replicate"] * plan["shard"]
    if by_fsdp and is_known and several and facts.get("defers_reduction", framework.defers_reduction):
        plan |= {"reduce": "step", "grad_dtype": facts.get("sum_dtype") or plan["param_dtype"]}
