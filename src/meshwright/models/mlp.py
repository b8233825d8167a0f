"""The deep MLP: L square layers, y = σ(W x + b), the model on which data, tensor and pipeline parallelism are taught.

It regresses: rows of `hidden` numbers in, rows of `hidden` numbers out, and the last layer has no activation. A row
counts as a token, so `batch × seq` rows make a step, and a target row of NaN counts as padding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.describe.model import Model


class MlpLayer(nn.Module):
    def __init__(self, model: Model, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(model.hidden, model.hidden, bias=model.ffn_bias)
        # A square layer has no gate: the gated activations name their plain half.
        self.activation = F.gelu if model.activation in ("gelu", "geglu") else F.relu
        self.last = last

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        y_BSH = self.linear(x_BSH)
        return y_BSH if self.last else self.activation(y_BSH)


class Mlp(nn.Module):
    def __init__(self, model: Model, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): MlpLayer(model, last=i == model.layers - 1) for i in layers})

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x_BSH = layer(x_BSH)
        return x_BSH


def squared_error(output_BSH: torch.Tensor, target_BSH: torch.Tensor) -> torch.Tensor:
    """Mean over the width, sum over the rows that are no padding."""
    valid = ~target_BSH.isnan()
    return F.mse_loss(output_BSH[valid], target_BSH[valid], reduction="sum") / output_BSH.shape[-1]
