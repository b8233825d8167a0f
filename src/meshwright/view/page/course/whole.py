"""Figures of the fifth part: combined axes, topology, failures, scaling laws, published runs."""

import math

from meshwright import formulas
from meshwright.describe.config import Config
from meshwright.errors import MeshwrightError
from meshwright.planner import goodput as failures
from meshwright.planner.cases import studies
from meshwright.units import Json, format_count, format_decimal_bytes, format_seconds
from meshwright.view.page import published, ranks
from meshwright.view.page.course import drawing as draw
from meshwright.view.page.course.drawing import Control, Figure, Values, registered, stat
from meshwright.view.page.subject import Subject

FIGURES: dict[str, Figure] = {}
figure = registered(FIGURES)

WORLD = 64
DEGREES = (1, 2, 4)
HOUR = 3600.0
AROUND_ONE: Json = {"log": 2, "low": 0.5, "high": 2.0}  # an axis of ratios
LLAMA3_HOURS = round(failures.GPU_MTBF / HOUR, -2)  # between interruptions of a GPU of Llama 3


@figure(
    "groups",
    Control("tp", "tp", 8, (1, 2, 4, 8, 16), "whole"),
    Control("cp", "cp", 1, DEGREES, "whole"),
    Control("pp", "pp", 2, (1, 2, 4, 8), "whole"),
)
def groups(subject: Subject, v: Values) -> Json:
    """The grid of 64 ranks in nodes of 8, and the groups of a rank."""
    rest, product = WORLD // (v["tp"] * v["cp"] * v["pp"]), v["tp"] * v["cp"] * v["pp"]
    if not rest:
        raise MeshwrightError(
            "MW-WEB-008",
            f"tp {v['tp']} × cp {v['cp']} × pp {v['pp']} = {product} ranks, more than {WORLD}",
            why="The product of the degrees is the number of GPUs, and data parallelism takes what is left",
        )
    document = {
        "model": "gpt3-175b",
        "cluster": {"extends": "dgx-h100", "gpus": WORLD},
        "workload": {"batch": 512, "seq": 2048},
        "plan": {"tp": v["tp"], "cp": v["cp"], "pp": v["pp"], "replicate": rest},
    }
    data = ranks.data(Subject(Config.from_document(document)))
    return {"draw": "ranks", "data": data, "stats": [stat("Data-parallel ranks", str(rest), f"{WORLD} / {product}")]}


@figure(
    "networks",
    Control("size", "Buffer", 1e9, tuple(m * 10.0**k for k in range(4, 11) for m in (1, 3)), "bytes"),
    Control("nodes", "Nodes of 8 GPUs", 8, (2, 4, 8, 16, 32), "whole"),
    Control("network", "Network card of a GPU", 50e9, (3e9, 12.5e9, 25e9, 50e9, 100e9), "rate"),
    Control("share", "Oversubscription", 1, (1, 2, 4, 7), "number"),
)
def networks(subject: Subject, v: Values) -> Json:
    """Seconds of an all-reduce by each algorithm over nodes of eight GPUs."""
    between = {"nodes": v["nodes"], "latency_between": "5us", "bandwidth_between": v["network"] / v["share"]}
    times = formulas.collective_times("all-reduce", v["size"], 8 * v["nodes"], "1.5us", "378GB/s", **between)
    shown = {name: times[name] for name in sorted(times, key=lambda name: times[name]) if name != "naive"}
    rows = []
    for k, (name, s) in enumerate(shown.items()):
        words = formulas.formula("all-reduce", name)
        rows.append(draw.bar(name, format_seconds(s), draw.part("time", s, "compute" if k else "optimizer", words)))
    through = formulas.bytes_sent("all-reduce", v["size"] / 8, v["nodes"])
    ratio = shown["ring"] / next(iter(shown.values()))
    stats = [
        stat("Fastest", next(iter(shown)), format_seconds(next(iter(shown.values())))),
        stat("One flat ring", f"{ratio:.1f} ×", "as long: one card of a node carries all"),
        stat("Bytes through a card", format_decimal_bytes(through), "if all eight share the buffer"),
    ]
    note = "NVLink 378 GB/s and 1.5 µs inside a node, 5 µs between nodes."
    return draw.bars(rows, draw.axis("time of one all-reduce", "s"), stats=stats, note=note)


