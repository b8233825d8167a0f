"""The networks of a described `Model`: one transformer, of which all presets are configurations, the deep MLP, and residual networks.

They contain no parallelism. Three conventions make them easy to split: every matrix is a separate module (`q`, `k`,
`v`, `gate`, `up`), so that any shard of any parameter is a box of the full tensor; shapes inside are read from the
tensors (`-1` heads), so that a module with fewer heads works; and the name of a layer contains its index in the
whole model, so that `layers.7.attention.q.weight` is the same parameter in every pipeline stage of every plan.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.describe import legality
from meshwright.describe.model import Model
from meshwright.describe.plan_fields import PlanFields
from meshwright.describe.sharding import parameters
from meshwright.models.adapter import adapt
from meshwright.models.initialise import DrawnWeights, Weights, initial_value
from meshwright.models.loss import cross_entropy
from meshwright.models.mlp import Mlp, squared_error
from meshwright.models.resnet import ResNet, label_loss
from meshwright.models.transformer import Transformer

__all__ = [
    "DrawnWeights",
    "Mlp",
    "ResNet",
    "Transformer",
    "Weights",
    "build",
    "initial_value",
    "loss_function",
    "width_of_output",
]


def build(model: Model, layers: range | None = None) -> nn.Module:
    """Build the network on the meta device. `layers` selects one pipeline stage: these layers, with the embedding if
    they include the first layer and with the head if they include the last."""
    legality.check(PlanFields(), model, trainer=True)
    layers = layers if layers is not None else range(model.layers)
    with torch.device("meta"):
        if model.resnet.stages:
            return ResNet(model.resnet)
        network = Mlp(model, layers) if model.kind == "mlp" else Transformer(model, layers)
        if model.adapter.on:
            adapt(network, model, parameters(model, layers))
        return network


def loss_function(model: Model) -> Callable[[Tensor, Tensor], Tensor]:
    """(output, target) → the loss summed over valid tokens. The training step divides by their global number."""
    return label_loss if model.resnet.stages else squared_error if model.kind == "mlp" else cross_entropy


def width_of_output(model: Model) -> int:
    return model.resnet.classes if model.resnet.stages else model.hidden if model.kind == "mlp" else model.padded_vocab
