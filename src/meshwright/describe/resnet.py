"""Residual networks with bottleneck blocks: `[model.resnet]` (He et al. 2016; ResNet-50 is stages 3, 4, 6, 3).

    stem     7×7 convolution, stride 2, and 3×3 pooling, stride 2
    block    1×1 to p channels, 3×3, 1×1 to 4·p channels, each with batch norm; p doubles from stage to stage, and the first block of each
             stage but the first halves the image in its 3×3 convolution (and has a 1×1 convolution on its shortcut)
    head     mean over the image, and a product with a bias

A sample is an image. Its cost is known by totals (`kind = "counts"`): 2·in·out·k²·s² FLOPs a convolution with an output of s × s, and for
backward the inputs of every convolution, norm and pool.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from pydantic import Field

from meshwright.describe.base import Described, Size
from meshwright.errors import MeshwrightError

EXPANSION = 4  # channels of a block's output over those inside of it
ELEMENT = 2  # bytes of a saved number, in 16 bits


class Convolution(NamedTuple):
    """A convolution and the batch norm after it."""

    name: str
    norm: str
    d_in: int
    d_out: int
    kernel: int
    stride: int
    size: int  # height and width of its output

    @property
    def flops(self) -> int:
        return 2 * self.d_in * self.d_out * self.kernel**2 * self.size**2


class ResNetOptions(Described):
    """The shape of a residual network."""

    stages: tuple[Size, ...] = Field(
        default=(), description="residual blocks of each stage; empty: not a residual network"
    )
    width: Size = Field(default=64, description="channels of the stem and inside the blocks of the first stage")
    image: Size = Field(default=224, description="height and width of an image of three channels")
    classes: Size = 1000

    def check(self, layers: int) -> None:
        """Raise if the model has another number of layers than blocks, or if the image is too small for the stages."""
        if layers != sum(self.stages):
            raise MeshwrightError(
                "MW-MODEL-010",
                f"{layers} layers, and stages of {' + '.join(map(str, self.stages))} blocks",
                why="Each block is a layer",
                fix=f"--set model.layers={sum(self.stages)}",
            )
        least = 4 * 2 ** len(self.stages)
        if self.image < least:
            raise MeshwrightError(
                "MW-MODEL-010",
                f"images of {self.image} × {self.image} for {len(self.stages)} stages",
                why="The stem and every stage but the first halve an image, and batch norm needs more than one number of a channel",
                fix=f"--set model.resnet.image={least}",
            )

    @cached_property
    def stem(self) -> Convolution:
        return Convolution("stem.conv", "stem.norm", 3, self.width, 7, 2, -(-self.image // 2))

    @cached_property
    def blocks(self) -> tuple[tuple[Convolution, ...], ...]:
        """The convolutions of each block; the fourth, where there is one, is that of the shortcut."""
        out: list[tuple[Convolution, ...]] = []
        channels, size = self.width, -(-self.stem.size // 2)
        for stage, count in enumerate(self.stages):
            inner = self.width * 2**stage
            for block in range(count):
                stride = 2 if stage and not block else 1
                small, wide = -(-size // stride), EXPANSION * inner
                at = f"layers.{len(out)}"
                convolutions = [
                    Convolution(f"{at}.conv1", f"{at}.norm1", channels, inner, 1, 1, size),
                    Convolution(f"{at}.conv2", f"{at}.norm2", inner, inner, 3, stride, small),
                    Convolution(f"{at}.conv3", f"{at}.norm3", inner, wide, 1, 1, small),
                ]
                if not block:
                    convolutions.append(Convolution(f"{at}.shortcut", f"{at}.norm4", channels, wide, 1, stride, small))
                out.append(tuple(convolutions))
                channels, size = wide, small
        return tuple(out)

    @property
    def features(self) -> int:
        """Channels that the head reads."""
        return EXPANSION * self.width * 2 ** (len(self.stages) - 1)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, in the order in which the network registers them."""
        out: dict[str, tuple[int, ...]] = {}
        for c in (self.stem, *(c for block in self.blocks for c in block)):
            out |= {f"{c.name}.weight": (c.d_out, c.d_in, c.kernel, c.kernel)}
            out |= {f"{c.norm}.weight": (c.d_out,), f"{c.norm}.bias": (c.d_out,)}
        return out | {"head.project.weight": (self.classes, self.features), "head.project.bias": (self.classes,)}

    @property
    def head_flops(self) -> int:
        return 2 * self.features * self.classes

    @property
    def block_flops(self) -> int:
        """Forward, of all blocks, for one image."""
        return sum(c.flops for block in self.blocks for c in block)

    def saved(self, block: tuple[Convolution, ...]) -> int:
        """Bytes that backward needs of a block for one image: its input, and the inputs of norms and later convolutions."""
        first, second = block[0], block[1]
        inner = first.d_out * first.size**2 + second.d_out * second.size**2
        norms = sum(c.d_out * c.size**2 for c in block)
        return ELEMENT * (first.d_in * first.size**2 + inner + norms)

    @property
    def saved_by_ends(self) -> int:
        """Bytes that backward needs of the stem, with its pooling, and of the head."""
        last = self.blocks[-1][2].size
        stem = self.stem.d_out * self.stem.size**2
        return ELEMENT * (3 * self.image**2 + 2 * stem + self.features * last**2 + self.features)
