"""`meshwright show crossover`, `roofline`, `zero`, `buckets`, `ranks` and `modeler`: closed forms on one's own numbers, or on those of a plan.

    meshwright show crossover --alpha 1us --bandwidth 450GB/s
    meshwright show roofline --peak 989TFLOP/s --bandwidth 50GB/s --batch 32 --seq 2048
    meshwright show zero --parameters 7B --ranks 8
    meshwright show buckets --gradients 500MB --backward 200ms --alpha 5us --bandwidth 300GB/s
    meshwright show ranks plan.toml
    meshwright show modeler --stages 4 --microbatches 8 --hidden 12288

With a plan file the numbers are those of the view of the same name on the page: both come from one function.
"""

from collections.abc import Callable, Mapping
from typing import Any

from meshwright import formulas
from meshwright.cost.roofline import ridge
from meshwright.describe import catalog
from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.config import load_cluster
from meshwright.describe.layout import Layout
from meshwright.errors import MeshwrightError, unknown
from meshwright.predict.estimate import Estimate
from meshwright.units import (
    Json,
    parse_bytes,
    parse_seconds,
)
from meshwright.view.page import modeler, ranks, roofline
from meshwright.view.page.subject import Subject
from meshwright.view.show import overlap, zero
from meshwright.view.show.options import unused

TOPICS = {
    "crossover": "the size below which latency dominates: of your link, or of every link of the catalog",
    "roofline": "FLOPs per byte, ridge and regime: of your numbers, of a cluster, or of a plan file",
    "zero": "bytes of model state by ZeRO stage: of your numbers, or of a plan file",
    "buckets": "the best number of gradient buckets: of your numbers, or the timelines of a plan file",
    "ranks": "the process groups of a plan file: the ranks of every group, and the level that it spans",
    "modeler": "a pipeline by its few numbers: bubble, memory, bandwidth between stages, chunks",
}
# The options of each topic, with the value that stands for "not given".
OPTIONS: dict[str, dict[str, Any]] = {
    "crossover": {"alpha": "", "bandwidth": "", "size": ""},
    "roofline": {"names": "", "cluster": "", "peak": "", "bandwidth": "", "batch": 0, "seq": 0, "precision": ""},
    "zero": {"names": "", "parameters": "", "ranks": 0, "memory": ""},
    "buckets": {"names": "", "gradients": "", "backward": "", "alpha": "", "bandwidth": ""},
    "ranks": {"names": ""},
    "modeler": {
        "stages": 4, "microbatches": 8, "layers": 0, "tokens": 0, "hidden": 0, "tp": 0, "layer_time": "", "precision": "",
        "schedule": "", "bandwidth": "", "gradients": "", "rate": "", "overhead": "",
    },
}  # fmt: skip
EXAMPLES = {
    "crossover": "--alpha 1us --bandwidth 450GB/s",
    "roofline": "--peak 989TFLOP/s --bandwidth 50GB/s --batch 32 --seq 2048",
    "zero": "--parameters 7B --ranks 8",
    "buckets": "--gradients 500MB --backward 200ms --alpha 5us --bandwidth 300GB/s",
    "ranks": "plan.toml",
    "modeler": "--stages 4 --microbatches 8",
}
WITH_PLAN = ("roofline", "zero", "buckets", "ranks")
DEFAULT_RANKS, DEFAULT_MEMORY = 8, "80GB"


