"""`docs/accuracy.md`, written by `meshwright validate --markdown`: every figure on the page is computed from the published runs."""

import math
from statistics import NormalDist

import numpy as np

from meshwright.calibrate.runs import accuracy
from meshwright.calibrate.runs.accuracy import FEWEST, INSIDE, Accuracy, Band, half_width_without
from meshwright.calibrate.runs.beside import QUOTED
from meshwright.calibrate.runs.left_out import BUILDING, SEEN, TESTING, LeftOut, half_of, halves, macro_scores, scores
from meshwright.calibrate.runs.stack_fit import BETWEEN_SOURCES, FREEDOM, MOST_RUNS, NOISE
from meshwright.calibrate.runs.validate import NOT_FOR_TIME, macro
from meshwright.cost.band import base
from meshwright.view.accuracy_regret import regrets, table
from meshwright.view.tables import markdown_table
from meshwright.view.validate import (
    PEER_COLUMNS,
    half_means,
    headline_cells,
    peer_rows,
    percent,
    residual_groups,
    stack_rows,
    unseen_cells,
    unseen_means,
)

INTRODUCTION = """# Accuracy: predictions compared with published runs

Written by `meshwright validate --headline --beside benchmarks/peers.csv --markdown docs/accuracy.md` from the {rows:,} published runs that come
with Meshwright ({failed} of them failed). Of those that finished, {refused} are refused (their shape, degrees or batch are not published, contradict
each other or cannot be described) and the step times of {not_scored:,} are not scored (none is published, a repetition disagrees, or the source is
for memory only): `meshwright validate` counts them by source and lists the reasons. A blank cell of a table means *not published*; `--json` lists
what was assumed for each row. Errors are |predicted / measured − 1|.

## Sources that the fit has not seen

Each source is predicted with the numbers of its stack from **other** sources (*source left out*); a stack that no other source uses gets the numbers
of the typical stack. Then one, two or five of its runs are seen (`meshwright calibrate --from-run`), and the others predicted. *Model left out*:
all runs of the source are seen but those of the same hidden size and number of layers. *As shipped*: the catalog's numbers, fitted to all sources.
Switches of stacks and terms of the cost model are chosen by looking at sources of the *building* half; the *testing* half says what that does
elsewhere. A hash of a source's name decides (`calibrate/runs/left_out.py`). Earlier choices looked at both halves.
"""
HOW = """
## How the numbers are fitted

Constants of hardware come from measured products and collectives, from one H200, and from datasheets. A stack has switches (what is fused,
what overlaps, its attention kernel, what selective recompute means, whether its dispatch removes duplicates) from its code and papers, and six
numbers: host time of an operator; rates of matrix products, of attention and of collectives between nodes over their benchmarked rates (inside
nodes collectives reach them); time of memory-bound operations over one pass per kernel; share of compute that hides communication. `meshwright
calibrate --runs published` fits the numbers of all stacks at once (`calibrate/runs/stack_fit.py`): population → stack → source, each level normal
with a prior, errors of a run Student's t with {freedom:g} degrees of freedom and a scale of {noise:.0%} (more where communication or the host
dominate). All runs of a source count as at most {most:g}.
Shares of peak are not fitted to runs (`benchmarks/shares.py` compares them with what was measured): those of H100 and H200 are what `meshwright
bench` measured on one H200, those of B200 and MI355X come from measured products. The rates of GB200, B300 and GB300 come from NVIDIA's tables of
its kernels (`tests/cost/test_published_kernels.py`). No operation of an A100 was measured: its products and copies
reach the shares of Hopper, its attention the rate of the paper of flash attention 2. Switches, assumptions for unpublished settings and the
scales of the priors were chosen while looking at left-out errors; so was the faster of two hosts on which the copy of a shard in nanotron's
ZeRO-1 was measured (10.5 and 22 µs). The bytes that nanotron saves were fitted to its own runs. The host time of a collective over that of an
operator (Megatron-LM 0.5, others 2) and the rate of the scan of Mamba-2 (half of attention's) were fitted to runs too. Expectation maximisation,
with the widths of the priors between sources as four sources more, changes none of them by more than 10%, but for what all numbers have in
common (0.05 instead of 0.08), and no error by more than 0.3 points. A stack that is no longer in use (`obsolete`) does not count in the typical
one.
"""
MISSES = """## What the residuals consist of

Median error and bias of left-out predictions by the largest part besides compute, by GPU and by kind of model. A term that did not help left-out
sources was deleted. One of them is real, a product whose tiles do not fill the last wave of processors: 150 products on one H200 follow the
formula without it within 1.6% (median), with it within 2.3%. The tables of Megatron-Bridge have no CUDA graphs, dispatchers, overlap of expert
messages, recompute, multi-token prediction and stages: those are from the settings of each release (`benchmarks/bridge_settings.csv`). Runs with
graphs of the whole step are predicted as well as others with them, and half too slow without. gpt-oss is predicted too fast, most with few
expert ranks; one of its runs on GB300 has a slow kernel (NVIDIA/cudnn-frontend#256, as its table says). Qwen3 235B with plain all-to-alls between
nodes is predicted too slow. Attention in mxfp8 is not modelled: by NVIDIA's tables (cudnn-frontend, benchmark/sdpa_benchmark_training) it gains
nothing with heads of 128, and a quarter with DeepSeek's. Nor are products that a recipe keeps in bf16 in every layer, and rows that graphs of
the whole step pad. [Plan quality](plan-quality.md) has the choices of plans."""


