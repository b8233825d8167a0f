"""The catalog in the terminal: one table per kind, one card per entry, each with its sources."""

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe import catalog
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.cluster import Cluster, Link
from meshwright.describe.config import load_cluster
from meshwright.describe.model import Model
from meshwright.describe.result import values_of
from meshwright.describe.stack import Stack
from meshwright.formulas import cluster_ridges
from meshwright.interop.frameworks import FRAMEWORKS
from meshwright.units import Json, format_bytes, format_count, format_flops, format_rate, format_seconds
from meshwright.view.tables import facts, filled, heading


def overview() -> RenderableType:
    """The number of entries of each kind, with examples."""
    rows = [(kind, len(catalog.names(kind)), ", ".join(catalog.names(kind)[-4:])) for kind in catalog.KINDS]
    return Group(
        filled(("kind", ">entries", "~examples"), rows),
        Text("meshwright catalog KIND lists all entries; meshwright catalog KIND NAME shows one", "dim"),
    )


def listing(kind: str) -> RenderableType:
    """All entries of a kind."""
    columns, row = LISTS[kind]
    return filled(columns, (row(catalog.load(kind, name)) for name in catalog.names(kind)))


def card(kind: str, name: str) -> RenderableType:
    """One entry in full."""
    return CARDS[kind](entry_of(kind, name))


def entry_of(kind: str, name: str) -> Any:
    """The object of a catalog name, or of a cluster file."""
    return load_cluster(name) if kind == "clusters" and name.endswith(".toml") else catalog.load(kind, name)


def as_json(kind: str, name: str) -> Json:
    """One entry as JSON: every field, for a model its parameter counts, for a cluster the ridge of each level."""
    entry = entry_of(kind, name)
    out = entry.model_dump(mode="json")
    if isinstance(entry, Model):
        out |= {"parameters": entry.total, "active_parameters": entry.active, "parameters_by_part": entry.parameters()}
    if isinstance(entry, Cluster):
        out["ridge_by_level"] = {level.level: level.ridge for level in cluster_ridges(entry)}
    return out


# Frameworks


def frameworks_json() -> Json:
    """The frameworks that settings are written for, with the versions whose own parser was given what we write."""
    return {
        f.name: {
            **values_of(f, "title"),
            "package": f.package or f.name,
            **values_of(f, "form", "stack"),
            "versions_tried": list(f.tried),
            "part_tried": f.tried_part,
        }
        for f in FRAMEWORKS.values()
    }


def frameworks() -> RenderableType:
    tried = {f.name: ", ".join(f.tried) + (f": {f.tried_part}" if f.tried_part else "") for f in FRAMEWORKS.values()}
    rows = [(f.name, f.title, f.form, tried[f.name]) for f in FRAMEWORKS.values()]
    note = "versions tried: the package's own parser read what we write (make test-frameworks). Other versions may refuse it."
    return Group(filled(("--for", "framework", "form", "~versions tried"), rows), Text(note, "dim"))


# Models


def model_row(model: Model) -> tuple[object, ...]:
    active = format_count(model.active) if model.experts else ""
    return model.name, format_count(model.total), active, model.describe_shape()


def model_card(model: Model) -> RenderableType:
    seq = model.max_positions or 4096
    parameters = model.parameters()
    sparse = f", {format_count(model.active, 4)} active per token" if model.experts else ""
    published = model.published
    figures = []
    if published.parameters:
        difference = model.total / published.parameters - 1
        figures.append(f"{format_count(published.parameters, 4)} ({difference:+.2%} ours)")
    if published.active:
        figures.append(f"{format_count(published.active, 4)} active")
    size = [("shape", model.describe_shape()), ("parameters", f"{format_count(model.total, 4)}{sparse}")]
    top = facts([*size, ("published", ", ".join(figures)), ("source", published.source), ("note", published.note)])
    if model.kind == "counts":
        return Group(heading(model.name), top)
    flops = model.flops(seq)
    rows = []
    for part in {**parameters, **flops}:
        count = (
            (format_count(parameters[part]), f"{parameters[part] / model.total:.1%}")
            if part in parameters
            else ("", "")
        )
        rows.append((part, *count, format_count(flops[part]) if part in flops else ""))
    columns = ("part", ">parameters", ">share", f">forward FLOPs per token, sequence {seq}")
    return Group(heading(model.name), top, filled(columns, rows))


# Clusters and what they are made of


def cluster_row(cluster: Cluster) -> tuple[object, ...]:
    """One row, such as `dgx-h100  h100-sxm  8  nvlink4 378 GB/s  ib-ndr 40 GB/s  2.6k · 25k`; rates are per device, ridges in FLOPs per byte."""
    links, ridges = [], [format_count(level.ridge, 2) for level in cluster_ridges(cluster)]
    for k, level in enumerate(cluster.levels):
        over = f" 1:{level.oversubscription:g}" if level.oversubscription > 1 else ""
        links.append(f"{level.link.name} {format_rate(cluster.device_bandwidth(k))}{over}")
    price = f"{cluster.price:.2f}" if cluster.price else ""
    between = " · ".join(dict.fromkeys(links[1:]))
    ridge = " · ".join(dict.fromkeys(ridges))
    return cluster.name, cluster.accelerator.name, cluster.node_size, links[0], between, ridge, price


