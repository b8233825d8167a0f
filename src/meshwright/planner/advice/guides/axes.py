"""Textbook guides to single strategies: ZeRO stages, tensor, pipeline, all three together, ZeRO-3's network, inference.

Tensor and pipeline guides are lists of conditions ("use when", "avoid when", "best practices"). Each condition is checked for
the given problem and shown with its result, so that the reader sees the reason for the recommendation.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost.advice import inference_latency
from meshwright.cost.memory import largest_state
from meshwright.describe.plan import Plan
from meshwright.lower.step import step_program
from meshwright.planner.advice.alternatives import step
from meshwright.planner.advice.guides.problem import Problem
from meshwright.planner.advice.guides.recommendation import Recommendation
from meshwright.units import format_bytes, format_rate, format_seconds

GATES = {"unusable": 12.5e9, "standard": 50e9}  # bytes/s a device: 100 Gb/s and 400 Gb/s ports
MUCH_FASTER = 4.0  # inside a node against between nodes: from here sharding inside only is worth its memory
TRADE = "ZeRO-2 with accumulation reduces once a micro-batch, not once a step: it is free only without accumulation"


def zero_stage(s: Problem) -> Recommendation:
    """The lowest stage that fits without recompute, else the lowest that fits; inside nodes only where the network is narrow."""
    stages = {stage: s.shaped(zero=stage) for stage in range(4)}
    whole = [p for p in stages.values() if p and p.recompute == "none" and s.fits(p)]
    plan = whole[0] if whole else s.first_fitting(stages.values())
    chosen = plan.zero if plan else 0
    ratio = s.cluster.device_bandwidth(0) / s.between
    hybrid = s.shaped(zero=3, hybrid=True) if chosen >= 2 and s.nodes > 1 and ratio >= MUCH_FASTER else None
    if s.fits(hybrid):
        plan, name = hybrid, "HSDP"
    else:
        name = {0: "no stage: DDP fits", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}[chosen]
    states = ", ".join(f"{name_} {format_bytes(size)}" for name_, size in stage_states(s, stages).items())
    return Recommendation(
        "ZeRO stage",
        plan,
        f"{name}; parameters, gradients and optimizer states per device over {s.world}: {states}{s.aside(plan)}",
        "A Guide to Distributed Training, 8.6",
        "ZeRO-1: optimizer states are too large; ZeRO-2: gradients too; ZeRO-3: the model itself; HSDP: limited "
        "bandwidth between nodes",
        TRADE,
    )


def stage_states(s: Problem, stages: Mapping[int, Plan | None]) -> dict[str, float]:
    """Bytes of model state on the fullest device under each ZeRO stage: the numbers of the memory table, in the plan's dtypes."""
    plans = {("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")[stage]: plan for stage, plan in stages.items() if plan}
    if not plans:
        return {}
    program = step_program(s.model, list(plans.values()), s.workload, s.stack)
    return dict(zip(plans, largest_state(program).tolist(), strict=True))


def checklist(conditions: dict[str, bool]) -> str:
    return ", ".join(f"{'✓' if holds else '✗'} {what}" for what, holds in conditions.items())


def tensor(s: Problem) -> Recommendation:
    """9.8: use, avoid, best practices."""
    source, wording = (
        "A Guide to Distributed Training, 9.8",
        "TP=8 for 8-GPU nodes, pipeline across nodes, sequence parallelism for activations",
    )
    small = s.fits(s.shaped(zero=1))
    legal = [d for d in s.tensor_degrees if d > 1]
    use = {
        "a fast link inside the node": s.fast_inside,
        f"heads divide by {s.node}": s.node in s.tensor_degrees,
        "the model does not fit by sharding optimizer states alone": not small,
    }
    if small or not s.fast_inside or not legal:
        return Recommendation(
            "tensor guide",
            None,
            f"avoid: {checklist(use)}",
            source,
            wording,
            '"avoid for small models" means that it is not needed: with a small batch it can still be the fastest choice',
        )
    plan = s.first_fitting(s.shaped(tp=s.node, pp=p, zero=1) for p in (1, 2, 4, 8, 16))
    return Recommendation(
        "tensor guide",
        plan,
        f"use: {checklist(use)}",
        source,
        wording,
        "its traffic a layer is 4·2(T−1)/T·b·s·h elements: 352 MB for GPT-3 at T = 8, not 175",
    )


