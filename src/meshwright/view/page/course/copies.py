"""Figures of the second part: data parallelism, buckets and prefetching, ZeRO."""

from meshwright import formulas
from meshwright.cost.overlap import BackwardLayer, bucket_timeline, prefetch_timeline
from meshwright.units import Json, counted, format_count, format_decimal_bytes, format_seconds
from meshwright.view.page.course import drawing as draw
from meshwright.view.page.course.drawing import Control, Figure, Values, registered, stat
from meshwright.view.page.subject import Subject
from meshwright.view.show import zero as stages
from meshwright.view.show.overlap import pair

FIGURES: dict[str, Figure] = {}
figure = registered(FIGURES)

PARAMETERS = (1e9, 3e9, 7e9, 13e9, 34e9, 70e9, 175e9, 405e9)
POWERS = tuple(2**k for k in range(13))
RATES = tuple(k * 1e9 for k in (1.25, 3, 12.5, 25, 50, 100, 450))
LAYERS = 8
ACHIEVED = 400e12  # FLOP/s of a GPU of these figures: an H100 at 40% of its dense peak


@figure(
    "data-parallel",
    Control("parameters", "Parameters", 7e9, PARAMETERS, "count"),
    Control("tokens", "Tokens in a batch", 2.0**22, tuple(2.0**k for k in range(18, 25)), "count"),
    Control("bandwidth", "Network of a GPU", 50e9, RATES, "rate"),
)
def data_parallel(subject: Subject, v: Values) -> Json:
    """Seconds of compute and of the gradient all-reduce by the number of GPUs, with the batch fixed."""
    n, tokens, rate = v["parameters"], v["tokens"], v["bandwidth"]
    compute = {p: formulas.training_flops(n, tokens) / p / ACHIEVED for p in POWERS[1:]}
    reduce = {p: formulas.bytes_sent("all-reduce", 2 * n, p) / rate for p in POWERS[1:]}
    hidden = {p: formulas.overlapped_step(compute[p], reduce[p], 2 / 3) for p in POWERS[1:]}  # backward is two thirds
    turn = next((p for p in POWERS[1:] if reduce[p] > 2 / 3 * compute[p]), None)
    series = [
        draw.curve("compute", compute),
        draw.curve("all-reduce of gradients", reduce, dash="7 4"),
        draw.curve("step: reduction behind backward", hidden, width=3),
    ]
    stats = [
        stat("Gradients", format_decimal_bytes(2 * n), "2 bytes each"),
        stat("Sent by a GPU", format_decimal_bytes(reduce[POWERS[-1]] * rate), "almost the same for any number"),
        stat("Hidden up to", ("none" if turn == 2 else f"{turn // 2:,} GPUs") if turn else "all", "of those drawn"),
    ]
    note = "GPUs compute at 400 TFLOP/s. The all-reduce can hide behind backward, two thirds of the compute."
    marks = [draw.mark(turn, "no longer hidden", "bad", low=True)] if turn else []
    x, y = draw.axis("GPUs", "whole", 2), draw.axis("seconds in a step", "s", 10)
    return draw.lines(series, x, y, marks, stats=stats, note=note)


@figure(
    "buckets",
    Control("bucket", "Bucket", 100e6, (5e6, 10e6, 25e6, 50e6, 100e6, 200e6, 400e6, 800e6, 3.2e9), "bytes"),
    Control("layer", "Gradients of a layer", 400e6, (50e6, 100e6, 200e6, 400e6), "bytes"),
    Control("backward", "Backward of a layer", 20e-3, (2e-3, 5e-3, 10e-3, 20e-3, 40e-3), "s"),
    Control("bandwidth", "Network of a GPU", 50e9, RATES, "rate"),
    Control("latency", "Latency of a call", 50e-6, (5e-6, 20e-6, 50e-6, 200e-6, 1e-3), "s"),
)
def buckets(subject: Subject, v: Values) -> Json:
    """Backward of eight layers with its gradients reduced after it, and in buckets behind it."""

    def time_of(size: float) -> float:
        return v["latency"] + formulas.bytes_sent("all-reduce", size, 64) / v["bandwidth"]

    layers = [BackwardLayer(f"layer {LAYERS - 1 - k}", v["backward"], v["layer"]) for k in range(LAYERS)]
    ways = [bucket_timeline(layers, v["bucket"], time_of, behind) for behind in (False, True)]
    one = f"a layer's backward takes {format_seconds(v['backward'])}, a bucket {format_seconds(time_of(v['bucket']))}"
    found = pair(ways, ("reduce after backward", "buckets behind backward"), one)
    exposed = found["ways"][1]["end_s"] - found["compute_s"]
    ratio = formulas.overlap_ratio(LAYERS * time_of(v["layer"]), found["compute_s"])
    stats = [
        stat("Exposed", format_seconds(exposed), "after the last backward"),
        stat("One bucket", format_seconds(time_of(v["bucket"])), format_decimal_bytes(v["bucket"])),
        stat("Overlap ratio", f"{ratio:.2f}", "all-reduce / backward"),
    ]
    return draw.spans(found, "backward", "dp", "backward", "bucket all-reduce", stats=stats)


