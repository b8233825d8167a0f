"""One trace instead of a bench: how much nearer are predictions of other plans after `calibrate --from-trace`?

    python benchmarks/from_trace.py --folder loop            measure (continues what is there), then compare
    python benchmarks/from_trace.py --folder loop --limit 0  compare only

The plans, ranks and emulated network are those of `closed_loop.py --compute real` (needs root), whose folder can be continued: plans without a trace
are measured again. Every plan runs a few steps, then one more under torch.profiler.
Half of the plans are held out (every second one of the table); each plan of the other half is in turn the one whose trace calibrates the
catalog's laptop, from which the held-out plans are predicted. Nothing else is known of the machine: no bench, no other plan.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import closed_loop
from closed_loop import PLANS, config_of, in_ranks, records, trace_folder

HELD_OUT = list(PLANS)[1::2]


def measure(folder: Path, options: argparse.Namespace) -> None:
    from meshwright.comm.emulate.emulation import Emulation
    from meshwright.comm.emulate.system import check_rights
    from meshwright.comm.emulate.topology import Topology, parse_between

    measured = {result["plan"] for result in records(folder / "real.jsonl")}
    done = {name for name in measured if any(trace_folder(folder / "traces", name).glob("*"))}
    plans = [name for name in options.only if name not in done]
    if plans and options.limit > 0:
        check_rights()
        with Emulation(Topology(4, 2, *parse_between(options.between)), f"trace{os.getpid() % 10**6}") as emulation:
            job = {"kind": "plans", "plans": plans, "compute": "real", "steps": options.steps, "limit": options.limit}
            job["traces"] = str(folder / "traces")
            in_ranks(emulation, job, folder / "real.jsonl", options.limit + 600)


def laptop() -> Any:
    """The catalog's laptop as one machine of eight: what a user says who has measured nothing."""
    from meshwright.describe.catalog import load

    plain = load("clusters", "laptop")
    return plain.but(levels=(plain.levels[0].but(size=closed_loop.RANKS),), gpus=closed_loop.RANKS)


def compare(folder: Path) -> dict[str, Any]:
    """Errors of the held-out plans without calibration, and with the trace of each other plan."""
    from meshwright.errors import MeshwrightError
    from meshwright.explain.calibration import calibrate_from_trace
    from meshwright.explain.explanation import explain_traces
    from meshwright.explain.folder import read_traces
    from meshwright.predict.prediction import predict

    measured = {r["plan"]: statistics.median(r["seconds"]) for r in records(folder / "real.jsonl")}
    held_out = {name: measured[name] for name in HELD_OUT if name in measured}
    if not held_out:
        sys.exit(
            f"{folder} has no measurement of a held-out plan ({', '.join(HELD_OUT[:3])} …): run without --limit 0 and without --only"
        )
    configs = {name: config_of(name, laptop()) for name in measured}

    def error(calibrated: Any) -> tuple[float, float]:
        parts = {} if calibrated is None else {"cluster": calibrated.cluster, "stack": calibrated.stack}
        times = {name: predict(configs[name].but(**parts)).step_time_s for name in held_out}
        ratios = [times[name] / held_out[name] for name in held_out]
        choice = statistics.median(ratios)
        shapes = statistics.median(abs(r / choice - 1) for r in ratios)
        return statistics.median(abs(r - 1) for r in ratios), shapes

    rows, (plain, plain_shape) = [], error(None)
    print(
        f"{len(held_out)} held-out plans; no calibration: median error {plain:.0%}, after one common factor {plain_shape:.0%}"
    )
    for name in (name for name in measured if name not in HELD_OUT):
        try:
            traces = read_traces([trace_folder(folder / "traces", name)])
            found = calibrate_from_trace(explain_traces(traces), configs[name])
        except MeshwrightError as problem:
            print(f"{name:<24} not used: {problem}")
            continue
        after, shape = error(found)
        rows.append({"plan": name, "error": after, "error_after_a_factor": shape, "step_s": found.step_s})
        print(
            f"{name:<24}{after:8.0%}{shape:8.0%}   traced step {found.step_s[0]:.2f} s, measured {measured[name]:.2f} s"
        )
    if not rows:
        sys.exit(f"{folder} has no trace that could be used: run without --limit 0 and without --only")
    errors = [row["error"] for row in rows]
    summary = {"held_out": len(held_out), "no_calibration": plain, "median_after_one_trace": statistics.median(errors),
               "traces_that_halve": sum(error <= plain / 2 for error in errors), "traces": len(errors)}  # fmt: skip
    print(json.dumps(summary))
    return {"summary": summary, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PLANS), help="plans of the table")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600.0, help="start no further plan after this many seconds")
    parser.add_argument("--between", default="200Mb/s,1ms")
    parser.add_argument("--folder", default="loop")
    options = parser.parse_args()

    from meshwright.errors import MeshwrightError

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the emulation is removed on the way
    folder = Path(options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        measure(folder, options)
    except MeshwrightError as error:
        sys.exit(str(error))
    (folder / "summary.json").write_text(json.dumps(compare(folder), indent=2), "utf-8")


if __name__ == "__main__":
    main()
