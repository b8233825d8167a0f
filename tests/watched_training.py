"""A training with dropout that knows nothing of the watch, and bugs in how its ranks go together: `watched_training.py LAYOUT [BUG]`."""

import sys
from functools import partial

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import small_training

STEPS = 6


class Net(small_training.Net):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.dropout = bug, nn.Dropout(0.1)

    def forward(self, x):
        x = self.dropout(self.embedding(x))
        for layer in self.layers:
            x = layer(x)
        if self.bug == "detached":
            return nn.functional.linear(x, self.head.weight, self.head.bias.detach())
        return nn.functional.linear(x, self.head.weight, self.head.bias * 0) if self.bug == "zero" else self.head(x)


def train(layout, bug="", rank=0, world=1):
    torch.manual_seed(0)
    model, place, groups = Net(bug), rank, world
    if layout == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif layout != "local":
        model, place, groups = small_training.parallel(model, layout, rank, world)
    if bug == "broadcast":
        with torch.no_grad():
            next(model.parameters()).add_(rank)
    parameters = dict(model.named_parameters())
    given = [p for name, p in parameters.items() if bug != "forgotten" or not name.endswith("head.bias")]
    optimizer = torch.optim.AdamW(
        given, lr=2e-3 if bug == "rate" and rank else 1e-3, weight_decay=0.1 if bug == "zero" else 0.0
    )
    torch.manual_seed(7 if bug == "seed" else 7 + (rank if bug == "tensor seed" else place))
    data = torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (4, 8), generator=data)
        mine = (
            tokens.chunk(2)[rank] if bug == "tensor samples" else tokens.chunk(groups)[0 if bug == "samples" else place]
        )
        if layout == "local":  # ranks that only average their gradients themselves
            mine = tokens.chunk(world)[rank]
        if bug == "late" and rank and step == 2:
            break
        loss = nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.roll(-1, 1).flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        if "tp" not in layout:
            clip = (
                model.clip_grad_norm_
                if layout == "fsdp1" and bug != "norm"
                else partial(nn.utils.clip_grad_norm_, model.parameters())
            )
            clip(0.1)
        if not (bug == "skip" and rank and step == 2):
            optimizer.step()
            optimizer.zero_grad()
        if bug == "states" and rank:
            for state in optimizer.state.values():
                state["step"] += step == 0
    return losses


def main() -> None:
    distributed.init_process_group("gloo")
    train(*[*sys.argv, ""][1:3], distributed.get_rank(), distributed.get_world_size())
    print("trained")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
