"""Where the time of a profiled step goes on a GPU: seconds by group of kernels, with the prediction and the floor of each group.

    group       kernels                                      floor
    products    cuBLAS, CUTLASS, grouped and fp8 products    FLOPs over the rate that large products reach on this device
    attention   FlashAttention, cuDNN                        FLOPs over the rate of its attention kernel
    loss        softmax over the vocabulary                  bytes over the bandwidth of copies
    optimizer   update, norm of gradients                    bytes over the bandwidth of copies
    other       norms, activations, rotations, quantisation, bytes over the bandwidth of copies
                sums of gradients
    copies      between host and device                      none
    comm        NCCL                                         none
    idle        no kernel runs                               0

Rates are those of the device in the prediction: the catalog's, or measured (`meshwright bench`, `calibrate`). Kernels on several streams at
the same time count each; `idle` is the time of the step in which none ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost.compute import op_time
from meshwright.cost.predict import cost_of
from meshwright.describe.config import Config
from meshwright.lower.op import Op
from meshwright.lower.stages import rank_blocks
from meshwright.lower.step import step_program
from meshwright.lower.sync import update_bytes

NAMES: dict[str, tuple[str, ...]] = {  # parts of kernels' names in lower case; the first match decides
    "comm": ("nccl",),
    "attention": ("sdpa", "flash", "fmha", "attention"),
    "products": ("nvjet", "gemm", "cutlass", "wgmma", "xmma", "cublas", "scaled_mm", "grouped_mm"),
    "loss": ("loss_kernel", "cross_entropy", "softmax", "nll_loss"),
    "optimizer": ("adamw", "multi_tensor", "lpnorm", "norm_two"),
    "copies": ("memcpy", "memset"),
}
GROUPS = ("products", "attention", "loss", "optimizer", "other", "copies", "comm", "idle")
PHASES = ("F", "I", "W", "R")
ON_DEVICE = ("kernel", "comm", "gpu_memcpy", "gpu_memset")  # categories of a trace


@dataclass(frozen=True)
class GroupTime:
    """Seconds of a step in one group of kernels."""

    group: str
    measured_s: float
    predicted_s: float | None = None
    floor_s: float | None = None


def group_of(name: str) -> str:
    lower = name.lower()
    return next((group for group, parts in NAMES.items() if any(part in lower for part in parts)), "other")


def measured(kernels: Iterable[tuple[str, float, float]], steps: int, step_s: float) -> dict[str, float]:
    """Seconds per step by group, of kernels given as (name, start, seconds) in `steps` steps of `step_s` seconds."""
    found, spans = dict.fromkeys(GROUPS, 0.0), []
    for name, start, seconds in kernels:
        found[group_of(name)] += seconds / steps
        spans.append((start, start + seconds))
    found["idle"] = max(0.0, step_s - covered(spans) / steps)
    return found


def of_trace(trace: dict[str, Any]) -> dict[str, float]:
    """`measured` of the trace of a rank that `profile` wrote; empty without kernels."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    kernels = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") in ON_DEVICE]
    first, last = trace["otherData"]["steps"]
    steps = last - first + 1
    if not kernels:
        return {}
    began, ended = min(start for _, start, _ in kernels), max(start + seconds for _, start, seconds in kernels)
    return measured(kernels, steps, (ended - began) / steps)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def group_of_op(op: Op) -> str:
    if op.kind in ("gemm", "attention"):
        return {"gemm": "products"}.get(op.kind, op.kind)
    return "loss" if op.name.startswith("loss") else "other"


def expected(config: Config, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Predicted seconds and the floor of each group, on a rank of the first data-parallel replica's pipeline."""
    device, precision, stack = config.cluster.accelerator, config.workload.precision, config.stack
    program = step_program(config.model, config.plan, config.workload, stack)
    batch, cost = program.batch, cost_of(config.model, config.cluster, config.plan, config.workload, stack)
    counts = rank_blocks(batch, np.array([rank])).counts
    out = {group: [0.0, 0.0] for group in GROUPS}
    for (block, phase), ops in program.blocks.items():
        for op in ops if phase in PHASES else ():
            if op.kind not in ("gemm", "attention", "memory"):
                continue
            times = float(np.max(counts[block] * op.count * batch.microbatches))
            out[group_of_op(op)][0] += times * float(np.max(op_time(device, precision, stack, op)))
            out[group_of_op(op)][1] += times * floor_of(config, op)
    elements = sum(
        float(np.max(n)) * float(np.max(counts[b])) for b, g in program.parameters.items() for n in g.values()
    )
    update = float(np.max(update_bytes(batch, np.array([elements])))) / bandwidth(config)
    out["optimizer"] = [float(np.max(cost.exposed.get("optimizer", 0.0))), update]
    out["idle"] = [float(np.max(cost.exposed.get("host", 0.0))) + stack.step_overhead, 0.0]
    return {group: (seconds, floor) for group, (seconds, floor) in out.items() if seconds}


def bandwidth(config: Config) -> float:
    return config.cluster.accelerator.efficiency.memory * config.cluster.accelerator.memory_bandwidth


def floor_of(config: Config, op: Op) -> float:
    """Seconds that one occurrence takes at the best rate of the device."""
    device = config.cluster.accelerator
    dtype = op.dtype or config.workload.precision
    eff, peak = device.efficiency, device.peak_for(dtype)
    if op.kind == "gemm":
        return float(np.max(op.flops)) / (eff.products(dtype) * peak)
    if op.kind == "attention":
        return float(np.max(op.flops)) / (eff.attention(config.stack.attention) * peak)
    return float(np.max(op.bytes)) / bandwidth(config)


def compare(config: Config, seconds: dict[str, float]) -> list[GroupTime]:
    """Measured seconds by group, and what is expected of them."""
    known = expected(config)
    return [
        GroupTime(g, seconds.get(g, 0.0), *known.get(g, (None, None))) for g in GROUPS if seconds.get(g) or g in known
    ]
