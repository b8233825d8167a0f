"""What the cost model expects of each group of kernels in a step, with the floor at the best rates of the device, and of each product shape."""

import numpy as np

from meshwright.cost.compute import op_time
from meshwright.describe.config import Config
from meshwright.explain.kernels import GROUPS
from meshwright.lower.program import Op
from meshwright.lower.sync import update_bytes
from meshwright.predict.prediction import cost_of

PHASES = ("F", "I", "E", "W", "R")


def group_of_op(op: Op) -> str:
    groups = {"gemm": "products", "attention": "attention"}
    return groups.get(op.kind) or ("loss" if op.name.startswith("loss") else "other")


def expected(config: Config, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Predicted seconds and the floor of each group, on a rank of the first data-parallel replica's pipeline."""
    device, precision, stack = config.cluster.accelerator, config.workload.precision, config.stack
    cost = cost_of(config.but(stack=stack))
    program, batch, blocks = cost.program, cost.program.batch, cost.program.ranks[rank]
    out = {group: [0.0, 0.0] for group in GROUPS}
    for (block, phase), ops in program.blocks.items():
        for op in ops if phase in PHASES else ():
            if op.kind not in ("gemm", "attention", "memory"):
                continue
            times = float(np.max(blocks.times(block, phase) * op.count * batch.microbatches))
            out[group_of_op(op)][0] += times * float(np.max(op_time(device, precision, stack, op)))
            out[group_of_op(op)][1] += times * floor_of(config, op)
    elements = sum(
        float(np.max(n)) * float(np.max(blocks.counts[b])) for b, g in program.parameters.items() for n in g.values()
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


# Products in a batch, and the three sizes in order: the same for forward and both gradients
ShapeKey = tuple[int, tuple[int, ...]]


def shape_key(batch: float, *sizes: float) -> ShapeKey:
    return round(batch), tuple(sorted(round(size) for size in sizes))


def expected_products(config: Config) -> dict[ShapeKey, tuple[float, float, str]]:
    """Predicted seconds and FLOPs per step of the products of each shape on rank 0, and the operations that they are."""
    device, precision, stack = config.cluster.accelerator, config.workload.precision, config.stack
    program = cost_of(config).program
    out: dict[ShapeKey, tuple[float, float, str]] = {}
    for (block, phase), ops in program.blocks.items():
        for op in ops if phase in PHASES else ():
            times = float(np.max(program.ranks[0].times(block, phase) * op.count * program.batch.microbatches))
            if op.kind != "gemm" or not op.shape or not times:
                continue
            key = shape_key(*(float(np.max(size)) for size in op.shape))
            seconds, flops, names = out.get(key, (0.0, 0.0, ""))
            names = names if op.name in names.split(", ") else f"{names}, {op.name}".removeprefix(", ")
            one = float(np.max(op_time(device, precision, stack, op)))
            out[key] = seconds + times * one, flops + times * float(np.max(op.flops)), names
    return out
