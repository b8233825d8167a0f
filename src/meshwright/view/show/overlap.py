"""Bucket and prefetch timelines: how DDP hides the reduction of gradients behind backward, and FSDP the gathering of weights behind compute.

The layers, their times and their bytes are those of this plan. Both ways are drawn over its data-parallel ranks,
even if the plan uses only one of them.
"""

from typing import Any

import numpy as np

from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.overlap import BackwardLayer, Span, bucket_timeline, prefetch_timeline
from meshwright.lower.program import Op, scalar
from meshwright.planner.advice.alternatives import PlanTrials, changed
from meshwright.predict.estimate import Estimate
from meshwright.units import Json, format_decimal_bytes, format_seconds
from meshwright.view.page.subject import Subject

LAYERS = 8
ONE_RANK = "One data-parallel rank: there are no gradients to reduce and no weights to gather."
BUCKETS = (25e6, 50e6, 100e6, 200e6, 400e6, 800e6)


def data(subject: Subject) -> dict[str, Any]:
    """Two timelines of each: without and with overlap."""
    e = subject.estimate
    if e.plan.dp * e.plan.cp == 1:
        return {"ranks": 1, "ddp": None, "fsdp": None, "note": ONE_RANK}
    nearest = min(BUCKETS, key=lambda size: abs(size - e.plan.bucket))
    bucket = float(subject.option("bucket", nearest, BUCKETS))
    count = min(LAYERS, max(1, e.model.layers // e.plan.stages)) if e.model.layers else 1
    ranks = e.plan.dp * e.plan.cp
    return {
        "ranks": ranks,
        "layers": count,
        "bucket_bytes": bucket,
        "bucket_choices": [{"bytes": size, "text": format_decimal_bytes(size)} for size in BUCKETS],
        "ddp": ddp_timelines(e, bucket, count),
        "fsdp": fsdp_timelines(e, count),
        "note": f"The last {count} layers in backward and the first {count} in forward of one micro-batch, over {ranks} data-parallel ranks.",
    }


def layer_seconds(e: Estimate, phases: str) -> float:
    """Seconds of one dense layer in some phases: compute and exposed tensor- or context-parallel communication, without data parallelism."""
    block = "dense" if ("dense", "F") in e.cost.times else next(iter(e.cost.times))[0]
    times = (e.cost.times[block, phase] for phase in phases if (block, phase) in e.cost.times)
    return sum((scalar(t.busy) - scalar(t.parts.get("dp", 0.0)) for t in times), 0.0)


def ddp_timelines(e: Estimate, bucket: float, count: int) -> dict[str, Any] | None:
    """Backward with gradients reduced after it, and behind it."""
    ddp = PlanTrials(e.config).of(changed(e.plan, zero=0, replicate=e.plan.dp, shard=1, reduce="auto", reshard=True))
    if ddp is None:
        return None
    batch = ddp.program.batch
    block = "dense" if "dense" in ddp.program.loads else next(iter(ddp.program.loads))
    size = scalar(ddp.program.loads[block]["dense"].held) * scalar(batch.grad_bytes)
    seconds = layer_seconds(ddp, "IWR" if ddp.plan.recompute == "full" else "IW")
    network = CollectiveTimes(ddp.cluster, batch)

    def time_of(n: float) -> float:
        reduce: Json = {"collective": "all_reduce", "axis": "dp_cp", "message_bytes": np.array([n])}
        return scalar(network.time(Op("reduce", "dense", "collective", 1.0, **reduce)))

    layers = [BackwardLayer(f"layer {ddp.model.layers - 1 - k}", seconds, size) for k in range(count)]
    ways = [bucket_timeline(layers, bucket, time_of, overlap) for overlap in (False, True)]
    each = f"{format_decimal_bytes(bucket)} in {format_seconds(time_of(bucket))}"
    words = f"a layer's backward takes {format_seconds(seconds)} and leaves {format_decimal_bytes(size)} of gradients; one bucket of {each}"
    return pair(ways, ("reduce after backward", "buckets behind backward"), words)


def fsdp_timelines(e: Estimate, count: int) -> dict[str, Any] | None:
    """Forward with weights gathered just in time, and one layer ahead."""
    fsdp = PlanTrials(e.config).of(changed(e.plan, zero=3, replicate=1, shard=e.plan.dp, reshard=True, reduce="auto"))
    if fsdp is None:
        return None
    network = fsdp.cost.network
    block = "dense" if ("dense", "F") in fsdp.program.blocks else next(iter(fsdp.program.blocks))[0]
    gathers = [op for op in fsdp.program.blocks[block, "F"] if op.collective == "all_gather" and op.part == "dense"]
    if not gathers:
        return None
    # The stages of a pipeline gather once per step; a layer of a larger unit counts its share of it.
    times = fsdp.plan.microbatches(fsdp.workload) if fsdp.plan.pp > 1 else 1
    counts = [min(1.0, times * scalar(op.count)) for op in gathers]
    gather = sum(n * scalar(network.time(op)) for n, op in zip(counts, gathers, strict=True))
    size = sum(n * scalar(op.message_bytes) for n, op in zip(counts, gathers, strict=True))
    compute = layer_seconds(fsdp, "F")
    names = [f"layer {k}" for k in range(count)]
    ways = [prefetch_timeline(names, compute, gather, ahead) for ahead in (False, True)]
    words = f"a layer's forward takes {format_seconds(compute)}, gathering its {format_decimal_bytes(size)} of weights {format_seconds(gather)}"
    return pair(ways, ("gather, then compute", "prefetch the next layer"), words)


def pair(ways: list[list[Span]], names: tuple[str, str], words: str) -> dict[str, Any]:
    """Two timelines at one scale, with the time that overlap saves."""
    ends = [max(span.end for span in spans) for spans in ways]
    compute = sum(span.seconds for span in ways[0] if span.stream == "compute")
    saved = 1 - ends[1] / ends[0]
    return {
        "ways": [
            {"name": name, "end_s": end, "spans": [span._asdict() for span in spans]}
            for name, end, spans in zip(names, ends, ways, strict=True)
        ],
        "compute_s": compute,
        "saved": saved,
        "formula": f"{words}\n{names[0]}: {format_seconds(ends[0])}; {names[1]}: {format_seconds(ends[1])}, {saved:.0%} less; "
        f"compute alone {format_seconds(compute)}",
    }
