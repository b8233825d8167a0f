"""From facts to a plan and a workload, with what contradicts it.

    data parallelism   dp = GPUs / (tp · cp · pp); where their number is not given, the fewest that the degrees need
    ZeRO               shard = dp / replicate where it is not given
    batch              batch = micro-batch × accumulation × dp, from any two of them

A quantity that no key states takes a value that breaks no rule, so that the rules of `describe.legality` judge only what was stated; `assumed`
lists them. A quantity that cannot be reconciled with another (8 × 2 degrees on 8 GPUs) becomes a `Problem`, and the plan takes the nearest
value that has a meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from meshwright.describe import catalog
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.interop.frameworks.framework import Framework
from meshwright.interop.keys import Facts
from meshwright.interop.problems import SettingsProblem
from meshwright.interop.stages import stages
from meshwright.interop.switches import switch_plan, switch_stack

STAGES = ("none", "optimizer", "gradients", "parameters")
MOST_GPUS = 10**9


@dataclass
class Assembled:
    """A plan and a workload made of facts, the number of GPUs (0: not given), and what was assumed or is wrong."""

    plan: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    gpus: int = 0
    stack: dict[str, Any] = field(default_factory=dict)  # what the settings change of the framework's stack
    exposed: list[str] = field(default_factory=list)  # axes that the settings do not overlap and the framework could
    assumed: list[str] = field(default_factory=list)
    problems: list[SettingsProblem] = field(default_factory=list)
    has_least_gpus: bool = False  # the number of GPUs that was given is the smallest that the degrees allow
    fit_is_known: bool = True  # False: a part of the memory is not modelled

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
    stack = catalog.load("stacks", framework.stack)
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
        out.problems.append(
            SettingsProblem(
                "MW-SET-002",
                f"{named} does not divide {world} GPUs{unset}",
                why="The experts of every stage use all of its ranks",
                fix="expert tensor parallelism 1" if etp > 1 and world % (grid // etp) == 0 else "",
            )
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
        out.problems.append(
            SettingsProblem(
                "MW-SET-001",
                f"{named} ≠ {world} GPUs",
                why="The degrees must multiply to the GPUs",
                fix=f"{stated * rest} GPUs",
            )
        )
        dp = int(stated)
        out.gpus = math.copysign(1, out.gpus) * dp * rest  # type: ignore[assignment]
        out.gpus = int(out.gpus)
    if dp % replicate:
        out.problems.append(
            SettingsProblem(
                "MW-SET-001",
                f"{replicate} replicas do not divide {dp} data-parallel ranks",
                fix=f"{dp} or a divisor of it",
            )
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
    virtual, each, problems = stages(facts, layers, framework)
    if schedule in ("zbv", "dualpipev"):
        virtual = 2
    elif schedule in ("interleaved", "looped-bfs", "interleaved-zb") and virtual == 1:
        virtual = 1 if facts.get("layers_per_chunk") or facts.get("virtual") else 2
        schedule = schedule if virtual > 1 or schedule != "interleaved" else "1f1b"
    elif schedule == "1f1b" and virtual > 1:
        schedule = "interleaved"
    elif schedule in ("gpipe", "naive", "zb-h1", "zb-h2"):
        virtual = 1
    out.problems += problems
    ends = 2 if framework.ends_are_layers or facts.get("counts_embedding") or facts.get("scripted") else 0
    if (
        layers is not None and layers < virtual * out.plan["pp"] <= layers + ends
    ):  # the embedding or the head fills a stage alone
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
        out.problems.append(
            SettingsProblem(
                "MW-SET-004",
                f"the batch {batch} is not micro-batch × accumulation × data parallelism = {product}",
                why="The framework computes one of the three from the others and refuses another value",
                fix=f"a batch of {micro * facts['accumulation'] * dp}",
            )
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
    kinds = (
        bool(facts.get("offload_states") or facts.get("offload_parameters")),
        bool(facts.get("offload_activations")),
    )
    plan["offload"] = {
        (False, False): "none",
        (True, False): "states",
        (False, True): "activations",
        (True, True): "both",
    }[kinds]
    bucket = facts.get("bucket") or facts.get("bucket_mb", 0) * 10**6 or facts.get("bucket_elements", 0) * 2
    if isinstance(bucket, int | float) and bucket:
        plan["bucket"] = float(bucket)


def _numerics(facts: Facts, out: Assembled) -> None:
    half, eight = facts.get("half") or "bf16", facts.get("eight")
    out.plan["param_dtype"] = half
    out.workload["precision"] = eight or half
    if facts.get("grad_dtype"):
        out.plan["grad_dtype"] = facts["grad_dtype"]
    if facts.get("state_dtype"):
        out.plan["state_dtype"] = facts["state_dtype"]
    if facts.get("optimizer"):
        out.workload["optimizer"] = facts["optimizer"]
    if half == "fp32" or facts.get("master") is False:
        out.plan["master"] = False
