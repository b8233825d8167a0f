"""PyTorch's own parallelism: ddp, fsdp1, fsdp2, hsdp, tp2, sp2 with any of them; a plain loop without a layout."""

from contextlib import nullcontext

import common
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def tensor_parallel(model, mesh, sequence):
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    if sequence:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan["drop"] = SequenceParallel(use_local_output=True)
        for part in ("attention", "mlp"):
            plan[part] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["attention.o"] = plan["mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
        first = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, first)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def parallel(model, chosen):
    """The model under the layout, this rank's data-parallel place, and the number of data-parallel ranks."""
    layout, world = chosen.layout, chosen.world
    cuts = max(common.degree(layout, "tp"), common.degree(layout, "sp"))
    shape = (world // cuts, cuts)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if cuts > 1:
        tensor_parallel(model, mesh["tp"], "sp2" in layout)
    if "fsdp2" in layout or "hsdp" in layout:
        over = (
            init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            if "hsdp" in layout
            else mesh["dp"]
        )
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if "mixed" in layout
            else MixedPrecisionPolicy()
        )
        for layer in model.layers:
            fully_shard(layer, mesh=over, mp_policy=policy)
        fully_shard(model, mesh=over, mp_policy=policy)
    if "fsdp1" in layout:
        over = {}
        if "hybrid" in layout:  # replicas only: the groups of shards have one rank each
            groups = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
            over = {"device_mesh": groups, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = FullyShardedDataParallel(
            model,
            **over,
            auto_wrap_policy=ModuleWrapPolicy({common.Block}),
            use_orig_params="flat" not in layout,
            device_id=torch.device("cpu"),
        )
    if "ddp" in layout:
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view="view" in layout, static_graph="static" in layout
        )
    return model, mesh["dp"].get_local_rank(), world // cuts


def without_reduction(model, last):
    """FSDP and DDP reduce after the last micro-batch only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def clip(model, limit):
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(limit)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), limit)


def main():
    chosen = common.options()
    if chosen.bug:
        import bugs_torch

        bugs_torch.plant(chosen)
    if chosen.world > 1:
        distributed.init_process_group("gloo")
    model, place, ranks = (
        common.model_of(chosen, tied="tied" in chosen.layout, dropout=0.1 if "dropout" in chosen.layout else 0.0),
        0,
        1,
    )
    whole = model
    if chosen.world > 1:
        model, place, ranks = parallel(model, chosen)
    if "recompute" in chosen.layout:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(whole, check_fn=lambda part: isinstance(part, common.Block))
    optimizer = common.optimizer_of(chosen, model.parameters())
    autocast = torch.autocast("cpu", torch.bfloat16) if "autocast" in chosen.layout else nullcontext()
    for step in range(common.STEPS):
        optimizer.zero_grad()
        batches = common.micro_batches(chosen, step, place, ranks)
        for number, (inputs, labels) in enumerate(batches):
            with without_reduction(model, number == len(batches) - 1):
                with autocast:
                    loss = common.loss_of(model(inputs), labels) / len(batches)
                loss.backward()
        if chosen.clip:
            clip(model, chosen.clip)
        optimizer.step()
    if chosen.world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
