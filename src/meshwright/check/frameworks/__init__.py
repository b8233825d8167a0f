"""How each framework says what a rank holds, and where its gradients are: one object each. The first that recognises a model is used."""

from __future__ import annotations

from torch import nn

from meshwright.check.frameworks.deepspeed import DeepSpeed
from meshwright.check.frameworks.fsdp import FSDP1, FSDP2
from meshwright.check.frameworks.megatron import Megatron
from meshwright.check.frameworks.plain import Framework
from meshwright.check.modules import topmost

FRAMEWORKS: tuple[type[Framework], ...] = (DeepSpeed, Megatron, FSDP2, FSDP1, Framework)


def framework_of(module: nn.Module) -> Framework:
    model = topmost(module)
    return next(kind for kind in FRAMEWORKS if kind.recognises(model))(model)
