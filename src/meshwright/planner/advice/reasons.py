"""Why each field of the winner has its value, in figures of this problem.

Two choices look wrong to a reader who knows the usual lessons, so they are compared with the usual choice, estimated on the spot:

- tensor parallelism **without** sequence parallelism. SP sends the same bytes forward, but backward gathers its input once more (only a
  shard of it was kept): it costs a little time and saves activation memory. It is left out where memory is not short.
- context parallelism for **short** sequences. The lesson "from 32k tokens on" is about need: below, one GPU holds a sequence. But cp also
  divides the work of a sequence over GPUs when the batch has too few sequences for more data parallelism, and where it hides its transfers
  it costs less than more tensor parallelism or a longer pipeline.
"""

from meshwright.describe import legality
from meshwright.describe.plan import Plan
from meshwright.describe.workload import FP8
from meshwright.planner.advice.alternatives import USABLE_MEMORY, PlanTrials, changed, fits, moved, settings, step
from meshwright.predict.estimate import Estimate
from meshwright.units import format_decimal_bytes, format_seconds

LONG_CONTEXT = 32_768  # tokens from which one expects context parallelism
WORTH = 0.001  # share of the step below which fp8 all-gathers are not offered
COMPRESSION_WORTH = 0.02  # share of the step below which compressed gradients are not offered
SHARDED = {
    0: "gradients all-reduced",
    1: "optimizer states sharded",
    2: "gradients and optimizer states sharded",
    3: "parameters, gradients and optimizer states sharded",
}


def reasons(e: Estimate) -> dict[str, str]:
    """Give the reason for the value of each field that the plan sets."""
    trial = PlanTrials(e.config)
    plan = e.plan
    out = {}
    if plan.tp > 1:
        out["tp"] = f"every layer split over {plan.tp} GPUs, within the {_level(e, 'tp')}; {exposed(e, 'tp')}"
        out["sp"] = sequence_parallel(e, trial)
    if plan.cp > 1:
        out["cp"] = context_parallel(e, trial)
    if plan.pp > 1:
        out |= pipeline(e)
    if plan.ep > 1:
        experts = f"{e.model.experts} experts over {plan.ep} groups"
        out["ep"] = f"{experts}, within the {_level(e, 'ep')}; {exposed(e, 'ep')}"
    if plan.dp > 1:
        over = f" over {plan.shard} of {plan.dp}" if plan.zero and plan.replicate > 1 else ""
        out["zero" if plan.zero else "replicate"] = f"{SHARDED[plan.zero]}{over}; {exposed(e, 'dp')}"
    if plan.dp * plan.cp > 1 and plan.bucket != Plan().bucket:
        size = format_decimal_bytes(plan.bucket)
        out["bucket"] = f"gradients in buckets of {size}: small buckets cost latency, the last one is never hidden"
    if words := compression(e, trial):
        out["compression"] = words
    if words := fp8_gathers(e, trial):
        out["gather_dtype"] = words
    out["microbatch"] = batch_arithmetic(e)
    if plan.recompute != "none":
        more = format_seconds(e.prediction.exposed_s.get("recompute", 0.0))
        out["recompute"] = f"{more} of extra compute, so that activations fit"
    if plan.offload != "none":
        out["offload"] = offload(e)
    if plan.order:
        places = ", ".join(f"{a} in the {e.levels[a]}" for a in plan.order if a in e.levels)
        out["order"] = f"axes from the nearest neighbours to the farthest: {places}"
    return out


def sequence_parallel(e: Estimate, trial: PlanTrials) -> str:
    """Explain why sequence parallelism is on or off under tensor parallelism."""
    if e.plan.sp:
        return "norms and their activations split as well: the same bytes forward, less memory"
    other = trial.of(changed(e.plan, sp=True))
    if other is None:
        return f"off: {e.workload.seq:,} tokens do not divide by tp · cp = {e.plan.tp * e.plan.cp}"
    longer = step(other) / step(e) - 1
    saved = (e.prediction.memory_gib or 0.0) - (other.prediction.memory_gib or 0.0)
    return (
        f"off: with it a step takes {100 * longer:+.1f}% (one more gather in backward), for {saved:.1f} GiB less memory"
    )


def compression(e: Estimate, trial: PlanTrials) -> str:
    """Say what compressed gradients save or would save; "" if data-parallel communication is hidden or the stack cannot compress.

    Compression is lossy, so it is offered and never chosen unasked. Both plans are estimated by the closed form.
    """
    plan, now = e.plan, trial.of(e.plan)
    if now is None or plan.dp * plan.cp == 1:
        return ""
    if plan.wire != "none":
        other = trial.of(changed(plan, compression="none", comm_dtype=None))
        more = f"; uncompressed this plan takes {100 * (step(other) / step(now) - 1):+.1f}%" if other else ""
        return f"gradients are sent in {plan.wire}: lossy, it changes the numerics of training{more}"
    if now.prediction.exposed_s.get("dp", 0.0) < COMPRESSION_WORTH * step(now):
        return ""
    tried = {name: trial.of(changed(plan, compression=name)) for name in e.stack.compressions}
    gains = {name: step(other) / step(now) - 1 for name, other in tried.items() if other and fits(other, USABLE_MEMORY)}
    worth = [f"{name} {100 * gain:+.1f}%" for name, gain in gains.items() if gain <= -COMPRESSION_WORTH]
    if not worth:
        return ""
    allowed = worth[0].split()[0]
    return (
        f"off; a step with compressed gradients takes {', '.join(worth)}, but they are lossy: they change the numerics of training; "
        f"--allow compression={allowed} searches for the best plan with it"
    )


