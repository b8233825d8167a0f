"""Predictions of other tools beside ours, on the same runs.

A file of predictions has the columns `row_id`, `tool` and `step_time_s`; a tool may predict some of the runs only. Our error of a run is that with
its source left out where sources can be left out, otherwise that of the catalog's numbers. `benchmarks/llm_analysis_times.py` writes such a file.

What other projects publish of their own errors on these sources, or on hardware that these sources have, is quoted in `QUOTED`.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.calibrate.runs.left_out import LeftOut
from meshwright.calibrate.runs.rows import number
from meshwright.calibrate.runs.validate import Outcome, not_scored
from meshwright.errors import MeshwrightError

COLUMNS = ("row_id", "tool", "step_time_s")


class Quoted(NamedTuple):
    """What a project publishes of its errors of step time."""

    tool: str
    runs: str
    error: str
    where: str


QUOTED = (
    Quoted("vTrain", "vtrain_ground_truth, its runs on one node", "8.4% mean", "vTrain (MICRO 2024)"),
    Quoted("vTrain", "vtrain_ground_truth, its runs on several nodes", "14.7% mean", "vTrain (MICRO 2024)"),
    Quoted("Calculon", "the eight runs of Korthikanti et al., table 5", "3.7% mean, 8.9% at most", "Calculon (SC23)"),
    Quoted("SimuMax", "43 runs on B200: Llama 3, DeepSeek, long contexts", "-13.5% to +0.1%", "SimuMax, docs/FULL_RESULTS.md"),
    Quoted("SimuMax", "Llama 3 70B on 8 A100 PCIe, 12 runs", "-3.1% to +2.1%", "SimuMax, docs/FULL_RESULTS.md"),
)  # fmt: skip


@dataclass(frozen=True)
class PeerScore:
    """The errors of one tool on one source, and ours on the same runs."""

    source: str
    tool: str
    runs: int
    mean: float
    median: float
    our_mean: float
    our_median: float


def read(path: str) -> dict[str, dict[str, float]]:
    """Predicted seconds by tool and run."""
    if not Path(path).is_file():
        fix = "give a CSV with the columns " + ", ".join(COLUMNS)
        raise MeshwrightError("MW-VAL-001", f"{path!r} is not a file", fix=fix)
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                what = f"{Path(path).name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
                raise MeshwrightError("MW-VAL-002", what, valid=COLUMNS)
            by_tool: dict[str, dict[str, float]] = defaultdict(dict)
            for row in reader:
                seconds = number(row["step_time_s"])
                if seconds:
                    by_tool[row["tool"] or "?"][row["row_id"] or ""] = seconds
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeshwrightError("MW-VAL-001", f"{Path(path).name} is not a readable CSV", why=str(error)[:100]) from None
    return dict(by_tool)


def peer_scores(
    outcomes: Iterable[Outcome], left_out: LeftOut | None, by_tool: dict[str, dict[str, float]]
) -> list[PeerScore]:
    """The scores of each tool on each source. Only runs that both predict, and whose step time is scored, count."""
    outcomes = list(outcomes)
    repeated = {o.source for o in outcomes if o.pair_ratio is not None}
    ours = {o.case.row_id: o.error for o in outcomes if o.error is not None and not not_scored(o, repeated)}
    if left_out is not None:
        ours |= {o.case.row_id: float(e) for o, e in zip(left_out.runs, np.expm1(left_out.source), strict=True)}
    measured = {o.case.row_id: (o.source, o.case.step_time) for o in outcomes}
    errors: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for tool, predicted in by_tool.items():
        for row_id, seconds in predicted.items():
            if row_id in ours:
                source, truth = measured[row_id]
                errors[source, tool].append((abs(seconds / (truth or np.nan) - 1), abs(ours[row_id])))
    return [
        PeerScore(source, tool, len(pairs), *_mean_and_median(pairs, 0), *_mean_and_median(pairs, 1))
        for (source, tool), pairs in sorted(errors.items())
    ]


def _mean_and_median(pairs: list[tuple[float, float]], column: int) -> tuple[float, float]:
    sizes = [pair[column] for pair in pairs]
    return float(np.mean(sizes)), float(np.median(sizes))
