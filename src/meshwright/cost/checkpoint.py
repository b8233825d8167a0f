"""Memory of a save and of a load (a resume loads before its first step), on the fullest device and in the memory of the fullest host.

Between steps no activations are alive: a device has its shards of parameters and optimizer states, gradient buffers that stay allocated
(`Stack.flat_shards`), the driver's context, and what it gathers. With N parameters of the model, w bytes of a saved weight (4 where a master
exists) and s bytes of its optimizer states:

    saves      gathered on a device                    in the memory of a host
    sharded    nothing                                 one tensor at a time: not counted
    copied     nothing                                 N·(w + s) / shards, for each rank of the host that writes a shard
    rank-0     a unit, max(w, s) bytes per parameter   N · max(w, s): first all weights, then all states
    weights    the largest tensor, in 16 bits          N · 2
    group      nothing                                 N·(w + s) / (tp·pp), for each first rank of a data-parallel group
    device     N·w / (tp·pp)                           nothing

    loads      sent through a device                   in the memory of a host
    sharded    nothing                                 one tensor at a time: not counted
    rank-0     the largest tensor, w bytes             N · max(w, s)
    every-rank nothing                                 N · w for each rank of the host

A unit is what FSDP gathers at once: a layer, or its root unit, which has the embedding and the output projection. rank-0 is FSDP's
FULL_STATE_DICT with `rank0_only` and `offload_to_cpu`, as accelerate sets it; weights is DeepSpeed's gathering of 16-bit weights under ZeRO-3;
group is Megatron-LM's format `torch` with the distributed optimizer. What an adapter leaves frozen is not saved; it is loaded.
"""

from meshwright.describe.accelerator import DTYPE_BYTES
from meshwright.describe.cluster import Cluster
from meshwright.describe.config import Config
from meshwright.describe.plan import Plan
from meshwright.describe.result import GIB, Prediction
from meshwright.describe.stack import Stack
from meshwright.units import format_bytes

ROOT = ("embedding", "head")


def checkpoint_memory(config: Config, memory: list[dict[str, float]], blocks: dict[str, float]) -> dict[str, float]:
    """GiB on the fullest device and host at a save and at a load, and the memory of a host. `memory`: GiB of each stage by part; `blocks`:
    parameters of each block on a rank before ZeRO."""
    plan, stack, cluster = config.plan, config.stack, config.cluster
    weight = 4.0 if plan.master else float(DTYPE_BYTES[plan.param_dtype])
    states = float(config.workload.state_copies * DTYPE_BYTES[plan.state_dtype])
    every, total, split = float(config.model.total), float(config.model.trained), plan.tp * plan.pp
    root = sum(blocks.get(name, 0.0) for name in ROOT)
    unit = max(root, *(size for name, size in blocks.items() if name not in ROOT), 0.0)
    tensor = max(blocks.get(name, 0.0) for name in ROOT)
    sharded = plan.shard * plan.cp if plan.zero else 1
    everywhere = {"tp": plan.tp, "pp": plan.pp, **({"dp": plan.shard, "cp": plan.cp} if plan.zero else {})}
    device, host = {
        "sharded": (0.0, 0.0),
        "copied": (
            0.0,
            total * (weight + states) / (split * sharded) * ranks_of_host(plan, stack, cluster, everywhere),
        ),
        "rank-0": (unit * max(weight, states), total * max(weight, states)),
        "weights": (tensor * DTYPE_BYTES[plan.param_dtype], total * DTYPE_BYTES[plan.param_dtype]),
        "group": (
            0.0,
            total * (weight + states) / split * ranks_of_host(plan, stack, cluster, {"tp": plan.tp, "pp": plan.pp}),
        ),
        "device": (total * weight / split, 0.0),
    }[stack.saves]
    loaded, read = {
        "sharded": (0.0, 0.0),
        "rank-0": (tensor * weight, max(every * weight, total * states)),
        "every-rank": (0.0, every * weight * min(plan.world, cluster.host_size)),
    }[stack.loads]
    parts = ("parameters", "optimizer", "context", *(("gradients",) if stack.flat_shards else ()))
    between = max(sum(stage[part] for part in parts) for stage in memory)
    return {
        "save_device": between + device / GIB,
        "save_host": host / GIB,
        "load_device": between + loaded / GIB,
        "load_host": read / GIB,
        "host_limit": cluster.host_limit / GIB,
    }


def ranks_of_host(plan: Plan, stack: Stack, cluster: Cluster, axes: dict[str, int]) -> int:
    """The ranks of the first host among those that have the first coordinate on every axis but `axes`, and there one below the given size."""
    degrees, count, span = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "dp": plan.dp}, 1, 1
    for axis in plan.order or stack.order:
        inside = max(1, min(degrees[axis], cluster.host_size // span))
        count *= min(inside, axes.get(axis, 1))
        span *= degrees[axis]
    return count


def checkpoint_words(p: Prediction, stack: Stack) -> str:
    """Format the memory of a save and of a load: of the fullest device, and of the fullest host if the stack copies or collects there."""
    sizes = p.checkpoint_gib

    def words(name: str) -> str:
        host = sizes[f"{name}_host"]
        device = format_bytes(sizes[f"{name}_device"] * GIB)
        limit = format_bytes(sizes["host_limit"] * GIB)
        return f"{device} on a device" + (f", {format_bytes(host * GIB)} of {limit} on a host" if host else "")

    save, load = words("save"), words("load")
    if save == load:
        return f"save, load, resume: {save}"
    return f"save ({stack.saves}): {save}; load, resume ({stack.loads}): {load}"
