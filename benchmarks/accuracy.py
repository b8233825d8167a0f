"""The error of step time as parts of the cost model are added one by one.

    python benchmarks/accuracy.py RUNS.csv

Prints, for every source, the median absolute error of step time of a constant-MFU baseline and of the cost model as its parts are
added, then the macro average over sources; all with the catalog's numbers of the stacks. `meshwright validate` shows the errors of sources
that the fit has not seen.
"""

from __future__ import annotations

import sys

import numpy as np

from meshwright.calibrate.runs import rows, validate
from meshwright.calibrate.runs.rows import Case, apply_readings
from meshwright.cost.step import step_cost
from meshwright.lower.step import step_program

STEPS = ("compute", "+ communication", "+ pipeline bubble", "+ host floor", "+ once per step")
COMMUNICATION = ("tp", "cp", "ep", "pp", "interference")


def cumulative(c: Case) -> np.ndarray:
    """Predicted seconds as parts are added, in the order of STEPS."""
    assert c.model
    assert c.plan
    assert c.workload
    assert c.cluster
    cost = step_cost(step_program(c.model, c.plan, c.workload, c.stack), c.cluster)
    part = {k: float(np.broadcast_to(v, 1)[0]) for k, v in cost.exposed.items()}
    once = part["optimizer"] + part["overhead"] + part.get("dp", 0.0)
    comm = sum(part.get(k, 0.0) for k in COMMUNICATION)
    compute = sum(part.values()) - once - comm - part["bubble"] - part["host"]
    return np.cumsum([compute, comm, part["bubble"], part["host"], once])


def utilisation(c: Case) -> float:
    """Measured MFU of a run."""
    assert c.model
    assert c.cluster
    assert c.workload
    assert c.step_time
    peak = c.cluster.accelerator.peak_for(c.workload.precision) * c.cluster.world
    return c.model.model_flops(c.workload.seq) * c.workload.tokens_per_step / (c.step_time * peak)


def main(path: str) -> None:
    cases: dict[str, list[Case]] = {}
    for row in rows.read(path):
        c = apply_readings(rows.case(row))
        ratio = rows.number(row.get("pair_ratio"))
        stalled = row["file"] == "ultrascale_playbook" and (ratio is None or ratio > validate.STALLED)
        if not c.refused and c.step_time and not stalled and row["file"] not in validate.NOT_FOR_TIME:
            cases.setdefault(row["file"], []).append(c)
    mfu = {source: float(np.median([utilisation(c) for c in group])) for source, group in cases.items()}
    print("| source | rows | constant MFU | " + " | ".join(STEPS) + " |")
    print("| --- | ---: |" + " ---: |" * (len(STEPS) + 1))
    table = []
    for source, group in sorted(cases.items()):
        measured = np.array([c.step_time for c in group], dtype=float)
        others = float(np.median([v for s, v in mfu.items() if s != source]))
        flat = np.array([utilisation(c) for c in group]) * measured / others
        steps = np.array([cumulative(c) for c in group])
        errors = [np.median(np.abs(flat / measured - 1)), *np.median(np.abs(steps / measured[:, None] - 1), axis=0)]
        table.append(errors)
        print(f"| {source} | {len(group)} | " + " | ".join(f"{100 * e:.1f}%" for e in table[-1]) + " |")
    print("| **macro average** | | " + " | ".join(f"**{100 * e:.1f}%**" for e in np.mean(table, axis=0)) + " |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        print("accuracy: needs the CSV of published runs as its argument")
