"""The tables of `meshwright show crossover`, `roofline`, `zero`, `buckets`, `ranks` and `modeler`, from the data of `numbers`."""

from collections.abc import Callable
from typing import Any

from rich.text import Text

from meshwright.cost.memory import zero_state_bytes
from meshwright.units import Json, format_count, format_decimal_bytes, format_flops, format_rate, format_seconds
from meshwright.view.tables import filled, heading

MOST_GROUPS = 8  # groups of an axis that are printed; --json has all


def page(topic: str, found: Json) -> list[Any]:
    """The tables of a topic."""
    return PAGES[topic](found)


def crossover_page(found: Json) -> list[Any]:
    size = found["size_bytes"]
    columns = (
        "link",
        ">α",
        ">rate",
        ">n* = α·B",
        *((f">{format_decimal_bytes(size)} takes", "bound by") if size else ()),
    )
    rows = []
    for row in found["links"]:
        cells = [row["link"], format_seconds(row["latency_s"]), format_rate(row["bandwidth"])]
        cells.append(format_decimal_bytes(row["crossover_bytes"], 4))
        rows.append((*cells, *((format_seconds(row["time_s"]), row["regime"]) if size else ())))
    note = "below n* latency dominates: fuse, use trees; above it bandwidth: use rings, compress, overlap"
    advice = found["links"][0].get("advice") if len(found["links"]) == 1 else None
    return [
        heading("Crossover", "T(n) = α + n·β"),
        filled(columns, rows),
        Text("; ".join(advice) if advice else note, "dim"),
    ]


def plan_roofline_page(found: Json) -> list[Any]:
    rows = [
        (
            c["level"],
            format_rate(c["bandwidth"]),
            format_decimal_bytes(c["bytes"]),
            number(c["ccr"]),
            number(c["ridge"]),
            f"{c['efficiency']:.0%}",
        )
        for c in found["ceilings"]
    ]
    columns = ("level", ">rate per device", ">sent per step", ">FLOPs per byte", ">ridge", ">of the peak")
    words = f"{found['regime']}; the tightest level is {found['level']}: {'; '.join(found['advice'])}"
    return [heading("Communication roofline", found["plan"]), filled(columns, rows), Text(words, "dim")]


def roofline_page(found: Json) -> list[Any]:
    if "plan" in found:
        return plan_roofline_page(found)
    unit = "sequences" if found["seq"] else "tokens"
    point = "ccr" in found["levels"][0]
    more = (">FLOPs per byte", ">of the peak", "!regime") if point else ()
    names = ("level", ">rate per device", ">ridge", ">critical batch", *more)
    rows: list[tuple[str, ...]] = []
    for row in found["levels"]:
        cells = [row["level"], format_rate(row["bandwidth"]), number(row["ridge"]), number(row["critical_batch"])]
        rows.append((*cells, *((number(row["ccr"]), f"{row['efficiency']:.1%}", row["regime"]) if point else ())))
    parts: list[Any] = [
        heading("Communication roofline", f"data parallelism at {format_flops(found['peak'])} {found['precision']}"),
        filled(names, rows),
        Text(
            f"FLOPs per byte = 6·tokens / (2·bytes of a gradient); ridge = peak / rate, dense and in one direction; batch: {unit} per device",
            "dim",
        ),
    ]
    if point:
        parts.append(Text("; ".join(found["levels"][-1]["advice"]), "dim"))
    return parts


def number(value: float | None) -> str:
    """A number with separators; infinite where nothing is sent."""
    if value is None:
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def zero_page(found: Json) -> list[Any]:
    limit = found["limit_bytes"]
    walls = {wall["name"]: wall["largest"] for wall in found["wall"]}
    rows = []
    for row in found["stages"]:
        sizes = (format_decimal_bytes(part["bytes"], 4) for part in row["parts"])
        fits = Text("yes", "green") if row["bytes"] <= limit else Text("no", "red")
        rows.append(
            (
                row["name"],
                *sizes,
                format_decimal_bytes(row["bytes"], 4),
                fits,
                format_count(walls[row["name"]]),
                row["sent"],
            )
        )
    per = f"{zero_state_bytes(1, 1, 0):g} bytes per parameter; activations come on top"
    title = (
        f"{format_count(found['parameters'])} parameters on {found['ranks']:,} GPUs of {format_decimal_bytes(limit)}"
    )
    columns = (
        "stage",
        ">parameters",
        ">gradients",
        ">optimizer",
        ">state per GPU",
        "fits",
        ">largest model",
        "sent per step",
    )
    parts: list[Any] = [heading("ZeRO stages", title), filled(columns, rows), Text(f"{found['note']} {per}", "dim")]
    if found.get("plan"):
        whole = [
            (
                row["name"],
                format_decimal_bytes(row["bytes"]),
                "yes" if row["fits"] else "no",
                format_seconds(row["step_time_s"]),
                "this plan" if row["now"] else "",
            )
            for row in found["plan"]
        ]
        parts += [
            heading("This plan with each stage", "the whole memory, as estimated"),
            filled(("stage", ">peak", "fits", ">step", "~"), whole),
        ]
    return parts


