"""Zero-bubble schedules compared with published runs: the order of schedules and their memory, with stage times of the cost model.

    python benchmarks/zero_bubble.py RUNS.csv

For every model and number of micro-batches the source measured, the four schedules are built, walked with the stage times that `cost` gives,
and compared with the measured step time and peak memory. Without an argument it prints its usage.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np

from meshwright.calibrate.runs import rows
from meshwright.cost.step import step_cost
from meshwright.cost.walked import walk_step
from meshwright.describe.result import GIB
from meshwright.lower import step_program


def main(path: str) -> None:
    groups: dict[tuple[str, int, int], list[tuple[str, float, float, float, float]]] = defaultdict(list)
    for row in rows.read(path):
        c = rows.case(row)
        if (
            row["file"] == "zero_bubble"
            and not c.refused
            and c.model
            and c.plan
            and c.workload
            and c.cluster
            and c.step_time
            and c.memory
        ):
            program = step_program(c.model, c.plan, c.workload, c.stack)
            cost = step_cost(program, c.cluster, every_rank=True)
            context = max(float(np.broadcast_to(m["context"], 1)[0]) for m in cost.memory)
            memory = (float(cost.peak_memory[0]) - context) / GIB
            groups[row["model"], c.plan.pp, c.plan.microbatches(c.workload)].append(
                (row["schedule"], c.step_time, walk_step(program, cost, c.plan).time, c.memory, memory)
            )
    print(f"{'model':20} {'P':>3} {'M':>4}  schedule: measured s / walked s (error), measured GB / predicted GiB")
    errors, memory_errors, same = [], [], 0
    for (model, p, m), found in sorted(groups.items()):
        print(
            f"{model:20} {p:3} {m:4}  "
            + "; ".join(
                f"{s}: {t:.3f}/{w:.3f} ({100 * (w / t - 1):+.0f}%), {gb:.0f}/{g:.0f}" for s, t, w, gb, g in found
            )
        )
        errors += [abs(w / t - 1) for _, t, w, _, _ in found]
        memory_errors += [abs(g / gb - 1) for *_, gb, g in found]
        same += sorted(found, key=lambda f: f[1])[0][0] == sorted(found, key=lambda f: f[2])[0][0]
    pairs = [
        (a, b)
        for found in groups.values()
        for i, a in enumerate(found)
        for b in found[i + 1 :]
        if abs(a[1] / b[1] - 1) > 0.01
    ]
    right = np.mean([(a[1] < b[1]) == (a[2] < b[2]) for a, b in pairs])
    print(f"median error of time {100 * np.median(errors):.1f}%, of memory {100 * np.median(memory_errors):.1f}%")
    print(
        f"fastest schedule right in {same} of {len(groups)} groups; order right in {100 * right:.0f}% of {len(pairs)} pairs that differ by over 1%"
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        print("zero_bubble: needs the CSV of published runs as its argument")
