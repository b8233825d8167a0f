"""The closed loop: measure an emulated cluster, predict many plans from that measurement, run them all, and compare.

    python benchmarks/closed_loop.py                    products replaced by sleeps: isolates communication
    python benchmarks/closed_loop.py --compute real     real products; the cores are shared by all ranks
    python benchmarks/closed_loop.py --folder loop --limit 120     keeps all results in a folder; run it again to continue there

Four nodes of two ranks, 200 Mb/s and 1 ms between nodes (`meshwright emulate`; needs root, else nothing is run). Calibration comes first and
uses operations of sizes fixed beforehand only: `meshwright bench` and `calibrate` for the network, and the device part of the calibration of
this machine (`comm.bench.device`) on all ranks at once. No constant is fitted to the runs of the plans.

Sleeps are defined by the cost model's compute (`sleeping`), so the first table compares communication, overlap, schedules and
what the ranks' own Python costs; the second also compares computation.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SLEEPING_FLOPS = 16e9
SEQ, BATCH, WARMUP = 128, 16, 1
RANKS, DEVICE_BUDGET_S = 8, 1.0
JOIN_S = 120.0
NO_TIME = 1e15  # FLOP/s of products that take no time
COMMUNICATION = ("dp", "tp", "cp", "pp", "ep")
MODEL = {
    "name": "loop", "hidden": 256, "layers": 8, "heads": 8, "kv_heads": 8, "ffn": 256, "vocab": 256, "tied": True,
    "max_positions": 256,
}  # fmt: skip
EXPERTS = {**MODEL, "name": "loop-moe", "layers": 4, "ffn": 256, "experts": 8, "top_k": 2, "expert_ffn": 256}

# name: (plan, changes of the workload, model)
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp8": ({"replicate": 8, "microbatch": 2}, {}, MODEL),
    "dp8 accumulate 2": ({"replicate": 8, "microbatch": 1}, {}, MODEL),
    "dp8 batch 32": ({"replicate": 8, "microbatch": 2}, {"batch": 32}, MODEL),
    "dp8 batch 8": ({"replicate": 8, "microbatch": 1}, {"batch": 8}, MODEL),
    "dp8 fp16": ({"replicate": 8, "microbatch": 2, "compression": "fp16"}, {}, MODEL),
    "dp8 int8": ({"replicate": 8, "microbatch": 2, "compression": "int8"}, {}, MODEL),
    "dp8 top-k 1%": ({"replicate": 8, "microbatch": 2, "compression": "top-k"}, {}, MODEL),
    "dp8 powersgd 4": ({"replicate": 8, "microbatch": 2, "compression": "powersgd"}, {}, MODEL),
    "zero1": ({"shard": 8, "zero": 1, "microbatch": 2}, {}, MODEL),
    "zero2": ({"shard": 8, "zero": 2, "microbatch": 2}, {}, MODEL),
    "zero3": ({"shard": 8, "zero": 3, "microbatch": 2}, {}, MODEL),
    "zero3 kept": ({"shard": 8, "zero": 3, "reshard": False, "microbatch": 2}, {}, MODEL),
    "hsdp 4x2": ({"replicate": 4, "shard": 2, "zero": 3, "microbatch": 2}, {}, MODEL),
    "hsdp 2x4": ({"replicate": 2, "shard": 4, "zero": 3, "microbatch": 2}, {}, MODEL),
    "tp2 dp4": ({"tp": 2, "replicate": 4, "microbatch": 4}, {}, MODEL),
    "tp2+sp dp4": ({"tp": 2, "sp": True, "replicate": 4, "microbatch": 4}, {}, MODEL),
    "tp2 zero1 4": ({"tp": 2, "shard": 4, "zero": 1, "microbatch": 4}, {}, MODEL),
    "tp4 dp2": ({"tp": 4, "replicate": 2, "microbatch": 8}, {}, MODEL),
    "tp8": ({"tp": 8, "microbatch": 16}, {}, MODEL),
    "pp4 dp2 gpipe": ({"pp": 4, "replicate": 2, "schedule": "gpipe", "microbatch": 1}, {}, MODEL),
    "pp4 dp2 1f1b": ({"pp": 4, "replicate": 2, "schedule": "1f1b", "microbatch": 1}, {}, MODEL),
    "pp4x2 dp2 interleaved": ({"pp": 4, "virtual": 2, "replicate": 2, "schedule": "interleaved", "microbatch": 1}, {}, MODEL),
    "pp4 dp2 zb-h1": ({"pp": 4, "replicate": 2, "schedule": "zb-h1", "microbatch": 1}, {}, MODEL),
    "pp8 1f1b": ({"pp": 8, "schedule": "1f1b", "microbatch": 1}, {}, MODEL),
    "pp2 dp4 1f1b": ({"pp": 2, "replicate": 4, "schedule": "1f1b", "microbatch": 1}, {}, MODEL),
    "pp4 tp2 1f1b": ({"pp": 4, "tp": 2, "schedule": "1f1b", "microbatch": 2}, {}, MODEL),
    "cp2 ring dp4": ({"cp": 2, "replicate": 4, "microbatch": 4}, {}, MODEL),
    "cp2 ulysses dp4": ({"cp": 2, "cp_kind": "ulysses", "replicate": 4, "microbatch": 4}, {}, MODEL),
    "cp8 ring": ({"cp": 8, "microbatch": 16}, {}, MODEL),
    "moe dp8": ({"replicate": 8, "microbatch": 2}, {}, EXPERTS),
    "moe ep2 dp8": ({"replicate": 8, "ep": 2, "microbatch": 2}, {}, EXPERTS),
    "moe ep8 dp8": ({"replicate": 8, "ep": 8, "microbatch": 2}, {}, EXPERTS),
}  # fmt: skip


def config_of(name: str, cluster: Any) -> Any:
    """The configuration of a plan of the table."""
    from meshwright.describe.config import Config

    plan, workload, model = PLANS[name]
    dtypes = {"param_dtype": "fp32", "grad_dtype": "fp32", "state_dtype": "fp32", "master": False}
    return Config.from_parts(
        model, cluster, "gloo-cpu", {"batch": BATCH, "seq": SEQ, "precision": "fp32", **workload}, {**dtypes, **plan}
    )


# ---- in every rank


def rank_main(job: dict[str, Any]) -> None:
    """Run the device test, or all plans one after the other, and print results as JSON lines from rank 0."""
    import torch

    from meshwright.training.launch.join import joined
    from meshwright.training.launch.rank import placement

    torch.set_num_threads(1)
    place = placement(os.environ)
    assert place is not None, "`emulate run` starts the ranks"
    with joined(place, "cpu", "gloo", JOIN_S, JOIN_S) as context:
        measure_rank(context, job)


def measure_rank(context: Any, job: dict[str, Any]) -> None:
    import torch

    if job["kind"] == "device":
        found = device_test(context)
        if context.rank == 0:
            print(json.dumps(found))
        return
    start = time.monotonic()
    for name in job["plans"]:
        spent = torch.tensor(time.monotonic() - start)
        torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
        if spent > job["limit"]:
            return
        result = {"plan": name, **run_plan(name, context, job)}
        if context.rank == 0:
            print(json.dumps(result), flush=True)


def device_test(context: Any) -> dict[str, Any]:
    """The operations of the machine's calibration, on all ranks at once; means over the ranks. The clock counts seconds in which a rank
    computed."""
    import torch
    from torch import distributed

    from meshwright.comm.bench.device import measure_device
    from meshwright.comm.bench.timing import Synchronization
    from meshwright.host import usable_cores

    def mean(values: Any) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(x) for x in total / context.world]

    ranks = Synchronization(barrier=distributed.barrier, agree=mean)
    points = measure_device("cpu", ranks, budget_s=DEVICE_BUDGET_S, rank=context.rank)
    return {
        "dtype": "fp32",
        "ranks": context.world,
        "cores": usable_cores(),
        "operations": [p.as_dict() for p in points],
    }


def run_plan(name: str, context: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every step after the warm-up, as rank 0 sees them, and the seconds that its products slept per step."""
    import contextlib

    from sleeping import SleepingDevice, device_of
    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.parallel.numerics.precision import DTYPES
    from meshwright.training.data.sources import Corpus
    from meshwright.training.loop import Trainer

    config = config_of(name, "laptop")
    parallel = apply(
        config.model,
        config.plan,
        config.workload,
        context.rank,
        device="cpu",
        dtype=DTYPES["fp32"],
        order=config.stack.order,
    )
    trainer = Trainer(parallel, Corpus(config.model, config.workload.seq, 0))
    sleeping = SleepingDevice(device_of(SLEEPING_FLOPS)) if job["compute"] == "sleep" else None
    seconds = []
    with sleeping or contextlib.nullcontext():
        for _ in range(WARMUP + job["steps"]):
            distributed.barrier()
            start = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - start)
    slept = sleeping.slept / len(seconds) if sleeping else 0.0
    if "traces" in job:
        trace_steps(trainer, trace_folder(Path(job["traces"]), name) / f"rank-{context.rank}.json.gz")
    return {"seconds": seconds[WARMUP:], "slept_s": slept}


