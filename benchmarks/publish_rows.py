"""Write the published runs that come with the package: `src/meshwright/calibrate/runs/published.csv.xz`.

    python benchmarks/publish_rows.py RUNS.csv FAILED.csv H200.jsonl

Every row gets the licence of its source. The measurements of one H200 (`train` lines of H200.jsonl) become rows: the shapes are those of
Llama-3.2 1B and 3B with an untied head, found by their number of parameters. The runs named "mini" call scaled_dot_product_attention, which
is as fast there as with cuDNN alone.

The tables of Megatron-Bridge do not have CUDA graphs, the dispatcher of experts and the overlap of its messages, what is recomputed, modules of
multi-token prediction (its recipes train them with DeepSeek-V3 and Nemotron 3 Super), the layers of each stage, fused products of experts,
layers in bf16 and layers whose activations are offloaded. `bridge_settings.csv` has them, from the settings of the same release in its
repository (`scripts/performance/configs`, and the recipes in `src/megatron/bridge/recipes` that they start from; v0.1.0rc4 for the tables of
25.09) whose degrees and micro-batch are those of the row. A row without such settings in its release or the one before or after has blank cells.
"""

import csv
import io
import json
import lzma
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src" / "meshwright" / "calibrate" / "runs" / "published.csv.xz"
SETTINGS = Path(__file__).with_name("bridge_settings.csv")
SETTING_COLUMNS = (
    "graphs",
    "dispatch",
    "overlap",
    "recompute_layers",
    "recompute_modules",
    "mtp",
    "stages",
    "fused",
    "wide_layers",
    "offload_layers",
)
PAPER = "facts of a paper"
LICENCES = {
    "ultrascale_playbook": "Apache-2.0 (huggingface/nanotron)",
    "ultrascale_playbook_failed": "Apache-2.0 (huggingface/nanotron)",
    "vtrain_ground_truth": f"{PAPER}; its artifact has no licence file (VIA-Research/vTrain)",
    "nvidia_dgxc_benchmarking": "LICENSE of NVIDIA/dgxc-benchmarking",
    "megatron_bridge_perf_summary": "LICENSE of NVIDIA-NeMo/Megatron-Bridge",
    "megatron_lm_golden_values": "LICENSE of NVIDIA/Megatron-LM",
    "llm_foundry": "Apache-2.0 (mosaicml/llm-foundry)",
    "bigscience_bloom": "Apache-2.0 (bigscience-workshop/bigscience)",
    "dlperf_v100_gpt": "LICENSE of Oneflow-Inc/DLPerf",
    "h200_single_gpu": "our own measurements, the licence of Meshwright",
}
SHAPES = {"1b": (16, 2048, 8192, 32, 8), "3b": (28, 3072, 8192, 24, 8)}  # layers, hidden, ffn, heads, kv heads


def stack_of(name: str) -> str:
    if "compile" in name:
        return "torch-compile"
    return "huggingface" if name.startswith("hf") else "torch-eager"


def h200_rows(path: str) -> list[dict[str, str]]:
    """The training runs on one H200 as rows; runs in fp8 by hand-written casts are left out: no stack has them."""
    found = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines()):
        run = json.loads(line)
        if run["what"] != "train" or "fp8" in run["name"]:
            continue
        layers, hidden, ffn, heads, kv_heads = SHAPES[run["shape"]]
        found.append(
            {
                "file": "h200_single_gpu",
                "tier": "1",
                "row_id": f"h200_single_gpu-{number:02d}",
                "stack": stack_of(run["name"]),
                "task": "pretrain",
                "zero": "0",
                "recompute_mode": "none",
                "dtype": "bf16",
                "schedule": "none",
                "source": "our own runs on one H200",
                "model": f"Llama-3.2 {run['shape'].upper()} untied",
                "params": str(run["params"]),
                **dict(zip(("layers", "hidden", "ffn_hidden", "heads", "kv_heads"), map(str, (layers, hidden, ffn, heads, kv_heads)), strict=True)),
                "vocab": "128256",
                "seq_len": str(run["S"]),
                "gpu_type": "H200",
                "gpus": "1",
                "tp": "1",
                "sp": "0",
                "cp": "1",
                "pp": "1",
                "dp": "1",
                "zero_fsdp": "bf16 parameters and states" if "bf16 params" in run["name"] else "fp32 parameters, autocast",
                "micro_batch": str(run["B"]),
                "global_batch": str(run["B"]),
                "flash_attn": "1" if run["name"].startswith("hf") else "fused (cuDNN)",
                "step_time_s": f"{run['step_ms'] / 1e3:.6g}",
                "memory_gib": f"{run['peak_gib']:.6g}",
                "notes": f"{run['name']}; torch's peak of allocated memory",
            }
        )  # fmt: skip
    return found


def main(runs: str, failed: str, h200: str) -> None:
    rows: list[dict[str, str]] = []
    names: list[str] = []
    for path in (runs, failed):
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = names or list(reader.fieldnames or [])
            rows += list(reader)
    rows += h200_rows(h200)
    out = io.StringIO()
    writer = csv.DictWriter(out, [*names, *SETTING_COLUMNS, "licence"], restval="", lineterminator="\n")
    writer.writeheader()
    with SETTINGS.open(newline="", encoding="utf-8") as file:
        settings = {row["row_id"]: {name: row[name] for name in SETTING_COLUMNS} for row in csv.DictReader(file)}
    for row in rows:
        clean = {k: " ".join((v or "").split()) for k, v in row.items()} | settings.get(row["row_id"], {})
        if clean.get("recompute_layers"):
            clean["recompute_mode"] = "full" if clean["recompute_layers"] != "0" else "none"
        if clean["task"] == "lora" and clean["file"] == "megatron_lm_golden_values":
            clean["task"] = (
                "latent"  # the tests name `q-lora-rank` and `kv-lora-rank`: ranks of latent attention, not of adapters
            )
        writer.writerow({**clean, "licence": LICENCES.get(row["file"], PAPER)})
    TARGET.write_bytes(lzma.compress(out.getvalue().encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(rows)} rows, {TARGET.stat().st_size} bytes: {TARGET}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(*sys.argv[1:])
    else:
        print("publish_rows: needs RUNS.csv, FAILED.csv and H200.jsonl as its arguments")
