"""Train on one GPU through `meshwright train`, side by side with compiled Hugging Face and with a plain compiled control.

    python benchmarks/gpu/run.py speed --shapes 1.5b            step times and memory of all four, and the predictions
    python benchmarks/gpu/run.py experts                        a Mixtral- and a DeepSeek-shaped model, and dense ones of equal active size
    python benchmarks/gpu/run.py graph                          a model with 16 experts, launched and replayed from a CUDA graph
    python benchmarks/gpu/run.py long                           32k, 128k and 512k tokens; 32k with and without offload
    python benchmarks/gpu/run.py loss --steps 2000 --seeds 3    fp8 against bf16 on text: validation loss

Each contender runs in a separate process, one after the other. Every part takes less than 10 minutes on one H200. `benchmarks/gpu.md` has
the figures.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
from shapes import EXPERTS, HOST_BOUND, LONG, SHAPES, SMALL

HERE = Path(__file__).parent
LIMIT_S = 580
TEXT_BYTES = 40e6
STEPS = 16
ONLY = "base,ours"
DEVICE = os.environ.get("DEVICE", "cuda")
CLUSTER = os.environ.get("CLUSTER", "dgx-h200")  # or the file of a calibration: its rates predict


def run_file(folder: Path, shape: dict[str, Any], precision: str, **sections: dict[str, Any]) -> Path:
    """A run file of a shape."""
    model = {k: v for k, v in shape.items() if k not in ("batch", "seq")} | {"max_positions": shape["seq"]}
    content = {
        "cluster": CLUSTER,
        "model": model,
        "workload": {"batch": shape["batch"], "seq": shape["seq"], "precision": precision},
        "plan": {"microbatch": shape["batch"], "grad_dtype": "bf16"} | sections.get("plan", {}),
        "checkpoint": {"keep": 0},
    }
    content |= {name: table for name, table in sections.items() if name != "plan"}
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(content), "utf-8")
    return path


def train(shape: dict[str, Any], precision: str, steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """The result of `meshwright train --json`."""
    with tempfile.TemporaryDirectory() as folder:
        file = run_file(Path(folder), shape, precision, **sections)
        command = [sys.executable, "-m", "meshwright", "train", str(file), "--steps", str(steps), "--device", DEVICE]
        command += ["--out", str(Path(folder) / "run")]
        return last_json(subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=LIMIT_S))


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    text = done.stdout
    start = text.find("{")
    try:
        found = json.loads(text[start:]) if start >= 0 else {}
    except json.JSONDecodeError:
        found = {}
    if "measurement" not in found and "name" not in found:
        print(text[-1500:], done.stderr[-3000:], file=sys.stderr)
    return found


def baseline(shape: str, hf: bool) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "control.py"), shape, *(["--hf"] if hf else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(done.stdout[-500:], done.stderr[-2000:], file=sys.stderr)
    return json.loads(lines[-1]) if lines else {}


def tensors_gib(prediction: dict[str, Any]) -> float:
    """Predicted bytes of tensors on the fullest rank: what the allocator reserves beyond them, and the context, are no tensors."""
    left_out = ("context", "slack")
    return max(sum(v for k, v in stage.items() if k not in left_out) for stage in prediction["memory_by_stage"])


def row(name: str, result: dict[str, Any], base: float = 0.0) -> float:
    """Print one line of a comparison; returns tokens per second."""
    if "measurement" not in result:
        print(f"{name:28s} failed", flush=True)
        return 0.0
    m, p = result["measurement"], result["prediction"]
    memory, predicted = max(stage["tensors"] for stage in m["memory_by_stage"]), tensors_gib(p)
    rate = m["tokens_per_s"]
    against = f"{rate / base:5.2f}x" if base else "      "
    print(
        f"{name:28s} {m['step_time_s'] * 1e3:9.1f} ms {rate:9.0f} tokens/s {against} {memory:6.1f} GiB, reserved {m['memory_gib']:6.1f}   "
        f"predicted {p['step_time_s'] * 1e3:9.1f} ms ({p['step_time_s'] / m['step_time_s'] - 1:+.1%}) "
        f"{predicted:6.1f} GiB ({predicted / memory - 1:+.1%})   MFU {m['mfu']:.1%}",
        flush=True,
    )
    return rate


def kernels(result: dict[str, Any]) -> None:
    """Print where the profiled steps went, by group of kernels."""
    for group in result.get("kernels", ()):
        known = [f"{1e3 * group[name]:8.2f}" if group[name] else "       –" for name in ("predicted_s", "floor_s")]
        print(
            f"    {group['group']:10s} {1e3 * group['measured_s']:8.2f} ms, predicted {known[0]}, floor {known[1]}",
            flush=True,
        )


def speed(shapes: list[str], only: str, graphs: str) -> None:
    for shape in shapes:
        base = 0.0
        for name, hf in (("Hugging Face, compiled", True), ("control", False)) if "base" in only else ():
            found = baseline(shape, hf)
            if found:
                base = base or found["tokens_per_s"]
                print(
                    f"{shape} {name:23s} {found['step_ms']:9.1f} ms {found['tokens_per_s']:9.0f} tokens/s "
                    f"{found['tokens_per_s'] / base:5.2f}x {found['peak_gib']:6.1f} GiB",
                    flush=True,
                )
        for precision in (p for p in ("bf16", "fp8") if "ours" in only or p in only):
            result = train(SHAPES[shape], precision, STEPS, run={"profile_steps": 2, "graphs": graphs})
            row(f"{shape} ours, {precision}", result, base)
            kernels(result)


def graph() -> None:
    losses = []
    for graphs in ("off", "step"):
        result = train(HOST_BOUND, "bf16", STEPS, run={"graphs": graphs})
        row(f"16 experts, graphs {graphs}", result)
        losses.append(result.get("measurement", {}).get("loss", []))
    if all(losses):
        different = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
        print(
            f"losses of {STEPS} steps differ by at most {different:.1e}: {losses[0][-1]:.6f} and {losses[1][-1]:.6f}",
            flush=True,
        )


def experts(only: str) -> None:
    for name, (sparse, dense) in EXPERTS.items():
        if only != ONLY and name not in only:
            continue
        results = {kind: train(shape, "bf16", STEPS) for kind, shape in (("experts", sparse), ("dense", dense))}
        for kind, result in results.items():
            row(f"{name} {kind}", result)
        if all("measurement" in result for result in results.values()):
            ours, equal = (results[kind]["measurement"]["mfu"] for kind in ("experts", "dense"))
            print(f"{name}: MFU {ours / equal:.2f}x that of the dense model of equal active size", flush=True)


def long(lengths: list[int]) -> None:
    for tokens in lengths:
        shape = LONG | {"batch": 1, "seq": tokens}
        steps = {32768: 8, 131072: 3}.get(tokens, 1)
        kept: list[dict[str, Any]] = [{}] if tokens == 32768 else []
        for plan in [*kept, {"offload": "activations"}]:
            name = f"{tokens // 1024}k, recompute" + (", offload" if plan else "")
            result = train(shape, "bf16", steps, plan={"recompute": "full", **plan})
            row(name, result)
            notes = result.get("measurement", {}).get("assumed", ())
            print(*(f"    {note}" for note in notes if "compilation" in note), sep="\n", flush=True)


def prepare_text(folder: Path) -> Path:
    """A token file of text that every machine with torch has: the sources of torch, a byte per token."""
    import torch

    texts, size = folder / "text", 0
    texts.mkdir()
    for i, source in enumerate(sorted(Path(torch.__file__).parent.rglob("*.py"))):
        text = source.read_bytes()
        (texts / f"{i:05d}.txt").write_bytes(text)
        size += len(text)
        if size > TEXT_BYTES:
            break
    command = [sys.executable, "-m", "meshwright", "data", "prepare", str(texts), "--tokenizer", "bytes"]
    subprocess.run([*command, "--out", str(folder / "tokens")], check=True, capture_output=True, timeout=LIMIT_S)
    return folder / "tokens"


def start(here: Path, precision: str, seed: int, steps: int, data: dict[str, Any]) -> subprocess.Popen[str]:
    """A training of the small model in the background; its result is in `here`."""
    here.mkdir()
    file = run_file(here, SMALL, precision, data=data, optimizer={"warmup": 100})
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--steps", str(steps), "--seed", str(seed)]
    command += ["--device", DEVICE, "--out", str(here / "run"), "--json"]
    with (here / "out.json").open("w") as out, (here / "err.txt").open("w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, text=True)


def late_loss(here: Path, steps: int) -> float | None:
    """The mean validation loss of the last 200 steps; None if the training failed."""
    text = (here / "out.json").read_text()
    result = json.loads(text[text.find("{") :]) if "{" in text else {}
    if "measurement" not in result:
        print(text[-800:], (here / "err.txt").read_text()[-1500:], file=sys.stderr)
        return None
    return statistics.fmean(value for step, value in result["measurement"]["validation_loss"] if step >= steps - 200)


def loss(steps: int, seeds: int, workers: int) -> None:
    """Validation losses of both precisions; `workers` runs share the GPU at a time."""
    running: dict[tuple[str, int], subprocess.Popen[str]] = {}
    found: dict[str, list[float]] = {"bf16": [], "fp8": []}
    todo = [(precision, seed) for seed in range(seeds) for precision in ("fp8", "bf16")]  # fp8 takes longer here
    with tempfile.TemporaryDirectory() as folder:
        data = {"path": str(prepare_text(Path(folder))), "eval_every": 20, "validation": 0.001}
        while todo or running:
            while todo and len(running) < workers:
                precision, seed = todo.pop(0)
                running[precision, seed] = start(Path(folder) / f"{precision}-{seed}", precision, seed, steps, data)
            time.sleep(0.5)
            for precision, seed in [key for key, child in running.items() if child.poll() is not None]:
                del running[precision, seed]
                value = late_loss(Path(folder) / f"{precision}-{seed}", steps)
                if value is not None:
                    found[precision].append(value)
                    print(f"{precision} seed {seed}: validation loss {value:.4f} over the last 200 steps", flush=True)
    if found["bf16"] and found["fp8"]:
        spread = max(found["bf16"]) - min(found["bf16"])
        difference = statistics.fmean(found["fp8"]) - statistics.fmean(found["bf16"])
        print(f"fp8 − bf16: {difference:+.4f}; the largest difference between two seeds of bf16: {spread:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "experts", "graph", "long", "loss"))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--graphs", choices=("off", "step"), default="off")
    parser.add_argument("--only", default=ONLY, help="base, ours, bf16, fp8; for experts: the models")
    parser.add_argument("--lengths", nargs="*", type=int, default=[32768, 131072, 524288])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if given.part == "speed":
        speed(given.shapes, given.only, given.graphs)
    elif given.part == "experts":
        experts(given.only)
    elif given.part == "graph":
        graph()
    elif given.part == "long":
        long(given.lengths)
    else:
        loss(given.steps, given.seeds, given.workers)


if __name__ == "__main__":
    main()