BAND_COLUMNS = (
    "what is known", "runs", "band of a step that only computes", "inside: building", "testing", "fewest inside", "median half-width",
    "mean of medians",
)  # fmt: skip


def document(accuracy: Accuracy) -> str:
    """The whole page."""
    parts = [
        introduction(accuracy),
        sources_table(accuracy),
        HOW.format(freedom=FREEDOM, noise=NOISE[0], most=MOST_RUNS),
        stacks(accuracy),
        bands(accuracy),
        memory(accuracy),
        misses(accuracy),
        regrets(accuracy),
        headlines(accuracy),
        beside_others(accuracy),
        licences(),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def introduction(accuracy: Accuracy) -> str:
    counts = {name: sum(getattr(s, name) for s in accuracy.sources.values()) for name in ("refused", "not_scored")}
    return INTRODUCTION.format(
        rows=len(accuracy.outcomes) + len(accuracy.failed), failed=len(accuracy.failed), **counts
    )


def sources_table(accuracy: Accuracy) -> str:
    names = ("source", "half", "rows", "stack known", "bias", "source left out", "p90", *(f"after {n}" for n in SEEN))
    shipped = {name: score.median for name, score in accuracy.sources.items()}
    rows = [[*unseen_cells(name, s), percent(shipped.get(name))] for name, s in accuracy.unseen.items()]
    for half, values in half_means(accuracy.unseen).items():
        median = macro(halves(accuracy.sources)[half.split()[0]]).get("median")
        rows.append([half, "", "", "", *unseen_means(values), percent(median)])
    means = [*unseen_means(accuracy.unseen_overall), percent(accuracy.overall.get("median"))]
    head = (*names, "model left out", "as shipped")
    return table(head, [*rows, ["**macro average**", "", "", "", *(f"**{mean}**" for mean in means)]]) + _floor(
        accuracy
    )


def _floor(accuracy: Accuracy) -> str:
    """Return how much of the error a calibration can remove at all: that of six numbers fitted to all runs of a source remains."""
    left = accuracy.left_out
    if left is None or not np.isfinite(left.after[1]).any():
        return ""
    floor = _macro_median(left.by_source(np.abs(np.expm1(left.fitted))))
    seen = np.isfinite(left.after[1])  # runs of a source and stack that have another run
    error = np.where(seen, np.abs(np.expm1(left.source)), np.nan)
    before, one = (_macro_median(left.by_source(sizes)) for sizes in (error, left.after[1]))
    before_of, after_of = left.by_source(error), left.by_source(left.after[1])
    worse, most = _most_harm(before_of, after_of)
    sizes = before_of[worse][np.isfinite(before_of[worse])]
    return (
        f"\n\nOne run takes {percent(1 - one / before)} of the error off (target: a quarter). The source whose mean error grows most by it is "
        f"{worse}, by {100 * most:.1f} points (the standard error of the mean error of its {len(sizes)} runs is "
        f"{100 * sizes.std(ddof=1) / math.sqrt(len(sizes)):.1f} points). Which sources are off as a whole cannot be seen from one run, so a "
        "calibration averages over that (`calibrate/runs/stack_fit.py`); the scales of that average were chosen after seeing these errors. With "
        f"all runs of a source seen, {percent(floor)} remain: six numbers of a stack cannot explain more.{_unnamed(accuracy)}"
    )


def _unnamed(accuracy: Accuracy) -> str:
    """The errors of a user whose framework is not in the catalog."""
    if accuracy.unnamed is None:
        return ""
    o = macro_scores(scores(accuracy.unnamed))
    after = ", ".join(f"{percent(o[f'after_{n}'])} after {n}" for n in SEEN)
    return (
        "\n\nIf no run named its stack, as for a framework that is not in the catalog, all would be predicted with the typical one, from runs of "
        "other frameworks only: a macro-averaged "
        f"median of {percent(o['median'])} (90th percentile {percent(o['p90'])}), {after} of the source's runs ({len(accuracy.unnamed.runs)} runs, "
        "a part of each large source). From these come the bands of an unknown stack, also of one that is calibrated: the numbers of a stack do not "
        "make up for unknown switches."
    )


def _macro_median(by_source: dict[str, np.ndarray]) -> float:
    """The mean over sources of the median of their runs; runs that are NaN do not count, nor do sources with less than two others."""
    known = [sizes[np.isfinite(sizes)] for sizes in by_source.values()]
    return float(np.mean([np.median(sizes) for sizes in known if len(sizes) > 1]))


def _most_harm(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> tuple[str, float]:
    """The source whose mean error grows most, and by how much."""
    seen = [name for name in after if np.isfinite(after[name]).any()]
    growth = {name: float(np.nanmean(after[name]) - np.nanmean(before[name])) for name in seen}
    return max(growth.items(), key=lambda item: item[1])


def stacks(accuracy: Accuracy) -> str:
    if accuracy.left_out is None:
        return ""
    head = ("stack", "rows", "launch", "products", "attention", "elementwise", "network", "hides")
    return table(head, stack_rows(accuracy.left_out.fit))


def bands(accuracy: Accuracy) -> str:
    rows = []
    for level, b in accuracy.bands.items():
        edges = " to ".join(f"{100 * math.expm1(x * base(level)):+.0f}%" for x in (-b.low, b.high))
        inside = *(percent(b.inside(half)) for half in (BUILDING, TESTING)), _fewest_inside(b)
        rows.append((level, str(b.runs), edges, *inside, percent(b.half_width), percent(b.mean_of_medians)))
    text = (
        "## Bands\n\nFrom the residuals of left-out sources, by what is known of the stack; wider where exposed communication between nodes, the "
        "host, experts or a device with assumed shares of peak dominate (`cost/band.py`). The variance is that between sources and that within "
        f"one; it is scaled until, of the building half, {INSIDE:.0%} of the runs of a source whose residuals were not used are inside, in the "
        f"mean, and {FEWEST:.0%} of the worst source. For an unknown stack all sources of a framework are left out together: no run of it, nor "
        "of its forks, was seen. Runs of obsolete stacks do not count. Target: a median half-width of 35% for an unknown stack and 15% for a "
        "known one. "
        "In the median over all runs every source has the same weight; the mean over sources of their medians is larger, because a few of them "
        "have wide bands.\n\n"
    )
    return text + table(BAND_COLUMNS, rows) + _widths_by_source(accuracy)


def _fewest_inside(b: Band) -> str:
    """The source with the smallest share of runs inside the band, and that share."""
    name = min(b.by_source, key=lambda source: b.by_source[source][0])
    return f"{percent(b.by_source[name][0])} ({name})"


def _widths_by_source(accuracy: Accuracy) -> str:
    """Tabulate the contributions to the width of the bands of known stacks."""
    if "published" not in accuracy.bands or accuracy.left_out is None:
        return ""
    common = math.sqrt(BETWEEN_SOURCES[0, 1])  # of ln seconds, in all numbers of a source together
    alone = math.sinh(deviations_inside() * common)
    text = (
        "\n\nThe bands of a published and of a calibrated stack by source: the share of its runs inside bands from the other sources, its "
        "median half-width, and the half-width of this level if the source did not exist. Nine of ten runs of every source cannot be inside "
        "narrow bands while some sources have runs that the cost model does not explain: in megatron_bridge_perf_summary recompute is "
        "not published. The coefficients of the width were chosen on a grid of the building half. "
        "Widths from the fit's covariance make it larger. Separate bands for runs with and "
        "without experts, pipelines, several nodes or Blackwell GPUs do not make it clearly smaller. Runs of other sources on one stack "
        "differ by "
        f"{common:.0%} in all their times together (`stack_fit.BETWEEN_SOURCES`), which alone is a half-width of {alone:.0%}. In megatron_sc21 "
        "the runs with ZeRO-3 of an early DeepSpeed (`deepspeed-2021`) count as an unknown stack: it gathers parameter by parameter.\n\n"
    )
    cells: dict[str, list[str]] = {}
    levels = [level for level in ("published", "calibrated") if level in accuracy.bands]
    names = sorted({name for level in levels for name in accuracy.bands[level].by_source})
    for level in levels:
        without, known = half_width_without(accuracy.left_out, level), accuracy.bands[level].by_source
        for name in names:
            values = (*known[name], without.get(name)) if name in known else (None, None, None)
            cells.setdefault(name, [name]).extend(percent(value) if value is not None else "–" for value in values)
    head = [f"{level}: {column}" for level in levels for column in ("inside", "half-width", "all without it")]
    return text + table(("source", *head), [tuple(row) for row in cells.values()])


def deviations_inside() -> float:
    """Return how many standard deviations on either side of the mean hold the share `INSIDE` of a normal distribution."""
    return NormalDist().inv_cdf((1 + INSIDE) / 2)


def memory(accuracy: Accuracy) -> str:
    rows = [
        (name, half_of(name), percent(s.memory_median), percent(s.false_alarms))
        for name, s in sorted(accuracy.sources.items())
        if s.memory_median is not None
    ]
    o = accuracy.overall
    alarms = percent(o.get("false_alarms"))
    text = (
        "## Memory\n\nPeak memory, of the quantity that a source reports: *allocated* (torch's live tensors), *reserved* (with fragments) or *used* "
        f"(nvidia-smi). Runs that finished although we predict that they do not fit: {alarms} macro-averaged. "
    )
    if "recall_failed" in o:
        text += (
            f"Of {len(accuracy.failed)} runs of the H100 sweep that crashed or ran out of memory, {percent(o['recall_failed'])} are predicted not to "
            "fit (the cause of a crash is not published). "
        )
    for half, part in halves(accuracy.sources).items():
        means = macro(part)
        rows.append((f"{half} half", "", percent(means.get("memory_median")), percent(means.get("false_alarms"))))
    rows.append(("**macro average**", "", f"**{percent(o.get('memory_median'))}**", f"**{alarms}**"))
    return text + "\n\n" + table(("source", "half", "median error", "finished, predicted not to fit"), rows)


def misses(accuracy: Accuracy) -> str:
    """Describe what the largest left-out errors have in common."""
    if accuracy.left_out is None:
        return ""
    text = MISSES + _largest_runs(accuracy.left_out) + "\n\n"
    kinds = residual_groups(accuracy.left_out).items()
    rows = [row for label, groups in kinds for row in _group_rows(label, groups, accuracy.left_out)]
    return text + table(("group", "runs", "bias", "median error", "p90"), rows)


def _largest_runs(left_out: LeftOut) -> str:
    """The largest cluster of the nanotron sweep, whose runs and whose collectives are both slower than those of the next smaller one suggest."""
    gpus = np.array([o.plan.world if o.source == "ultrascale_playbook" and o.plan else 0 for o in left_out.runs])
    error = np.expm1(left_out.source)
    if not (gpus == 512).any() or not (gpus == 256).any():
        return ""
    large, small = (percent(float(np.median(error[gpus == n])), True) for n in (512, 256))
    slow = int((error[gpus == 512] < -0.5).sum())
    return (
        f" In ultrascale_playbook the bias is {large} on 512 GPUs and {small} on 256: {slow} of {int((gpus == 512).sum())} runs took more than twice "
        "the prediction, others of the same layout did not. The collectives published for this cluster slow down there too: an all-reduce of 256 MB "
        "takes 8.2 ms on 256 GPUs and 16.3 ms on 512."
    )


def _group_rows(label: str, groups: list[str], left_out: LeftOut) -> list[tuple[str, ...]]:
    names, error = np.array(groups), np.expm1(left_out.source)
    rows: list[tuple[str, ...]] = []
    for name in sorted(set(groups)):
        part = error[names == name]
        size = np.abs(part)
        sizes = (percent(float(np.quantile(size, q))) for q in (0.5, 0.9))
        rows.append((f"{label}: {name}", str(len(part)), percent(float(np.median(part)), True), *sizes))
    return rows


def headlines(accuracy: Accuracy) -> str:
    if not accuracy.headlines:
        return ""
    rows = [headline_cells(o) for o in accuracy.headlines]
    text = (
        "## Well-known runs\n\n`meshwright validate --headline`. Settings that were not published are assumed: the least recompute that fits, 1F1B "
        "where the interleaving is unknown.\n\n"
    )
    return text + table(("run", "plan", "measured", "predicted", "band", "error"), rows)


OTHERS = """## Beside other tools

On the same runs, ours with their source left out. llm-analysis 0.2.2 was run by us with the rates that its page recommends where nothing was
measured, half of the peak FLOP/s and nine tenths of the bandwidth (`benchmarks/llm_analysis_times.py`). To compare a tool, or your own runs:

<!-- not run: needs the runs of a user -->
```console
$ meshwright validate RUNS.csv --beside PREDICTIONS.csv
```

RUNS.csv has the columns of the published runs (at least `file,row_id,model,gpu_type,gpus,tp,pp,global_batch,seq_len,step_time_s`), PREDICTIONS.csv
has `row_id,tool,step_time_s`. `benchmarks/torchtitan.csv` has torchtitan's published tables in this form; they are in no fit.

"""
QUOTES = """
What projects publish of themselves, by their own measure, not computed by us:

"""


def beside_others(accuracy: Accuracy) -> str:
    """Other tools on the same runs, and what projects publish of their errors."""
    if not accuracy.beside:
        return ""
    head = [column.lstrip(">") for column in PEER_COLUMNS]
    quotes = table(("tool", "runs", "error", "published in"), [tuple(quote) for quote in QUOTED])
    return OTHERS + table(head, peer_rows(accuracy)) + "\n" + QUOTES + quotes


def licences() -> str:
    rows = sorted(accuracy.licences().items())
    note = f"\nScored for memory only: {', '.join(NOT_FOR_TIME)}.\n"
    return "## Sources and licences\n\n" + markdown_table(("source", "licence"), rows) + "\n" + note
