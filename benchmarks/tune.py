"""How many runs does `tune` need? Replayed from measured times of the 32 plans of the closed loop.

    python benchmarks/tune.py                    needs no cluster: the measured times are those in docs/measured.md
    python benchmarks/tune.py --runs 6 --seeds 20

Each replay starts with a random plan, then measures what `tune` proposes: the expected gain from predictions, their doubt and the correlation
between plans. Only plans that train the same (model and batch) can be compared by step time, so 27 of the 32 are candidates; with all 32 the
time per sequence is compared, as if models were equal. `exact` leaves compressed gradients out too, which predictions find at once. Predictions:

    stated       the network as stated (four nodes of two ranks, 200 Mb/s, 1 ms) and the catalog's CPU: nothing was measured before
    calibrated   those of the table, from a bench of the machine
    disturbed    those of the table, each off by a random factor (standard deviation 30%)

Printed is how far the best plan found after each run is above the fastest of all, the median of the seeds, and the run after which `tune` stops.
"""

import argparse
import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from closed_loop import BATCH, PLANS, config_of

from meshwright.planner.tune.belief import Belief

PAGE = Path(__file__).parent.parent / "docs" / "measured.md"
ROW = re.compile(r"^(.+?)\s+([0-9.]+) s\s+([0-9.]+) s\s+[-+0-9.]+%\s+[0-9.]+%$")
DISTURBED = 0.3  # of ln seconds
CLUSTER: dict[str, Any] = {
    "name": "stated",
    "accelerator": "cpu",
    "gpus": 8,
    "levels": [
        {"name": "node", "size": 2, "link": "loopback"},
        {"name": "rail", "size": 4, "link": {"name": "stated", "bandwidth": 25e6, "alpha": 1e-3, "source": "stated"}},
    ],
}


def tables(page: Path = PAGE) -> list[dict[str, tuple[float, float]]]:
    """The tables of the page: seconds predicted and measured of each plan."""
    found: list[dict[str, tuple[float, float]]] = []
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("plan  "):
            found.append({})
        elif found and (row := ROW.match(line)) and row[1] in PLANS:
            found[-1][row[1]] = float(row[2]), float(row[3])
    return found


def same_work(names: Any, which: str) -> list[str]:
    """The plans to choose from: `all`, those of the `same` work, and of these the `exact` ones."""
    same = [n for n in names if which == "all" or not (n.startswith("moe") or "batch" in n)]
    return [n for n in same if which != "exact" or "compression" not in PLANS[n][0]]


def sequences(name: str) -> int:
    return int({"batch": BATCH, **PLANS[name][1]}["batch"])


def replay(belief: Belief, times: np.ndarray, first: int, runs: int, stop: float) -> tuple[list[float], int]:
    """How far the best is above the fastest after each run, and the number of runs after which `tune` stops."""
    found, stopped, chosen = [], 0, first
    for number in range(1, runs + 1):
        belief.learn(chosen, float(times[chosen]))
        found.append(float(np.exp(min(belief.measured.values())) / times.min() - 1))
        gains = belief.gains()
        if not stopped and gains.max() < stop:
            stopped = number
        chosen = int(gains.argmax())
    return found, stopped or runs


def result(table: dict[str, tuple[float, float]], kind: str, which: str, options: argparse.Namespace) -> dict[str, Any]:
    from meshwright.describe.cluster import Cluster
    from meshwright.predict.prediction import predict

    names = same_work(table, which)
    size = np.array([sequences(name) / BATCH for name in names])
    stated = [predict(config_of(name, Cluster(**CLUSTER))) for name in names]
    measured = np.array([table[name][1] for name in names]) / size
    predicted = np.array([p.step_time_s for p in stated] if kind == "stated" else [table[n][0] for n in names]) / size
    exposed = [p.exposed_s for p in stated]
    common = float(np.median([np.log(p.step_time_high_s / p.step_time_low_s) for p in stated])) / 3.29
    all_found, all_stops = [], []
    for seed in range(options.seeds):
        noise = np.random.default_rng(seed).normal(0, DISTURBED if kind == "disturbed" else 0, len(names))
        belief = Belief.from_parts(predicted * np.exp(noise), exposed, common)
        first = random.Random(seed).randrange(len(names))
        found, stop = replay(belief, measured, first, options.runs, options.stop)
        all_found.append(found)
        all_stops.append(stop)
    medians = [statistics.median(found[i] for found in all_found) for i in range(options.runs)]
    best = [found[stop - 1] for found, stop in zip(all_found, all_stops, strict=True)]
    return {"plans": len(names), "which": which, "predictions": kind, "median": medians, "worst": max(f[-1] for f in all_found),
            "within_2": sum(f[-1] <= 0.02 for f in all_found), "stops": statistics.median(all_stops),
            "at_stop": statistics.median(best)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--stop", type=float, default=0.01)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        {"table": number, **result(table, kind, which, options)}
        for number, table in enumerate(tables())
        for which in ("all", "same", "exact")
        for kind in ("stated", "calibrated", "disturbed")
    ]
    if options.json:
        print(json.dumps(rows))
        return
    print("above the fastest after each run, median of the seeds")
    for row in rows:
        steps = " ".join(f"{value:6.1%}" for value in row["median"])
        print(
            f"table {row['table']}, {row['plans']} plans ({row['which']:<5}), {row['predictions']:<10} {steps}   "
            f"within 2%: {row['within_2']} of {options.seeds}, "
            f"worst {row['worst']:.0%}; stops after {row['stops']:g} runs, {row['at_stop']:.1%} above"
        )


if __name__ == "__main__":
    main()
