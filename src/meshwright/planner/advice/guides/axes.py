"""Textbook guides to single strategies: ZeRO stages, tensor, pipeline, all three together, ZeRO-3's network, inference.

Tensor and pipeline guides are lists of conditions ("use when", "avoid when", "best practices"). Each condition is checked for
the given problem and shown with its result, so that the reader sees the reason for the recommendation.
"""

from collections.abc import Mapping

from meshwright.cost.advice import inference_latency
from meshwright.cost.memory import largest_state
from meshwright.describe.plan import Plan
from meshwright.lower.step import step_program
from meshwright.planner.advice.alternatives import step
from meshwright.planner.advice.guides.problem import Advice, GuideProblem, guide
from meshwright.units import format_bytes, format_rate, format_seconds

GATES = {"unusable": 12.5e9, "standard": 50e9}  # bytes/s a device: 100 Gb/s and 400 Gb/s ports
MUCH_FASTER = 4.0  # inside a node against between nodes: from here sharding inside only is worth its memory
TRADE = "ZeRO-2 with accumulation reduces once a micro-batch, not once a step: it is free only without accumulation"


@guide("ZeRO stage", "A Guide to Distributed Training, 8.6")
def zero_stage(s: GuideProblem) -> Advice:
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
    return Advice(
        plan,
        f"{name}; parameters, gradients and optimizer states per device over {s.world}: {states}{s.aside(plan)}",
        "ZeRO-1: optimizer states are too large; ZeRO-2: gradients too; ZeRO-3: the model itself; HSDP: limited "
        "bandwidth between nodes",
        TRADE,
    )


def stage_states(s: GuideProblem, stages: Mapping[int, Plan | None]) -> dict[str, float]:
    """Bytes of model state on the fullest device under each ZeRO stage: the numbers of the memory table, in the plan's dtypes."""
    plans = {("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")[stage]: plan for stage, plan in stages.items() if plan}
    if not plans:
        return {}
    program = step_program(s.model, list(plans.values()), s.workload, s.stack)
    return dict(zip(plans, largest_state(program).tolist(), strict=True))


def checklist(conditions: dict[str, bool]) -> str:
    return ", ".join(f"{'✓' if holds else '✗'} {what}" for what, holds in conditions.items())


@guide(
    "tensor guide",
    "A Guide to Distributed Training, 9.8",
    "TP=8 for 8-GPU nodes, pipeline across nodes, sequence parallelism for activations",
)
def tensor(s: GuideProblem) -> Advice:
    """9.8: use, avoid, best practices."""
    small = s.fits(s.shaped(zero=1))
    legal = [d for d in s.tensor_degrees if d > 1]
    use = {
        "a fast link inside the node": s.fast_inside,
        f"heads divide by {s.node}": s.node in s.tensor_degrees,
        "the model does not fit by sharding optimizer states alone": not small,
    }
    if small or not s.fast_inside or not legal:
        return Advice(
            None,
            f"avoid: {checklist(use)}",
            correction='"avoid for small models" means that it is not needed: with a small batch it can still be the fastest choice',
        )
    plan = s.first_fitting(s.shaped(tp=s.node, pp=p, zero=1) for p in (1, 2, 4, 8, 16))
    return Advice(
        plan,
        f"use: {checklist(use)}",
        correction="its traffic a layer is 4·2(T−1)/T·b·s·h elements: 352 MB for GPT-3 at T = 8, not 175",
    )


