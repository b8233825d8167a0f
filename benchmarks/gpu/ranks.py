"""One GPU as one rank of 8 to 512: predicted and measured compute and memory of many layouts.

    python benchmarks/gpu/ranks.py --predict predictions.jsonl                 before the measurement; needs no GPU
    python benchmarks/gpu/ranks.py --out ranks.jsonl --budget 540              on the GPU: all layouts, or --half 0 or 1
    python benchmarks/gpu/ranks.py --compare ranks.jsonl                       predict again, and compare with the measurements
    python benchmarks/gpu/ranks.py --tiny --device cpu --out tiny.jsonl        the same layouts with small shapes

Layers are as many as take seconds; everything else is the shape of the model. Some ranks warm up at a time (compilers need the host), and each is
timed alone: warming up holds a shared lock, timing an exclusive one. The predictions stand in the first lines of the output.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLUSTER = os.environ.get("CLUSTER", str(HERE / "h200.toml"))
STEPS, USABLE_GIB = 5, 120.0
LLAMA, LLAMA70, MIXTRAL, LITE, V3, QWEN = (
    "llama3-8b",
    "llama3-70b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "qwen3-30b-a3b",
)
LONG = "llama3.1-8b"

# name: (model, layers, sequence, precision, micro-batches, rank, plan)
LAYOUTS: dict[str, tuple[str, int, int, str, int, int, dict[str, Any]]] = {
    "8B fsdp64 full": (LLAMA, 16, 8192, "bf16", 1, 0, {"shard": 64, "zero": 3, "microbatch": 1, "recompute": "full"}),
    "8B fsdp8": (LLAMA, 8, 4096, "bf16", 1, 0, {"shard": 8, "zero": 3, "microbatch": 2}),
    "8B tp4 fsdp8": (LLAMA, 16, 8192, "bf16", 2, 5, {"tp": 4, "sp": True, "shard": 8, "zero": 3, "microbatch": 1}),
    "8B tp8 dp4": (LLAMA, 16, 4096, "bf16", 2, 0, {"tp": 8, "sp": True, "replicate": 4, "microbatch": 2}),
    "8B pp4 dp8 first": (LLAMA, 32, 4096, "bf16", 8, 0, {"pp": 4, "replicate": 8, "microbatch": 1}),
    "8B pp4 dp8 last": (LLAMA, 32, 4096, "bf16", 8, 3, {"pp": 4, "replicate": 8, "microbatch": 1}),
    "8B fp8 fsdp16": (LLAMA, 12, 4096, "fp8", 1, 0, {"shard": 16, "zero": 3, "microbatch": 2}),
    "8B zero1 selective": (
        LLAMA, 8, 8192, "bf16", 2, 0,
        {"tp": 2, "sp": True, "shard": 16, "zero": 1, "microbatch": 1, "recompute": "selective"}),
    "70B fsdp128 full": (LLAMA70, 8, 4096, "bf16", 1, 0, {"shard": 128, "zero": 3, "microbatch": 1, "recompute": "full"}),
    "70B fsdp512 full": (LLAMA70, 5, 8192, "bf16", 1, 0, {"shard": 512, "zero": 3, "microbatch": 1, "recompute": "full"}),
    "70B tp8 pp4 dp4 first": (LLAMA70, 24, 4096, "bf16", 8, 0, {"tp": 8, "sp": True, "pp": 4, "replicate": 4, "microbatch": 1}),
    "70B tp8 pp4 dp4 last": (LLAMA70, 24, 4096, "bf16", 8, 24, {"tp": 8, "sp": True, "pp": 4, "replicate": 4, "microbatch": 1}),
    "70B tp8 fsdp64": (LLAMA70, 12, 8192, "bf16", 1, 0, {"tp": 8, "sp": True, "shard": 64, "zero": 3, "microbatch": 1}),
    "70B fp8 tp4 fsdp16": (LLAMA70, 6, 4096, "fp8", 1, 0, {"tp": 4, "sp": True, "shard": 16, "zero": 3, "microbatch": 1}),
    "8x7B ep8 fsdp8": (MIXTRAL, 6, 4096, "bf16", 1, 0, {"shard": 8, "zero": 3, "ep": 8, "microbatch": 2}),
    "8x7B ep8 fsdp32": (MIXTRAL, 8, 4096, "bf16", 1, 0, {"shard": 32, "zero": 3, "ep": 8, "microbatch": 1, "recompute": "full"}),
    "8x7B tp4 ep8 zero1": (MIXTRAL, 6, 4096, "bf16", 2, 0, {"tp": 4, "sp": True, "shard": 16, "zero": 1, "ep": 8, "microbatch": 1}),
    "V2-Lite ep8 fsdp8": (LITE, 6, 4096, "bf16", 1, 0, {"shard": 8, "zero": 3, "ep": 8, "microbatch": 4}),
    "V2-Lite ep16 fsdp64": (LITE, 10, 4096, "bf16", 2, 0, {"shard": 64, "zero": 3, "ep": 16, "microbatch": 2}),
    "V3 ep64 fsdp64": (V3, 5, 4096, "bf16", 1, 0, {"shard": 64, "zero": 3, "ep": 64, "microbatch": 1, "recompute": "full"}),
    "30B-A3B ep8 fsdp32": (QWEN, 8, 4096, "bf16", 1, 0, {"shard": 32, "zero": 3, "ep": 8, "microbatch": 2}),
    "8B 128k cp8 ring": (LONG, 8, 131072, "bf16", 1, 3, {"cp": 8, "shard": 8, "zero": 3, "microbatch": 1, "recompute": "full"}),
    "8B 64k cp4 ulysses": (
        LONG, 8, 65536, "bf16", 1, 1,
        {"cp": 4, "cp_kind": "ulysses", "shard": 8, "zero": 3, "microbatch": 1, "recompute": "full"}),
    "8B 64k tp4 cp4": (LONG, 8, 65536, "bf16", 1, 0, {"tp": 4, "sp": True, "cp": 4, "shard": 4, "zero": 3, "microbatch": 1, "recompute": "full"}),
}  # fmt: skip
TINY = {"hidden": 256, "ffn": 512, "vocab": 512, "heads": 8, "kv_heads": 8}
TINY_EXPERTS = {"expert_ffn": 64}
TINY_SEQ = 16  # of the sequence


def config_of(name: str, tiny: bool, eager: bool = False) -> Any:
    """The complete configuration of a layout; `eager`: without compilation."""
    from meshwright.describe.config import Config
    from meshwright.training.run import completed

    model, layers, seq, precision, rounds, _, plan = LAYOUTS[name]
    shape: dict[str, Any] = {"extends": model, "layers": layers}
    if tiny:
        seq = max(seq // 64, 64)
        shape |= TINY | (TINY_EXPERTS if model in (MIXTRAL, LITE, V3, QWEN) else {})
        if model == MIXTRAL:
            shape["ffn"] = 0
    dp = plan.get("shard", 1) * plan.get("replicate", 1)
    workload = {"batch": dp * plan["microbatch"] * rounds, "seq": seq, "precision": "bf16" if tiny else precision}
    cluster = CLUSTER
    config = Config.from_parts(shape, cluster, "torch-eager" if eager else "meshwright", workload, plan)
    return completed(config.but(run=config.run.but(compile="off")) if eager else config, STEPS)


def predicted(name: str, tiny: bool, eager: bool = False) -> dict[str, Any]:
    """What is predicted of the rank of a layout."""
    from meshwright.predict.one_rank import measured_config, predicted_ranks

    config = config_of(name, tiny, eager)
    rank = LAYOUTS[name][5]
    from meshwright.describe.layout import Layout

    stage = Layout(config.plan, config.plan.order or config.stack.order).coordinates(rank)["pp"]
    found = predicted_ranks(measured_config(config))[stage]
    return {
        "layout": name, "eager": eager, "world": config.plan.world, "rank": rank, "plan": config.plan.title(), "step_s": found.step_s,
        "allocated_gib": found.allocated_gib, "reserved_gib": found.reserved_gib,
    }  # fmt: skip


def measure_one(name: str, device: str, tiny: bool, lock: Path) -> None:
    """In a process of its own: measure the rank, and print the result as a JSON line."""
    from dataclasses import asdict

    from meshwright.training.measure.one_rank import measure_rank

    with lock.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        began = time.monotonic()

        def alone() -> None:
            print(f"{name}: warm after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_UN)
            fcntl.flock(handle, fcntl.LOCK_EX)

        eager = False
        try:
            found = measure_rank(config_of(name, tiny), LAYOUTS[name][5], STEPS, device, alone)
        except Exception as error:  # a fault of the compiled layer is no reason to have no measurement
            print(f"{name}: {error!r}\n{error.__cause__!r}"[:1500], file=sys.stderr, flush=True)
            eager = True
            found = measure_rank(config_of(name, tiny, True), LAYOUTS[name][5], STEPS, device, alone)
    print(json.dumps({"layout": name, "eager": eager, **asdict(found), "step_s": found.step_s}), flush=True)


def batches(names: list[str], predictions: dict[str, Any], at_once: int) -> list[list[str]]:
    """Groups of layouts that fit in the memory of the device together."""
    groups: list[list[str]] = []
    for name in names:
        size = 1.35 * predictions[name]["reserved_gib"] + 3
        last = groups[-1] if groups else []
        if (
            last
            and len(last) < at_once
            and sum(1.35 * predictions[n]["reserved_gib"] + 3 for n in last) + size < USABLE_GIB
        ):
            last.append(name)
        else:
            groups.append([name])
    return groups


def measure(names: list[str], device: str, tiny: bool, out: Path, budget_s: float, at_once: int) -> None:
    began = time.monotonic()
    predictions = {name: predicted(name, tiny) for name in names}
    with out.open("a") as stream:
        stream.writelines(json.dumps({"predicted": p}) + "\n" for p in predictions.values())
        stream.writelines(json.dumps({"predicted": predicted(n, tiny, True)}) + "\n" for n in names)
    names = sorted(names, key=lambda n: predictions[n]["reserved_gib"])
    for group in batches(names, predictions, at_once):
        left = budget_s - (time.monotonic() - began)
        if left < 30:
            print(f"no time left for {group}", flush=True)
            continue
        lock = out.with_suffix(".lock")
        lock.touch()
        command = [sys.executable, __file__, "--device", device, "--lock", str(lock), *(["--tiny"] if tiny else [])]
        env = {**os.environ, "OMP_NUM_THREADS": "4"}
        running = {
            n: subprocess.Popen(
                [*command, "--one", n], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
            for n in group
        }
        for name, child in running.items():
            try:
                stdout, stderr = child.communicate(
                    timeout=max(left - (time.monotonic() - began) + (budget_s - left), 20)
                )
            except subprocess.TimeoutExpired:
                child.kill()
                print(f"{name}: timed out", flush=True)
                continue
            lines = [line for line in stdout.splitlines() if line.startswith("{")]
            if not lines:
                print(f"{name}: failed\n{stderr[-1500:]}", flush=True)
                with out.open("a") as stream:
                    stream.write(json.dumps({"failed": name, "why": stderr[-1500:]}) + "\n")
                continue
            with out.open("a") as stream:
                stream.write(json.dumps({"measured": json.loads(lines[-1])}) + "\n")
            result = json.loads(lines[-1])
            show(predicted(name, tiny, True) if result["eager"] else predictions[name], result)
            if result["eager"]:
                print(f"   eager, because: {stderr[-700:]}", flush=True)
        print(f"   {time.monotonic() - began:.0f} s", flush=True)


def show(p: dict[str, Any], m: dict[str, Any]) -> tuple[float, float]:
    """Print a layout; returns the errors of compute and of memory."""
    time_error, memory_error = p["step_s"] / m["step_s"] - 1, p["allocated_gib"] / m["allocated_gib"] - 1
    reserved = f"reserved {m['reserved_gib']:6.1f} ({p['reserved_gib']:6.1f})" if m["reserved_gib"] else ""
    print(
        f"{p['layout']:24s} {p['world']:4d} ranks {m['step_s'] * 1e3:9.1f} ms, predicted {p['step_s'] * 1e3:9.1f} ({time_error:+6.1%})   "
        f"{m['allocated_gib']:6.2f} GiB, predicted {p['allocated_gib']:6.2f} ({memory_error:+6.1%}) {reserved} "
        f"spread {m['spread']:.1%} {'; '.join(m['notes'])}",
        flush=True,
    )
    return time_error, memory_error


def compare(file: Path, tiny: bool, again: bool) -> None:
    """Print all layouts of a file: with the predictions in it, or with those of today."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    measured = {row["measured"]["layout"]: row["measured"] for row in rows if "measured" in row}
    before = {(p["layout"], p.get("eager", False)): p for p in (row["predicted"] for row in rows if "predicted" in row)}
    pairs = ((n, m.get("eager", False), m) for n, m in measured.items())
    errors = [show(predicted(n, tiny, eager) if again else before[n, eager], m) for n, eager, m in pairs]
    for what, values in zip(("compute", "memory"), zip(*errors, strict=True), strict=True):
        sizes = [abs(v) for v in values]
        print(f"{what}: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, {len(sizes)} layouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--first-sight", action="store_true", help="compare with the predictions in the file")
    parser.add_argument("--half", type=int)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--budget", type=float, default=540)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one")
    parser.add_argument("--lock", type=Path)
    given = parser.parse_args()
    names = [n for i, n in enumerate(LAYOUTS) if given.half is None or i % 2 == given.half]
    names = [n for n in names if not given.only or n in given.only]
    if given.one:
        measure_one(given.one, given.device, given.tiny, given.lock)
    elif given.compare:
        compare(given.compare, given.tiny, not given.first_sight)
    elif given.predict:
        given.predict.write_text("".join(json.dumps(predicted(n, given.tiny)) + "\n" for n in names), "utf-8")
    else:
        measure(names, given.device, given.tiny, given.out, given.budget, given.at_once)


if __name__ == "__main__":
    main()
