"""Goodput of the best plan for `meshwright plan`, and a page about 100,000 GPUs, checkpoint intervals and several sites.

`make pages` (`python -m meshwright.view.goodput docs/past-one-cluster.md`) writes it; a test compares the page with this module.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from meshwright.planner import goodput, sites
from meshwright.planner.cases import studies
from meshwright.planner.goodput import RESTART, SAVE
from meshwright.planner.result import Result
from meshwright.predict.estimate import Estimate, estimate
from meshwright.units import format_bytes, format_count, format_rate, format_seconds
from meshwright.view.tables import markdown_table

COPIES = (1, 2, 3, 6)
LINES = (12.5e9, 125e9, 1250e9)  # bytes/s per direction: 100 Gb/s, 1 and 10 Tb/s
BAR = 30


def rows(r: Result) -> Iterator[tuple[str, str]]:
    """Yield the effect of failures and of several sites on the best plan, as (name, text) rows."""
    if r.reliability is not None:
        yield from failures(r, r.reliability)
    if (c := r.crossing) is not None:
        sent = f"sends {format_bytes(c.site_bytes)} per step, {format_seconds(c.transfer_s)} at {format_rate(r.line)}"
        local = f", at most {c.share:.0%} longer if every {c.every} steps (local SGD, another algorithm)"
        longer = f"the step takes {c.slowdown:.2f}× as long if gradients are exchanged every step"
        yield f"{c.sites} sites", f"each runs this plan and {sent}: {longer}{local if c.every > 1 else ''}"


def failures(r: Result, rel: goodput.Reliability) -> Iterator[tuple[str, str]]:
    young = format_seconds(goodput.young_interval(rel.save, rel.mtbf))
    costs = f"a save blocks for {format_seconds(rel.save)}, a restart takes {format_seconds(rel.restart)}"
    yield "failures", f"one every {format_seconds(rel.mtbf)}; {costs}"
    yield "save every", f"{format_seconds(rel.interval)} (Daly; Young {young})"
    mfu = (r.prediction.mfu or 0) * rel.goodput
    left = f"{rel.goodput:.1%} of the time is useful training; MFU × goodput {mfu:.1%}"
    if (x := r.explanation.training) is not None and rel.goodput > 0:
        days, low, high = (d / rel.goodput for d in (x.days, x.days_low, x.days_high))
        left += f"; {days:,.1f} days ({low:,.1f} to {high:,.1f}) for {format_count(x.tokens)} tokens"
    yield "goodput", left
    near = [goodput.goodput(rel.interval * k, rel.save, rel.restart, rel.mtbf) for k in (0.25, 4)]
    yield "", f"saving four times as often: {near[0]:.1%}; a quarter as often: {near[1]:.1%}"
    for item in rel.assumed:
        yield "assumed", item


def page() -> str:
    """Return the page `docs/past-one-cluster.md`. Each function yields the blocks of a section, between which lines are blank."""
    start = studies.evaluate("llama3-405b").estimate
    return "\n\n".join([HEAD, *large(start), *saves(start), *between(start)]) + "\n"


HEAD = """# Past one cluster

Calculated, not run. The formulas are in `planner.goodput` and `planner.sites`; tests compare them with Llama 3's 419
interruptions in 54 days on 16,384 GPUs and with the failure rates of a research cluster."""
SCALED = "GPUs, tokens per step, step, MFU, efficiency, failure every, save every, goodput, MFU × goodput"
SITES = "sites, line, sent by a site, exchange, step without exchange, slowdown at H = 1, H for 5% slowdown"


def numbers(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table of numbers; commas separate the names of its columns."""
    return markdown_table([f">{name}" for name in columns.split(", ")], rows)


