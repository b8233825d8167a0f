"""The optimizer of a run: AdamW, Adam, momentum or SGD of torch, or Muon, on the pieces of this rank.

On a GPU AdamW runs fused, with clipping and with the rounding of masters to parameters (`FusedAdamW`). It updates 32-bit numbers only: where
there are no masters, 16-bit parameters are updated by torch's operations one by one.

**Groups.** A parameter group says which pieces have weight decay, and by which factor their learning rate is scaled to the width:

    role        weight decay                    factor of the rate with scale_with_width = w
    matrix      yes                             w / hidden;  under Muon √(w / hidden)
    router      yes                             w / hidden
    head        yes                             w / hidden
    embedding   unless decay_embeddings = false 1
    vector      no: norm weights and biases     1

Weight decay shrinks a weight towards zero, which is a prior for the entries of a matrix; a norm weight is near 1 and a bias is an offset, so
decay would only harm them. A tied embedding is an embedding.

**Scaling with the width** (µP, Yang et al. 2021). In a product over `hidden` inputs, Adam's steps of equal size add up: a model twice as wide
moves its outputs twice as far, so the rate of its matrices is halved. An embedding is looked up, not summed over. Muon's update is an
orthogonal matrix times √hidden (`muon`): its effect grows with √hidden only.

**Fused AdamW** passes once over a GPU's memory: clip, decay, moments, update, and the rounding of a master to its parameter.

    read    gradient 2 or 4 bytes, master 4, both moments 8
    write   master 4, both moments 8, parameter 2

28 or 30 bytes for each parameter. In separate passes it would be 60: the gradient is widened (6), scaled by the clip factor (8) and copied
(8), the update reads and writes 28, the parameter is rounded (6), and the norm reads the wide gradient once more (4).

The clip factor is a number on the device: the kernel reads it there, and the host does not wait for it. It is 0 or NaN if the norm is not
finite. A `guarded` update then writes nothing; the host learns of that later, and does not count the step (`take_back`).
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.describe.optimizer import Optimizer
from meshwright.describe.variants import OPTIMIZERS
from meshwright.parallel.pieces import Piece
from meshwright.parallel.sharded import Sharded
from meshwright.training.optimizer.muon import Muon
from meshwright.training.optimizer.schedule import base_rate
from meshwright.units import Json


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW, with the same states, for float32 parameters on a GPU. `rounded` has the tensor that each updated parameter is
    rounded to, if any. `gradient_factor` is multiplied with every gradient of the next step; if `guarded`, a factor of 0 or NaN leaves it out."""

    rounded: Mapping[nn.Parameter, Tensor] = {}
    gradient_factor: Tensor | None = None
    guarded = False
    last_states: Sequence[Json] = ()  # of the parameters in the last step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        from meshwright.training.optimizer import adamw_kernel

        states = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                state["step"] += 1
                moments, rounded = (state["exp_avg"], state["exp_avg_sq"]), self.rounded.get(parameter)
                step, factor = int(state["step"]), self.gradient_factor
                adamw_kernel.update(parameter, parameter.grad, moments, rounded, factor, self.guarded, step, group)
                states.append(state)
        self.gradient_factor, self.last_states = None, states

    def take_back(self) -> None:
        """Do not count the last step: its factor was 0 or NaN."""
        for state in self.last_states:
            state["step"] -= 1


def role_of(piece: Piece) -> str:
    """matrix, router, head, embedding or vector."""
    return "embedding" if piece.box.tied else piece.box.parameter.role


def weight_decay(role: str, kind: str, settings: Optimizer) -> float:
    has_none = role == "vector" or (role == "embedding" and not settings.decay_embeddings)
    return 0.0 if has_none or "weight_decay" not in OPTIMIZERS[kind].settings else settings.weight_decay


def rate_factor(role: str, kind: str, settings: Optimizer, hidden: int) -> float:
    if not settings.scale_with_width or role in ("embedding", "vector"):
        return 1.0
    ratio = settings.scale_with_width / hidden
    return sqrt(ratio) if OPTIMIZERS[kind].by_matrix and role == "matrix" else ratio


def parameter_groups(pieces: list[Piece], kind: str, settings: Optimizer, hidden: int) -> list[Json]:
    """torch's parameter groups of these pieces: one for each combination of weight decay, rate factor and Muon."""
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for piece in pieces:
        role = role_of(piece)
        key = (
            weight_decay(role, kind, settings),
            rate_factor(role, kind, settings, hidden),
            OPTIMIZERS[kind].by_matrix and role == "matrix",
        )
        groups.setdefault(key, []).append(piece.parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor, "orthogonal": orthogonal}
        for (decay, factor, orthogonal), parameters in groups.items()
    ]


Groups = list[Json]


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


def nothing_to_train() -> Json:
    """A group for a rank whose parameters are all frozen: torch refuses an optimizer without parameters."""
    empty = nn.Parameter(torch.zeros(0))
    return {"params": [empty], "weight_decay": 0.0, "rate_factor": 1.0, "orthogonal": False}


def can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_cuda and p.dtype == torch.float32 for p in parameters)
