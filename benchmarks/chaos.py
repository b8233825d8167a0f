"""Unattended runs under seeded faults: how many are survived, how fast they are noticed, what they cost.

    python benchmarks/chaos.py [--faults 22] [--seed 0] [--minutes 9] [--out runs/chaos] [--part 0/1]
    python benchmarks/chaos.py --report --out runs/chaos

Every run trains a small model on local ranks with checkpoints, and suffers each kind of fault once, in a random order (`faults.inject` has
the kinds). A fault is survived if the run reaches the next one without help and **every loss equals, bit for bit, that of a run without faults**.
For each fault:

    detect    from the fault to the event that names it
    recover   from there to the end of the first step that follows
    redone    steps trained a second time
    lost      from the fault until the step in which it happened is done: the time that the fault cost

The effective training time is the share of useful time at one fault every 10 minutes. It is 1 − lost / 600 s with the mean of all kinds, which
have equal weights, and by Daly's formula (`planner.goodput`) with the measured restart times, the time between saves and their stall.

A slice runs until `--minutes` have passed; started again it continues with the next run. `--part 2/6` does every sixth run from the second:
several processes share the work. Results are lines of OUT/faults-PART.jsonl.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.run_folder import new_lines, read_about, read_events, read_steps
from meshwright.planner.goodput import goodput
from meshwright.training.faults.inject import KINDS, LOG, VARIABLE, Fault

MODEL = {"hidden": 64, "layers": 4, "heads": 4, "ffn": 128, "vocab": 256}
WORKLOAD = {"batch": 8, "seq": 32, "precision": "fp32"}
PLANS = (
    {"replicate": 2},
    {"tp": 2},
    {"shard": 2, "zero": 3},
    {"pp": 2},
)
SAVE_EVERY, SPACING, FIRST = 6, 24, 12
STEPS = FIRST + SPACING * len(KINDS)
BETWEEN_S = 600.0  # one fault every ten minutes
FAULTS = "faults.json"
NOTICED = {"slow": ("slow",), "nan": ("rollback",), "spike": ("rollback",), "disk-full": ("checkpoint-failed", "fault")}


def draw_faults(
    seed: int, kinds: Sequence[str], world: int, first: int, spacing: int, save_every: int = 0
) -> list[Fault]:
    """One fault of each given kind, in a random order of ranks and steps, about `spacing` steps apart. The same for the same seed."""
    draw = random.Random(seed)
    faults = []
    for number, kind in enumerate(kinds):
        step = first + number * spacing + draw.randrange(max(1, spacing // 4))
        seconds, steps = 0.0, 1
        if kind == "kill-save" and save_every:
            step = -(-step // save_every) * save_every  # the first step after a save began
            seconds = draw.uniform(0.0, 0.05)
        if kind == "slow":
            seconds, steps = draw.uniform(0.3, 0.5), 2 * spacing // 3 or 1
        if kind == "disk-full":
            steps = save_every + 1  # at least one save fails
        faults.append(Fault(kind, draw.randrange(world), step, seconds, steps))
    return faults


def write_faults(path: Path, faults: Sequence[Fault]) -> None:
    path.write_text(json.dumps([asdict(fault) for fault in faults], indent=1), "utf-8")


def config(number: int) -> Config:
    """The configuration of a run: plans take turns."""
    plan = {"param_dtype": "fp32", "master": False, **PLANS[number % len(PLANS)]}
    return Config.from_parts(
        MODEL,
        "laptop",
        "gloo-cpu",
        WORKLOAD,
        plan,
        optimizer={"on_nan": "rollback", "learning_rate": 1e-3},
        checkpoint={"every": SAVE_EVERY, "keep": 3},
        run={"restarts": 100, "spike": 3.0},
    )


def train(folder: Path, number: int, seed: int, faults: bool) -> float:
    """Train one run with the faults of its number; returns its seconds."""
    from meshwright.training.run import run_training

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kinds = list(KINDS)
    random.Random(f"{seed}/{number}").shuffle(kinds)
    world = config(number).plan.world
    drawn = draw_faults(seed * 1000 + number, kinds, world, FIRST, SPACING, SAVE_EVERY) if faults else []
    write_faults(folder / FAULTS, drawn)
    began = time.monotonic()
    run_training(config(number), STEPS, seed=seed, folder=folder)
    return time.monotonic() - began


def reference(out: Path, number: int, seed: int, part: int) -> list[float]:
    """The losses of the run without faults; each plan is trained once in each part."""
    folder = out / f"reference-{part}-{seed}-{number % len(PLANS)}"
    if len(read_steps(folder)) < STEPS:
        train(folder, number, seed, faults=False)
    return [row["loss"] for row in read_steps(folder)]


def measured(folder: Path, losses: list[float], number: int, error: str) -> Iterator[dict[str, Any]]:
    """A row for each injected fault of a run."""
    rows = {row["step"]: row for row in read_steps(folder)}
    events, attempts = read_events(folder), read_about(folder).get("attempts", [])
    injected, _ = new_lines(folder / LOG, 0)
    step_s = statistics.median(row["seconds"] for row in rows.values()) if rows else 0.0
    # The first step whose loss differs from that of the reference, or is missing: the last fault before it was not survived.
    differs = next((step for step, loss in enumerate(losses) if step not in rows or rows[step]["loss"] != loss), STEPS)
    for i, fault in enumerate(injected):
        begin = fault["time"]
        end = injected[i + 1]["time"] if i + 1 < len(injected) else float("inf")
        names = NOTICED.get(fault["kind"], ("fault",))
        noticed = [e for e in events if e["kind"] in names and begin - 0.01 <= e["time"] < end]
        again = [a for a in attempts if begin < a["start"] < end]
        at = noticed[0]["time"] if noticed else None
        after = [row["time"] for row in rows.values() if row["time"] > (again[0]["start"] if again else at or begin)]
        back = rows.get(fault["step"])
        following = injected[i + 1]["step"] if i + 1 < len(injected) else STEPS
        yield {
            "run": number,
            "plan": " ".join(f"{k}={v}" for k, v in PLANS[number % len(PLANS)].items()),
            "kind": fault["kind"],
            "rank": fault["rank"],
            "step": fault["step"],
            "survived": back is not None and not fault["step"] <= differs < following,
            "noticed": at is not None,
            "named": names_rank(noticed[0]["text"], fault) if noticed else False,
            "detect_s": at - begin if at is not None else None,
            "recover_s": min(after) - at if again and after and at is not None else None,
            "redone": fault["step"] - (again[0]["resumed_from"] or 0) if again else 0,
            "lost_s": max(0.0, back["time"] - begin - step_s) if back is not None else None,
            "step_s": step_s,
            "error": error,
        }


def names_rank(text: str, fault: dict[str, Any]) -> bool:
    return f"rank {fault['rank']}" in text or fault["kind"] in ("nan", "spike", "disk-full")


def run_slice(options: argparse.Namespace) -> None:
    os.environ[VARIABLE] = FAULTS  # inherited by the ranks, which find the file in their run folder
    part, parts = map(int, options.part.split("/"))
    log = options.out / f"faults-{part}.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    done = {row["run"] for row in new_lines(log, 0)[0]}
    runs = range(part, -(-options.faults // len(KINDS)), parts)
    deadline = time.monotonic() + 60 * options.minutes
    longest = 0.0
    for number in runs:
        if number in done:
            continue
        if time.monotonic() + longest > deadline:
            print(f"{log}: the next slice continues with run {number}")
            return
        losses = reference(options.out, number, options.seed, part)
        folder = options.out / f"run-{number}"
        error, began = "", time.monotonic()
        try:
            train(folder, number, options.seed, faults=True)
        except Exception as failure:  # a fault that was not survived
            error = f"{type(failure).__name__}: {failure}"
        longest = max(longest, time.monotonic() - began)
        rows = list(measured(folder, losses, number, error))
        with log.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        survived = sum(row["survived"] for row in rows)
        print(
            f"run {number} ({rows[0]['plan'] if rows else ''}): {survived} of {len(KINDS)} faults survived in {longest:.0f} s {error}"
        )
        sys.stdout.flush()


def report(out: Path) -> bool:
    """Print the table; returns whether every fault was survived."""
    rows = [row for file in sorted(out.glob("faults-*.jsonl")) for row in new_lines(file, 0)[0]]
    if not rows:
        print("no faults yet")
        return True
    print(
        f"{len(rows)} faults in {len({row['run'] for row in rows})} runs; seconds are medians, and the largest in brackets"
    )
    print(f"{'fault':<11}{'survived':>11}{'noticed':>9}{'detect s':>17}{'recover s':>17}{'redone':>8}{'lost s':>17}")
    means = []
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        if not mine:
            continue
        cells = [f"{sum(r['survived'] for r in mine)} of {len(mine)}", f"{sum(r['noticed'] for r in mine)}"]
        detect, recover, lost = (spread(mine, name) for name in ("detect_s", "recover_s", "lost_s"))
        redone = statistics.median(r["redone"] for r in mine)
        print(f"{kind:<11}{cells[0]:>11}{cells[1]:>9}{detect:>17}{recover:>17}{redone:>8g}{lost:>17}")
        means.append(statistics.mean(r["lost_s"] for r in mine if r["lost_s"] is not None))
    lost_s = statistics.mean(means)
    restart = statistics.mean(
        r["detect_s"] + r["recover_s"] for r in rows if r["detect_s"] is not None and r["recover_s"] is not None
    )
    between = SAVE_EVERY * statistics.median(r["step_s"] for r in rows)
    print(
        f"mean time lost per fault: {lost_s:.1f} s; effective training time at one fault every 10 minutes: {1 - lost_s / BETWEEN_S:.1%}"
    )
    by_formula = goodput(between, 0.0, restart, BETWEEN_S)
    print(f"by Daly's formula, with restarts of {restart:.1f} s and a save every {between:.2f} s: {by_formula:.1%}")
    return all(row["survived"] for row in rows)


def spread(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=2 * len(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--report", action="store_true", help="print the table of all slices, and run nothing")
    options = parser.parse_args()
    if not options.report:
        run_slice(options)
    if not report(options.out):
        raise SystemExit("some faults were not survived")


if __name__ == "__main__":
    main()
