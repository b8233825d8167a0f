"""Goodput against the checkpoint interval: the share of wall time that is useful training, by Daly's formula (`planner.goodput`)."""

from typing import Any

from meshwright.planner import goodput
from meshwright.units import format_bytes, format_seconds
from meshwright.view.page.subject import Subject

POINTS, REACH = 61, 32.0


def data(subject: Subject) -> dict[str, Any]:
    """The curve around the best interval; options: mtbf, checkpoint and restart, as `plan` takes them."""
    options = {name: subject.option(name, "") for name in ("mtbf", "checkpoint", "restart")}
    rel = goodput.read_reliability(subject.plan.world, **options)
    young = goodput.young_interval(rel.save, rel.mtbf)
    curve = goodput.curve(rel.save, rel.restart, rel.mtbf, POINTS, REACH)
    mfu = subject.estimate.prediction.mfu or 0.0
    size = goodput.checkpoint_bytes(subject.model.total)
    save, mtbf = format_seconds(rel.save), format_seconds(rel.mtbf)
    return {
        "gpus": subject.plan.world,
        "mtbf_s": rel.mtbf,
        "checkpoint_s": rel.save,
        "restart_s": rel.restart,
        "daly_s": rel.interval,
        "young_s": young,
        "goodput": rel.goodput,
        "mfu": mfu,
        "effective_mfu": mfu * rel.goodput,
        "checkpoint_bytes": size,
        "assumed": list(rel.assumed),
        "curve": [{"interval_s": t, "goodput": share, "formula": formula(t, rel)} for t, share in curve],
        "formulas": {
            "daly_s": f"Daly τ* = √(2·δ·M)·(1 + …) − δ = {format_seconds(rel.interval)} with δ = {save}, M = {mtbf}",
            "young_s": f"Young τ* = √(2·δ·M) = √(2 × {save} × {mtbf}) = {format_seconds(young)}",
            "mtbf_s": f"one failure every {format_seconds(rel.mtbf)} on {subject.plan.world:,} GPUs",
            "checkpoint_bytes": f"{subject.model.total:,.0f} parameters × 14 bytes = {format_bytes(size)}",
        },
        "note": f"Save every {format_seconds(rel.interval)}: {rel.goodput:.1%} of the time is useful training, "
        f"MFU × goodput = {mfu * rel.goodput:.1%}.",
    }


def formula(interval: float, rel: goodput.Reliability) -> str:
    """Daly's expectation with its numbers."""
    share = goodput.goodput(interval, rel.save, rel.restart, rel.mtbf)
    return (
        f"τ = {format_seconds(interval)}: goodput = τ/M / (e^(R/M)·(e^((τ+δ)/M) − 1)) = {share:.1%} with M = {format_seconds(rel.mtbf)}, "
        f"δ = {format_seconds(rel.save)}, R = {format_seconds(rel.restart)}"
    )
