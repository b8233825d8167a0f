"""Check parity, overlap and predictions between the GPUs of your machine, over NCCL, and print what to send us.

    python benchmarks/multi_gpu.py                                      all GPUs of this machine: it starts the ranks itself
    torchrun --nproc-per-node 8 benchmarks/multi_gpu.py                 the same with ranks of a launcher, on one machine or several
    python benchmarks/multi_gpu.py --cluster mine.toml                  predict from your own `meshwright bench` and `calibrate`
    python benchmarks/multi_gpu.py --device cpu --ranks 2 --reduced     on CPU processes over gloo, in a minute: what our tests run

**We have not run this over NCCL between GPUs**: we have one GPU. What it runs is proved on CPU processes (gloo and our backend) and with several
ranks on one GPU (`--share-device`). Your result is the first of its kind; please send the file that it writes.

    parity       every layout trains a small model in float64 for three steps, and rank 0 trains the same alone: losses, gradients and
                 parameters agree to 1e-9, and the number and bytes of collectives are the lowered ones
    overlap      every layout trains a model that keeps the GPUs busy: seconds of communication that compute hides, and seconds that
                 the step waits for it
    prediction   the same runs: step time, exposed communication and memory, predicted before the run and measured

It takes about five minutes on 8 GPUs, needs 20 GB of memory on each and writes nothing but its result (`--out`).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.describe.config import Config
from meshwright.describe.model import Model
from meshwright.describe.plan import Plan
from meshwright.describe.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.training.launch.rank import Placement, placement

SMALL: dict[str, Any] = {"hidden": 64, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 256}
BUSY: dict[str, Any] = {"hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "ffn": 8192, "vocab": 32768}
EXPERTS = {"experts": 8, "top_k": 2}
BOUND = 1e-9
SILENCE_S = 300.0


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Plans for this number of ranks, an even one: each strategy over all ranks, and pairs over two axes from 4 ranks on."""
    half = ranks // 2
    found: dict[str, dict[str, Any]] = {
        "data": {"replicate": ranks},
        "zero 1": {"shard": ranks, "zero": 1},
        "zero 3": {"shard": ranks, "zero": 3},
        "tensor with sequence": {"tp": min(ranks, 4), "sp": True, "replicate": max(1, ranks // 4)},
        "context ring": {"cp": 2, "shard": half, "zero": 3},
        "pipeline 1f1b": {"pp": 2, "replicate": half},
        "pipeline zero-bubble": {"pp": 2, "replicate": half, "schedule": "zb-h1"},
        "experts": {"replicate": ranks, "ep": 2},
    }
    if ranks >= 4:
        found["zero 3 and tensor"] = {"shard": half, "zero": 3, "tp": 2, "sp": True}
        found["hybrid zero 3"] = {"replicate": 2, "shard": half, "zero": 3}
        found["pipeline and tensor"] = {"pp": 2, "tp": 2, "replicate": ranks // 4}
    return found


# Parity


def parity_jobs(chosen: dict[str, dict[str, Any]], ranks: int) -> list[Any]:
    from meshwright.proof.records import Job

    jobs = []
    for title, fields in chosen.items():
        model = Model(**SMALL, **({**EXPERTS, "expert_ffn": 32} if title == "experts" else {}))
        jobs.append(
            Job(model, Plan(**fields), Workload(batch=4 * ranks, seq=32), steps=3, dtypes=("fp64",), watch=True)
        )
    return jobs


def work(context: Any, chosen: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """On every rank: train all small layouts; rank 0 then trains each of them alone, compares, and returns the rows of the table."""
    from torch import distributed

    from meshwright.proof.compare import compare
    from meshwright.proof.prove import one_device
    from meshwright.proof.trace import record_one

    jobs = parity_jobs(chosen, context.world)
    traces = []
    for job in jobs:
        traces.append(record_one(context, job, "fp64"))
        distributed.barrier()
    everyone: list[Any] = [None] * context.world
    distributed.all_gather_object(everyone, traces)
    distributed.destroy_process_group()
    if context.rank:
        return []
    backend = "nccl" if context.device.startswith("cuda") else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    rows = []
    for i, (title, job) in enumerate(zip(chosen, jobs, strict=True)):
        alone = record_one(replace(context, rank=0, world=1), replace(one_device(job), reference=False), "fp64")
        many = [rank[i] for rank in everyone]
        errors = compare(alone, many).errors
        wrong = [str(row) for trace in many for row in trace.traffic if row.unexplained]
        passed = all(error < BOUND for error in errors.values()) and not wrong
        rows.append({"layout": title, "passed": passed, "errors": errors, "unexplained_traffic": wrong[:4]})
    distributed.destroy_process_group()
    return rows


def check_parity(
    place: Placement | None, ranks: int, device: str, chosen: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    if place is None:
        from meshwright.training.launch import local

        return local.run(f"{__name__}:work", ranks, chosen, device=device, silence=SILENCE_S, group_timeout=SILENCE_S)[
            0
        ]
    from meshwright.training.launch.join import joined

    with joined(place, device) as context:
        return work(context, chosen)


# Overlap and predictions


def busy_config(title: str, fields: dict[str, Any], ranks: int, cluster: str, reduced: bool) -> Config:
    """A configuration that keeps GPUs busy; a small one with `reduced`."""
    shape = {**(SMALL if reduced else BUSY), **(EXPERTS if title == "experts" else {})}
    if title == "experts":
        shape["expert_ffn"] = 32 if reduced else 2048
    seq, dtype = (32, "fp32") if reduced else (2048, "bf16")
    workload = {"batch": 4 * ranks, "seq": seq, "precision": dtype}
    plan = {**fields, "param_dtype": dtype, "master": dtype != "fp32"}
    stack = "gloo-cpu" if cluster == "laptop" else "default"
    config = Config.from_parts(shape, cluster, stack, workload=workload, plan=plan)
    return replace(config, cluster=config.cluster.with_gpus(ranks))


def measure(title: str, config: Config, device: str, steps: int) -> dict[str, Any] | None:
    """Train one layout; a row on rank 0, None on the others."""
    from meshwright import api

    training = api.train(config, steps=steps, device=device, calibrate=False)
    if training is None:
        return None
    measured, predicted = training.measurement, training.prediction
    return {
        "layout": title,
        "plan": config.plan.title(),
        "step_time_s": measured.step_time_s,
        "predicted_step_time_s": [predicted.step_time_s, predicted.step_time_low_s, predicted.step_time_high_s],
        "exposed_s": measured.parts,
        "predicted_exposed_s": predicted.parts,
        "hidden_s": (training.communication or {}).get("hidden_s", {}),
        "difference": [[d.what, d.unit, d.predicted, d.measured] for d in training.differences],
        "losses": measured.loss[:1] + measured.loss[-1:],
    }


# Report


def about_machine(device: str, ranks: int) -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device != "cpu" else []
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
    return {"ranks": ranks, "gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def print_parity(rows: list[dict[str, Any]]) -> None:
    print(f"\nparity with one device{'':<8}  loss      gradient  parameter  collectives as lowered")
    for row in rows:
        e = row["errors"]
        verdict = "ok" if row["passed"] else "FAILED"
        print(
            f"  {row['layout']:<28}{e['loss']:<10.1e}{e['gradient']:<10.1e}{e['parameter']:<11.1e}"
            f"{'yes' if not row['unexplained_traffic'] else 'NO'}   {verdict}"
        )


def print_run(row: dict[str, Any]) -> None:
    waits = {part: s for part, s in row["exposed_s"].items() if part not in ("compute", "optimizer")}
    middle, low, high = row["predicted_step_time_s"]
    step, hidden = row["step_time_s"], sum(row["hidden_s"].values())
    print(
        f"  {row['layout']:<24}{1e3 * step:9.1f} ms   predicted {1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
        f"   waits {1e3 * sum(waits.values()):.1f} ms, hidden {1e3 * hidden:.1f} ms",
        flush=True,
    )


def guarded(title: str, action: Callable[[], Any]) -> Any:
    """The result of one layout, or its error as a row: one failure does not hide the others."""
    try:
        return action()
    except MeshwrightError as error:
        print(f"  {title:<24}{error}", flush=True)
        return {"layout": title, "error": str(error)}


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="default: one for each GPU; under torchrun: its ranks")
    parser.add_argument(
        "--cluster", default="", help="a cluster of the catalog or a file; default: dgx-h100, laptop on CPUs"
    )
    parser.add_argument("--reduced", action="store_true", help="small models and few steps")
    parser.add_argument("--only", default="", help="layouts by name, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("multi_gpu.json"))
    return parser.parse_args(arguments)


def cluster_of(options: argparse.Namespace) -> str:
    return options.cluster or ("laptop" if options.device == "cpu" else "dgx-h100")


def described_as(options: argparse.Namespace) -> str:
    """The cluster of the predictions, and whether its numbers are this machine's."""
    if options.cluster:
        return str(options.cluster)
    return f"the catalog's {cluster_of(options)}, which is not measured on this machine (--cluster FILE)"


def main(arguments: list[str] | None = None) -> int:
    options = options_of(sys.argv[1:] if arguments is None else arguments)
    place = placement(os.environ)
    ranks = place.world if place is not None else options.ranks
    if not ranks:
        from meshwright.training.machine import gpu_count

        ranks = gpu_count()
    if ranks < 2 or ranks % 2:
        print(
            f"{ranks} ranks: an even number from 2 on is needed; on a machine without GPUs: --device cpu --ranks 2 --reduced"
        )
        return 2
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    chosen = {name: fields for name, fields in layouts(ranks).items() if not wanted or name in wanted}
    reports = place is None or place.rank == 0
    rows = check_parity(place, ranks, options.device, chosen)
    if reports:
        print_parity(rows)
        model = "small" if options.reduced else "1.1B"
        print(f"\nsteps of a {model} model: measured, predicted for {described_as(options)}, and communication")
    runs = []
    for title, fields in chosen.items():
        config = busy_config(title, fields, ranks, cluster_of(options), options.reduced)
        steps = 3 if options.reduced else 20
        row = guarded(title, partial(measure, title, config, options.device, steps))
        if row is not None:
            runs.append(row)
            if "error" not in row:
                print_run(row)
    if not reports:
        return 0
    result = {"version": 1, "machine": about_machine(options.device, ranks), "parity": rows, "runs": runs}
    options.out.write_text(json.dumps(result, indent=1), "utf-8")
    failed = [row["layout"] for row in rows if not row["passed"]] + [row["layout"] for row in runs if "error" in row]
    if options.out != Path(os.devnull):
        print(f"\nPlease send us {options.out}: attach it to an issue, with the name of the machine or cloud instance.")
    print(f"Failed: {', '.join(failed)}" if failed else "All layouts agree with one device.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
