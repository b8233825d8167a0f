"""Memory of a GPU: by part with the limit, for each pipeline stage, and over the time of a step."""

from functools import partial

import numpy as np

from meshwright.cost.checkpoint import checkpoint_words
from meshwright.cost.memory import PARTS
from meshwright.describe.variants import OPTIMIZERS
from meshwright.describe.workload import Workload
from meshwright.predict.estimate import Estimate
from meshwright.programs.pipelines.walk import held_changes
from meshwright.units import format_value
from meshwright.view.page.sheet import Part, panel, part, stats, view
from meshwright.view.page.subject import Subject

gib = partial(format_value, unit="GiB")
STATES = ("parameters", "gradients", "optimizer")
FAR = 4  # times the peak, above which the limit would hide what is below it
MOST_POINTS = 600  # of the curve over time; more than the pixels of a figure are not seen


def data(subject: Subject) -> Part:
    """Parts by stage, and the curve over time of one stage (option `stage`; default: the fullest)."""
    e, p = subject.estimate, subject.estimate.prediction
    fullest, limit, stages = p.fullest_stage, p.memory_limit_gib, p.memory_by_stage
    stage = min(int(subject.option("stage", fullest, most=1e6)), len(stages) - 1)
    names = [name for name in PARTS if any(one[name] > 0 for one in stages)]
    texts, peak, saved = part_formulas(e), sum(stages[fullest].values()), p.checkpoint_gib
    device, host, most = (saved[key] for key in ("save_device", "save_host", "host_limit"))
    at_save = f"and {gib(host)} of {gib(most)} of a host" if host else "on a device; written one tensor at a time"
    summed = " + ".join(f"{name} {stages[fullest][name]:.2f}" for name in names)
    flight = float(e.walked.walk.peak_memory[fullest])
    (over, curve), offered = over_time(e, stage), [[s, f"stage {s}"] for s in range(len(stages))]
    return {
        "limit_gib": limit,
        "fullest": fullest,
        "stages": [
            {"total_gib": sum(one.values()), "parts": [{"name": name, "gib": one[name], "formula": texts[name]} for name in names]}
            for one in stages
        ],
        **view(
            stats(("Peak, fullest stage", peak, "gib", {"detail": f"of {gib(limit)} usable", "tone": "bad" if peak > limit else "good",
                                                        "formula": f"peak = {summed} = {peak:.2f} GiB"}),
                  ("Model states", sum(stages[fullest][name] for name in STATES), "gib",
                   {"detail": "parameters, gradients, optimizer", "formula": texts["states"]}),
                  ("Activations", stages[fullest]["activations"], "gib",
                   {"detail": f"{flight:.3g} micro-batches in flight", "formula": texts["activations"]}),
                  ("At a save", device, "gib", {"detail": at_save, "formula": checkpoint_words(p, e.stack),
                                                "tone": "bad" if device > limit or host > most else ""})),
            over,
            part("choices", choices=[{"name": "stage", "label": "Stage", "values": offered, "value": stage}]) if len(stages) > 1 else None,
            curve,
        ),
    }  # fmt: skip


def over_time(e: Estimate, stage: int) -> list[Part]:
    """Memory of one stage during a step. Activations are there from a micro-batch's forward to its backward; all other parts are shown at
    their peak."""
    parts, limit = e.prediction.memory_by_stage[stage], e.prediction.memory_limit_gib
    walk, total = e.walked.walk, e.walked.time
    times, counts = held_changes(walk, stage)
    order = np.argsort(times, kind="stable")
    constant = sum(size for part, size in parts.items() if part != "activations")
    held = constant + counts[order] / (float(counts.max()) or 1.0) * parts["activations"]
    peak, far = constant + parts["activations"], limit > FAR * sum(parts.values())
    words = f"Stage {stage} keeps up to {walk.peak_memory[stage]:.3g} micro-batches between their forward and their backward."
    return [
        panel("Over time within the step", f"{words} The limit of {gib(limit)} is far above." if far else words),
        part("curves", label=f"Memory of stage {stage} over one step: {gib(constant)} constant, peak {gib(peak)}", height=230, left=56, inset=0,
             x={"from": 0, "to": total, "label": "time within the step", "unit": "s"},
             y={"from": 0, "to": peak * 1.26 if far else max(peak, limit) * 1.05, "label": "GiB"},
             marks=[] if far else [{"at": limit, "words": f"limit {gib(limit)}", "colour": "bad", "flat": True}],
             series=[{"name": "states, working memory, context: constant", "colour": "parameters", "area": 0.45, "only": True, "dots": False,
                      "points": [[0.0, constant], [total, constant]]},
                     {"name": "activations in flight", "colour": "activations", "area": 0.75, "width": 1.2, "steps": True, "dots": False,
                      "base": constant, "points": [[0.0, constant], *thinned(times[order], held), [total, constant]]}]),
    ]  # fmt: skip


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
