"""A chain of transformer layers of fixed sizes, forward and backward, with room for a collective where tensor parallelism has one.

Operations that are timed one by one are too fast to predict a training step. In a layer no operation follows itself: each finds caches, and
branches of the processor, that other operations have used. Around the operations are modules, views and saved tensors, which take the
host's time and start no kernel. So a calibration also times whole layers, built as the trainer builds them (`models.transformer`), at sizes
listed in `device.LAYERS`, before any model is known; what they take beyond their operations becomes two factors (`device_fit`).

    x + attention(norm(x)),  then  x + ffn(norm(x))          heads of 16, half as many of keys and values, FFN twice as wide

`Between` is called before and after attention and FFN: in backward of their input and in forward of their output, the four places of a
layer in which tensor parallelism communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from meshwright.calibrate.device_fit import layer_model
from meshwright.models.attention import Geometry
from meshwright.models.transformer import Layer

CALLS_PER_LAYER = 4  # of `Between`


class Between(Protocol):
    """What a chain does between two parts of a layer: in the forward of the given tensor, or in its backward."""

    def __call__(self, x: torch.Tensor, in_backward: bool) -> torch.Tensor: ...


def unchanged(x: torch.Tensor, in_backward: bool) -> torch.Tensor:
    return x


def layers_call(
    dtype: torch.dtype, tokens: int, width: int, sequences: int, layers: int = 1
) -> Callable[[Between], None]:
    """Forward and backward of some layers on `sequences` that have `tokens` together; weight gradients accumulate."""
    model = layer_model(width, tokens // sequences)
    geometry = Geometry(model)
    chain = [Layer(model, geometry, 0).to(dtype) for _ in range(layers)]
    for layer in chain:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    shape = (sequences, tokens // sequences, width)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    start = torch.randn(shape, dtype=dtype)

    def run(between: Between) -> None:
        y = x
        for layer in chain:
            attended = layer.attention(between(layer.attention_norm(y), in_backward=True))
            y = y + layer.attention_drop(layer.attention_post_norm(between(attended, in_backward=False)))
            fed = layer.ffn(between(layer.ffn_norm(y), in_backward=True))
            y = y + layer.ffn_drop(layer.ffn_post_norm(between(fed, in_backward=False)))
        y.backward(start)

    return run
