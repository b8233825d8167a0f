"""Goodput against the checkpoint interval: the share of wall time that is useful training, by Daly's formula (`planner.goodput`)."""

import math

from meshwright.planner import goodput
from meshwright.units import format_bytes, format_seconds
from meshwright.view.page.sheet import Part, panel, part, stats, text, view
from meshwright.view.page.subject import Subject

POINTS, REACH = 61, 32.0
TICKS = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 259200, 604800, 2592000)
CHOICES = {
    "mtbf": ("Time between failures", "as Llama 3’s GPUs", "30min", "1h", "3h", "12h", "3d"),
    "checkpoint": ("A save blocks for", "10 s (default)", "1s", "30s", "60s", "5min"),
    "restart": ("Restart takes", "5 min (default)", "30s", "2min", "10min", "30min"),
}


def data(subject: Subject) -> Part:
    """The curve around the best interval; options: mtbf, checkpoint and restart, as `plan` takes them."""
    options = {name: subject.option(name, "") for name in CHOICES}
    rel, gpus = goodput.read_reliability(subject.plan.world, **options), f"{subject.plan.world:,} GPUs"
    mfu, size = subject.estimate.prediction.mfu or 0.0, goodput.checkpoint_bytes(subject.model.total)
    young, useful = goodput.young_interval(rel.save, rel.mtbf), rel.goodput
    save, mtbf, every, by_young = map(format_seconds, (rel.save, rel.mtbf, rel.interval, young))
    curve = goodput.curve(rel.save, rel.restart, rel.mtbf, POINTS, REACH)
    note = f"Save every {every}: {useful:.1%} of the time is useful training, MFU × goodput = {mfu * useful:.1%}."
    least = max(0, math.floor(10 * min(share for _, share in curve)) / 10)
    best = f"Daly τ* = √(2·δ·M)·(1 + …) − δ = {every} with δ = {save}, M = {mtbf}"
    choices = [{"name": key, "label": label, "values": [["", usual], *more], "value": options[key]}
               for key, (label, usual, *more) in CHOICES.items()]  # fmt: skip
    return view(
        stats(("Goodput", useful, "share", {"detail": "share of wall time that is useful", "tone": "good" if useful > 0.9 else "warn"}),
              ("Save every", rel.interval, "s", {"detail": f"Daly; Young {by_young}", "formula": best}),
              ("Failure every", rel.mtbf, "s", {"detail": f"{gpus} together", "formula": f"one failure every {mtbf} on {gpus}"}),
              ("MFU × goodput", mfu * useful, "share", {"detail": f"MFU {mfu:.1%}"}),
              ("Checkpoint", size, "bytes", {"detail": "weights, masters, moments",
                                             "formula": f"{subject.model.total:,.0f} parameters × 14 bytes = {format_bytes(size)}"})),
        panel("Goodput by interval", note),
        part("choices", choices=choices),
        part("curves", label=note, height=300, left=68, marks=[{"at": rel.interval, "words": f"Daly {every}", "colour": "optimizer", "low": True}],
             x={"log": 10, "label": "time between checkpoints", "unit": "minutes", "ticks": [t for t in TICKS if curve[0][0] <= t <= curve[-1][0]]},
             y={"from": least, "to": 1, "label": "goodput", "unit": "share" if least > 0.85 else "percent"},
             series=[{"points": [list(one) for one in curve], "colour": "compute", "dots": False},
                     {"points": [[t, share, formula(t, share, rel)] for t, share in curve[::4]], "colour": "compute", "only": True},
                     {"points": [[young, useful, f"Young τ* = √(2·δ·M) = √(2 × {save} × {mtbf}) = {by_young}"]],
                      "colour": "tp", "shape": "diamond", "radius": 5, "only": True}]),
        text(f"Assumed: {'; '.join(rel.assumed)}.") if rel.assumed else None,
    )  # fmt: skip


def formula(interval: float, share: float, rel: goodput.Reliability) -> str:
    """Daly's expectation with its numbers."""
    return (
        f"τ = {format_seconds(interval)}: goodput = τ/M / (e^(R/M)·(e^((τ+δ)/M) − 1)) = {share:.1%} with M = {format_seconds(rel.mtbf)}, "
        f"δ = {format_seconds(rel.save)}, R = {format_seconds(rel.restart)}"
    )