def offload(e: Estimate) -> str:
    """Say what is kept in host memory and what that costs; the rates of the host are assumed."""
    what = {"states": "optimizer states", "activations": "saved activations"}.get(
        e.plan.offload, "states and activations"
    )
    parts = e.prediction.exposed_s
    copies = f", {format_seconds(parts['offload'])} of copies" if parts.get("offload") else ""
    update = f"the update takes {format_seconds(parts.get('optimizer', 0.0))}{copies}"
    return f"{what} in host memory: without it plans do not fit or are much slower; {update} (host rates assumed, not measured)"


def fp8_gathers(e: Estimate, trial: PlanTrials) -> str:
    """Say what all-gathers in fp8 would save; "" if the workload is not in fp8 or the stack cannot gather in fp8.

    Without sequence parallelism nothing is gathered under tensor parallelism, so it is tried with it as well. Both plans are estimated by
    the closed form: the winner's time may be a simulated one.
    """
    plan, now = e.plan, trial.of(e.plan)
    if e.workload.precision not in FP8 or not e.stack.fp8_gathers or now is None:
        return ""
    if plan.gather_dtype == "fp8":
        other = trial.of(changed(plan, gather_dtype="same"))
        more = 100 * (step(other) / step(now) - 1) if other else 0.0
        return f"operands and ZeRO-3 weights of fp8 products gathered in fp8: in 16 bits a step takes {more:+.1f}%"
    tried = [changed(plan, gather_dtype="fp8"), *([changed(plan, sp=True, gather_dtype="fp8")] if plan.tp > 1 else [])]
    legal = [p for p in tried if p is not None and p.gathers]
    best = trial.fastest((p for p in legal if not legality.not_trained(p, e.model, e.workload, e.stack)), USABLE_MEMORY)
    if best is None or step(best) > (1 - WORTH) * step(now):
        return ""
    less = f"with {settings(plan, best.plan)} a step takes {100 * (step(best) / step(now) - 1):+.1f}%"
    return f"{less}: gathers halve, reductions and pipeline sends do not"


def context_parallel(e: Estimate, trial: PlanTrials) -> str:
    """Say what context parallelism splits and, for a short sequence, what other axes would cost instead."""
    plan = e.plan
    words = f"each sequence of {e.workload.seq:,} over {plan.cp} GPUs, within the {_level(e, 'cp')}; {exposed(e, 'cp')}"
    if e.workload.seq >= LONG_CONTEXT:
        return words
    one_stage = (
        plan.but(virtual=1, schedule="1f1b", layers_per_stage=()) if plan.virtual > 1 else plan
    )  # a longer pipeline has fewer layers per stage
    replacements = {
        axis: trial.of(moved(plan, "cp", axis, plan.cp, e.workload, e.stack))
        or trial.of(moved(one_stage, "cp", axis, plan.cp, e.workload, e.stack))
        for axis in ("dp", "tp", "pp")
    }
    return f"{words}; in its place {', '.join(_in_place(axis, other, e) for axis, other in replacements.items())}"


def _in_place(axis: str, other: Estimate | None, e: Estimate) -> str:
    degree = getattr(e.plan, axis) * e.plan.cp
    if other is None:
        return f"{axis} {degree} is not legal"
    if not fits(other, USABLE_MEMORY):
        return f"{axis} {degree} does not fit"
    return f"{axis} {degree} takes {100 * (step(other) / step(e) - 1):+.1f}%"


def pipeline(e: Estimate) -> dict[str, str]:
    """Stages and their layers; the schedule and its bubble."""
    plan, rounds = e.plan, e.plan.microbatches(e.workload)
    stages = plan.stage_layers(e.model.layers)
    layers = f"{min(stages)}" if min(stages) == max(stages) else f"{min(stages)} to {max(stages)}"
    return {
        "pp": f"{plan.stages} stages of {layers} layer{'s' * (layers != '1')} over {plan.pp} ranks",
        "schedule": f"{rounds} micro-batches a step; bubble fraction {e.bubble_fraction:.1%} of the schedule, as walked",
    }


def exposed(e: Estimate, axis: str) -> str:
    """Say how much of the step an axis's communication is exposed."""
    seconds, step_s = e.prediction.exposed_s.get(axis, 0.0), e.prediction.step_time_s
    if seconds < 5e-4 * step_s:
        return "its communication is hidden behind compute"
    return f"{format_seconds(seconds)} of the step exposed ({100 * seconds / step_s:.1f}%)"


def batch_arithmetic(e: Estimate) -> str:
    """batch = micro-batch × accumulation × dp, with the numbers."""
    plan, workload = e.plan, e.workload
    unit = "sequences" if e.model.kind == "transformer" else "samples"
    rounds = plan.microbatches(workload)
    return f"{workload.batch:,} {unit} = micro-batch {plan.microbatch} × {rounds} accumulated × dp {plan.dp}"


def _level(e: Estimate, axis: str) -> str:
    return e.levels.get(axis, "node")
