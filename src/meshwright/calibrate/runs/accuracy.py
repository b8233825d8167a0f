"""The accuracy of predictions on a table of runs: with the catalog's numbers, and with the source left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshwright.calibrate.runs import validate
from meshwright.calibrate.runs.bands import Band, bands
from meshwright.calibrate.runs.left_out import (
    LeftOut,
    SourceScore,
    finite_or_none,
    leave_out,
    macro_scores,
    responding,
    scores,
    usable,
    without_stacks,
)
from meshwright.calibrate.runs.outcomes import Outcome, predict_rows


@dataclass
class Accuracy:
    """Outcomes of the runs, of the well-known runs and of the failed ones, with their scores."""

    outcomes: list[Outcome]
    headlines: list[Outcome]
    failed: list[Outcome]
    sources: dict[str, validate.Score]
    overall: dict[str, float]
    left_out: LeftOut | None = None
    unseen: dict[str, SourceScore] = field(default_factory=dict)
    unseen_overall: dict[str, float] = field(default_factory=dict)
    bands: dict[str, Band] = field(default_factory=dict)
    unnamed: LeftOut | None = None  # of some of the runs, without their stacks

    def as_dict(self) -> dict[str, Any]:
        return {
            "overall": self.overall,
            "sources": {name: s.as_dict() for name, s in self.sources.items()},
            "left_out": {
                "overall": finite_or_none(self.unseen_overall),
                "sources": {name: s.as_dict() for name, s in self.unseen.items()},
                "bands": {level: band.__dict__ for level, band in self.bands.items()},
            },
            "rows": [o.as_dict() for o in (*self.outcomes, *self.headlines)],
        }


def assess(
    rows: list[dict[str, str]],
    headlines: list[dict[str, str]],
    failed: list[dict[str, str]],
    progress: Callable[[float], None] | None = None,
    unnamed: bool = True,
) -> Accuracy:
    """Predict all runs and score them. Sources are left out in turn if there are at least two of them; with `unnamed` also without their stacks."""
    total, done = max(len(rows) + len(headlines) + len(failed), 1), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done / total)

    outcomes = predict_rows(rows, advance, responding(rows))
    famous, crashed = (predict_rows(part, advance) for part in (headlines, failed))
    sources = {name: validate.score(part) for name, part in validate.by(outcomes, ["source"]).items()}
    overall = validate.macro(sources)
    recall = validate.recall(crashed)
    if recall is not None:
        overall["recall_failed"] = recall
    found = Accuracy(outcomes, famous, crashed, sources, overall)
    if len({o.source for o in usable(outcomes)}) > 1:
        found.left_out = leave_out(outcomes)
        found.unseen = scores(found.left_out)
        found.unseen_overall = macro_scores(found.unseen)
        found.unnamed = without_stacks(found.left_out.runs) if unnamed else None
        found.bands = bands(found.left_out, found.unnamed)
    return found
