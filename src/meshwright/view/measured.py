"""The page of `meshwright measure`: each measured rank beside its prediction, and the step composed from them."""

from rich.console import Group, RenderableType

from meshwright.units import Json, counted, format_seconds
from meshwright.view.tables import filled


def page(result: Json) -> RenderableType:
    columns = ("!rank", ">stage", *beside("step"), *beside("allocated"), ">spread")
    ranks = filled(columns, map(rank_cells, result["ranks"]))
    rows = [
        (row["rank"], part, format_seconds(seconds))
        for row in result["ranks"]
        for part, seconds in sorted((row["parts_s"] or {}).items(), key=lambda item: -item[1])
    ]
    step = result["step"]
    seconds, low, high, compute, predicted = (
        format_seconds(step[key])
        for key in ("step_time_s", "step_time_low_s", "step_time_high_s", "compute_s", "predicted_s")
    )
    notes = dict.fromkeys(note for row in result["ranks"] for note in row["notes"])
    micro = {row["microbatches"] for row in result["ranks"]}
    return Group(
        f"[bold]{result['title']}[/] on {result['device']}: {counted(len(result['ranks']), 'measured rank')}, "
        f"{', '.join(map(str, sorted(micro)))} micro-batches",
        ranks,
        filled(("!rank", "part", ">seconds"), rows),
        f"Step of all ranks: {seconds} ({low} to {high}); compute of the busiest rank {compute}, measured; predicted {predicted}",
        f"[dim]assumed: {'; '.join(['network and schedule as predicted', *notes])}[/]",
    )


def beside(name: str) -> tuple[str, ...]:
    return f">{name}", ">predicted", ">difference"


def rank_cells(row: Json) -> tuple[object, ...]:
    """A measured rank beside its prediction."""
    cells: list[object] = [row["rank"], row["stage"]]
    for key, form in (("step_s", format_seconds), ("allocated_gib", "{:.2f} GiB".format)):
        measured, predicted = row[key], row["predicted"][key]
        cells += [form(measured), form(predicted), f"{predicted / measured - 1:+.1%}"]
    return *cells, f"{row['spread']:.0%}"