def large(start: Estimate) -> Iterator[str]:
    yield "## A hundred thousand GPUs"
    yield (
        f"Llama-3 405B's plan ({start.plan.title()}), with more data-parallel replicas and a batch that grows with them. Each device\n"
        f"fails once in {goodput.GPU_MTBF / goodput.DAY / 365:.1f} years, as in the training of Llama 3; a save blocks for {SAVE:.0f} s and\n"
        f"a restart takes {RESTART / 60:.0f} minutes."
    )
    rows = []
    for r in sites.scale_out(start, COPIES, SAVE, RESTART):
        tokens, rel = format_count(r.batch * start.workload.seq), r.reliability
        speed = (format_seconds(r.step_s), f"{r.mfu:.1%}", f"{r.efficiency:.1%}")
        failures = (format_seconds(rel.mtbf), format_seconds(rel.interval))
        rows.append((f"{r.gpus:,}", tokens, *speed, *failures, f"{r.goodput:.1%}", f"{r.effective_mfu:.1%}"))
    yield numbers(SCALED, rows)
    yield (
        "The step time stays the same, but failures become more frequent: their rate is the sum over all devices. The batch grows too,\n"
        "beyond the size that is useful for training. With a fixed batch (and plain 1F1B, since interleaving runs micro-batches in rounds of\n"
        "pp) each rank has fewer micro-batches, and the pipeline bubble takes a larger share of the step:"
    )
    plain = start.plan.but(virtual=1, schedule="1f1b", layers_per_stage=())
    fixed_batch = estimate(start.config.but(plan=plain))
    same_batch = sites.scale_out(fixed_batch, (1, 2, 4, 8), SAVE, RESTART, weak=False)
    cells = [(f"{r.gpus:,}", format_seconds(r.step_s), f"{r.mfu:.1%}", f"{r.efficiency:.1%}") for r in same_batch]
    yield numbers("GPUs, step, MFU, efficiency", cells)


def saves(start: Estimate) -> Iterator[str]:
    yield "## How often to save"
    size = goodput.checkpoint_bytes(start.model.total)
    yield (
        f"A checkpoint of {format_count(start.model.total)} parameters has {format_bytes(size)}. Goodput by the interval between\n"
        f"checkpoints, if a save blocks for {SAVE:.0f} s and a restart takes {RESTART / 60:.0f} minutes:"
    )
    for gpus in (16_384, 98_304):
        rel = goodput.reliability(gpus, SAVE, RESTART)
        young = format_seconds(goodput.young_interval(SAVE, rel.mtbf))
        yield f"{gpus:,} GPUs, a failure every {format_seconds(rel.mtbf)}: Young {young}, Daly {format_seconds(rel.interval)}"
        curve = goodput.curve(SAVE, RESTART, rel.mtbf)
        bars = [f"{format_seconds(t):>9}  {share:6.1%}  {'█' * round(BAR * share)}" for t, share in curve]
        yield "\n".join(["```", *bars, "```"])
    longest = goodput.largest_restart(0.9, SAVE, goodput.system_mtbf(goodput.GPU_MTBF, 98_304))
    shorter = "shorter checkpoints: no restart time is short enough"
    needed = f"a restart within {format_seconds(longest)}" if longest else shorter
    yield (
        "The curve is flat around its optimum: half or twice the best interval costs one or two percent. At 98,304 GPUs the best\n"
        f"interval loses {1 - rel.goodput:.0%} of the time; 90% goodput needs {needed}."
    )


def between(start: Estimate) -> Iterator[str]:
    yield "## Several sites"
    yield (
        "Each site runs the plan above, and only gradients are exchanged between sites, once per step or every H steps (local SGD,\n"
        "another algorithm with another loss curve). A site sends 2·(S−1)/S·N·bytes over the line."
    )
    rows = []
    for count, bandwidth in product((2, 4), LINES):
        c = sites.crossing(start, count, bandwidth, sites.LATENCY, dtype="bf16")
        times = (format_seconds(c.transfer_s), format_seconds(c.step_s), f"{c.slowdown:.2f}×")
        rows.append((str(count), format_rate(bandwidth), format_bytes(c.site_bytes), *times, str(c.every)))
    yield numbers(SITES, rows)
    yield "Tensor, context and pipeline groups must stay within a site: `meshwright lint` names the axes that do not, and what they cost there."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
