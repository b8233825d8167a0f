"""ZeRO stages and the memory wall: bytes of state on a GPU for every stage, by the textbook formula, and the largest model that fits.

    DDP 2N + 2N + 12N      ZeRO-1 2N + 2N + 12N/P      ZeRO-2 2N + 14N/P      ZeRO-3 16N/P

The textbook's bytes are those of `cost.memory.zero_state_bytes`; the view adds the whole memory of this plan with each stage, as estimated.
"""

from meshwright.cost.memory import largest_model, zero_state_bytes
from meshwright.cost.step import step_cost
from meshwright.lower.step import step_program
from meshwright.planner.advice.alternatives import changed
from meshwright.units import Json, format_count, format_decimal_bytes
from meshwright.view.page.subject import Subject

STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
PARTS = (
    {"param": 2.0, "grad": 0.0, "optimizer": 0.0},
    {"param": 0.0, "grad": 2.0, "optimizer": 0.0},
    {"param": 0.0, "grad": 0.0, "optimizer": 12.0},
)
NAMES = ("parameters", "gradients", "optimizer")
SPLIT = ("2N + 2N + 12N", "2N + 2N + 12N/P", "2N + 2N/P + 12N/P", "(2N + 2N + 12N)/P")
SENT = ("2(P−1)/P·N", "2(P−1)/P·N", "2(P−1)/P·N", "3(P−1)/P·N")  # elements per step, one micro-batch (docs/figures.md)
WALL = [1e8 * 10 ** (k / 8) for k in range(41)]  # parameters of the wall's curves: 0.1B to 10T
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# A printed figure of a 7B model on 8 GPUs, which does not add up, and the right values (docs/figures.md).
SEED_PARAMETERS, SEED_RANKS = 7e9, 8
SEED_PRINTED_GB = (140.0, 42.0, 30.0, 18.0)


def data(subject: Subject) -> Json:
    """Bars of the stages, the curves of the wall, and this plan with each stage."""
    ranks = subject.option("ranks", nearest(subject.plan.dp * subject.plan.cp), RANKS)
    n = float(subject.model.trained)
    limit = subject.cluster.accelerator.memory
    return {
        "parameters": n,
        "ranks": ranks,
        "rank_choices": list(RANKS),
        "limit_bytes": limit,
        "accelerator": subject.cluster.accelerator.name,
        "stages": [stage_row(n, ranks, stage) for stage in range(4)],
        "wall": [wall(ranks, stage, limit) for stage in range(4)],
        "plan": plan_rows(subject),
        "seed": seed_rows(),
        "note": note(n, ranks, limit) + frozen_note(subject),
    }


def nearest(ranks: int) -> int:
    """The largest offered number of ranks up to that of the plan; 8 for a plan without data parallelism."""
    return max((r for r in RANKS if r <= ranks), default=8) if ranks > 1 else 8


def stage_row(n: float, ranks: int, stage: int) -> Json:
    parts = [zero_state_bytes(n, ranks, stage, **part) for part in PARTS]
    total = zero_state_bytes(n, ranks, stage)
    words = " + ".join(format_decimal_bytes(size) for size in parts)
    return {
        "stage": stage,
        "name": STAGES[stage],
        "parts": [{"name": name, "bytes": size} for name, size in zip(NAMES, parts, strict=True)],
        "bytes": total,
        "sent": SENT[stage],
        "formula": f"{STAGES[stage]}: {SPLIT[stage]} with N = {format_count(n)}, P = {ranks}: {words} = {format_decimal_bytes(total)}",
    }


def wall(ranks: int, stage: int, limit: float) -> Json:
    """State by model size, and the largest model whose state fits one GPU."""
    per_parameter = zero_state_bytes(1.0, ranks, stage)
    most = largest_model(limit, per_parameter)
    return {
        "name": STAGES[stage],
        "curve": [[n, n * per_parameter] for n in WALL],
        "largest": most,
        "formula": f"{STAGES[stage]} on {ranks} GPUs: {format_decimal_bytes(limit)} / {per_parameter:.3g} bytes per parameter = "
        f"{format_count(most)} parameters of state, without activations",
    }


def plan_rows(subject: Subject) -> list[Json]:
    """The whole memory of this plan's fullest GPU with each ZeRO stage; stages that are not legal here are left out."""
    e = subject.estimate
    plans = []
    for stage in range(4):
        degrees = {"replicate": e.plan.dp, "shard": 1} if stage == 0 else {"replicate": 1, "shard": e.plan.dp}
        plan = changed(e.plan, zero=stage, **degrees)  # None on one rank, where ZeRO shards nothing
        if plan is not None and plan.is_legal(e.model, e.workload, e.cluster, e.stack):
            plans.append((stage, plan))
    if not plans:
        return []
    cost = step_cost(step_program(e.model, [plan for _, plan in plans], e.workload, e.stack), e.cluster)
    return [
        {
            "name": STAGES[stage],
            "bytes": float(cost.peak_memory[k]),
            "step_time_s": float(cost.time[k]),
            "now": plan.zero == e.plan.zero,
            "fits": bool(cost.peak_memory[k] <= e.cluster.accelerator.memory),
        }
        for k, (stage, plan) in enumerate(plans)
    ]


def seed_rows() -> list[Json]:
    """Compare the printed figures with the formula."""
    return [
        {"name": STAGES[k], "printed_gb": printed, "right_gb": zero_state_bytes(SEED_PARAMETERS, SEED_RANKS, k) / 1e9}
        for k, printed in enumerate(SEED_PRINTED_GB)
    ]


def frozen_note(subject: Subject) -> str:
    """What the states of trained parameters do not count."""
    frozen = subject.model.total - subject.model.trained
    return (
        f" {format_count(frozen)} frozen parameters have no gradient and no state, and come on top." if frozen else ""
    )


def note(n: float, ranks: int, limit: float) -> str:
    fits = [STAGES[k] for k in range(4) if zero_state_bytes(n, ranks, k) <= limit]
    least = format_decimal_bytes(zero_state_bytes(n, ranks, 3))
    if not fits:
        return f"On {ranks} GPUs no stage fits the state of {format_count(n)} parameters: ZeRO-3 needs {least} of {format_decimal_bytes(limit)}."
    return f"On {ranks} GPUs the state of {format_count(n)} parameters fits with {', '.join(fits)}."