@figure(
    "bucket-count",
    Control("gradients", "Gradients", 500e6, (100e6, 200e6, 500e6, 1e9, 2e9, 14e9), "bytes"),
    Control("latency", "Latency α", 5e-6, (1e-6, 2e-6, 5e-6, 20e-6, 50e-6, 200e-6), "s"),
    Control("bandwidth", "Bandwidth", 300e9, (12.5e9, 25e9, 50e9, 300e9, 450e9), "rate"),
)
def bucket_count(subject: Subject, v: Values) -> Json:
    """T(k) = k·α + t/k and its smallest value."""
    transfer = v["gradients"] / v["bandwidth"]
    best = formulas.bucket_count(v["gradients"], v["latency"], v["bandwidth"], 1e3)
    counts = sorted({round(2 ** (k / 2)) for k in range(21)} | {best})
    exposed = {k: formulas.chunked_time(k, transfer, v["latency"]) for k in counts}
    series = [
        draw.curve("T(k) = k·α + t/k", exposed, width=3),
        draw.curve("the last bucket, t/k", {k: transfer / k for k in counts}, dash="7 4"),
        draw.curve("latencies, k·α", {k: k * v["latency"] for k in counts}, dash="2 4"),
    ]
    stats = [
        stat("Best", f"{best} buckets", f"of {format_decimal_bytes(v['gradients'] / best)}"),
        stat("Exposed", format_seconds(exposed[best]), f"one: {format_seconds(transfer + v['latency'])}"),
    ]
    x, y = draw.axis("buckets k", "whole", 10), draw.axis("exposed", "s", 10)
    return draw.lines(series, x, y, [draw.mark(best, f"k* = {best}")], stats=stats)


@figure(
    "prefetch",
    Control("compute", "Forward of a layer", 4e-3, (1e-3, 2e-3, 4e-3, 8e-3, 16e-3), "s"),
    Control("weights", "Weights of a layer", 200e6, (50e6, 100e6, 200e6, 400e6, 800e6), "bytes"),
    Control("bandwidth", "Network of a GPU", 50e9, RATES, "rate"),
)
def prefetch(subject: Subject, v: Values) -> Json:
    """Forward of FSDP with weights gathered just in time, and one layer ahead."""
    gather = formulas.bytes_sent("all-gather", v["weights"], 64) / v["bandwidth"]
    names = [f"layer {k}" for k in range(LAYERS)]
    ways = [prefetch_timeline(names, v["compute"], gather, ahead) for ahead in (False, True)]
    one = f"a layer's forward takes {format_seconds(v['compute'])}, gathering its weights {format_seconds(gather)}"
    found = pair(ways, ("gather, then compute", "prefetch the next layer"), one)
    exposed = found["ways"][1]["end_s"] - found["compute_s"]
    hidden = "hidden" if gather <= v["compute"] else "longer than a layer computes"
    stats = [
        stat("One gather", format_seconds(gather), hidden),
        stat("Exposed", format_seconds(exposed), "the first gather at least"),
        stat("Saved", f"{found['saved']:.0%}", "by prefetching"),
    ]
    return draw.spans(found, "forward", "gathered", "forward", "all-gather of weights", stats=stats)


@figure(
    "zero",
    Control("parameters", "Parameters", 7e9, PARAMETERS, "count"),
    Control("ranks", "Data-parallel GPUs", 8, POWERS, "whole"),
    Control("memory", "Memory of a GPU", 80e9, (24e9, 40e9, 80e9, 141e9, 192e9), "bytes"),
)
def zero(subject: Subject, v: Values) -> Json:
    """Bytes of model state on one GPU for each ZeRO stage."""
    n, p = v["parameters"], v["ranks"]
    colours = {"parameters": "parameters", "gradients": "gradients", "optimizer": "states"}
    rows = []
    for stage in range(4):
        one = stages.stage_row(n, p, stage)
        parts = (draw.part(x["name"], x["bytes"], colours[x["name"]], one["formula"]) for x in one["parts"])
        rows.append(draw.bar(one["name"], format_decimal_bytes(one["bytes"]), *parts))
    largest = [formulas.largest_model(v["memory"], formulas.state_memory(1, p, stage).total) for stage in (0, 3)]
    stats = [
        stat("State", format_decimal_bytes(formulas.state_memory(n).total), "16 bytes per parameter"),
        stat("DDP holds up to", format_count(largest[0]), "parameters, without activations"),
        stat("ZeRO-3 holds up to", format_count(largest[1]), f"on {counted(p, 'GPU')}"),
    ]
    limit, note = (v["memory"], f"memory {format_decimal_bytes(v['memory'])}"), stages.note(n, p, v["memory"])
    return draw.bars(rows, draw.axis("bytes of state on one GPU", "bytes"), limit, stats=stats, note=note)
