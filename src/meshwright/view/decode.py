"""The page of `estimate --decode`: what is kept of a sequence, the time of a token by sequences of a replica, and other degrees of parallelism."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.describe.result import GIB
from meshwright.predict.decode import Decoding, TokenTime
from meshwright.units import counted, format_bytes, format_seconds
from meshwright.view.tables import Columns, filled, heading, listed

PARTS = ("weights", "cache", "communication", "other")
OTHERS = (">tp", ">ep", ">replicas", ">prefill", ">one token", ">most", ">its token", ">tokens/s per GPU")


def page(d: Decoding) -> RenderableType:
    caches = [
        (name, number, format_bytes(size / number), format_bytes(size))
        for (name, (number, _)), size in zip(d.caches.items(), d.cache_bytes.values(), strict=True)
    ]

    def seconds(part: str) -> Callable[[TokenTime], str]:
        return lambda row: format_seconds(row.parts_s[part])

    tokens: Columns = {
        ">sequences": lambda row: f"{row.sequences:,}",
        ">token": lambda row: format_seconds(row.token_s),
        ">tokens/s": lambda row: f"{row.tokens_per_s:,.0f}",
        ">per GPU": lambda row: f"{row.tokens_per_s / d.plan.world:,.0f}",
        **{f">{part}": seconds(part) for part in PARTS},
        ">memory": lambda row: f"{row.memory_gib:.1f} GiB",
        "!bound by": lambda row: row.bound_by if row.fits else "does not fit",
    }
    prompt = f"prefill of {d.context:,} tokens: {format_seconds(d.prefill_s)} to the first token of one sequence"
    return Group(
        heading(f"{d.config.model.name} on {d.plan.world} × {d.config.cluster.accelerator.name}", title(d)),
        Text(f"weights {d.weights_gib:.1f} GiB on each device; {prompt}"),
        Text(""),
        heading("KV cache", f"of one sequence of {d.context:,} tokens"),
        filled(("mixer", ">layers", ">a layer", ">all layers"), caches),
        heading("One token of each sequence", "sequences of a replica"),
        listed(d.table, tokens),
        Text(crossing(d)),
        Text(""),
        heading("Other degrees", "one sequence of a replica, and the most that fit"),
        filled(OTHERS, map(other, d.alternatives)),
        *(Text(f"assumed: {words}", "dim") for words in d.assumed),
    )


def title(d: Decoding) -> str:
    ep = f", ep {d.plan.ep}" if d.plan.ep > 1 else ""
    return f"tp {d.plan.tp}{ep}, {counted(d.plan.dp, 'replica')}, {d.config.workload.precision}"


def crossing(d: Decoding) -> str:
    """Where decoding stops being bound by memory, in words."""
    products, whole = d.compute_bound_products, d.compute_bound_sequences
    text = (
        f"Products with weights are bound by memory below {products:,} sequences of a replica"
        if products
        else "Products are always bound by memory"
    )
    if whole is None:
        return f"{text}; with the cache decoding always is: a sequence's cache takes longer to read than its token to compute."
    return f"{text}, all of decoding below {whole:,}; {d.most_sequences:,} fit."


def other(d: Decoding) -> tuple[str, ...]:
    first, last = d.ends
    degrees = str(d.plan.tp), str(d.plan.ep), str(d.plan.dp), format_seconds(d.prefill_s), format_seconds(first.token_s)
    if not d.most_sequences:
        return (*degrees, f"0 ({first.memory_gib:.0f} of {d.config.cluster.accelerator.memory / GIB:.0f} GiB)", "", "")
    return (*degrees, f"{d.most_sequences:,}", format_seconds(last.token_s), f"{last.tokens_per_s / d.plan.world:,.0f}")
