"""`docs/accuracy.md`, written by `meshwright validate --markdown`: every figure on the page is computed from the published runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.calibrate.runs import published
from meshwright.calibrate.runs.accuracy import Accuracy
from meshwright.calibrate.runs.left_out import SEEN, LeftOut
from meshwright.calibrate.runs.stack_fit import FREEDOM, MOST_RUNS, NOISE
from meshwright.calibrate.runs.validate import NOT_FOR_TIME
from meshwright.cost.band import base, shares
from meshwright.view.left_out import number_cells, percent
from meshwright.view.validate import headline_cells

INTRODUCTION = """# Accuracy: predictions compared with published runs

Written by `meshwright validate --headline --markdown docs/accuracy.md` from the {rows:,} published runs that come with Meshwright ({failed} of them
failed). A blank cell of a table means *not published*; `--json` lists what was assumed for each row. Errors are |predicted / measured − 1|.

## Sources that the fit has not seen

Each source is predicted with the numbers of its stack from **other** sources (*source left out*); a stack that no other source uses gets the numbers
of the typical stack. Then one, two or five of its runs are seen (`meshwright calibrate --from-run`), and the others predicted. *Model left out*:
all runs of the source are seen but those of the same hidden size and number of layers. *As shipped*: the catalog's numbers, fitted to all sources.
"""
HOW = """
## How the numbers are fitted

