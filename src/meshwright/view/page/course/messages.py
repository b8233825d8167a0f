"""Figures of the first part: a message, the collectives, and the rooflines of compute and of links."""

from meshwright import formulas
from meshwright.describe import catalog
from meshwright.describe.config import load_cluster
from meshwright.errors import MeshwrightError
from meshwright.planner.advice.alternatives import PlanTrials
from meshwright.programs.collectives import ALGORITHMS, OPERATIONS
from meshwright.programs.collectives.comparison import SIZES, compare, runs_on
from meshwright.units import Json, format_decimal_bytes, format_flops, format_rate, format_seconds
from meshwright.view.page import collectives
from meshwright.view.page.course import drawing as draw
from meshwright.view.page.course.drawing import Control, Figure, Values, registered, sentence, stat
from meshwright.view.page.subject import Subject
from meshwright.view.show.collective_request import ELEMENT_BYTES, CollectiveRequest, cluster_of, prepared

FIGURES: dict[str, Figure] = {}
figure = registered(FIGURES)

LATENCIES = tuple(k * 1e-6 for k in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50))
RATES = tuple(k * 1e9 for k in (1.25, 3, 12.5, 25, 40, 50, 100, 200, 300, 450, 900))
BYTES = tuple(m * 10.0**k for k in range(3, 10) for m in (1, 2, 5))
CLUSTERS = ("dgx-a100", "dgx-h100", "dgx-b200", "gb200-nvl72", "ethernet-cluster", "tpu-v5p")
COMPARED = (
    "ring", "tree", "halving-doubling", "recursive-halving", "recursive-doubling", "pairwise", "bruck", "hierarchical", "two-level", "nvls",
)  # fmt: skip
RANKS = (2, 3, 4, 5, 6, 8, 12, 16)


@figure(
    "message",
    Control("latency", "Latency α", 1e-6, LATENCIES, "s"),
    Control("bandwidth", "Bandwidth 1/β", 450e9, RATES, "rate"),
    Control("size", "Message", 1e5, BYTES, "bytes"),
)
def message(subject: Subject, v: Values) -> Json:
    """T(n) = α + n·β with its two terms, and where they are equal."""
    alpha, rate, size = v["latency"], v["bandwidth"], v["size"]
    equal, time = formulas.crossover_size(alpha, rate), formulas.message_time(size, alpha, rate)
    sizes = [10.0 ** (k / 8) for k in range(24, 81)]
    series = [
        draw.curve("T(n) = α + n·β", {n: formulas.message_time(n, alpha, rate) for n in sizes}, width=3),
        draw.curve("α alone", dict.fromkeys(sizes, alpha), dash="2 4"),
        draw.curve("n·β alone", {n: n / rate for n in sizes if n / rate > alpha / 100}, dash="7 4"),
        draw.marker("", (size, time, f"{format_decimal_bytes(size)}: {format_seconds(time)}"), colour="focus"),
    ]
    regime = formulas.message_regime(size, alpha, rate)
    words, note = f"n* = {format_decimal_bytes(equal)}", f"What helps here: {'; '.join(regime.advice)}."
    stats = [
        stat("Time", format_seconds(time), regime.name),
        stat("n* = α/β", format_decimal_bytes(equal), "both terms are equal"),
        stat("Of the bandwidth", f"{size / time / rate:.0%}", format_rate(size / time)),
    ]
    x, y = draw.axis("bytes of the message", "bytes", 10), draw.axis("time", "s", 10)
    return draw.lines(series, x, y, [draw.mark(equal, words)], f"Time by size; {words}", stats=stats, note=note)


