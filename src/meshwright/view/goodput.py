"""Goodput of the best plan for `meshwright plan`, and a page about 100,000 GPUs, checkpoint intervals and several sites.

`make pages` (`python -m meshwright.view.goodput docs/past-one-cluster.md`) writes it; a test compares the page with this module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.cost.estimate import Estimate, estimate
from meshwright.planner import goodput, sites
from meshwright.planner.cases import studies
from meshwright.planner.goodput import RESTART, SAVE
from meshwright.planner.result import Result
from meshwright.units import format_bytes, format_count, format_rate, format_seconds

COPIES = (1, 2, 3, 6)
LINES = (12.5e9, 125e9, 1250e9)  # bytes/s a direction: 100 Gb/s, 1 and 10 Tb/s
BAR = 30


def rows(r: Result) -> Iterator[tuple[str, str]]:
    """The effect of failures and of several sites on the best plan, as (name, text) rows."""
    if r.reliability is not None:
        yield from surviving(r, r.reliability)
    if (c := r.crossing) is not None:
        sent = f"sends {format_bytes(c.site_bytes)} a step, {format_seconds(c.transfer_s)} at {format_rate(r.line)}"
        every = (
            f", within {c.share:.0%} if every {c.every} steps (local updates: another algorithm)" if c.every > 1 else ""
        )
        yield (
            f"{c.sites} sites",
            f"each runs this plan and {sent}: {c.slowdown:.2f}× the step if gradients cross every step{every}",
        )


def surviving(r: Result, rel: goodput.Reliability) -> Iterator[tuple[str, str]]:
    young = format_seconds(goodput.young_interval(rel.save, rel.mtbf))
    habits = f"a save blocks for {format_seconds(rel.save)}, a restart takes {format_seconds(rel.restart)}"
    yield "failures", f"one every {format_seconds(rel.mtbf)}; {habits}"
    yield "save every", f"{format_seconds(rel.interval)} (Daly; Young {young})"
    left = f"{rel.goodput:.1%} of the time moves training on; MFU × goodput {(r.prediction.mfu or 0) * rel.goodput:.1%}"
    if (x := r.explanation.training) is not None and rel.goodput > 0:
        days, low, high = (d / rel.goodput for d in (x.days, x.days_low, x.days_high))
        left += f"; {days:,.1f} days ({low:,.1f} to {high:,.1f}) for {format_count(x.tokens)} tokens"
    yield "goodput", left
    near = [goodput.goodput(rel.interval * k, rel.save, rel.restart, rel.mtbf) for k in (0.25, 4)]
    yield "", f"saving four times as often: {near[0]:.1%}; four times as seldom: {near[1]:.1%}"
    for item in rel.assumed:
        yield "assumed", item


def page() -> str:
    start = studies.evaluate("llama3-405b").estimate
    return "\n".join([*head(), *large(start), *saves(start), *between(start)]).rstrip() + "\n"


def head() -> Iterator[str]:
    yield "# Past one cluster"
    yield ""
    yield "Calculated, not run. The formulas are in `planner.goodput` and `planner.sites`; tests compare them with Llama 3's 419"
    yield "interruptions in 54 days on 16,384 GPUs and to the failure rates of a research cluster."
    yield ""


def large(start: Estimate) -> Iterator[str]:
    yield "## A hundred thousand GPUs"
    yield ""
    yield f"Llama-3 405B's plan ({start.plan.title()}), repeated along data parallelism with the batch growing alongside. Devices fail as"
    yield f"Llama 3's did, once in {goodput.GPU_MTBF / goodput.DAY / 365:.1f} years each; a save blocks for {SAVE:.0f} s and a restart"
    yield f"takes {RESTART / 60:.0f} minutes."
    yield ""
    yield "| GPUs | tokens a step | step | MFU | efficiency | failure every | save every | goodput | MFU × goodput |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for r in sites.scale_out(start, COPIES, SAVE, RESTART):
        tokens = format_count(r.batch * start.workload.seq)
        rel = r.reliability
        yield (
            f"| {r.gpus:,} | {tokens} | {format_seconds(r.step_s)} | {r.mfu:.1%} | {r.efficiency:.1%} | {format_seconds(rel.mtbf)} | "
            f"{format_seconds(rel.interval)} | {r.goodput:.1%} | {r.effective_mfu:.1%} |"
        )
    yield ""
    yield "The step time stays the same, but failures become more frequent: their rate is the sum over all devices. The batch grows too, past"
    yield "what training can use well. With a fixed batch (and plain 1F1B, since interleaving runs micro-batches in rounds of pp) each rank"
    yield "has fewer micro-batches, and the pipeline bubble takes a larger share of the step:"
    yield ""
    yield "| GPUs | step | MFU | efficiency |"
    yield "| ---: | ---: | ---: | ---: |"
    plain = start.plan.but(virtual=1, schedule="1f1b")
    held = estimate(start.model, start.cluster, plain, start.workload, start.stack)
    for r in sites.scale_out(held, (1, 2, 4, 8), SAVE, RESTART, weak=False):
        yield f"| {r.gpus:,} | {format_seconds(r.step_s)} | {r.mfu:.1%} | {r.efficiency:.1%} |"
    yield ""


def saves(start: Estimate) -> Iterator[str]:
    yield "## How often to save"
    yield ""
    size = goodput.checkpoint_bytes(start.model.total)
    yield f"A checkpoint of {format_count(start.model.total)} parameters holds {format_bytes(size)}. Goodput against the interval between"
    yield f"checkpoints that block for {SAVE:.0f} s, with restarts of {RESTART / 60:.0f} minutes:"
    for gpus in (16_384, 98_304):
        rel = goodput.reliability(gpus, SAVE, RESTART)
        young = format_seconds(goodput.young_interval(SAVE, rel.mtbf))
        yield ""
        yield f"{gpus:,} GPUs, a failure every {format_seconds(rel.mtbf)}: Young {young}, Daly {format_seconds(rel.interval)}"
        yield ""
        yield "```"
        for interval, share in goodput.curve(SAVE, RESTART, rel.mtbf):
            yield f"{format_seconds(interval):>9}  {share:6.1%}  {'█' * round(BAR * share)}"
        yield "```"
    mtbf = goodput.system_mtbf(goodput.GPU_MTBF, 98_304)
    longest = goodput.largest_restart(0.9, SAVE, mtbf)
    yield ""
    yield "Around its optimum the curve is flat: half or twice the best interval costs one or two percent. At 98,304 GPUs the best"
    needed = (
        f"a restart within {format_seconds(longest)}"
        if longest
        else "shorter checkpoints: no restart time is short enough"
    )
    yield f"interval loses {1 - rel.goodput:.0%} of the time; for 90% goodput there it takes {needed}."
    yield ""


def between(start: Estimate) -> Iterator[str]:
    yield "## Several sites"
    yield ""
    yield "Each site runs the plan above, and only gradients cross between sites, once per step or every H steps (local SGD, another"
    yield "algorithm with another loss curve). A site sends 2·(S−1)/S·N·bytes over the line."
    yield ""
    yield "| sites | line | sent by a site | exchange | step alone | every step | H for 5% |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for count in (2, 4):
        for bandwidth in LINES:
            c = sites.crossing(start, count, bandwidth, sites.LATENCY, dtype="bf16")
            yield (
                f"| {count} | {format_rate(bandwidth)} | {format_bytes(c.site_bytes)} | {format_seconds(c.transfer_s)} | "
                f"{format_seconds(c.step_s)} | {c.slowdown:.2f}× | {c.every} |"
            )
    yield ""
    yield "Tensor, context and pipeline groups must stay within a site: `planner.sites.axes_across` lists the axes that span a level, and `lint`"
    yield "shows what they cost there."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