def trace_folder(traces: Path, name: str) -> Path:
    """Where the traces of a plan are."""
    return traces / name.replace(" ", "_").replace("%", "")


def trace_steps(trainer: Any, file: Path) -> None:
    """Train two steps under torch's profiler."""
    from torch import distributed, profiler

    file.parent.mkdir(parents=True, exist_ok=True)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for step in range(2):
            distributed.barrier()
            with profiler.record_function(f"ProfilerStep#{step}"):
                trainer.train_step()
    profile.export_chrome_trace(str(file))
    distributed.barrier()


# ---- in the parent


def in_ranks(emulation: Any, job: dict[str, Any], file: Path, timeout_s: float) -> None:
    """Run this script in every rank and append the JSON lines that it prints to a file."""
    from meshwright.comm.emulate.ranks import RunSettings

    def line(rank: int, text: str, is_error: bool) -> None:
        if is_error or not text.startswith("{"):
            print(f"[rank {rank}] {text}", file=sys.stderr)
            return
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text + "\n")
        found = json.loads(text)
        if "plan" in found:
            print(f"  {found['plan']:<24}{statistics.median(found['seconds']):8.3f} s", file=sys.stderr)

    settings = RunSettings(timeout_s=timeout_s, line=line)
    emulation.run([sys.executable, os.path.abspath(__file__), "--rank", json.dumps(job)], settings)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def run_bench(emulation: Any, file: Path, budget_s: float) -> None:
    from meshwright.comm.emulate.ranks import RunSettings

    command = [sys.executable, "-m", "meshwright", "bench", "--backends", "gloo", "--json", str(file)]
    command += ["--operations", "all-reduce,all-gather,reduce-scatter,all-to-all,point-to-point"]
    command += ["--max-size", "4MiB", "--budget", f"{budget_s:.0f}s"]
    emulation.run(command, RunSettings(timeout_s=4 * budget_s + 120, line=lambda *line: None))


