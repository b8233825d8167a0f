"""A training script that knows nothing of the recorder: `small_training.py LAYOUT [BUG]`, alone or under torchrun."""

import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ByHand(torch.autograd.Function):
    """Copies forward and sums backward, or the other way round, as in Megatron's layers."""

    @staticmethod
    def forward(ctx, x, forward, lost):
        ctx.backward = not forward and not lost
        if forward:
            x = x.clone()
            distributed.all_reduce(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.backward:
            distributed.all_reduce(gradient)
        return gradient, None, None


class CutBlock(Block):
    """A part of a block for each rank; `lost`: the sum of backward is left out."""

    def __init__(self, block, rank, world, lost):
        super().__init__()
        self.norm, self.up, self.down = block.norm, block.up, block.down
        for weight, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            weight.data = weight.data.chunk(world, dim)[rank].clone()
        self.lost = lost

    def forward(self, x):
        inputs = ByHand.apply(self.norm(x), False, self.lost)
        product = nn.functional.linear(torch.relu(self.up(inputs)), self.down.weight)
        return x + ByHand.apply(product, True, False) + self.down.bias


def parallel(model, layout, rank, world, bug=""):
    """The model under a layout, and the data-parallel place of this rank."""
    place, groups = rank, world
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")) if "tp" in layout else None
    if mesh is not None:
        place, groups = rank // 2, world // 2
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout.startswith("fsdp2"):
        of = {} if mesh is None else {"mesh": mesh["dp"]}
        for layer in model.layers:
            fully_shard(layer, **of)
        fully_shard(model, **of)
    if layout == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if layout == "by-hand":
        model.layers = nn.ModuleList(CutBlock(layer, rank, world, bug == "lost") for layer in model.layers)
        place, groups = 0, 1
    if layout.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    return model, place, groups


def train(layout, bug="", rank=0, world=1, dtype=torch.float64):
    torch.manual_seed(1 if bug == "seed" else 0)
    model, place, groups = Net().to(dtype), rank, world
    if not layout.startswith("one"):
        model, place, groups = parallel(model, layout, rank, world, bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(0, 32, (2, 4, 8), generator=torch.Generator().manual_seed(2 if bug == "data" else 1))
    for step, tokens in enumerate(batches):
        mine = tokens.chunk(groups)[0 if bug == "samples" else place]
        if bug != "stale" or step == 0:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.roll(-1, 1).flatten())
        (loss / 2 if bug == "factor" else loss).backward()
        if bug == "dies":
            raise RuntimeError("planted")
        if bug == "rate" and rank == 1:
            optimizer.param_groups[0]["lr"] = 2e-3
        if "clip" in layout:
            nn.utils.clip_grad_norm_(model.parameters(), 0.25 if bug == "norm" and rank else 0.5)
        optimizer.step()


def main() -> None:
    layout, bug = [*sys.argv, ""][1:3]
    rank, world = 0, 1
    if layout != "one":
        distributed.init_process_group("gloo")
        rank, world = distributed.get_rank(), distributed.get_world_size()
    train(layout, bug, rank, world)
    if layout != "one":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
