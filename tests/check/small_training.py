"""A training script that knows nothing of the recorder: `small_training.py LAYOUT [BUG]`, alone or under torchrun."""

import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUT, BUG = ([*sys.argv, "", ""])[1:3]


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


def parallel(model, rank, world):
    """The model under a layout, and the data-parallel place of this rank."""
    place, groups = rank, world
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")) if "tp" in LAYOUT else None
    if mesh is not None:
        place, groups = rank // 2, world // 2
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if LAYOUT.startswith("fsdp2"):
        of = {} if mesh is None else {"mesh": mesh["dp"]}
        for layer in model.layers:
            fully_shard(layer, **of)
        fully_shard(model, **of)
    if LAYOUT == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if LAYOUT == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, place, groups


def main() -> None:
    rank, world = 0, 1
    if LAYOUT != "one":
        distributed.init_process_group("gloo")
        rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model, place, groups = Net().double(), rank, world
    if LAYOUT != "one":
        model, place, groups = parallel(model, rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(0, 32, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    for tokens in batches:
        mine = tokens.chunk(groups)[0 if BUG == "samples" else place]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.roll(-1, 1).flatten())
        (loss / 2 if BUG == "factor" else loss).backward()
        if BUG == "dies":
            raise RuntimeError("planted")
        if BUG == "bias" and rank == 1:
            optimizer.param_groups[0]["lr"] = 2e-3
        optimizer.step()
    if LAYOUT != "one":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