def buckets_page(found: Json) -> list[Any]:
    if "counts" not in found:
        return timelines_page(found)
    rows = [
        (
            f"{row['buckets']:,}",
            format_decimal_bytes(row["bucket_bytes"]),
            format_seconds(row["exposed_s"]),
            "best" if row["buckets"] == found["best"] else "",
        )
        for row in found["counts"]
    ]
    ratio, least = found["overlap_ratio"], format_decimal_bytes(found["smallest_bucket_bytes"])
    seconds, backward = format_seconds(found["communication_s"]), format_seconds(found["backward_s"])
    verdict = "all but the last bucket can be hidden" if ratio <= 1 else "more than backward can hide"
    words = f"{format_decimal_bytes(found['gradient_bytes'])} take {seconds} behind {backward} of backward: overlap ratio {ratio:.3g}, {verdict}"
    return [
        heading("Gradient buckets", "T(k) = k·α + t/k"),
        filled((">buckets", ">bucket", ">exposed", "~"), rows),
        Text(f"{words}; a bucket below α·B = {least} is bound by latency", "dim"),
    ]


def timelines_page(found: Json) -> list[Any]:
    parts: list[Any] = [heading("Buckets and prefetching", found["note"])]
    for key, title in (("ddp", "DDP: gradients in buckets"), ("fsdp", "FSDP: weights of the next layer ahead")):
        if found[key]:
            rows = [(way["name"], format_seconds(way["end_s"])) for way in found[key]["ways"]]
            parts += [filled((title, ">ends after"), rows), Text(found[key]["formula"].partition("\n")[0], "dim")]
    return parts


def ranks_page(found: Json) -> list[Any]:
    if not found["axes"]:
        return [heading("Process groups", "one rank: no groups")]
    rows = []
    for one in found["axes"]:
        shown = [members(group) for group in one["ranks"][:MOST_GROUPS]]
        more = f" … {one['groups'] - MOST_GROUPS:,} more" if one["groups"] > MOST_GROUPS else ""
        rows.append(
            (one["axis"], one["size"], f"{one['groups']:,}", one["stride"], one["level"], "  ".join(shown) + more)
        )
    order = ", ".join(found["order"])
    return [
        heading(
            "Process groups", f"{found['world']:,} ranks, {found['node_size']} a node; fastest axis first: {order}"
        ),
        filled(("axis", ">ranks", ">groups", ">apart", "level", "groups of ranks"), rows),
    ]


def members(group: list[int]) -> str:
    """The ranks of a group: {0,8,16}, or {0,8 … 248} where they are many."""
    if len(group) <= 8:
        return "{" + ",".join(map(str, group)) + "}"
    return f"{{{group[0]},{group[1]} … {group[-1]}}}"


UNITS: dict[str, Callable[[float], str]] = {
    "share": lambda v: f"{v:.1%}",
    "s": lambda v: format_seconds(v, 4),
    "bit/s": lambda v: f"{v / 1e9:,.2f} Gb/s",
    "MiB": lambda v: f"{v / 2**20:,.4g} MiB",
    "GiB": lambda v: f"{v / 2**30:,.4g} GiB",
}


def modeler_page(found: Json) -> list[Any]:
    i = found["inputs"]
    rows = [
        (row["name"], "" if row["tool"] is None else UNITS[row["unit"]](row["tool"]), UNITS[row["unit"]](row["ours"]), row["formula"], row["why"])
        for row in found["rows"]
    ]  # fmt: skip
    advice = found["advice"]
    words = f"compute rate: {format_flops(found['rate']['flops_per_s'])} per GPU for a layer of width {i['hidden']:,} on {i['tokens']:,} tokens"
    parts: list[Any] = [
        heading(
            "Pipeline modeler",
            f"{i['stages']} stages × {i['microbatches']} micro-batches, {i['schedule']}, {i['precision']}, tp {i['tp']}",
        ),
        filled(("", ">published tool", ">here", "formula", "~difference"), rows),
        Text(f"chunks: {found['chunks']['formula']}", "dim"),
        Text(words, "dim"),
    ]
    if advice["low"]:
        ours = advice["ours"]
        parts.append(
            Text(
                f"efficiency {advice['efficiency_share']:.1%} is below 80%: {ours['microbatches']} micro-batches or {ours['stages']} stages reach it"
            )
        )
    return parts


PAGES: dict[str, Callable[[Json], list[Any]]] = {
    "crossover": crossover_page,
    "roofline": roofline_page,
    "zero": zero_page,
    "buckets": buckets_page,
    "ranks": ranks_page,
    "modeler": modeler_page,
}