@figure(
    "player",
    Control("operation", "Operation", "all-reduce", tuple(OPERATIONS), kind="choice"),
    Control("algorithm", "Algorithm", "ring", kind="choice"),
    Control("ranks", "Ranks", 4, RANKS, "whole"),
    Control("values", "Own values", "", unit="such as 1,2,3,4", kind="text"),
)
def player(subject: Subject, v: Values) -> Json:
    """A collective step by step, with the values on every rank."""
    operation, named = v["operation"], ALGORITHMS[v["operation"]]
    algorithm = v["algorithm"] if v["algorithm"] in named else next(name for name in ("ring", *named) if name in named)
    v["algorithm"] = algorithm
    request = CollectiveRequest(operation, algorithm=algorithm, ranks=v["ranks"], values=True, names=v["values"])
    shown = prepared(request)
    program = collectives.program_data(shown.program)
    inputs = [[float(x) for x in values] for values in shown.inputs or []]
    stats = [
        stat("Steps", str(shown.program.steps), f"{algorithm} {operation}"),
        stat("Time", formulas.formula(operation, algorithm), "n bytes, P ranks, without shared links"),
    ]
    out: Json = {
        "draw": "player",
        "data": {"program": program, "inputs": inputs},
        "choices": {"algorithm": list(named)},
    }
    return out | {"stats": stats, "note": sentence(OPERATIONS[operation])}


@figure(
    "sizes",
    Control(
        "operation",
        "Operation",
        "all-reduce",
        ("all-reduce", "reduce-scatter", "all-gather", "all-to-all"),
        kind="choice",
    ),
    Control("cluster", "Cluster", "dgx-h100", CLUSTERS, kind="choice"),
    Control("ranks", "Ranks", 16, (4, 8, 16, 32), "whole"),
)
def sizes(subject: Subject, v: Values) -> Json:
    """The simulated time of every algorithm by message size."""
    cluster = cluster_of(v["cluster"], v["ranks"])
    several = v["ranks"] > cluster.node_size
    named = [
        a
        for a in COMPARED
        if a in ALGORITHMS[v["operation"]]
        and runs_on(cluster, a)
        and (several or a not in ("hierarchical", "two-level"))
    ]
    found = compare(v["operation"], cluster, v["ranks"], SIZES, named, element_bytes=ELEMENT_BYTES)
    data = collectives.content(v["operation"], "", list(found.times), v["ranks"], cluster.name, compared=found)
    return {"draw": "sizes", "data": data, "note": sentence(collectives.crossovers(found))}


@figure("family")
def family(subject: Subject, v: Values) -> Json:
    """How the operations are composed of each other, and which are duals."""
    return {"draw": "family", "data": collectives.content("all-reduce", "", [], 8, "")}


@figure(
    "compute-roofline",
    Control(
        "accelerator",
        "Accelerator",
        "h100-sxm",
        ("a100-80gb", "h100-sxm", "h200-sxm", "b200", "mi300x", "tpu-v5p"),
        kind="choice",
    ),
    Control("tokens", "Tokens of a product", 1024, tuple(2**k for k in range(16)), "whole"),
    Control("hidden", "Hidden size", 4096, (1024, 2048, 4096, 8192, 12288, 16384), "whole"),
)
def compute_roofline(subject: Subject, v: Values) -> Json:
    """The rate of a kernel against its FLOPs per byte of memory."""
    chip = catalog.load("accelerators", v["accelerator"])
    peak, rate, (t, h) = chip.peak_for("bf16"), chip.memory_bandwidth, (v["tokens"], v["hidden"])
    product = 2 * t * h * h / (2 * (2 * t * h + h * h))
    series = [
        draw.curve(
            v["accelerator"], {x: min(peak, x * rate) for x in (10.0 ** (k / 8) for k in range(-4, 33))}, width=3
        )
    ]
    for name, x, shape, colour in (
        ("a norm", 5 / 4, "circle", "optimizer"),
        (f"a product of {t:,} × {h:,} × {h:,}", product, "diamond", "tp"),
    ):
        words = f"{name}: {x:,.1f} FLOPs per byte, at most {format_flops(min(peak, x * rate))}"
        series.append(draw.marker(name, (x, min(peak, x * rate), words), shape=shape, colour=colour))
    ridge = formulas.ridge(peak, rate)
    bound = "compute" if product >= ridge else "memory"
    stats = [
        stat("Peak", format_flops(peak), "bf16, dense"),
        stat("Memory", format_rate(rate), "bytes per second"),
        stat("Ridge", f"{ridge:,.0f}", "FLOPs per byte"),
        stat("The product", f"{product:,.0f}", f"FLOPs per byte; bound by {bound}"),
    ]
    x_axis, y_axis = draw.axis("FLOPs per byte of memory", log=10), draw.axis("FLOP/s", "flops", 10)
    return draw.lines(series, x_axis, y_axis, [draw.mark(ridge, f"ridge {ridge:,.0f}")], stats=stats)