@figure(
    "failures",
    Control("gpus", "GPUs", 16384, tuple(2**k for k in range(6, 18)), "whole"),
    Control("save", "A save blocks for", 60.0, (1.0, 5.0, 10.0, 30.0, 60.0, 300.0), "s"),
    Control("restart", "Restart takes", 300.0, (30.0, 120.0, 300.0, 1800.0), "s"),
    Control(
        "unit", "Hours between failures of a GPU", LLAMA3_HOURS, (5_000.0, 20_000.0, LLAMA3_HOURS, 100_000.0), "whole"
    ),
)
def failure(subject: Subject, v: Values) -> Json:
    """The share of time that trains, by the interval between saves."""
    r = failures.reliability(v["gpus"], v["save"], v["restart"], v["unit"] * HOUR)
    young = failures.young_interval(r.save, r.mtbf)
    shares = failures.curve(r.save, r.restart, r.mtbf, 49, 32.0)
    drawn = draw.curve("goodput", ((t, x, f"every {format_seconds(t)}: {x:.1%}") for t, x in shares), width=3)
    stats = [
        stat("A failure every", format_seconds(r.mtbf), "of the whole cluster"),
        stat("Save every", format_seconds(r.interval), f"Young's √(2·δ·M): {format_seconds(young)}"),
        stat("Goodput", f"{r.goodput:.1%}", "share of time that trains"),
    ]
    best = draw.mark(r.interval, f"best {format_seconds(r.interval)}", "optimizer", low=True)
    return draw.lines(
        [drawn], draw.axis("time between saves", "s", 10), draw.axis("goodput", "share", high=1.0), [best], stats=stats
    )


@figure(
    "loss",
    Control("flops", "FLOPs of the training", 1e22, tuple(10.0**k for k in range(19, 27)), "power"),
    Control("fit", "Fit", "besiroglu", ("besiroglu", "hoffmann"), kind="choice"),
)
def loss(subject: Subject, v: Values) -> Json:
    """Loss by the size of the model at a fixed number of FLOPs, with the optimum."""
    series: list[Json] = []
    for factor, dash in ((0.1, "2 4"), (1.0, None), (10.0, "7 4")):
        best = formulas.compute_optimal(v["flops"] * factor, v["fit"])
        sizes = [best.parameters * 10 ** (k / 8) for k in range(-12, 13)]
        losses = {n: formulas.chinchilla_loss(n, best.flops / 6 / n, v["fit"]) for n in sizes}
        look = {"dash": dash, "width": 3 if factor == 1 else 2}
        series.append(draw.curve(f"{power_of_ten(best.flops)} FLOPs", losses, **look))
    best = formulas.compute_optimal(v["flops"], v["fit"])
    words = f"{format_count(best.parameters)} parameters, {format_count(best.tokens)} tokens: loss {best.loss:.3f}"
    series.append(draw.marker("", (best.parameters, best.loss, words), colour="focus"))
    stats = [
        stat("Parameters", format_count(best.parameters), "with the lowest loss"),
        stat("Tokens", format_count(best.tokens), f"{best.tokens / best.parameters:.0f} for each parameter"),
        stat("Loss", f"{best.loss:.3f}", "nats per token"),
    ]
    x = draw.axis("parameters; tokens = FLOPs / 6N", "count", 10)
    y = draw.axis("loss, nats per token", "number", low=1.6)
    return draw.lines(series, x, y, stats=stats, note=f"Fit: {best.source}.")


def power_of_ten(value: float) -> str:
    """1e22 as 10²²."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@figure("runs")
def runs(subject: Subject, v: Values) -> Json:
    """Step times of well-known runs: predicted over measured, with the error band."""
    bands, inside = [], 0
    for o, _ in published.near_runs(subject):
        c, p = o.case, o.prediction
        assert p
        assert c.step_time
        low, high = p.step_time_low_s / c.step_time, p.step_time_high_s / c.step_time
        inside += low <= 1 <= high
        text = f"{p.step_time_s / c.step_time:.2f} × on {c.cluster.world:,} {c.cluster.accelerator.name}"
        bands.append(error_band(c.row_id, text, low, high - low, low <= 1 <= high, published.described(o)))
    stats = [stat("Inside the band", f"{inside} of {len(bands)}", "published step times")]
    return draw.bars(
        bands, draw.axis("predicted step / measured step", **AROUND_ONE), (1.0, "as measured"), stats=stats
    )


def error_band(label: str, text: str, low: float, width: float, within: bool, formula: str) -> Json:
    """The band of a prediction over the published figure, coloured by whether the figure is inside."""
    return draw.bar(label, text, draw.part("error band", width, "compute" if within else "tp", formula), start=low)


@figure("case", Control("case", "Run", "bloom", tuple(name for name in studies.CASES), kind="choice"))
def case(subject: Subject, v: Values) -> Json:
    """Published figures of one run over our estimate."""
    study = studies.evaluate(v["case"])
    bands = []
    for k, row in enumerate(study.rows):
        words = f"published {row.published:,.4g} {row.unit}, estimated {row.ours:,.4g} ({row.low:,.4g} to {row.high:,.4g}). Source: {row.source}"
        width = max((row.high - row.low) / row.published, 0.01)
        label = f"{row.unit}, {k + 1}" if sum(one.unit == row.unit for one in study.rows) > 1 else row.unit
        text = f"{row.ratio:.2f} × of {row.published:,.4g}"
        bands.append(error_band(label, text, row.low / row.published, width, row.within, words))
    note = f"{study.case.title}, {study.case.by}. {study.case.story}"
    return draw.bars(bands, draw.axis("estimated / published", **AROUND_ONE), (1.0, "as published"), note=note)
