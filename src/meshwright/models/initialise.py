"""Initial weights that do not depend on the layout.

Each parameter has a separate generator, seeded by a hash of (seed, name), and is drawn with the shape of the full tensor. A
rank that holds a part of it draws the full tensor and keeps its box (`describe.sharding`), so the same seed gives the
same weights under every plan. The cost: every rank draws every parameter of its stage in full, one at a time.

    matrices and embeddings   N(0, σ²),  σ = √(2 / 5h)     (Nguyen & Salazar 2019; 0.02 at h = 1000)
    outputs of a block        σ / √(2·layers)              (attention output, down projections of FFN and experts)
    layers of the deep MLP    σ = √(2 / h)                 (He et al. 2015)
    convolutions              σ = √(2 / fan out), and 0.01 for the head of a residual network
    norm weights 1 (less `norm_offset`), biases and sinks 0
    adapters                  A: U(−1/√in, 1/√in), B: 0    (Hu et al. 2021; PEFT's Kaiming with a = √5)

`scatter` adds N(0, 0.1²) to norm weights, biases, sinks and B: in a proof of parity an error in a bias must not be hidden by a bias of zero.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.describe.model import Model

BLOCK_OUTPUTS = ("attention.o.weight", "heads.o.weight", "down.weight")
ZERO = ("bias", "sinks.weight")
ADAPTER_A, ADAPTER_B = "lora_a.weight", "lora_b.weight"
SCATTER = 0.1


class Weights(Protocol):
    """Source of a model's parameter values: drawn, a folder of Hugging Face, a checkpoint."""

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box at `start` with this `shape` of a parameter whose full shape is `full`."""
        ...


@dataclass(frozen=True)
class DrawnWeights:
    """Initial weights drawn from (seed, name)."""

    model: Model
    seed: int
    scatter: bool = False

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        value = initial_value(self.model, name, torch.Size(full), self.seed, self.scatter)
        return box_of(value, start, shape)


@dataclass(frozen=True)
class WithDrawnAdapters:
    """The weights of a `base` that has no adapters, with drawn ones."""

    base: Weights
    drawn: DrawnWeights

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return (self.drawn if name.endswith((ADAPTER_A, ADAPTER_B)) else self.base).read(name, full, start, shape)


class UnsetWeights:
    """NaN for every weight, at no cost: a checkpoint will replace them all, and one that it lacked would be seen in the first step."""

    def read(self, name: str, full: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return torch.tensor(math.nan).expand(tuple(shape))


def box_of(full: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A view of the box at `start` with this `shape`."""
    for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
        full = full.narrow(dim, first, length)
    return full


def generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(model: Model, name: str, shape: torch.Size, seed: int, scatter: bool = False) -> Tensor:
    """The initial value of a parameter: the full tensor, in float32."""
    if name.endswith(ADAPTER_A):
        unit = torch.rand(shape, generator=generator(seed, name), dtype=torch.float32)
        return unit.mul_(2).sub_(1).div_(math.sqrt(shape[-1]))
    draw = torch.randn(shape, generator=generator(seed, name), dtype=torch.float32)
    if name.endswith(ADAPTER_B):
        return draw.mul_(SCATTER if scatter else 0.0)
    if len(shape) == 1 or name.endswith("bias"):
        centre = 0.0 if name.endswith(ZERO) else 1.0 - model.norm_offset
        return draw.mul_(SCATTER if scatter else 0.0).add_(centre)
    if model.resnet.stages:
        return draw.mul_(0.01 if len(shape) == 2 else math.sqrt(2 / (shape[0] * shape[2] * shape[3])))
    if model.kind == "mlp":
        return draw.mul_(math.sqrt(2 / model.hidden))
    deviation = math.sqrt(2 / (5 * model.hidden))
    if name.endswith(BLOCK_OUTPUTS):
        deviation /= math.sqrt(2 * model.layers)
    return draw.mul_(deviation)
