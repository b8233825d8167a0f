"""Figures of the fourth part: number formats, compressed gradients, what fills the memory."""

import numpy as np

from meshwright import formulas
from meshwright.cost.advice import topk_compression
from meshwright.describe import catalog
from meshwright.units import Json, counted, format_decimal_bytes, format_seconds
from meshwright.view.page.course import drawing as draw
from meshwright.view.page.course.drawing import Control, Figure, Values, registered, stat
from meshwright.view.page.subject import Subject
from meshwright.view.show.formats import FORMATS

FIGURES: dict[str, Figure] = {}
figure = registered(FIGURES)

MODELS = ("gpt2-xl", "llama2-7b", "llama3-8b", "llama2-70b", "llama3-70b", "gpt3-175b")
COLOURS = {"optimizer": "states"}  # the other parts have a colour of their name
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@figure("formats")
def formats(subject: Subject, v: Values) -> Json:
    """The range of each number format, from the least number above zero to the largest."""
    rows = []
    for f in FORMATS[1:]:
        low, normal, high = f.smallest, f.smallest_normal, f.largest
        words = f"{f.name}: {low:.2g} to {normal:.2g} with fewer digits", f"{f.name}: {normal:.2g} to {high:.3g}"
        fewer = draw.part("with fewer digits", normal - low, "hidden", words[0])
        every = draw.part("with all digits", high - normal, "compute", words[1])
        rows.append(draw.bar(f.name, f"{f.digits:.1f} digits", fewer, every, start=low))
    ticks = (1e-40, 1e-20, 1.0, 1e20, 1e40)
    note = "Formats of 8 bits or fewer need scale factors that map the data into their range."
    return draw.bars(rows, draw.axis("size of a number", "power", 10, 1e-46, 1e40, ticks), note=note)


@figure(
    "rounding",
    Control("weight", "Weight", 1.0, (0.01, 0.1, 1.0, 10.0), "number"),
    Control("update", "Each update, of the weight", 1e-3, (1e-5, 1e-4, 1e-3, 2e-3, 4e-3, 1e-2), "number"),
)
def rounding(subject: Subject, v: Values) -> Json:
    """A weight after many small updates: summed in fp32, and in a format that rounds each sum."""
    steps, step = 200, v["weight"] * v["update"]
    series: list[Json] = []
    for name, bits in (("fp32", 23), ("fp16", 10), ("bf16", 7)):
        at, points = v["weight"], [[0, v["weight"]]]
        for k in range(1, steps + 1):
            at = rounded(at + step, bits)
            points.append([k, at])
        series.append(draw.curve(name, points, width=2.5))
    lost = [1 - (s["points"][-1][1] - v["weight"]) / (steps * step) for s in series]
    stats = [
        stat("Lost in bf16", f"{lost[2]:.0%}", f"of {steps} updates of {step:g}"),
        stat("Lost in fp16", f"{lost[1]:.0%}", "the same updates"),
        stat("Half a step of bf16", f"{2.0**-8:.2%}", "of the weight: smaller updates may vanish"),
    ]
    return draw.lines(series, draw.axis("updates", "whole"), draw.axis("weight", low=v["weight"]), stats=stats)


def rounded(x: float, mantissa: int) -> float:
    """The nearest number with so many bits of mantissa, ties to even."""
    fraction, exponent = np.frexp(x)
    return float(np.ldexp(np.round(np.ldexp(fraction, mantissa + 1)), int(exponent) - mantissa - 1))


@figure(
    "compression",
    Control("share", "Top-k keeps", 0.01, (0.001, 0.003, 0.01, 0.03, 0.1), "share"),
    Control("parameters", "Parameters", 1e9, (1e8, 1e9, 7e9, 70e9), "count"),
)
def compression(subject: Subject, v: Values) -> Json:
    """Bytes that a rank sends for its gradients by the number of ranks, for several ways to compress them."""
    n = v["parameters"]
    dense = {p: formulas.bytes_sent("all-reduce", 4 * n, p) for p in RANKS}
    ways = {
        "fp32": dense,
        "bf16": {p: size / 2 for p, size in dense.items()},
        "int8": {p: size / 4 for p, size in dense.items()},
        f"top {v['share']:.1%} with 4-byte indices": {
            p: size / topk_compression(v["share"], 4, 4, p) for p, size in dense.items()
        },
    }
    worse = next((p for p in RANKS if topk_compression(v["share"], 4, 4, p) < 1), None)
    marks = [draw.mark(worse, "top-k sends more than fp32", "bad", low=True)] if worse else []
    one, few, many = (topk_compression(v["share"], 4, 4, *ranks) for ranks in ((), (8,), (64,)))
    stats = [
        stat("Ratio of one list", f"{one:.0f} ×", "values and indices, against fp32"),
        stat("Ratio on 8 ranks", f"{few:.1f} ×", "bytes sent"),
        stat("Ratio on 64 ranks", f"{many:.2g} ×", "bytes sent"),
    ]
    x, y = draw.axis("ranks", "whole", 2), draw.axis("bytes sent by a rank", "bytes", 10)
    return draw.lines([draw.curve(name, sizes) for name, sizes in ways.items()], x, y, marks, stats=stats)


