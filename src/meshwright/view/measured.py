"""The page of `meshwright measure`: each measured rank beside its prediction, and the step composed from them."""

from rich.console import Group, RenderableType

from meshwright.units import Json, format_seconds
from meshwright.view.tables import table


def page(result: Json) -> RenderableType:
    ranks = table(
        "!rank", ">stage", ">step", ">predicted", ">difference", ">allocated", ">predicted", ">difference", ">spread"
    )
    for row in result["ranks"]:
        p = row["predicted"]
        ranks.add_row(
            str(row["rank"]),
            str(row["stage"]),
            format_seconds(row["step_s"]),
            format_seconds(p["step_s"]),
            f"{p['step_s'] / row['step_s'] - 1:+.1%}",
            f"{row['allocated_gib']:.2f} GiB",
            f"{p['allocated_gib']:.2f} GiB",
            f"{p['allocated_gib'] / row['allocated_gib'] - 1:+.1%}",
            f"{row['spread']:.0%}",
        )
    parts = table("!rank", "part", ">seconds")
    for row in result["ranks"]:
        for part, seconds in sorted((row["parts_s"] or {}).items(), key=lambda item: -item[1]):
            parts.add_row(str(row["rank"]), part, format_seconds(seconds))
    step = result["step"]
    seconds, low, high, compute, predicted = (
        format_seconds(step[key])
        for key in ("step_time_s", "step_time_low_s", "step_time_high_s", "compute_s", "predicted_s")
    )
    notes = dict.fromkeys(note for row in result["ranks"] for note in row["notes"])
    micro = {row["microbatches"] for row in result["ranks"]}
    return Group(
        f"[bold]{result['title']}[/] on {result['device']}: {len(result['ranks'])} measured "
        f"rank{'s' * (len(result['ranks']) != 1)}, {', '.join(map(str, sorted(micro)))} micro-batches",
        ranks,
        parts,
        f"Step of all ranks: {seconds} ({low} to {high}); compute of the busiest rank {compute}, measured; predicted {predicted}",
        f"[dim]assumed: {'; '.join(['network and schedule as predicted', *notes])}[/]",
    )
