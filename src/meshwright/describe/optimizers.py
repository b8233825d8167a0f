"""The optimizers: what each one keeps for a parameter, which settings it reads, and its parts.

`OPTIMIZERS` is the only table of optimizers. The memory of a plan and the bytes of the update follow from `states`; the torch wing joins:

    part      room                        arguments                              what it returns
    make      training.optimizer.make     groups, settings, rate, parallel       the torch optimizer of this rank
    replay    proof.emulation.update      memory, settings, w, g, rate, r        one update of a tensor in NumPy, written a second time; `memory`
                                                                                 is its state, `r` rounds after each operation
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from meshwright.describe.variants import NameIn, Registry


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer, and its parts."""

    name: str
    about: str
    states: tuple[str, ...] = ()  # tensors that it keeps for each parameter, as torch names them
    numbers: tuple[str, ...] = ()  # and numbers, one for each parameter
    matrix_states: tuple[str, ...] | None = None  # states of the matrices of layers, if it updates whole matrices
    settings: tuple[str, ...] = ()  # fields of [optimizer] that it reads, besides those that all read
    divides: bool = False  # by the root of squared gradients, which underflow in fp16
    scales_linearly: bool = False  # with the batch, instead of with its root
    make: Callable[..., Any] | None = None
    replay: Callable[..., Any] | None = None

    @property
    def by_matrix(self) -> bool:
        """Whether it updates the matrices of layers as wholes, with other states than the rest."""
        return self.matrix_states is not None

    @property
    def moments(self) -> int:
        """States of a parameter; of a matrix of a layer where they differ."""
        return len(self.states if self.matrix_states is None else self.matrix_states)


MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
ADAM_SETTINGS, DECAY_SETTINGS = ("betas", "epsilon", "scale_with_width"), ("weight_decay", "decay_embeddings")
OPTIMIZERS: Registry[OptimizerKind] = Registry(
    "optimizer",
    OptimizerKind(
        "adamw",
        "Adam with decoupled weight decay",
        MOMENTS,
        ("step",),
        settings=ADAM_SETTINGS + DECAY_SETTINGS,
        divides=True,
    ),
    OptimizerKind("adam", "Adam without weight decay", MOMENTS, ("step",), settings=ADAM_SETTINGS, divides=True),
    OptimizerKind(
        "muon",
        "orthogonalised momentum for the matrices of layers, AdamW for other parameters",
        MOMENTS,
        ("step",),
        MOMENTUM,
        (*ADAM_SETTINGS, *DECAY_SETTINGS, "momentum"),
        divides=True,
    ),
    OptimizerKind("momentum", "SGD with momentum", MOMENTUM, settings=("momentum",), scales_linearly=True),
    OptimizerKind("sgd", "stochastic gradient descent", scales_linearly=True),
)
OptimizerName = Annotated[str, NameIn(OPTIMIZERS)]


def readers(setting: str) -> tuple[str, ...]:
    """The optimizers that read a field of `[optimizer]`."""
    return tuple(name for name, kind in OPTIMIZERS.items() if setting in kind.settings)