@figure(
    "break-even",
    Control("parameters", "Parameters", 7e9, (1e8, 1e9, 7e9, 70e9), "count"),
    Control("ratio", "Compression", 4, (2, 4, 8, 32), "number"),
    Control("seconds", "Compressing and expanding", 0.05, (0.01, 0.02, 0.05, 0.1, 0.5), "s"),
)
def break_even(subject: Subject, v: Values) -> Json:
    """Seconds of an all-reduce of fp32 gradients with and without compression, by the bandwidth."""
    size, rates = 4 * v["parameters"], [10.0 ** (k / 4) for k in range(36, 49)]
    less = {r: 2 * size / v["ratio"] / r + v["seconds"] for r in rates}
    left_out = 2 * size * (1 - 1 / v["ratio"])  # bytes that are not sent
    equal = left_out / v["seconds"]
    series = [draw.curve("fp32", {r: 2 * size / r for r in rates}), draw.curve(f"compressed {v['ratio']} ×", less)]
    marks = [draw.mark(equal, "equal")] if rates[0] < equal < rates[-1] else []
    stats = [
        stat("Pays below", f"{equal / 1e9:,.0f} GB/s", "if nothing is hidden"),
        stat("At 12.5 GB/s", f"saves {format_seconds(left_out / 12.5e9 - v['seconds'])}", "100 Gb/s Ethernet"),
    ]
    return draw.lines(
        series, draw.axis("bandwidth of a rank", "rate", 10), draw.axis("seconds", "s", 10), marks, stats=stats
    )


@figure(
    "memory",
    Control("model", "Model", "llama2-7b", MODELS, kind="choice"),
    Control("seq", "Tokens of a sequence", 4096, tuple(2**k for k in range(9, 17)), "whole"),
    Control("batch", "Sequences of a micro-batch", 1, (1, 2, 4, 8, 16), "whole"),
    Control("ranks", "GPUs that share the state (ZeRO-3)", 8, (1, 2, 4, 8, 16, 32, 64, 128), "whole"),
    Control("memory", "Memory of a GPU", 80e9, (24e9, 40e9, 80e9, 141e9, 192e9), "bytes"),
)
def memory(subject: Subject, v: Values) -> Json:
    """State and activations on one GPU, with each kind of recompute."""
    model = catalog.load("models", v["model"])
    state = formulas.state_memory(model.total, v["ranks"], 3)
    saved = formulas.model_activations(model, v["seq"], v["batch"])
    scores = formulas.model_activations(model, v["seq"], v["batch"], flash=False)
    inputs = 2.0 * model.layers * v["seq"] * v["batch"] * model.hidden
    one = saved / model.layers
    kinds = {"all, with attention scores": scores, "all but the scores": saved, "inputs of layers": inputs + one}
    rows = []
    for name, size in kinds.items():
        sizes = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": size,
        }
        parts = (
            draw.part(key, x, COLOURS.get(key, key), f"{key}: {format_decimal_bytes(x)}") for key, x in sizes.items()
        )
        rows.append(draw.bar(name, format_decimal_bytes(state.total + size), *parts))
    more = sum(model.flops(v["seq"]).values()) / model.model_flops(v["seq"])
    full = format_decimal_bytes(inputs + one)
    stats = [
        stat("State", format_decimal_bytes(state.total), f"16 bytes per parameter over {counted(v['ranks'], 'GPU')}"),
        stat("Activations", format_decimal_bytes(saved), f"{full} with full recompute"),
        stat("Price of full recompute", f"{more:.0%}", "more arithmetic"),
    ]
    note = "Full recompute keeps the input of every layer, and rebuilds one layer at a time."
    limit = v["memory"], f"memory {format_decimal_bytes(v['memory'])}"
    return draw.bars(rows, draw.axis("bytes on one GPU", "bytes"), limit, stats=stats, note=note)
