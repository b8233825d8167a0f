"""The closed loop: measure an emulated cluster, predict many plans from that measurement, run them all, and compare.

    python benchmarks/closed_loop.py                    products replaced by sleeps: isolates communication
    python benchmarks/closed_loop.py --compute real     real products; the cores are shared by all ranks
    python benchmarks/closed_loop.py --folder loop --only dp8 zero3     keeps all results in a folder, and continues there

Four nodes of two ranks, 200 Mb/s and 1 ms between nodes (`meshwright emulate`; needs root, else nothing is run). Calibration comes first and
uses operations of sizes fixed in this file and in `bench` only: `meshwright bench` and `calibrate` for the network; for the device one
elementwise operation at two sizes, and one product, on all ranks at once, so that ranks that share cores are measured sharing them.
No constant is fitted to the runs of the plans. Sleeps are defined by the cost model's compute (`training.sleeping`), so the first table
compares communication, overlap, schedules and what the ranks' own Python costs; the second also compares computation.
"""

from __future__ import annotations

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
OPERATORS = 100  # forward and backward, in the device test
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

    from meshwright.training.rank import join_environment

    torch.set_num_threads(1)
    context = join_environment()
    if job["kind"] == "device":
        found = device_test(context)
        if context.rank == 0:
            print(json.dumps(found))
        return
    for name in job["plans"]:
        result = {"plan": name, **run_plan(name, context, job)}
        if context.rank == 0:
            print(json.dumps(result), flush=True)


def device_test(context: Any) -> dict[str, float]:
    """Seconds of one small operator with its share of autograd, of an elementwise operation on 4 KiB and on 1 MiB, and of a product, on
    all ranks at once: medians over the ranks."""
    import torch
    from torch import distributed

    small, large, square = torch.zeros(1024), torch.zeros(262_144), torch.ones(256, 256)
    leaf = torch.ones(1024, requires_grad=True)

    def chain() -> None:
        value = leaf
        for _ in range(OPERATORS // 2):
            value = value * 1.0
        value.sum().backward()

    tests = {
        "chain_s": chain,
        "small_s": lambda: torch.add(small, small),
        "large_s": lambda: torch.add(large, large),
        "product_s": lambda: torch.mm(square, square),
    }
    found = {}
    for name, operation in tests.items():
        distributed.barrier()
        end, counts = time.perf_counter() + 3.0, 0
        start = time.perf_counter()
        while time.perf_counter() < end:
            operation()
            counts += 1
        own = torch.tensor([(time.perf_counter() - start) / counts])
        every = [torch.zeros(1) for _ in range(context.world)]
        distributed.all_gather(every, own)
        found[name] = statistics.median(float(t) for t in every)
    return {**found, "operator_s": found.pop("chain_s") / OPERATORS}


def run_plan(name: str, context: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every step after the warm-up, as rank 0 sees them, and the seconds that its products slept per step."""
    import contextlib

    from torch import distributed

    from meshwright.parallel.apply import apply
    from meshwright.parallel.numerics.precision import DTYPES
    from meshwright.training.data.corpus import Corpus
    from meshwright.training.loop import Trainer
    from meshwright.training.sleeping import SleepingDevice, device_of

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
    return {"seconds": seconds[WARMUP:], "slept_s": slept}


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
    command += ["--max-size", "16MiB", "--budget", f"{budget_s:.0f}s"]
    emulation.run(command, RunSettings(timeout_s=4 * budget_s + 120, line=lambda *line: None))


def device_from(test: dict[str, float], compute: str) -> Any:
    """The device of a prediction: memory bandwidth as measured; products as slept, or as measured. The elementwise operation reads two
    buffers and writes one."""
    from meshwright.describe.cluster import Accelerator, Efficiency

    product = max(test["product_s"] - test["small_s"], 1e-9)
    peak = SLEEPING_FLOPS if compute == "sleep" else 2 * 256**3 / product
    bandwidth = 3 * (2**20 - 4096) / max(test["large_s"] - test["small_s"], 1e-9)
    shares = Efficiency(
        gemm=1,
        gemm_traffic=0,
        floor=test["operator_s"],
        flash=1,
        fused=1,
        memory=1,
        source="measured by this benchmark",
    )
    return Accelerator(
        name="cpu", memory=2e9, memory_bandwidth=bandwidth, peak={"fp32": peak, "bf16": peak}, efficiency=shares
    )


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def spearman(first: list[float], second: list[float]) -> float:
    n = len(first)
    distance = sum((a - b) ** 2 for a, b in zip(ranks_of(first), ranks_of(second), strict=True))
    return 1 - 6 * distance / (n * (n * n - 1)) if n > 1 else 1.0


def compare(results: list[dict[str, Any]], cluster: Any, operator_s: float) -> list[dict[str, Any]]:
    """Compare predictions with measurements. The host time of an operator is the measured one."""
    from meshwright.cost.predict import predict

    rows = []
    for result in results:
        c = config_of(result["plan"], cluster)
        found = predict(c.model, c.cluster, c.plan, c.workload, c.stack.but(launch=operator_s))
        measured = statistics.median(result["seconds"])
        spread = (max(result["seconds"]) - min(result["seconds"])) / measured
        rows.append(
            {
                "plan": result["plan"],
                "predicted_s": found.step_time_s,
                "measured_s": measured,
                "spread": spread,
                "error": found.step_time_s / measured - 1,
                "slept_s": result["slept_s"],
                "exposed_s": found.exposed_s,
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
    if not plans and (folder / "bench.json").exists() and (folder / "device.jsonl").exists():
        return
    topology = Topology(4, 2, *parse_between(options.between))
    with Emulation(topology, f"loop{os.getpid() % 10**6}") as emulation:
        if not (folder / "bench.json").exists():
            run_bench(emulation, folder / "bench.json", options.budget)
        if not (folder / "device.jsonl").exists():
            in_ranks(emulation, {"kind": "device"}, folder / "device.jsonl", 120)
        if plans:
            job = {"kind": "plans", "plans": plans, "steps": options.steps, "compute": options.compute}
            in_ranks(emulation, job, folder / f"{options.compute}.jsonl", 3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", choices=("sleep", "real"), default="sleep")
    parser.add_argument("--only", nargs="*", default=list(PLANS), help="plans of the table")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of bench")
    parser.add_argument("--between", default="200Mb/s,1ms")
    parser.add_argument("--folder", default="", help="keep all results here; default: a temporary folder")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(json.loads(options.rank))
        return

    from meshwright.calibrate.calibration import calibrate
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
        test = records(folder / "device.jsonl")[0]
        cluster = network.but(accelerator=device_from(test, options.compute), gpus=8)
        rows = compare(records(folder / f"{options.compute}.jsonl"), cluster, test["operator_s"])
        print(f"\ncompute: {options.compute}; device test: {test}")
        summary = report(rows)
        found = {"summary": summary, "device": test, "rows": rows, "cluster": cluster.as_dict()}
        (folder / f"{options.compute}-summary.json").write_text(json.dumps(found, indent=2), "utf-8")


if __name__ == "__main__":
    main()