@figure(
    "link-roofline",
    Control("cluster", "Cluster", "dgx-h100", CLUSTERS, kind="choice"),
    Control("tokens", "Tokens of a device in a step", 8192, tuple(2**k for k in range(8, 19)), "whole"),
)
def link_roofline(subject: Subject, v: Values) -> Json:
    """FLOP/s of a device against FLOPs per byte that it sends: a slope for each level, the ridges, data parallelism and the present plan."""
    cluster = load_cluster(v["cluster"])
    peak = cluster.accelerator.peak_for("bf16")
    levels = {round(row.bandwidth): row for row in reversed(formulas.cluster_ridges(cluster, "bf16"))}
    xs = [10.0 ** (k / 8) for k in range(16, 57)]
    slopes = [
        draw.curve(
            f"{row.level} {format_rate(row.bandwidth)}", {x: min(peak, x * row.bandwidth) for x in xs}, width=2.5
        )
        for row in reversed(levels.values())
    ]
    slow = min(levels.values(), key=lambda row: row.bandwidth)

    def at(tokens: float) -> tuple[float, float, str]:
        ccr = formulas.compute_to_communication(1e9, tokens)
        rate = min(peak, ccr * slow.bandwidth)
        most = f"at most {format_flops(rate)} = {rate / peak:.0%} of the peak"
        return ccr, rate, f"{tokens:,.0f} tokens per device: {ccr:,.0f} FLOPs per byte, {most}"

    batches = [at(v["tokens"] * f) for f in (1 / 16, 1 / 4, 4, 16)]
    chosen = at(v["tokens"])
    series = [
        *slopes,
        draw.marker("the same at 1/16, 1/4, 4 and 16 times the batch", *batches, colour="quiet"),
        draw.marker("data parallelism over the slowest level", chosen, shape="diamond", colour="focus"),
    ]
    note = ""
    if cluster.name == subject.cluster.name:
        try:
            series.append(plan_points(subject))
        except MeshwrightError as error:
            note = f"The present plan is not drawn: {error.what}."
    marks = [draw.mark(row.ridge, f"ridge {row.ridge:,.0f}", low=True) for row in reversed(levels.values())]
    stats = [
        stat("FLOPs per byte", f"{chosen[0]:,.0f}", "3 · tokens / 2 bytes"),
        stat("Of the peak", f"{chosen[1] / peak:.0%}", "at most, if nothing else limits"),
        stat(
            "Critical batch", f"{formulas.critical_batch(peak, slow.bandwidth):,.0f}", "tokens of a device at the ridge"
        ),
    ]
    x, y = (
        draw.axis("FLOPs per byte sent", log=10, low=1e2, high=2e7),
        draw.axis("FLOP/s of a device", "flops", 10),
    )
    return draw.lines(series, x, y, marks, stats=stats, note=note)


def plan_points(subject: Subject) -> Json:
    """The step of the present plan at every level that it uses, at a quarter, once and four times its batch."""
    e = subject.estimate
    peak, points = e.cluster.accelerator.peak_for("bf16"), []
    for factor in (0.25, 1, 4):
        batch = round(e.workload.batch * factor)
        one = e if factor == 1 else PlanTrials(e.config).with_changes(e.plan, workload=e.workload.but(batch=batch))
        for c in one.roofline.ceilings if one else ():
            if c.bytes:
                words = f"the present plan at batch {batch:,}: {c.ccr:,.0f} FLOPs per byte through {c.level} links"
                points.append((c.ccr, c.efficiency * peak, words))
    return draw.marker("the present plan at ¼, 1 and 4 times its batch", *points, shape="square", colour="bad")
