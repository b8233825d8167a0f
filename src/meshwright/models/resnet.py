"""A residual network of bottleneck blocks (`describe.shape_parts`): ResNet-50 is one of its shapes.

Batch norm normalises each channel by the mean and variance of the micro-batch on this rank, as data-parallel training of such networks usually
does. No rank communicates for it, so a plan trains exactly what one device trains that accumulates gradients over micro-batches of the same
size: that is what `verify` compares with. Running averages are not kept; evaluation normalises by its own micro-batch too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.describe.shape_parts import Convolution, ResNetOptions
from meshwright.models.loss import cross_entropy


class BatchNorm(nn.Module):
    """Batch norm by the statistics of the micro-batch, in training and in evaluation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.batch_norm(x_BCHW, None, None, self.weight, self.bias, training=True)


def convolution(c: Convolution) -> nn.Conv2d:
    return nn.Conv2d(c.d_in, c.d_out, c.kernel, c.stride, c.kernel // 2, bias=False)


class Stem(nn.Module):
    def __init__(self, c: Convolution) -> None:
        super().__init__()
        self.conv, self.norm = convolution(c), BatchNorm(c.d_out)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x_BCHW))), 3, 2, 1)


class Block(nn.Module):
    """relu(x + f(x)); where f changes the shape, a convolution on the shortcut does too."""

    def __init__(self, convolutions: tuple[Convolution, ...]) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(convolutions[0]), BatchNorm(convolutions[0].d_out)
        self.conv2, self.norm2 = convolution(convolutions[1]), BatchNorm(convolutions[1].d_out)
        self.conv3, self.norm3 = convolution(convolutions[2]), BatchNorm(convolutions[2].d_out)
        self.shortcut = convolution(convolutions[3]) if len(convolutions) > 3 else None
        self.norm4 = BatchNorm(convolutions[3].d_out) if len(convolutions) > 3 else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.conv2(y_BCHW)))
        y_BCHW = self.norm3(self.conv3(y_BCHW))
        if self.shortcut is not None and self.norm4 is not None:
            x_BCHW = self.norm4(self.shortcut(x_BCHW))
        return F.relu(x_BCHW + y_BCHW)


class Classifier(nn.Module):
    def __init__(self, o: ResNetOptions) -> None:
        super().__init__()
        self.project = nn.Linear(o.features, o.classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.project(x_BCHW.mean((2, 3)))


class ResNet(nn.Module):
    def __init__(self, o: ResNetOptions) -> None:
        super().__init__()
        self.stem = Stem(o.stem)
        self.layers = nn.ModuleDict({str(i): Block(convolutions) for i, convolutions in enumerate(o.blocks)})
        self.head = Classifier(o)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(x_BCHW)
        for block in self.layers.values():
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW)


def label_loss(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Cross-entropy, summed over the images that have a label."""
    return cross_entropy(logits_BC[:, None], label_B[:, None])