def predicted(config: Any, machine: Any, compute: str) -> tuple[float, dict[str, float]]:
    """Seconds of a step and its exposed parts, on the network of `config` and the cores of this machine.

    Real compute: eight ranks share the cores, as in a training on this machine. Sleeps take no core, so a rank that sleeps leaves its core to
    another: computing takes what one rank needs with a core to itself, or what the cores need for all ranks, the longer of the two
    and 26% more where both are equal (as host and device in `cost.phase`).
    """
    from meshwright.calibrate.machine import calibrated
    from meshwright.predict.prediction import predict

    def found(machine: Any, peak: float) -> Any:
        cluster, stack = calibrated(config.cluster, config.stack, machine)
        if peak:
            cluster = cluster.but(accelerator=sleeping_accelerator(cluster.accelerator, peak))
            stack = stack.but(compute_slowdown=0.0)
        return predict(config.but(cluster=cluster, stack=stack))

    if compute == "real":
        whole = found(machine, 0.0)
        return whole.step_time_s, whole.exposed_s
    alone = machine.but(cores=float(machine.ranks))
    whole, host = (found(alone, peak) for peak in (SLEEPING_FLOPS, NO_TIME))
    busy = sum(s for part, s in host.exposed_s.items() if part not in (*COMMUNICATION, "bubble"))
    own = sum(s for part, s in whole.exposed_s.items() if part not in COMMUNICATION)
    waits = (own**3 + (machine.sharing * busy) ** 3) ** (1 / 3) - own
    return whole.step_time_s + waits, {**whole.exposed_s, "shared cores": waits}


def sleeping_accelerator(measured: Any, peak: float) -> Any:
    """The measured device with products and attention that sleep."""
    from sleeping import device_of

    update = measured.efficiency.update
    shares = device_of(peak).efficiency.but(update=update, source=measured.efficiency.source)
    return measured.but(peak={"fp32": peak, "bf16": peak}, efficiency=shares)


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def spearman(first: list[float], second: list[float]) -> float:
    n = len(first)
    distance = sum((a - b) ** 2 for a, b in zip(ranks_of(first), ranks_of(second), strict=True))
    return 1 - 6 * distance / (n * (n * n - 1)) if n > 1 else 1.0