def cluster_card(cluster: Cluster) -> RenderableType:
    rows = []
    ridges = cluster_ridges(cluster)
    for k, level in enumerate(cluster.levels):
        last = k == len(cluster.levels) - 1 and k > 0
        asides = [
            f"{level.ports} cards per node" if level.ports else "",
            f"1:{level.oversubscription:g} oversubscribed" if level.oversubscription > 1 else "",
            "one shared bus" if level.shared else "",
            "reduction in the switch" if level.reduces else "",
        ]
        link, words = level.link, ", ".join(filter(None, asides))
        joins, device = "any" if last else level.size, format_rate(cluster.device_bandwidth(k))
        rows.append((level.name, joins, link.name, *link_numbers(link), device, f"{ridges[k].ridge:,.0f}", words))
    columns = ("level", ">joins", "link", ">rate per port", ">achieved", ">α", ">rate per device", ">ridge", "~")
    ridge_words = Text(
        "ridge: FLOPs per byte sent at which compute and communication take equally long (bf16; show roofline)", "dim"
    )
    price = f"{cluster.price:.2f} US dollars per GPU-hour (approximate)" if cluster.price else ""
    known = [("accelerator", accelerator_line(cluster.accelerator)), ("price", price)]
    sources = facts({level.link.name: level.link.source for level in cluster.levels}.items())
    return Group(heading(cluster.name), facts([*known, *origin(cluster)]), filled(columns, rows), ridge_words, sources)


def origin(entry: Any) -> list[tuple[str, object]]:
    return [("source", entry.source), ("checked", entry.checked)]


def accelerator_line(device: Accelerator) -> str:
    main = "bf16" if "bf16" in device.peak else next(iter(device.peak))
    return (
        f"{device.name}: {format_flops(device.peak[main])} {main}, {format_bytes(device.memory)} "
        f"at {format_rate(device.memory_bandwidth)}"
    )


def accelerator_row(device: Accelerator) -> tuple[object, ...]:
    peaks = [
        f"{device.peak[d] / 1e12:,.4g}" if d in device.peak else "" for d in ("fp32", "tf32", "bf16", "fp8", "fp4")
    ]
    if not peaks[2] and "fp16" in device.peak:
        peaks[2] = f"{device.peak['fp16'] / 1e12:,.4g} (fp16)"
    return device.name, format_bytes(device.memory, 4), format_rate(device.memory_bandwidth), *peaks


def accelerator_card(device: Accelerator) -> RenderableType:
    memory = f"{format_bytes(device.memory, 4)} at {format_rate(device.memory_bandwidth)}"
    top = facts([("memory", memory), *origin(device), ("efficiency", device.efficiency.source)])
    rows = [(d, format_flops(rate, 4), f"{rate / device.memory_bandwidth:,.0f}") for d, rate in device.peak.items()]
    return Group(heading(device.name), top, filled(("type", ">dense peak", ">FLOPs per byte at the ridge"), rows))


def link_row(link: Link) -> tuple[object, ...]:
    return link.name, *link_numbers(link), format_bytes(link.crossover), link.source


def link_numbers(link: Link) -> tuple[str, str, str]:
    return format_rate(link.bandwidth), f"{link.efficiency:.0%}", format_seconds(link.alpha)


def link_card(link: Link) -> RenderableType:
    rate = f"{format_rate(link.bandwidth)} per direction and port, {link.efficiency:.0%} of it achieved"
    turn = f"{format_bytes(link.crossover)}: smaller messages are bound by latency, larger ones by bandwidth"
    times = [("α", format_seconds(link.alpha)), ("library hop", format_seconds(link.library_hop)), ("n* = α/β", turn)]
    top = facts([("rate", rate), *times, *origin(link)])
    rows = [
        (format_bytes(n), format_seconds(link.time(n)), format_rate(n / link.time(n))) for n in (2**10, 2**20, 2**30)
    ]
    return Group(heading(link.name), top, filled((">message", ">time", ">rate"), rows))


def stack_row(stack: Stack) -> tuple[object, ...]:
    overlaps = ", ".join(stack.overlap) or "nothing"
    return stack.name, format_seconds(stack.launch), stack.attention, overlaps, ", ".join(stack.order), stack.source


def stack_card(stack: Stack) -> RenderableType:
    rows = [
        (name, value if not isinstance(value, tuple) else ", ".join(map(str, value)) or "nothing")
        for name, value in stack.model_dump(exclude={"name"}).items()
    ]
    return Group(heading(stack.name), facts(rows))


LISTS: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[object, ...]]]] = {
    "models": (("model", ">parameters", ">active", "~shape"), model_row),
    "clusters": (("cluster", "accelerator", ">node", "inside", "between", ">ridge", ">$/h"), cluster_row),
    "accelerators": (
        ("accelerator", ">memory", ">bandwidth", ">fp32", ">tf32", ">bf16", ">fp8", ">fp4 TFLOP/s"),
        accelerator_row,
    ),
    "links": (("link", ">rate", ">achieved", ">α", ">n*", "~source"), link_row),
    "stacks": (("stack", ">launch", "attention", "overlaps", "order", "~source"), stack_row),
}
CARDS: dict[str, Callable[[Any], RenderableType]] = {
    "models": model_card,
    "clusters": cluster_card,
    "accelerators": accelerator_card,
    "links": link_card,
    "stacks": stack_card,
}
