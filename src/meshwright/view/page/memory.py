"""Memory of a GPU: by part with the limit, for each pipeline stage, and over the time of a step."""

from typing import Any

import numpy as np

from meshwright.cost.checkpoint import checkpoint_words
from meshwright.cost.memory import PARTS
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload
from meshwright.predict.estimate import Estimate
from meshwright.programs.pipelines.walk import held_changes
from meshwright.view.page.subject import Subject

STATES = ("parameters", "gradients", "optimizer")
MOST_POINTS = 600  # of the curve over time; more than the pixels of a figure are not seen


def data(subject: Subject) -> dict[str, Any]:
    """Parts by stage, the curve over time of one stage (option `stage`; default: the fullest), and formulas."""
    e = subject.estimate
    stages = e.prediction.memory_by_stage
    totals = [sum(stage.values()) for stage in stages]
    fullest = e.prediction.fullest_stage
    stage = min(int(subject.option("stage", fullest, most=1e6)), len(stages) - 1)
    parts = [part for part in PARTS if any(one[part] > 0 for one in stages)]
    texts = part_formulas(e)
    summed = " + ".join(f"{part} {stages[fullest][part]:.2f}" for part in parts)
    peak = f"peak = {summed} = {totals[fullest]:.2f} GiB"
    return {
        "limit_gib": e.prediction.memory_limit_gib,
        "peak_gib": totals[fullest],
        "fullest": fullest,
        "states_gib": sum(stages[fullest][part] for part in STATES),
        "activations_gib": stages[fullest]["activations"],
        "in_flight": float(e.walked.walk.peak_memory[fullest]),
        "parts": parts,
        "stages": [
            {
                "stage": s,
                "total_gib": totals[s],
                "parts": [{"name": part, "gib": one[part], "formula": texts[part]} for part in parts],
            }
            for s, one in enumerate(stages)
        ],
        "checkpoint": e.prediction.checkpoint_gib | {"text": checkpoint_words(e.prediction, e.stack)},
        "timeline": timeline(e, stage),
        "formulas": {"peak": peak, "states": texts["states"], "activations": texts["activations"]},
    }


def timeline(e: Estimate, stage: int) -> dict[str, Any]:
    """Memory of one stage during a step. Activations are there from a micro-batch's forward to its backward; all other parts are shown at
    their peak."""
    parts, walk = e.prediction.memory_by_stage[stage], e.walked.walk
    times, counts = held_changes(walk, stage)
    order = np.argsort(times, kind="stable")
    peak = float(counts.max()) or 1.0
    gib = counts[order] / peak * parts["activations"]
    constant = sum(size for part, size in parts.items() if part != "activations")
    total = e.walked.time
    return {
        "stage": stage,
        "points": [[0.0, 0.0], *thinned(times[order], gib), [total, 0.0]],
        "constant_gib": constant,
        "peak_gib": constant + parts["activations"],
        "total_s": total,
        "makespan_s": walk.makespan,
        "in_flight": float(walk.peak_memory[stage]),
    }


def thinned(times: np.ndarray, values: np.ndarray) -> list[list[float]]:
    """At most `MOST_POINTS` points: in each interval of a long curve its largest and its last value, so that no peak is lost."""
    if len(times) <= MOST_POINTS:
        points: list[list[float]] = np.column_stack((times, values)).tolist()
        return points
    out = []
    for piece in np.array_split(np.arange(len(times)), MOST_POINTS // 2):
        top = piece[values[piece].argmax()]
        out += [[float(times[i]), float(values[i])] for i in sorted({int(top), int(piece[-1])})]
    return out


def moments(w: Workload) -> str:
    """Return the states that the optimizer keeps for each parameter."""
    kind = OPTIMIZERS[w.optimizer]
    states = f"{kind.moments} moments"
    if kind.by_matrix:
        states = f"{kind.moments} moment of the matrices in layers, {len(kind.states)} of other parameters"
    return f"{states} and a moving average" if w.ema else states


def part_formulas(e: Estimate) -> dict[str, str]:
    """Return the formula of each part, with its numbers."""
    plan, w = e.plan, e.workload
    shard = plan.shard * plan.cp
    cut = {"optimizer": 1, "gradients": 2, "parameters": 3}
    sharded = {
        part: f", sharded over {shard} ranks by ZeRO-{plan.zero}" if plan.zero >= stage and shard > 1 else ""
        for part, stage in cut.items()
    }
    experts = " and experts / ep" if plan.ep > 1 else ""
    local = f"parameters of a rank: {e.model.total / 1e9:.2f}B / (tp {plan.tp} · pp {plan.pp}){experts}"
    master = " + fp32 master" if plan.master and plan.param_dtype in ("fp16", "bf16") else ""
    micro = f"micro-{e.model.describe_batch(w.but(batch=plan.microbatch))}"
    return {
        "parameters": f"{plan.param_dtype} weights{sharded['parameters']}; {local}",
        "gradients": f"accumulated in {plan.grad_dtype}{sharded['gradients']}; {local}",
        "optimizer": f"{w.optimizer}: {moments(w)} in {plan.state_dtype}{master}{sharded['optimizer']}; {local}",
        "activations": f"saved bytes of a {micro} × micro-batches in flight; recompute: {plan.recompute}",
        "gathered": "ZeRO-3: gathered weights of the running and of the prefetched layer",
        "working": "temporary tensors of one layer, gradients of the logits, communication buckets",
        "context": "driver, libraries, communicators",
        "slack": f"memory that the allocator reserves and cannot use: {e.stack.allocator_slack:.0%} of live tensors",
        "states": "states = N · (parameters + gradients + master and moments), each divided by the shard group if its ZeRO stage is on",
    }
