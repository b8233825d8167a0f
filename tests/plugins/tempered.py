"""A plug-in as a user writes it: attention with a learned factor of each head, and an optimizer that follows the sign of an average gradient.

Nothing at the top of the file imports torch: `plan` and `estimate` do not need it.
"""

from meshwright.describe.mixers import core_saved, with_options
from meshwright.describe.tensors import AttentionCore, Linear, Vector
from meshwright.describe.variants import ATTENTIONS, OPTIMIZERS, Attention, OptimizerKind


def block(m, mixer):
    width = m.head_width
    keys = m.heads * width
    linears = [
        Linear("q", "attention", m.hidden, keys, "column"),
        Linear("k", "attention", m.hidden, keys, "column", saves_input=False),
        Linear("v", "attention", m.hidden, keys, "column", saves_input=False),
        Linear("o", "attention", keys, m.hidden, "row"),
    ]
    core = AttentionCore(m.heads, m.heads, width, width)
    return with_options(
        m,
        mixer,
        linears,
        [Vector("factor", "attention", m.heads, "per-head")],
        core_saved(m, core, mixer),
        core,
        m.hidden,
    )


def module(model, geometry, layer):
    from torch import nn

    from meshwright.models.attention import Sinks, positions_of, rule_of
    from meshwright.models.dropout import Probabilities
    from meshwright.models.parts import ProductLinear as Product

    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.width, self.geometry = model.head_width, geometry
            self.rule, self.positions = rule_of(model, layer), positions_of(model, layer)
            self.power = model.attention_option("power")
            self.probabilities = Probabilities(0.0, f"layers.{layer}.probabilities")
            for name in ("q", "k", "v"):
                setattr(self, name, Product(model.hidden, model.heads * self.width, bias=False))
            self.factor = Sinks(model.heads)  # one number for each head: q · (1 + power · weight)
            self.o = Product(model.heads * self.width, model.hidden, bias=False)

        def forward(self, x_BSH):
            q, k, v = (y(x_BSH).unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (self.q, self.k, self.v))
            q, k = (self.geometry.rotated(y, self.positions) for y in (q, k))
            q = q * (1 + self.power * self.factor(x_BSH).transpose(1, 2).unsqueeze(-1))
            return self.o(self.geometry.attend(q, k, v, None, self.rule).transpose(1, 2).flatten(2))

    return Tempered()


TEMPERED = Attention(
    "tempered",
    "multi-head attention with a learned factor of the queries of each head",
    fields=("head_dim",),
    options={"power": 1.0},
    block=block,
    key_width=lambda m: m.head_width,
    rotated=lambda m: m.rope_dim or m.head_width,
    small=lambda m: {"rope_dim": 0},
    lower=lambda low: low.attention(low.project_grouped),
    module=module,
)


def make(groups, settings, rate, parallel):
    import torch

    class SignDescent(torch.optim.Optimizer):
        """Follows the sign of an average of gradients (Lion with one rate)."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                        average.lerp_(p.grad, 0.1)
                        p.sub_(average.tanh(), alpha=group["lr"])

    return SignDescent(groups, {"lr": rate})


def replay(memory, settings, w, g, rate, r):
    import numpy as np

    memory.first = r(memory.first + 0.1 * (g - memory.first))
    return r(w - rate * r(np.tanh(memory.first)))


SIGNED = OptimizerKind(
    "signed", "follows the sign of an average of gradients", states=("exp_avg",), make=make, replay=replay
)

ATTENTIONS.register(TEMPERED)
OPTIMIZERS.register(SIGNED)