def compare(results: list[dict[str, Any]], network: Any, machine: Any, compute: str) -> list[dict[str, Any]]:
    """Compare predictions with measurements."""
    rows = []
    for result in results:
        seconds, exposed = predicted(config_of(result["plan"], network), machine, compute)
        measured = statistics.median(result["seconds"])
        rows.append(
            {
                "plan": result["plan"],
                "predicted_s": seconds,
                "measured_s": measured,
                "spread": (max(result["seconds"]) - min(result["seconds"])) / measured,
                "error": seconds / measured - 1,
                "slept_s": result["slept_s"],
                "exposed_s": exposed,
            }
        )
    return rows


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the table and return its summary. The choice is among plans of the same model and batch."""
    print(f"{'plan':<24}{'predicted':>11}{'measured':>11}{'error':>8}{'spread':>8}")
    for row in sorted(rows, key=lambda row: row["measured_s"]):
        print(
            f"{row['plan']:<24}{row['predicted_s']:9.3f} s{row['measured_s']:9.3f} s{row['error']:+8.1%}{row['spread']:8.1%}"
        )
    errors = [abs(row["error"]) for row in rows]
    same = [row for row in rows if not row["plan"].startswith("moe") and "batch" not in row["plan"]]
    chosen, fastest = min(same, key=lambda r: r["predicted_s"]), min(same, key=lambda r: r["measured_s"])
    summary = {
        "plans": len(rows),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "spearman": spearman([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "chosen": chosen["plan"],
        "fastest": fastest["plan"],
        "regret": chosen["measured_s"] / fastest["measured_s"] - 1,
    }
    print(
        f"{len(rows)} plans: median error {summary['median_error']:.1%}, largest {summary['largest_error']:.0%}, Spearman "
        f"{summary['spearman']:.3f}; predicted fastest '{chosen['plan']}', {summary['regret']:.1%} slower than the fastest "
        f"measured ('{fastest['plan']}')"
    )
    return summary


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Fill the folder: bench.json, device.jsonl, and a line in COMPUTE.jsonl for each plan. What is there is kept."""
    from meshwright.comm.emulate.emulation import Emulation
    from meshwright.comm.emulate.topology import Topology, parse_between

    done = {result["plan"] for result in records(folder / f"{options.compute}.jsonl")}
    plans = [name for name in options.only if name not in done]
    device = folder / "device.jsonl"
    if not plans and (folder / "bench.json").exists() and device.exists():
        return
    topology = Topology(4, 2, *parse_between(options.between))
    with Emulation(topology, f"loop{os.getpid() % 10**6}") as emulation:
        if not (folder / "bench.json").exists():
            run_bench(emulation, folder / "bench.json", options.budget)
        if not device.exists():
            in_ranks(emulation, {"kind": "device"}, device, 120)
        if plans and options.limit > 0:
            job = {"kind": "plans", "plans": plans, **{k: getattr(options, k) for k in ("steps", "compute", "limit")}}
            in_ranks(emulation, job, folder / f"{options.compute}.jsonl", 3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", choices=("sleep", "real"), default="sleep")
    parser.add_argument("--only", nargs="*", default=list(PLANS), help="plans of the table")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of bench")
    parser.add_argument("--limit", type=float, default=3600.0, help="start no further plan after this many seconds")
    parser.add_argument("--between", default="200Mb/s,1ms")
    parser.add_argument("--folder", default="", help="keep all results here; default: a temporary folder")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(json.loads(options.rank))
        return

    from meshwright.calibrate.calibration import calibrate
    from meshwright.calibrate.device_fit import fit_device
    from meshwright.calibrate.machine import MachineMeasurement
    from meshwright.calibrate.points import Bench
    from meshwright.comm.emulate.system import check_rights
    from meshwright.errors import MeshwrightError

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the emulation is removed on the way
    try:
        check_rights()
    except MeshwrightError as error:
        print(f"not run: {error}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, options)
        network = calibrate([Bench.read(str(folder / "bench.json"))], "", "").cluster
        machine = MachineMeasurement(**records(folder / "device.jsonl")[0])
        cluster = network.but(gpus=RANKS)
        rows = compare(records(folder / f"{options.compute}.jsonl"), cluster, machine, options.compute)
        print(f"\ncompute: {options.compute}")
        summary = report(rows)
        constants = fit_device(machine.operations)._asdict()
        found = {"summary": summary, "constants": constants, "rows": rows, "cluster": cluster.as_dict()}
        (folder / f"{options.compute}-summary.json").write_text(json.dumps(found, indent=2), "utf-8")


if __name__ == "__main__":
    main()
