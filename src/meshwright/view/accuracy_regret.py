"""The section of `docs/accuracy.md` on regret: what it costs to run the plan that is predicted to be the fastest, and why another was faster."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.calibrate.runs.accuracy import Accuracy
from meshwright.calibrate.runs.left_out import LeftOut
from meshwright.calibrate.runs.validate import Configuration, PlannerChoice, choices, off_the_line
from meshwright.view.tables import markdown_table
from meshwright.view.validate import percent

UNEXPLAINED = 1.5  # a run that takes this many times its prediction has a cause that the cost model lacks
MOST_CHOICES = 10  # problems in the table of regrets
MEASURABLE = 1e-4  # share of a step below which no two measured runs agree


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose other columns are numbers."""
    return markdown_table([columns[0], *(f">{name}" for name in columns[1:])], rows) + "\n"


def regrets(accuracy: Accuracy) -> str:
    """The mean slowdown of the plan that is predicted to be the fastest, by source, and where it comes from."""
    rows = [(name, percent(s.regret)) for name, s in accuracy.unseen.items() if s.regret is not None]
    if not rows or accuracy.left_out is None:
        return ""
    left = accuracy.left_out
    made = choices(left.runs, np.exp(left.source) * np.array([o.case.step_time for o in left.runs]))
    right = sum(choice.regret == 0 for choice in made)
    usual = [c for c in made if c.chosen.measured <= UNEXPLAINED * c.chosen.predicted]
    by_source = [[c.regret for c in usual if c.chosen.run.source == name] for name, _ in rows]
    remaining = float(np.mean([np.mean(part) for part in by_source if part]))
    text = (
        "## Regret\n\nSlowdown of the plan that is predicted to be the fastest of a problem (one model, workload, cluster and stack in one source), "
        "against the measured fastest; mean over problems with at least three plans, source left out. Target: 3%. In "
        f"{right} of {len(made)} problems the chosen plan is the measured fastest. In {len(made) - len(usual)} of them it took more than "
        f"{UNEXPLAINED:g} times its prediction; without these the macro average is {percent(remaining)}.{_pipelines_with_tensors(left)}"
        f"{_composed(left)}\n\n"
    )
    rows.append(("**macro average**", f"**{percent(accuracy.unseen_overall['regret'])}**"))
    largest = sorted((c for c in made if c.regret > 0), key=lambda c: -c.regret)[:MOST_CHOICES]
    head = ("problem", "chosen plan (error)", "measured fastest (error)", "the predictions differ most in", "regret")
    text += table(("source", "mean regret"), rows)
    return text + "\nThe largest regrets:\n\n" + table(head, [_choice_cells(c) for c in largest])


def _choice_cells(c: PlannerChoice) -> tuple[str, ...]:
    """One row of the table of regrets. A part counts as a share of the predicted step of the measured fastest plan."""
    plans = [f"{_plan_title(x)} ({percent(x.predicted / x.measured - 1, True)})" for x in (c.chosen, c.fastest)]
    row, cluster = c.chosen.run.case.row, c.chosen.run.case.cluster
    problem = f"{c.chosen.run.source}: {row['model']}, {cluster.world} × {cluster.accelerator.name}, batch {row['global_batch']}"
    parts = [x.run.prediction.exposed_s if x.run.prediction else {} for x in (c.chosen, c.fastest)]
    more = {part: parts[0].get(part, 0.0) - parts[1].get(part, 0.0) for part in {*parts[0], *parts[1]}}
    most = max(sorted(more), key=lambda part: abs(more[part]))
    share = more[most] / max(sum(parts[1].values()), 1e-30)
    return problem, *plans, f"{most} ({100 * share:+.0f}% of the step)", percent(c.regret)


def _plan_title(x: Configuration) -> str:
    assert x.run.plan is not None
    return x.run.plan.title()


def _pipelines_with_tensors(left: LeftOut) -> str:
    """Return how often runs with a pipeline and wide tensor parallelism take a multiple of their prediction, in the source where most do."""
    slow = left.source < -math.log(2)
    both = np.array([o.plan is not None and o.plan.pp > 1 and o.plan.tp > 2 for o in left.runs])
    counts = {
        name: (int(values.sum()), len(values)) for name, values in left.by_source(np.where(both, slow, 0)).items()
    }
    name = max(counts, key=lambda source: counts[source][0])
    part, of_both = (left.by_source(x)[name] for x in (slow, both))
    if not part[of_both].any():
        return ""
    return (
        f" In {name} {int(part[of_both].sum())} of {int(of_both.sum())} runs with a pipeline and more than two tensor-parallel ranks took more than "
        f"twice the prediction, of the other {int((~of_both).sum())} runs {int(part[~of_both].sum())}: no term of the cost model does that."
    )


def _composed(left: LeftOut) -> str:
    """Return which sources publish times that were added up from those of layers: they have no noise, and what one layer has, all have."""
    text = ""
    on_one_node = np.array([o.case.cluster.world <= o.case.cluster.node_size for o in left.runs])
    for name in sorted({o.source for o in left.runs}):
        inside = np.array([o.source == name for o in left.runs])
        few, many = inside & on_one_node, inside & ~on_one_node
        distance = off_the_line([o for o, runs in zip(left.runs, few, strict=True) if runs])
        if len(distance) < 3 or np.median(distance) > MEASURABLE:
            continue
        text += (
            f" The times of the {few.sum()} runs of {name} on one node lie on straight lines in the number of layers (median distance "
            f"{100 * np.median(distance):.1g}%, of {len(distance)} runs): steps that were measured whole do not. They are sums of profiled layers, "
            "so a choice between two plans is a choice between two profiles."
        )
        if many.any():
            errors = [percent(float(np.median(np.abs(np.expm1(left.source[runs]))))) for runs in (few, many)]
            text += f" Median errors: {errors[0]} of these, {errors[1]} of its {many.sum()} runs on several nodes."
    return text
