"""A module of your own, proved: does a plan train it as one device does?

meshwright verify examples/verify_module.py:make --plan examples/demo-dp2-tp2.toml

`make` returns a small configuration with the same kinds of layers as the large one. `example`, `loss` and `table` are found by their names.
"""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def make() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 16), *[Block(16) for _ in range(4)], nn.Linear(16, 32))


def example(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of all data-parallel ranks together: inputs and targets."""
    ids = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(-1, 1)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


table = [
    ("0", "replicated"),
    ("*.norm", "replicated"),
    ("*.mlp", "region"),
    ("*.mlp.0", "column"),
    ("*.mlp.2", "row"),
    ("5", "replicated"),
]