Constants of hardware come from measured products and collectives, from one H200, and from datasheets. A stack has switches (what is fused,
what overlaps, its attention kernel, what selective recompute means, whether its dispatch removes duplicates) from its code and papers, and six
numbers: host time of an operator; rates of matrix products, of attention and of collectives over their benchmarked rates; time of memory-bound
operations over one pass per kernel; share of compute that hides communication. `meshwright calibrate --runs published` fits the numbers of all
stacks at once (`calibrate/runs/stack_fit.py`): population → stack → source, each level normal with a prior, errors of a run
Student's t with {freedom:g} degrees of freedom and a scale of {noise:.0%} (more where communication or the host dominate). All runs of a source
count as at most {most:g}.
Shares of peak are not fitted to runs (`benchmarks/shares.py` compares them with what was measured): those of H100 and H200 are what `meshwright
bench` measured on one H200, those of B200 and MI355X come from measured products. No operation of an A100 was measured: its products and copies
reach the shares of Hopper, its attention the rate of the paper of flash attention 2. Switches, assumptions for unpublished settings and the
scales of the priors were chosen while looking at left-out errors, and the bytes that nanotron saves were fitted to its own runs. So were the
host time of a collective over that of an operator (Megatron-LM 0.5, nanotron 3, others 2) and the rate of the scan of Mamba-2 (half of
attention's). Expectation maximisation, with the widths of the priors between sources as four sources more, changes none of them by more than
10%, but for what all numbers have in common (0.05 instead of 0.08), and no error by more than 0.3 points. A stack that is no longer in
use (`obsolete`) does not count in the typical one.
"""


def document(found: Accuracy) -> str:
    """The whole page."""
    parts = [
        INTRODUCTION.format(rows=len(found.outcomes) + len(found.failed), failed=len(found.failed)),
        sources_table(found),
        HOW.format(freedom=FREEDOM, noise=NOISE[0], most=MOST_RUNS),
        stacks(found),
        bands(found),
        memory(found),
        misses(found),
        regrets(found),
        headlines(found),
        licences(),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose other columns are numbers."""
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def sources_table(found: Accuracy) -> str:
    names = ("source", "rows", "stack known", "bias", "source left out", "p90", *(f"after {n}" for n in SEEN))
    rows = []
    for name, s in found.unseen.items():
        after = [percent(s.after[count]) for count in SEEN]
        shipped = found.sources[name].median if name in found.sources else None
        known = "yes" if s.stack_known else "no"
        cells = (percent(s.bias, True), percent(s.median), percent(s.p90), *after, percent(s.model), percent(shipped))
        rows.append((name, str(s.runs), known, *cells))
    o = found.unseen_overall
    means = [percent(o[key]) for key in ("median", "p90", *(f"after_{n}" for n in SEEN), "model")]
    last = ["**macro average**", "", "", percent(o["bias"], True), *means, percent(found.overall.get("median"))]
    head = (*names, "model left out", "as shipped")
    return table(head, [*rows, [f"**{c}**" if c and "*" not in c else c for c in last]]) + _floor(found)


def _floor(found: Accuracy) -> str:
    """How much of the error a calibration can remove at all: that of six numbers fitted to all runs of a source remains."""
    if found.left_out is None:
        return ""
    left = found.left_out
    floor = _macro_median(left.by_source(np.abs(np.expm1(left.fitted))))
    seen = np.isfinite(left.after[1])  # runs of a source and stack that have another run
    error = np.where(seen, np.abs(np.expm1(left.source)), np.nan)
    before, one = (_macro_median(left.by_source(sizes)) for sizes in (error, left.after[1]))
    worse, most = _most_harm(left.by_source(error), left.by_source(left.after[1]))
    return (
        f"\n\nOne run takes {percent(1 - one / before)} of the error off (target: a quarter). The source whose mean error grows most by it is "
        f"{worse}, by {100 * most:.1f} points (the standard error of the mean error of its 12 runs is 0.9 points). The median of papers_misc "
        "grows, its mean does not: it has the runs of four papers, and a run of one says nothing of the others. With the full prior in the place "
        "of an average over its scale (`calibrate/runs/posterior.py`) one run "
        "takes 9% off, but makes the mean error of five sources larger, by 10 to 44%. Which sources are off as a whole cannot be seen from one run: "
        "if the update by one run is multiplied by the best factor of each source, known beforehand, it takes 17% off: the "
        f"bound of such factors. With all runs of a source seen, {percent(floor)} remain: six numbers of a stack cannot explain more."
        " The scales of that average were chosen after seeing these errors; the "
        "9, 17, 10 to 44% and 0.9 points were measured once, outside this command."
    )


def _macro_median(by_source: dict[str, np.ndarray]) -> float:
    """The mean over sources of the median of their runs; runs that are NaN do not count, nor do sources with less than two others."""
    known = [sizes[np.isfinite(sizes)] for sizes in by_source.values()]
    return float(np.mean([np.median(sizes) for sizes in known if len(sizes) > 1]))


def _most_harm(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> tuple[str, float]:
    """The source whose mean error grows most, and by how much."""
    growth = {
        name: float(np.nanmean(after[name]) - np.nanmean(before[name]))
        for name in after
        if np.isfinite(after[name]).any()
    }
    return max(growth.items(), key=lambda item: item[1])


def stacks(found: Accuracy) -> str:
    if found.left_out is None:
        return ""
    fit = found.left_out.fit
    names = sorted({leaf.family for leaf in fit.leaves if not leaf.family.startswith("unknown")})
    rows = []
    for name in [*names, "typical"]:
        normal = fit.population() if name == "typical" else fit.family(name)
        spread = np.sqrt(np.diag(normal.covariance))
        count = sum(len(leaf.runs) for leaf in fit.leaves if leaf.family == name)
        rows.append((name, str(count or ""), *number_cells(normal.mean, spread)))
    return table(("stack", "rows", "launch", "products", "attention", "elementwise", "network", "hides"), rows)


def bands(found: Accuracy) -> str:
    rows = [
        (
            level,
            str(b.runs),
            f"{100 * math.expm1(-b.low * base(level)):+.0f}% to {100 * math.expm1(b.high * base(level)):+.0f}%",
            percent(b.coverage),
            percent(b.half_width),
        )
        for level, b in found.bands.items()
    ]
    text = (
        "## Bands\n\nFrom the residuals of left-out sources, by what is known of the stack; wider where exposed communication between nodes, the "
        "host, experts or a device with assumed shares of peak dominate (`cost/band.py`), and scaled until 90% of the runs of a source are inside "
        "whose residuals were not used. Target: a median half-width of 35% for an unknown stack and 15% for a known one.\n\n"
    )
    head = ("what is known", "runs", "band of a step that only computes", "inside", "median half-width")
    return text + table(head, rows) + _widths_by_source(found)


def _widths_by_source(found: Accuracy) -> str:
    """What the width of the bands of a published stack consists of."""
    if "published" not in found.bands:
        return ""
    text = (
        "\n\nThe bands of a published stack by source: the share of its runs inside quantiles of the other sources, and its median half-width. Nine "
        "of ten runs of every source cannot be inside narrow bands while some sources have runs that the cost model does not explain: in "
        "megatron_bridge_perf_summary recompute, CUDA graphs and overlap are not published, and experts on GB200 and GB300 take 0.4 to "
        "1.7 times the prediction (without this source the half-width is 2 points smaller); all of bigscience_bloom is slower than predicted. The "
        "coefficients of the width were chosen on a grid of 480; chosen without the source on which they are scored, they give 90% and the same "
        "half-widths. Widths from the fit's covariance make it larger. Runs of other sources on one stack differ by 8% in all their times together "
        "(`stack_fit.BETWEEN_SOURCES`), which alone is a half-width of 13%. "
        "In megatron_sc21 six of 22 runs are ZeRO-3 of an early DeepSpeed (`deepspeed-2021`): it gathers parameter by parameter, which explains half "
        "of what they take above their compute; they count as an unknown stack.\n\n"
    )
    rows = [
        (name, percent(inside), percent(half)) for name, (inside, half) in found.bands["published"].by_source.items()
    ]
    return text + table(("source", "inside", "median half-width"), rows)


def regrets(found: Accuracy) -> str:
    """The mean slowdown of the configuration that is predicted to be the fastest, by source."""
    rows = [(name, percent(s.regret)) for name, s in found.unseen.items() if s.regret is not None]
    if not rows:
        return ""
    text = (
        "## Regret\n\nSlowdown of the configuration that is predicted to be the fastest of a group (same source, model, GPUs and batch), against the "
        "measured fastest; mean over groups, source left out. Target: 3%. In bigscience_bloom each time is one iteration of one run; of the plan "
        "with the largest regret, a micro-batch of 1 took 43% longer than one of 2. In ultrascale_playbook a third of the runs on 512 GPUs took "
        "three to six times as long as predicted, while others with the same degrees are within 16%, and many runs with both tensor and pipeline "
        "parallelism took two to five times as long. In vtrain_ground_truth the choice is between plans "
        "that are predicted within 10% of each other on one node, and the measured time of a layer under tensor parallelism does not grow evenly "
        "with the micro-batch (hidden size 2048, tp 4: 3.2, 3.1, 5.5 and 8.1 ms for 1, 2, 4 and 8 sequences).\n\n"
    )
    rows.append(("**macro average**", f"**{percent(found.unseen_overall['regret'])}**"))
    return text + table(("source", "mean regret"), rows)


def memory(found: Accuracy) -> str:
    rows = [
        (name, percent(s.memory_median), percent(s.false_alarms))
        for name, s in sorted(found.sources.items())
        if s.memory_median is not None
    ]
    o = found.overall
    alarms = percent(o.get("false_alarms"))
    text = (
        "## Memory\n\nPeak memory, of the quantity that a source reports: *allocated* (torch's live tensors), *reserved* (with fragments) or *used* "
        f"(nvidia-smi). Runs that finished although we predict that they do not fit: {alarms} macro-averaged. "
    )
    if "recall_failed" in o:
        text += (
            f"Of {len(found.failed)} runs of the H100 sweep that crashed or ran out of memory, {percent(o['recall_failed'])} are predicted not to "
            "fit (the cause of a crash is not published). "
        )
    rows.append(("**macro average**", f"**{percent(o.get('memory_median'))}**", f"**{alarms}**"))
    return text + "\n\n" + table(("source", "median error", "finished, predicted not to fit"), rows)


def misses(found: Accuracy) -> str:
    """What the largest left-out errors have in common."""
    if found.left_out is None:
        return ""
    text = (
        "## What the residuals consist of\n\nMedian error and bias of left-out predictions by the largest part besides compute, by GPU and "
        "by kind of model. A term that did not help left-out sources was deleted.\n\n"
    )
    rows = [
        row
        for label, groups in residual_groups(found.left_out).items()
        for row in _group_rows(label, groups, found.left_out)
    ]
    return text + table(("group", "runs", "bias", "median error", "p90"), rows)


def residual_groups(left_out: LeftOut) -> dict[str, list[str]]:
    """Labels of every run, by kind of label."""
    by_part, by_gpu, by_kind = [], [], []
    for o in left_out.runs:
        communication, host, bubble = shares(o.prediction.exposed_s) if o.prediction else (0.0, 0.0, 0.0)
        largest = max(
            (communication, "communication above 15% of the step"),
            (host, "host above 15%"),
            (bubble, "bubble above 15%"),
        )
        by_part.append(largest[1] if largest[0] > 0.15 else "compute")
        by_gpu.append(o.case.cluster.accelerator.name if o.case.cluster else "")
        by_kind.append("experts" if o.case.model and o.case.model.experts else "dense")
    return {"part": by_part, "GPU": by_gpu, "model": by_kind}


def _group_rows(label: str, groups: list[str], left_out: LeftOut) -> list[tuple[str, ...]]:
    names, error = np.array(groups), np.expm1(left_out.source)
    rows: list[tuple[str, ...]] = []
    for name in sorted(set(groups)):
        part = error[names == name]
        size = np.abs(part)
        cells = (
            percent(float(np.median(part)), True),
            percent(float(np.median(size))),
            percent(float(np.quantile(size, 0.9))),
        )
        rows.append((f"{label}: {name}", str(len(part)), *cells))
    return rows


def headlines(found: Accuracy) -> str:
    if not found.headlines:
        return ""
    rows = [headline_cells(o) for o in found.headlines]
    text = (
        "## Well-known runs\n\n`meshwright validate --headline`. Settings that were not published are assumed: the least recompute that fits, 1F1B "
        "where the interleaving is unknown.\n\n"
    )
    return text + table(("run", "plan", "measured", "predicted", "band", "error"), rows)


def licences() -> str:
    rows = sorted(published.licences().items())
    note = f"\nScored for memory only: {', '.join(NOT_FOR_TIME)}.\n"
    lines = ["| source | licence |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)]
    return "## Sources and licences\n\n" + "\n".join(lines) + "\n" + note
