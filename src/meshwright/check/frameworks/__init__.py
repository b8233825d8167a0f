"""How each framework says what a rank holds, and where its gradients are: one object each. The first that recognises a model is used."""

from __future__ import annotations

from torch import nn

from meshwright.check.frameworks.deepspeed import DeepSpeed
from meshwright.check.frameworks.fsdp import FSDP1, FSDP2
from meshwright.check.frameworks.megatron import Megatron
from meshwright.check.frameworks.own import OwnNetwork
from meshwright.check.frameworks.plain import FrameworkAdapter
from meshwright.check.modules import topmost

FRAMEWORKS: tuple[type[FrameworkAdapter], ...] = (OwnNetwork, DeepSpeed, Megatron, FSDP2, FSDP1, FrameworkAdapter)


def framework_of(module: nn.Module) -> FrameworkAdapter:
    model = topmost(module)
    return next(kind for kind in FRAMEWORKS if kind.recognises(model))(model)