@guide(
    "pipeline guide",
    "A Guide to Distributed Training, 10.8",
    "M ≥ 4·P, interleaved stages, PP across nodes and TP inside, balanced layers",
)
def pipeline(s: GuideProblem) -> Advice:
    """10.8: ideal for, challenges, best practices."""
    rounds = [p for p in (2, 4, 8, 16, 32) if s.nodes >= p and p <= s.model.layers]
    ideal = {
        f"{s.nodes} nodes": s.nodes > 1,
        f"{s.model.layers} layers to distribute": s.model.layers >= 8,
        "tensor parallelism alone does not fit": not s.fits(s.shaped(tp=s.node, zero=1)),
    }
    if s.model.kind != "transformer" or not rounds:
        return Advice(None, f"avoid: {checklist(ideal)}")
    shaped = [plan for p in rounds if (plan := s.shaped(tp=s.node, pp=p, zero=1, virtual=2)) is not None]
    enough = [plan for plan in shaped if plan.microbatches(s.workload) >= 4 * plan.pp]
    if not enough:
        return Advice(None, f"avoid: no degree leaves M ≥ 4·P at batch {s.workload.batch}; {checklist(ideal)}")
    plan = s.first_fitting(enough)
    return Advice(
        plan,
        f"the smallest depth that fits with M ≥ 4·P; {checklist(ideal)}",
        correction="1F1B has GPipe's bubble and saves memory; interleaving shrinks the bubble and multiplies messages",
    )


@guide("3D", "Distributed Training at Scale, 8; A Guide to Distributed Training, 11.1")
def three_dimensions(s: GuideProblem) -> Advice:
    """Tensor inside nodes, pipeline across them, data over the other ranks: 70B on 512 as 8 × 8 × 8."""
    plan = s.shaped(tp=s.node, pp=min(8, s.nodes), zero=1)
    product = f"{plan.tp} × {plan.pp} × {plan.dp} = {plan.world} GPUs" if plan else "no legal split"
    return Advice(
        plan,
        f"each strategy on the level with enough bandwidth for it: {product}",
        "70B on 512 GPUs: TP=8 in the node, PP=8 across nodes, DP=8",
        "70B does not need a pipeline on 80 GB devices; it is faster only if the batch is too small for more data parallelism",
    )


@guide(
    "ZeRO-3's network",
    "Bandwidth and Efficiency Modeler, 4",
    "on a 100G link ZeRO-3 is unusable; on 400G/800G it is the standard",
)
def zero3_network(s: GuideProblem) -> Advice:
    """Whether the network is fast enough for ZeRO-3."""
    plan = s.shaped(zero=3)
    rate = f"{format_rate(s.between)} a device between nodes"
    if s.nodes == 1:
        return Advice(plan, "one node: its gathers stay inside the node")
    if s.between <= GATES["unusable"]:
        hidden = s.trial.of(plan)
        share = hidden.prediction.exposed_s.get("dp", 0.0) / step(hidden) if hidden else 1.0
        return Advice(
            None,
            f"avoid: {rate}, {share:.0%} of its step would wait for weights",
            correction="the compute between two gathers decides, not the port",
        )
    verdict = "between unusable and standard: check the exposed communication"
    verdict = "the standard" if s.between >= 0.75 * GATES["standard"] else verdict
    return Advice(plan, f"{rate}: {verdict}", correction="the compute between two gathers decides, not the port")


@guide("inference", "Distributed Training Basics, Strategy Selection")
def inference(s: GuideProblem) -> Advice:
    """Latency of one generated token: tensor parallelism divides it, a pipeline does not."""
    link = s.cluster.levels[0].link
    rate = s.cluster.accelerator.memory_bandwidth
    if s.model.kind != "transformer":
        return Advice(None, "only transformers generate tokens")

    def latency(tp: int) -> float:
        return inference_latency(s.model.active, s.model.layers, s.model.hidden, tp, rate, link.alpha, link.beta)

    best = min(s.tensor_degrees, key=latency)
    holds = 2 * s.model.total <= best * s.memory
    room = "" if holds else f", though 2 bytes a parameter need {-(-2 * s.model.total // s.memory):.0f} devices"
    return Advice(
        None,
        f"tp {best}: {format_seconds(latency(best))} a token at batch 1 against "
        f"{format_seconds(latency(1))} from one device's bandwidth or any pipeline{room}",
        "latency is critical, tensor parallelism preferred over pipeline",
    )
