"""The optimizer of a run: AdamW, Adam, momentum or SGD of torch, or Muon, on the pieces of this rank.

On a GPU AdamW runs fused, with clipping and with the rounding of masters to parameters (`fused`). It updates 32-bit numbers only: where
there are no masters, 16-bit parameters are updated by torch's operations one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.variants import OPTIMIZERS
from meshwright.parallel.sharded import Sharded
from meshwright.training.optimizer.fused import FusedAdamW
from meshwright.training.optimizer.groups import parameter_groups
from meshwright.training.optimizer.muon import Muon
from meshwright.training.optimizer.schedule import base_rate

Groups = list[dict[str, Any]]


def make_optimizer(parallel: Sharded, settings: Optimizer) -> torch.optim.Optimizer:
    """The workload's optimizer over the trained pieces of this rank."""
    kind = parallel.workload.optimizer
    trained = [p for p in parallel.updated if p.parameter.requires_grad]
    groups = parameter_groups(trained, kind, settings, parallel.width) or [nothing_to_train()]
    rate = base_rate(settings, parallel.workload)
    optimizer: torch.optim.Optimizer = OPTIMIZERS.part(kind, "make")(groups, settings, rate, parallel)
    return optimizer


def make_adam(groups: Groups, settings: Optimizer, rate: float, parallel: Sharded) -> torch.optim.Optimizer:
    optimizer, masters = adamw(groups, settings, rate), parallel.masters
    if isinstance(optimizer, FusedAdamW) and masters is not None:
        optimizer.rounded = masters.rounded()
        masters.reads_narrow = masters.rounds = True
    return optimizer


def make_muon(groups: Groups, settings: Optimizer, rate: float, parallel: Sharded) -> torch.optim.Optimizer:
    plain = [group for group in groups if not group["orthogonal"]]
    trained = [p for p in parallel.updated if p.parameter.requires_grad]
    return Muon(groups, trained, parallel, settings.momentum, adamw(plain, settings, rate) if plain else None)


def make_sgd(groups: Groups, settings: Optimizer, rate: float, parallel: Sharded) -> torch.optim.Optimizer:
    has_momentum = "momentum" in OPTIMIZERS[parallel.workload.optimizer].settings
    return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum if has_momentum else 0.0)


OPTIMIZERS.provide("adamw", make=make_adam)
OPTIMIZERS.provide("adam", make=make_adam)
OPTIMIZERS.provide("muon", make=make_muon)
OPTIMIZERS.provide("momentum", make=make_sgd)
OPTIMIZERS.provide("sgd", make=make_sgd)


def adamw(groups: Groups, settings: Optimizer, rate: float) -> torch.optim.AdamW:
    fused = can_fuse([p for group in groups for p in group["params"]])
    return (FusedAdamW if fused else torch.optim.AdamW)(groups, lr=rate, betas=settings.betas, eps=settings.epsilon)


def nothing_to_train() -> dict[str, Any]:
    """A group for a rank whose parameters are all frozen: torch refuses an optimizer without parameters."""
    empty = nn.Parameter(torch.zeros(0))
    return {"params": [empty], "weight_decay": 0.0, "rate_factor": 1.0, "orthogonal": False}


def can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_cuda and p.dtype == torch.float32 for p in parameters)
