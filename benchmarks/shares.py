"""Compare the shares of peak in the catalog with those that measurements give.

    python benchmarks/shares.py MEASUREMENTS

`MEASUREMENTS` is a folder with `gemm.csv` (matrix products of several devices, m × n × k up to 4096) and `h200_single_gpu.jsonl` (long runs
on one H200). `benchmarks/gpu/h200.toml` is what `meshwright calibrate` wrote from a `meshwright bench` of one H200: the catalog's shares of
Hopper are these. Each share is the one with which `cost.compute` gives the measured time (`calibrate.gpu`). Of gemm.csv the largest product
counts: smaller ones show the ramp of kernels, not what a device sustains.
"""

import csv
import json
import sys
import tomllib
from pathlib import Path

import numpy as np

from meshwright.calibrate.device_fit import share_of
from meshwright.calibrate.points import DevicePoint
from meshwright.describe.accelerator import Accelerator
from meshwright.describe.catalog import load

DEVICES = (("sm_90", "h100-sxm"), ("sm_100_B200", "b200"), ("gfx950", "mi355x"))
COMBINATION = "bf16xbf16->bf16"
LONG = 2048  # rows of the smallest product of the long runs that counts: a tenth of the largest work
H200 = Path(__file__).parent / "gpu" / "h200.toml"


def product_share(device: Accelerator, m: float, n: float, k: float, rate: float) -> float:
    """The share of peak of one product of m × k by k × n that ran at this rate."""
    work = 2.0 * m * n * k
    seconds = work / rate
    shape = {"m": m, "n": n, "k": k}
    times = {"median_s": seconds, "low_s": seconds, "high_s": seconds}
    return share_of(DevicePoint(kind="gemm", dtype="bf16", shape=shape, work=work, samples=1, **times), device, "gemm")


def main(folder: Path) -> None:
    print("| device | share | catalog | measured | by |")
    print("| --- | --- | ---: | ---: | --- |")
    bench = tomllib.loads(H200.read_text("utf-8"))["cluster"]["accelerator"]["efficiency"]
    hopper = load("accelerators", "h200")
    for name in ("gemm", "flash", "fused", "memory"):
        print(f"| h200 | {name} | {getattr(hopper.efficiency, name)} | {bench[name]:.3f} | meshwright bench |")
    lines = [json.loads(line) for line in (folder / "h200_single_gpu.jsonl").read_text("utf-8").splitlines()]
    long = [
        product_share(hopper, float(x["m"]), 4096.0, 4096.0, x["value"] * 1e12)
        for x in lines
        if x["what"] == "matmul_bf16_tflops_mx4096x4096" and x["m"] >= LONG
    ]
    print(f"| h200 | gemm | {hopper.efficiency.gemm} | {np.median(long):.3f} | median of {len(long)} long runs |")
    copies = next(x["value"] for x in lines if x["what"] == "copy_TBps") * 1e12 / hopper.memory_bandwidth
    print(f"| h200 | memory | {hopper.efficiency.memory} | {copies:.3f} | long run |")
    with (folder / "gemm.csv").open(newline="", encoding="utf-8") as file:
        products = [r for r in csv.DictReader(file) if r["dtype_combo"] == COMBINATION and r["batch"] == "1"]
    for name, entry in DEVICES:
        device = load("accelerators", entry)
        largest = max(
            (r for r in products if r["device"] == name), key=lambda r: float(r["m"]) * float(r["n"]) * float(r["k"])
        )
        m, n, k = (float(largest[x]) for x in "mnk")
        found = product_share(device, m, n, k, float(largest["flops_per_sec"]))
        print(f"| {entry} | gemm | {device.efficiency.gemm} | {found:.3f} | the largest product of gemm.csv |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        print("shares: needs the folder of gemm.csv and h200_single_gpu.jsonl as its argument")
