"""The tables of `meshwright show crossover`, `roofline`, `zero`, `buckets`, `ranks` and `modeler`, from the data of `numbers`."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from rich.text import Text

from meshwright.cost.memory import zero_state_bytes
from meshwright.units import Json, format_count, format_decimal_bytes, format_flops, format_rate, format_seconds
from meshwright.view.tables import Columns, filled, heading, listed

MOST_GROUPS = 8  # groups of an axis that are printed; --json has all


def page(topic: str, found: Json) -> list[Any]:
    """The tables of a topic."""
    return PAGES[topic](found)


def crossover_page(found: Json) -> list[Any]:
    columns: Columns = {
        "link": itemgetter("link"),
        ">α": lambda row: format_seconds(row["latency_s"]),
        ">rate": lambda row: format_rate(row["bandwidth"]),
        ">n* = α·B": lambda row: format_decimal_bytes(row["crossover_bytes"], 4),
    }
    if size := found["size_bytes"]:
        columns[f">{format_decimal_bytes(size)} takes"] = lambda row: format_seconds(row["time_s"])
        columns["bound by"] = itemgetter("regime")
    note = "below n* latency dominates: fuse, use trees; above it bandwidth: use rings, compress, overlap"
    advice = found["links"][0].get("advice") if len(found["links"]) == 1 else None
    words = Text("; ".join(advice) if advice else note, "dim")
    return [heading("Crossover", "T(n) = α + n·β"), listed(found["links"], columns), words]


def plan_roofline_page(found: Json) -> list[Any]:
    columns: Columns = {
        "level": itemgetter("level"),
        ">rate per device": lambda c: format_rate(c["bandwidth"]),
        ">sent per step": lambda c: format_decimal_bytes(c["bytes"]),
        ">FLOPs per byte": lambda c: number(c["ccr"]),
        ">ridge": lambda c: number(c["ridge"]),
        ">of the peak": lambda c: f"{c['efficiency']:.0%}",
    }
    words = f"{found['regime']}; the tightest level is {found['level']}: {'; '.join(found['advice'])}"
    return [heading("Communication roofline", found["plan"]), listed(found["ceilings"], columns), Text(words, "dim")]


def roofline_page(found: Json) -> list[Any]:
    if "plan" in found:
        return plan_roofline_page(found)
    unit = "sequences" if found["seq"] else "tokens"
    columns: Columns = {
        "level": itemgetter("level"),
        ">rate per device": lambda row: format_rate(row["bandwidth"]),
        ">ridge": lambda row: number(row["ridge"]),
        ">critical batch": lambda row: number(row["critical_batch"]),
    }
    terms = "FLOPs per byte = 6·tokens / (2·bytes of a gradient); ridge = peak / rate, dense and in one direction"
    notes = [f"{terms}; batch: {unit} per device"]
    if "ccr" in found["levels"][0]:
        columns[">FLOPs per byte"] = lambda row: number(row["ccr"])
        columns |= {">of the peak": lambda row: f"{row['efficiency']:.1%}", "!regime": itemgetter("regime")}
        notes.append("; ".join(found["levels"][-1]["advice"]))
    about = f"data parallelism at {format_flops(found['peak'])} {found['precision']}"
    title = heading("Communication roofline", about)
    return [title, listed(found["levels"], columns), *(Text(note, "dim") for note in notes)]


def number(value: float | None) -> str:
    """A number with separators; infinite where nothing is sent."""
    if value is None:
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def zero_page(found: Json) -> list[Any]:
    limit = found["limit_bytes"]
    walls = {wall["name"]: wall["largest"] for wall in found["wall"]}
    parts = (">parameters", ">gradients", ">optimizer")

    def size_of(k: int) -> Callable[[Json], str]:
        return lambda row: format_decimal_bytes(row["parts"][k]["bytes"], 4)

    columns: Columns = {
        "stage": itemgetter("name"),
        **{name: size_of(k) for k, name in enumerate(parts)},
        ">state per GPU": lambda row: format_decimal_bytes(row["bytes"], 4),
        "fits": lambda row: Text("yes", "green") if row["bytes"] <= limit else Text("no", "red"),
        ">largest model": lambda row: format_count(walls[row["name"]]),
        "sent per step": itemgetter("sent"),
    }
    per = f"{zero_state_bytes(1, 1, 0):g} bytes per parameter; activations come on top"
    where = f"{found['ranks']:,} GPUs of {format_decimal_bytes(limit)}"
    title = heading("ZeRO stages", f"{format_count(found['parameters'])} parameters on {where}")
    out = [title, listed(found["stages"], columns), Text(f"{found['note']} {per}", "dim")]
    if found.get("plan"):
        whole: Columns = {
            "stage": itemgetter("name"),
            ">peak": lambda row: format_decimal_bytes(row["bytes"]),
            "fits": lambda row: "yes" if row["fits"] else "no",
            ">step": lambda row: format_seconds(row["step_time_s"]),
            "~": lambda row: "this plan" if row["now"] else "",
        }
        out += [heading("This plan with each stage", "the whole memory, as estimated"), listed(found["plan"], whole)]
    return out


def buckets_page(found: Json) -> list[Any]:
    if "counts" not in found:
        return timelines_page(found)
    columns: Columns = {
        ">buckets": lambda row: f"{row['buckets']:,}",
        ">bucket": lambda row: format_decimal_bytes(row["bucket_bytes"]),
        ">exposed": lambda row: format_seconds(row["exposed_s"]),
        "~": lambda row: "best" if row["buckets"] == found["best"] else "",
    }
    ratio, least = found["overlap_ratio"], format_decimal_bytes(found["smallest_bucket_bytes"])
    seconds, backward = format_seconds(found["communication_s"]), format_seconds(found["backward_s"])
    verdict = "all but the last bucket can be hidden" if ratio <= 1 else "more than backward can hide"
    words = f"{format_decimal_bytes(found['gradient_bytes'])} take {seconds} behind {backward} of backward: overlap ratio {ratio:.3g}, {verdict}"
    return [
        heading("Gradient buckets", "T(k) = k·α + t/k"),
        listed(found["counts"], columns),
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
    columns: Columns = {
        "axis": itemgetter("axis"),
        ">ranks": itemgetter("size"),
        ">groups": lambda one: f"{one['groups']:,}",
        ">apart": itemgetter("stride"),
        "level": itemgetter("level"),
        "groups of ranks": groups,
    }
    about = f"{found['world']:,} ranks, {found['node_size']} a node; fastest axis first: {', '.join(found['order'])}"
    return [heading("Process groups", about), listed(found["axes"], columns)]


def groups(one: Json) -> str:
    """The first groups of an axis."""
    more = f" … {one['groups'] - MOST_GROUPS:,} more" if one["groups"] > MOST_GROUPS else ""
    return "  ".join(members(group) for group in one["ranks"][:MOST_GROUPS]) + more


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
    i, advice = found["inputs"], found["advice"]
    columns: Columns = {
        "": itemgetter("name"),
        ">published tool": lambda row: "" if row["tool"] is None else UNITS[row["unit"]](row["tool"]),
        ">here": lambda row: UNITS[row["unit"]](row["ours"]),
        "formula": itemgetter("formula"),
        "~difference": itemgetter("why"),
    }
    words = f"compute rate: {format_flops(found['rate']['flops_per_s'])} per GPU for a layer of width {i['hidden']:,} on {i['tokens']:,} tokens"
    shape = f"{i['stages']} stages × {i['microbatches']} micro-batches, {i['schedule']}, {i['precision']}, tp {i['tp']}"
    out: list[Any] = [heading("Pipeline modeler", shape), listed(found["rows"], columns)]
    out += [Text(f"chunks: {found['chunks']['formula']}", "dim"), Text(words, "dim")]
    if advice["low"]:
        enough = "{microbatches} micro-batches or {stages} stages reach it".format(**advice["ours"])
        out.append(Text(f"efficiency {advice['efficiency_share']:.1%} is below 80%: {enough}"))
    return out


PAGES: dict[str, Callable[[Json], list[Any]]] = {
    "crossover": crossover_page,
    "roofline": roofline_page,
    "zero": zero_page,
    "buckets": buckets_page,
    "ranks": ranks_page,
    "modeler": modeler_page,
}