def pipeline(s: Problem) -> Recommendation:
    """10.8: ideal for, challenges, best practices."""
    source, wording = (
        "A Guide to Distributed Training, 10.8",
        "M ≥ 4·P, interleaved stages, PP across nodes and TP inside, balanced layers",
    )
    rounds = [p for p in (2, 4, 8, 16, 32) if s.nodes >= p and p <= s.model.layers]
    ideal = {
        f"{s.nodes} nodes": s.nodes > 1,
        f"{s.model.layers} layers to distribute": s.model.layers >= 8,
        "tensor parallelism alone does not fit": not s.fits(s.shaped(tp=s.node, zero=1)),
    }
    if s.model.kind != "transformer" or not rounds:
        return Recommendation("pipeline guide", None, f"avoid: {checklist(ideal)}", source, wording)
    shaped = [plan for p in rounds if (plan := s.shaped(tp=s.node, pp=p, zero=1, virtual=2)) is not None]
    enough = [plan for plan in shaped if plan.microbatches(s.workload) >= 4 * plan.pp]
    if not enough:
        return Recommendation(
            "pipeline guide",
            None,
            f"avoid: no degree leaves M ≥ 4·P at batch {s.workload.batch}; {checklist(ideal)}",
            source,
            wording,
        )
    plan = s.first_fitting(enough)
    return Recommendation(
        "pipeline guide",
        plan,
        f"the smallest depth that fits with M ≥ 4·P; {checklist(ideal)}",
        source,
        wording,
        "1F1B has GPipe's bubble and saves memory; interleaving shrinks the bubble and multiplies messages",
    )


def three_dimensions(s: Problem) -> Recommendation:
    """Tensor inside nodes, pipeline across them, data over the other ranks: 70B on 512 as 8 × 8 × 8."""
    plan = s.shaped(tp=s.node, pp=min(8, s.nodes), zero=1)
    product = f"{plan.tp} × {plan.pp} × {plan.dp} = {plan.world} GPUs" if plan else "no legal split"
    return Recommendation(
        "3D",
        plan,
        f"each strategy on the level with enough bandwidth for it: {product}",
        "Distributed Training at Scale, 8; A Guide to Distributed Training, 11.1",
        "70B on 512 GPUs: TP=8 in the node, PP=8 across nodes, DP=8",
        "70B does not need a pipeline on 80 GB devices; it is faster only if the batch is too small for more data parallelism",
    )


def zero3_network(s: Problem) -> Recommendation:
    """Whether the network is fast enough for ZeRO-3."""
    source, wording = (
        "Bandwidth and Efficiency Modeler, 4",
        "on a 100G link ZeRO-3 is unusable; on 400G/800G it is the standard",
    )
    plan = s.shaped(zero=3)
    rate = f"{format_rate(s.between)} a device between nodes"
    if s.nodes == 1:
        return Recommendation("ZeRO-3's network", plan, "one node: its gathers stay inside the node", source, wording)
    if s.between <= GATES["unusable"]:
        hidden = s.trial.of(plan)
        share = hidden.prediction.exposed_s.get("dp", 0.0) / step(hidden) if hidden else 1.0
        return Recommendation(
            "ZeRO-3's network",
            None,
            f"avoid: {rate}, {share:.0%} of its step would wait for weights",
            source,
            wording,
            "the compute between two gathers decides, not the port",
        )
    verdict = (
        "the standard"
        if s.between >= 0.75 * GATES["standard"]
        else "between unusable and standard: check the exposed communication"
    )
    return Recommendation(
        "ZeRO-3's network",
        plan,
        f"{rate}: {verdict}",
        source,
        wording,
        "the compute between two gathers decides, not the port",
    )


def inference(s: Problem) -> Recommendation:
    """Latency of one generated token: tensor parallelism divides it, a pipeline does not."""
    link = s.cluster.levels[0].link
    rate = s.cluster.accelerator.memory_bandwidth
    if s.model.kind != "transformer":
        return Recommendation(
            "inference", None, "only transformers generate tokens", "Distributed Training Basics, Strategy Selection"
        )

    def latency(tp: int) -> float:
        return inference_latency(s.model.active, s.model.layers, s.model.hidden, tp, rate, link.alpha, link.beta)

    best = min(s.tensor_degrees, key=latency)
    holds = 2 * s.model.total <= best * s.memory
    room = "" if holds else f", though 2 bytes a parameter need {-(-2 * s.model.total // s.memory):.0f} devices"
    return Recommendation(
        "inference",
        None,
        f"tp {best}: {format_seconds(latency(best))} a token at batch 1 against "
        f"{format_seconds(latency(1))} from one device's bandwidth or any pipeline{room}",
        "Distributed Training Basics, Strategy Selection",
        "latency is critical, tensor parallelism preferred over pipeline",
    )
