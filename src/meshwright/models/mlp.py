"""The deep MLP: L square layers, y = σ(W x + b). Courses use it to teach data, tensor and pipeline parallelism.

It is a regression: the input and the output are rows of `hidden` numbers, and the last layer has no activation. A row is
a sample: a step has `batch` rows, independent of the sequence length, and a target row of NaN is padding. Dropout applies
between layers.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.describe.model import Model
from meshwright.models.dropout import make_dropout
from meshwright.models.parts import ProductLinear, activation_of


class MlpLayer(nn.Module):
    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        self.linear = ProductLinear(model.hidden, model.hidden, bias=model.ffn_bias)
        # A square layer has no gate, so a gated activation is replaced by its ungated form.
        self.activation = F.relu if model.activation == "swiglu" else activation_of(model)
        self.last = index == model.layers - 1
        self.drop = make_dropout(0.0 if self.last else model.dropout_rate, f"layers.{index}")

    def forward(self, x_BH: Tensor) -> Tensor:
        y_BH = self.linear(x_BH)
        return y_BH if self.last else self.activation(y_BH)


class Mlp(nn.Module):
    def __init__(self, model: Model, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): MlpLayer(model, i) for i in layers})

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.body(x_BH)

    def body(self, x_BH: Tensor) -> Tensor:
        for layer in self.layers.values():
            assert isinstance(layer, MlpLayer)
            # Outside the layer, because the output of a split layer is complete only here
            x_BH = layer.drop(layer(x_BH))
        return x_BH


def squared_error(output_BH: Tensor, target_BH: Tensor) -> Tensor:
    """Mean over the width, sum over the rows that are not padding."""
    valid = ~target_BH.isnan()
    return F.mse_loss(output_BH[valid], target_BH[valid], reduction="sum") / output_BH.shape[-1]
