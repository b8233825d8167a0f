"""How long does `meshwright explain` take for a large trace, and how much memory?

    python benchmarks/explain_large.py                  2 GB
    python benchmarks/explain_large.py --gigabytes 10   more events than are read: a part, and a note

The trace is written first: steps of a model with several layers, each an operator with shapes, its launch and its kernel, as torch.profiler
writes them with NCCL's records. Then the command runs as a process of its own, whose seconds and largest resident memory are printed as JSON.
The targets for 2 GB are 180 s on two cores, and 4 GB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP_US, LAYERS = 1_000_000, 64
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [{"name": "NVIDIA H200"}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
}


def event(category: str, name: str, start: float, duration: float, thread: int, **arguments: object) -> str:
    about = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": duration}
    return json.dumps(about | {"args": arguments})


def step_of(number: int) -> list[str]:
    """The events of one step: forward, backward with a reduction per layer, the update. About 5 MB."""
    begin, rows, width = number * STEP_US, [], STEP_US / (LAYERS * 41)
    rows.append(event("user_annotation", f"ProfilerStep#{number}", begin, STEP_US, 1))
    for layer in range(LAYERS):
        for place in range(41):
            at, key = begin + (layer * 41 + place) * width, (number * LAYERS + layer) * 41 + place
            name, kernel = (
                ("aten::mm", "nvjet_tst_128x256") if place % 4 == 0 else (f"aten::op{place}", f"kernel_{place}")
            )
            shapes = {"Input Dims": [[8192, 2048], [2048, 5632]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
            rows.append(
                event("cpu_op", name, at, width / 2, 1, **{"External id": key, **shapes, "Sequence number": key})
            )
            if layer * 2 >= LAYERS and place == 0:
                rows.append(event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at, width * 40, 2))
            joined = {"External id": key, "correlation": key}
            rows.append(event("cuda_runtime", "cudaLaunchKernel", at + width / 8, width / 8, 1, **joined))
            rows.append(
                event("kernel", kernel, at + width / 4, width * 0.7, 7, **joined, stream=7, device=0, grid=[64, 1, 1])
            )
        facts = {"Collective name": "allreduce", "In msg nelems": 10**7, "Out msg nelems": 10**7, "dtype": "BFloat16",
                 "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}  # fmt: skip
        rows.append(event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at, width * 5, 20, **facts, stream=20))
    rows.append(event("user_annotation", "Optimizer.step#AdamW.step", begin + STEP_US * 0.98, STEP_US * 0.01, 1))
    return rows


def write(path: Path, size: float) -> int:
    """Write a trace of at least `size` bytes; returns its number of events."""
    count = 0
    with path.open("w", encoding="utf-8") as out:
        out.write(json.dumps(HEAD)[:-1] + ', "traceEvents": [\n')
        number = 0
        while out.tell() < size:
            rows = step_of(number)
            out.write(",\n" * (number > 0) + ",\n".join(rows))
            number, count = number + 1, count + len(rows)
        out.write("\n]}")
    return count


def explained(path: Path) -> dict[str, object]:
    """Seconds and largest resident memory of the command, and the notes of its result."""
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "explain",
        str(path),
        "--json",
        "--html",
        str(path.with_suffix(".html")),
    ]
    start = time.monotonic()
    with path.with_suffix(".out").open("w") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    if status:
        raise SystemExit(f"`meshwright explain` ended with {os.waitstatus_to_exitcode(status)}")
    result = json.loads(path.with_suffix(".out").read_text())
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "memory_gb": round(usage.ru_maxrss * 1024 / 1e9, 3),
        "events_read": result["ranks"][0]["events"],
        "steps": len(result["ranks"][0]["steps"]),
        "attributed": result["attributed"],
        "notes": result["notes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", default=None, help="where the trace is written; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "rank-0.json"
        events = write(path, options.gigabytes * 1e9)
        about = {"gigabytes": round(path.stat().st_size / 1e9, 3), "events": events}
        print(json.dumps(about | explained(path), indent=2))


if __name__ == "__main__":
    main()
