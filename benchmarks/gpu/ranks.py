"""One GPU as one rank of 8 to 512: predicted and measured compute and memory of many layouts.

    python benchmarks/gpu/ranks.py --predict predictions.jsonl                 before the measurement; needs no GPU
    python benchmarks/gpu/ranks.py --out ranks.jsonl --budget 420              on the GPU: all layouts, or --only some
    python benchmarks/gpu/ranks.py --compare ranks.jsonl                       predict again, and compare with the measurements
    python benchmarks/gpu/ranks.py --tiny --device cpu --out tiny.jsonl        the same layouts with small shapes

Layers are as many as take seconds; everything else is the shape of the model. Several ranks warm up at a time (compilers need the host), and each is
timed alone. The output has a line of JSON for each thing known, as soon as it is known: first the predictions, then for each layout what was
measured, what filled its memory at the peak, and its kernels; or why it failed. Run again with the same output it measures what is missing, beside
the predictions that are there.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLUSTER = os.environ.get("CLUSTER", str(HERE / "h200.toml"))
STEPS, USABLE_GIB = 3, 130.0
WARM_LIMIT_S, PHASE_LIMIT_S, LEAST_S, DETAILS_S = 130, 60, 60.0, 110.0
LLAMA, LLAMA70, MIXTRAL, LITE, V3, QWEN = (
    "llama3-8b",
    "llama3-70b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "qwen3-30b-a3b",
)
LONG = "llama3.1-8b"
OUT_OF_MEMORY = "MW-MEASURE-002"

# name: (model, layers, sequence, precision, micro-batches, rank, plan)
LAYOUTS: dict[str, tuple[str, int, int, str, int, int, dict[str, Any]]] = {
    "8B fsdp64 full": (LLAMA, 16, 8192, "bf16", 1, 0, {"shard": 64, "zero": 3, "microbatch": 1, "recompute": "full"}),
    "8B fsdp8": (LLAMA, 8, 4096, "bf16", 1, 0, {"shard": 8, "zero": 3, "microbatch": 2}),
    "8B tp4 fsdp8": (LLAMA, 16, 8192, "bf16", 2, 5, {"tp": 4, "sp": True, "shard": 8, "zero": 3, "microbatch": 1}),
    "8B tp8 dp4": (LLAMA, 16, 4096, "bf16", 2, 0, {"tp": 8, "sp": True, "replicate": 4, "microbatch": 2}),
    "8B pp4 dp8 first": (LLAMA, 16, 4096, "bf16", 8, 0, {"pp": 4, "replicate": 8, "microbatch": 1}),
    "8B pp4 dp8 last": (LLAMA, 16, 4096, "bf16", 8, 3, {"pp": 4, "replicate": 8, "microbatch": 1}),
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


def config_of(name: str, tiny: bool, eager: bool = False) -> Any:
    """The complete configuration of a layout; `eager`: without compilation, `tiny`: small and in fp32."""
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
    workload = {"batch": dp * plan["microbatch"] * rounds, "seq": seq, "precision": "fp32" if tiny else precision}
    cluster = CLUSTER
    if tiny:
        plan = {**plan, "param_dtype": "fp32", "grad_dtype": "fp32", "state_dtype": "fp32", "master": False}
    config = Config.from_parts(shape, cluster, "meshwright-eager" if eager else "meshwright", workload, plan)
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


class Phases:
    """The order of the processes of a group: all warm up at a time, then each is timed alone, then each is profiled alone.

    Warming up holds one lock shared and timing holds it exclusive; a second lock is held shared until a process was timed. A phase that takes
    longer than its limit ends the process (SIGALRM), which frees its locks.
    """

    def __init__(self, name: str, folder: Path, slow: bool, warm_limit_s: int) -> None:
        self.name, self.slow, self.warm_limit_s, self.began = name, slow, warm_limit_s, time.monotonic()
        self.warming, self.timing = ((folder / lock).open("a") for lock in ("warming", "timing"))
        fcntl.flock(self.timing, fcntl.LOCK_SH)
        self.warm_up()

    def limit(self, seconds: int) -> None:
        signal.alarm(seconds * (10 if self.slow else 1))

    def warm_up(self) -> None:
        fcntl.flock(self.warming, fcntl.LOCK_SH)
        self.limit(self.warm_limit_s)

    def timed_next(self) -> None:
        signal.alarm(0)
        self.note("warm")
        fcntl.flock(self.warming, fcntl.LOCK_UN)
        fcntl.flock(self.warming, fcntl.LOCK_EX)
        self.limit(PHASE_LIMIT_S)

    def timed(self) -> None:
        signal.alarm(0)
        self.note("timed")
        fcntl.flock(self.warming, fcntl.LOCK_UN)
        fcntl.flock(self.timing, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def profiling(self) -> Iterator[None]:
        fcntl.flock(self.timing, fcntl.LOCK_EX)
        self.limit(PHASE_LIMIT_S)
        yield
        self.limit(PHASE_LIMIT_S)
        fcntl.flock(self.timing, fcntl.LOCK_UN)
        self.note("profiled")

    def note(self, what: str) -> None:
        print(f"{self.name}: {what} after {time.monotonic() - self.began:.0f} s", file=sys.stderr, flush=True)


def measure_one(name: str, given: argparse.Namespace) -> None:
    """In a process of its own: measure the rank of a layout, and append the result to the output; then its details."""
    phases = Phases(name, given.lock, given.device == "cpu", given.warm_limit)
    try:
        attempt(name, given, phases, False)
    except Exception as error:  # a fault of a compiled layer is no reason to have no measurement
        print(f"{name}: {error!r}\n{error.__cause__!r}"[:1500], file=sys.stderr, flush=True)
        if is_measured(name, given.out) or getattr(error, "code", "") == OUT_OF_MEMORY:
            raise
    else:
        return
    phases.warm_up()
    attempt(name, given, phases, True)


def attempt(name: str, given: argparse.Namespace, phases: Phases, eager: bool) -> None:
    from meshwright.training.measure.one_rank import measure_trainer, one_rank

    config = config_of(name, given.tiny, eager)
    with one_rank(config, LAYOUTS[name][5], given.device) as (trainer, fills):
        found = measure_trainer(trainer, fills, config, STEPS, phases.timed_next)
        phases.timed()
        append(given.out, {"measured": {"layout": name, "eager": eager, **asdict(found), "step_s": found.step_s}})
        if given.details and given.device.startswith("cuda"):
            details(name, trainer, fills, phases, given.out, given.details)


def details(name: str, trainer: Any, fills: Any, phases: Phases, out: Path, folder: Path) -> None:
    """Append the kernels of a profiled step, those of a step that repeats the copies of the measurement, what the host did in another,
    and what filled the memory at the peak."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from meshwright.explain.memory_snapshot import read_snapshot
    from meshwright.training.measure import timeline
    from meshwright.training.measure.one_rank import REPEATED

    snapshot, trace = (folder / f"{name.replace(' ', '-')}.{kind}" for kind in ("pickle", "json"))
    folder.mkdir(exist_ok=True, parents=True)

    def profiled(*activities: Any) -> Any:
        with profile(activities=activities) as found:
            trainer.train(1)
            torch.cuda.synchronize()
        return found

    with phases.profiling():
        began = time.perf_counter()
        trainer.train(1)
        issued_s = time.perf_counter() - began  # less than the step if the host runs ahead of the device
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - began
        profiled(ProfilerActivity.CUDA)  # the first profile of a process was seen with all durations zero
        found = profiled(ProfilerActivity.CUDA)
        fills.times = REPEATED
        repeated = profiled(ProfilerActivity.CUDA)
        fills.times = 1
        host = profiled(ProfilerActivity.CPU, ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=150_000, stacks="python")
        trainer.train(1)
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
    # Not the exported trace, in which torch 2.11 wrote durations of zero.
    events = [e for e in found.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    spans = [(e.name[:160], e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events]
    trace.write_text(json.dumps([[*span, e.thread] for span, e in zip(spans, events, strict=True)]), "utf-8")
    kernels: dict[str, list[float]] = {}
    for kernel, start, end in spans:
        sums = kernels.setdefault(kernel[:120], [0, 0.0])
        sums[0] += 1
        sums[1] += end - start
    more = {e.key[:120]: [e.count, e.self_device_time_total / 1e6] for e in repeated.key_averages()}
    rows = [[n, *sums, *more.get(n, ())] for n, sums in sorted(kernels.items(), key=lambda item: -item[1][1])[:60]]
    append(out, {"kernels": {"layout": name, "groups_s": timeline.by_group(spans), "largest": rows}})
    operators = sorted(host.key_averages(), key=lambda e: -e.self_cpu_time_total)
    launches = {e.key: e.count for e in operators if e.key.startswith(("cuda", "cuLaunch"))}
    row = {"layout": name, "issued_s": issued_s, "whole_s": whole_s, "launches": launches}
    row["operators"] = [[e.key[:80], e.count, e.self_cpu_time_total / 1e6] for e in operators[:60]]
    append(out, {"host": row})
    append(out, {"memory": {"layout": name, **read_snapshot(snapshot)[0].as_dict()}})
    snapshot.unlink()


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def is_measured(name: str, file: Path) -> bool:
    return any(row.get("measured", {}).get("layout") == name for row in rows_of(file))


def room(prediction: dict[str, Any]) -> float:
    """GiB that a layout may need: what is predicted and a fifth, and what a process takes."""
    return 1.2 * prediction["reserved_gib"] + 2


def groups_of(names: list[str], predictions: dict[str, Any], at_once: int) -> list[list[str]]:
    """Groups of layouts that fit in the memory of the device together; those of different models and precisions come first, large ones first."""
    groups: list[list[str]] = []
    seen: dict[tuple[str, str], int] = {}
    turns = {}
    for name in names:
        kind = LAYOUTS[name][0], LAYOUTS[name][3]
        turns[name] = seen.setdefault(kind, 0)
        seen[kind] += 1
    for name in sorted(names, key=lambda n: (turns[n], -room(predictions[n]))):
        for group in groups:
            if len(group) < at_once and sum(room(predictions[n]) for n in (*group, name)) < USABLE_GIB:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def measure(names: list[str], given: argparse.Namespace) -> None:
    """Predict all layouts, then measure them in groups until the budget is spent; those that failed once more, if there is time."""
    began, out = time.monotonic(), given.out
    predictions = {row["predicted"]["layout"]: row["predicted"] for row in rows_of(out) if "predicted" in row}
    for name in names:
        if name not in predictions:
            predictions[name] = predicted(name, given.tiny)
            append(out, {"predicted": predictions[name]})
    for at_once in (given.at_once, 2):
        groups = groups_of([n for n in names if not is_measured(n, out)], predictions, at_once)
        print(f"{sum(map(len, groups))} layouts in {len(groups)} groups, {time.monotonic() - began:.0f} s", flush=True)
        for group in groups:
            left = given.budget - (time.monotonic() - began)
            if left < LEAST_S:
                print(f"no time left for {group}", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                run_group(group, given, Path(folder), left, predictions)
            print(f"   {time.monotonic() - began:.0f} s", flush=True)
    compare(out, given.tiny, False)


def run_group(
    group: list[str], given: argparse.Namespace, folder: Path, limit_s: float, predictions: dict[str, Any]
) -> None:
    """A process for each layout; those that still run at the end of the time are ended."""
    out, tiny = given.out, given.tiny
    command = [sys.executable, __file__, "--device", given.device, "--lock", str(folder), "--out", str(out)]
    command += ["--tiny"] * tiny + ["--warm-limit", str(given.warm_limit)]
    if given.details and limit_s > DETAILS_S:
        command += ["--details", str(given.details)]
    env = {**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    running: dict[str, Any] = {}
    for name in group:
        with (folder / name).open("w") as file:
            running[name] = subprocess.Popen([*command, "--one", name], stdout=file, stderr=file, env=env)
    ends = time.monotonic() + limit_s
    while any(child.poll() is None for child in running.values()) and time.monotonic() < ends:
        time.sleep(0.2)
    for name, child in running.items():
        if child.poll() is None:
            child.kill()
        code, log = child.wait(), (folder / name).read_text("utf-8", "replace")
        if not is_measured(name, out):
            append(out, {"failed": name, "code": code, "why": log[-3000:]})
        if code or "Error" in log:
            print(f"{name}: exit {code}\n{log[-1200:]}", flush=True)
        else:
            print("   ".join(log.splitlines()[-3:]), flush=True)
    measured = {row["measured"]["layout"]: row["measured"] for row in rows_of(out) if "measured" in row}
    for name in group:
        if name in measured:
            eager = measured[name]["eager"]
            show(predicted(name, tiny, True) if eager else predictions[name], measured[name])


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
    rows = rows_of(file)
    measured = {row["measured"]["layout"]: row["measured"] for row in rows if "measured" in row}
    before = {(p["layout"], p.get("eager", False)): p for p in (row["predicted"] for row in rows if "predicted" in row)}
    pairs = ((n, m.get("eager", False), m) for n, m in measured.items())
    errors = [show(predicted(n, tiny, eager) if again or eager else before[n, eager], m) for n, eager, m in pairs]
    if not errors:
        return
    for what, values in zip(("compute", "memory"), zip(*errors, strict=True), strict=True):
        sizes = [abs(v) for v in values]
        print(f"{what}: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, {len(sizes)} layouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--first-sight", action="store_true", help="compare with the predictions in the file")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--budget", type=float, default=420)
    parser.add_argument("--at-once", type=int, default=7)
    parser.add_argument(
        "--warm-limit", type=int, default=WARM_LIMIT_S, help="seconds after which a layout that still compiles is ended"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--details", type=Path, help="a folder for snapshots of memory and traces of kernels; none without it"
    )
    parser.add_argument("--one")
    parser.add_argument("--lock", type=Path)
    given = parser.parse_args()
    names = [n for n in LAYOUTS if not given.only or n in given.only]
    if given.one:
        measure_one(given.one, given)
    elif given.compare:
        compare(given.compare, given.tiny, not given.first_sight)
    elif given.predict:
        given.predict.write_text("".join(json.dumps(predicted(n, given.tiny)) + "\n" for n in names), "utf-8")
    else:
        measure(names, given)


if __name__ == "__main__":
    main()