def data(topic: str, options: Mapping[str, Any], estimate: Estimate | None = None) -> Any:
    """What `--json` prints. `options` are those that were typed; `estimate` is that of the plan file."""
    if estimate is not None:
        for name in sorted(set(options) - {"names"}):
            raise unused(flag(name), "the plan file has this number", f"meshwright show {topic} {EXAMPLES[topic]}")
    return DATA[topic](options, estimate)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def needed(topic: str, given: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of options that a topic needs together."""
    missing = [name for name in names if name not in given]
    if missing:
        options = ", ".join(map(flag, missing))
        or_plan = " or a plan file" if topic in WITH_PLAN else ""
        what = f"show {topic} needs {options}{or_plan}"
        raise MeshwrightError("MW-SHOW-004", what, fix=f"meshwright show {topic} {EXAMPLES[topic]}")
    return [given[name] for name in names]


# Crossover


def crossover(given: Mapping[str, Any], estimate: Estimate | None) -> Json:
    """n* = α/β of a link, and what bounds a message of --size on it."""
    size = formulas.arguments.size("--size", given["size"]) if "size" in given else None
    if "alpha" in given or "bandwidth" in given:
        alpha, bandwidth = needed("crossover", given, "alpha", "bandwidth")
        links = [("your link", parse_seconds(alpha), formulas.arguments.rate("--bandwidth", bandwidth))]
    else:
        entries = [catalog.load("links", name) for name in catalog.names("links")]
        links = [(link.name, link.alpha, 1 / link.beta) for link in entries]
    return {"size_bytes": size, "links": [crossover_row(*link, size) for link in links]}


def crossover_row(name: str, alpha: float, bandwidth: float, size: float | None) -> Json:
    row: Json = {
        "link": name,
        "latency_s": alpha,
        "bandwidth": bandwidth,
        "crossover_bytes": formulas.crossover_size(alpha, bandwidth),
    }
    if size is None:
        return row
    regime = formulas.message_regime(size, alpha, bandwidth)
    time = formulas.message_time(size, alpha, bandwidth)
    return row | {"time_s": time, "regime": regime.name, "advice": list(regime.advice)}


# Roofline


def roofline_data(given: Mapping[str, Any], estimate: Estimate | None) -> Json:
    """The roofline of a plan's step, the ridges of a cluster, or the point of one's own numbers."""
    if estimate is not None:
        return {"plan": estimate.plan.title(), **roofline.data(Subject.of_estimate(estimate))["step"]}
    precision = given.get("precision", "bf16")
    if precision not in DTYPE_BYTES:
        raise unknown("MW-SHOW-004", "precision", precision, DTYPE_BYTES, "--precision {}")
    if "cluster" in given:
        for name in {"peak", "bandwidth"} & set(given):
            raise unused(f"--{name}", "the cluster has it")
        on = load_cluster(given["cluster"])
        peak, levels = on.accelerator.peak_for(precision), formulas.cluster_ridges(on, precision)
        rates = [(level.level, level.bandwidth) for level in levels]
    else:
        peak, rate = needed("roofline", given, "peak", "bandwidth")
        peak = formulas.arguments.flop_rate("--peak", peak)
        rates = [("your link", formulas.arguments.rate("--bandwidth", rate))]
    batch, seq = (
        formulas.arguments.whole(flag(name), given[name]) if name in given else 0 for name in ("batch", "seq")
    )
    tokens, size = batch * (seq or 1), DTYPE_BYTES[precision]
    found: Json = {"peak": peak, "precision": precision, "batch": batch, "seq": seq, "levels": []}
    for name, bandwidth in rates:
        row: Json = {"level": name, "bandwidth": bandwidth, "ridge": ridge(peak, bandwidth)}
        row["critical_batch"] = formulas.critical_batch(peak, bandwidth, seq or 1, size)
        if tokens:
            point = formulas.roofline_point(6.0 * tokens, 2.0 * size, peak, bandwidth)
            row |= point._asdict() | {"advice": list(point.advice)}
        found["levels"].append(row)
    return found


# ZeRO


def zero_data(given: Mapping[str, Any], estimate: Estimate | None) -> Json:
    """State by stage of one's own numbers, or the view of a plan."""
    if estimate is not None:
        return zero.data(Subject.of_estimate(estimate))
    (parameters,) = needed("zero", given, "parameters")
    n = formulas.arguments.count("--parameters", parameters)
    p = formulas.arguments.whole("--ranks", given.get("ranks", DEFAULT_RANKS))
    limit = formulas.arguments.size("--memory", given.get("memory", DEFAULT_MEMORY))
    stages = [zero.stage_row(n, p, stage) for stage in range(4)]
    walls = [zero.wall(p, stage, limit) for stage in range(4)]
    for wall in walls:
        wall.pop("curve")
    return {
        "parameters": n,
        "ranks": p,
        "limit_bytes": limit,
        "stages": stages,
        "wall": walls,
        "note": zero.note(n, p, limit),
    }


# Buckets


def buckets_data(given: Mapping[str, Any], estimate: Estimate | None) -> Json:
    """The best number of buckets of one's own numbers, or the timelines of a plan."""
    if estimate is not None:
        return overlap.data(Subject.of_estimate(estimate))
    gradients, backward, alpha, bandwidth = needed("buckets", given, "gradients", "backward", "alpha", "bandwidth")
    best = formulas.bucket_count(gradients, alpha, bandwidth, backward)
    total, window = parse_bytes(gradients), parse_seconds(backward)
    wire = total / formulas.arguments.rate("--bandwidth", bandwidth)
    latency = formulas.arguments.seconds("--alpha", alpha)
    counts = sorted({1, max(1, best // 4), max(1, best // 2), best, 2 * best, 4 * best})
    rows = [
        {"buckets": k, "bucket_bytes": total / k, "exposed_s": formulas.chunked_time(k, min(wire, window), latency)}
        for k in counts
    ]
    return {
        "gradient_bytes": total,
        "backward_s": window,
        "communication_s": wire,
        "overlap_ratio": formulas.overlap_ratio(wire, window),
        "smallest_bucket_bytes": formulas.smallest_bucket(alpha, bandwidth),
        "best": best,
        "counts": rows,
    }


# Ranks


def ranks_data(given: Mapping[str, Any], estimate: Estimate | None) -> Json:
    """Every group of every axis of a plan, with the level that the axis spans."""
    if estimate is None:
        raise MeshwrightError("MW-SHOW-004", "show ranks needs a plan file", fix="meshwright show ranks plan.toml")
    view = ranks.data(Subject.of_estimate(estimate))
    layout = Layout(estimate.plan, tuple(estimate.stack.order))
    axes = []
    for row in view["axes"]:
        groups = layout.groups(row["axis"])
        about = {name: row[name] for name in ("axis", "size", "groups", "level")}
        axes.append(about | {"stride": int(groups[0][1] - groups[0][0]), "ranks": groups.tolist()})
    return {"world": view["world"], "node_size": view["node_size"], "order": view["order"], "axes": axes}


# The modeler


def modeler_data(given: Mapping[str, Any], estimate: Estimate | None) -> Json:
    """The model of the page's view, on the options of the command."""
    same = {
        name: given[name]
        for name in ("stages", "microbatches", "layers", "tokens", "hidden", "tp", "schedule", "precision")
        if name in given
    }
    measures = {
        "layer_ms": ("layer_time", lambda text: 1e3 * parse_seconds(text)),
        "link_gbps": ("bandwidth", lambda text: 8e-9 * formulas.arguments.rate("--bandwidth", text)),
        "chunk_mb": ("gradients", lambda text: 1e-6 * parse_bytes(text)),
        "chunk_gbps": ("rate", lambda text: 8e-9 * formulas.arguments.rate("--rate", text)),
        "overhead_us": ("overhead", lambda text: 1e6 * parse_seconds(text)),
    }  # fmt: skip
    converted = {name: read(given[option]) for name, (option, read) in measures.items() if option in given}
    return modeler.model(modeler.checked(**same, **converted))


DATA: dict[str, Callable[[Mapping[str, Any], Estimate | None], Json]] = {
    "crossover": crossover,
    "roofline": roofline_data,
    "zero": zero_data,
    "buckets": buckets_data,
    "ranks": ranks_data,
    "modeler": modeler_data,
}
