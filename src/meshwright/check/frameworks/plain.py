"""Plain PyTorch: modules, DDP, DTensor. What other frameworks do in another way they override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.check.holdings import Holding, coordinates_of, local_part, whole

Part = tuple[torch.Tensor, Holding]


class Listener(Protocol):
    """What an adapter tells the recorder."""

    def add_local(self, name: str, gradient: torch.Tensor) -> None: ...
    def before_clipping(self) -> None: ...
    def after_clipping(self, norm: Any) -> None: ...


class FrameworkAdapter:
    """What the recorder asks a framework."""

    name = "torch"
    batch_dim = 0  # of activations
    shows_clipped = True  # gradients can be read between clipping and the update
    hooks_gradients = True  # hooks of parameters see the gradients of this rank

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters: dict[str, nn.Parameter] = {}

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return True

    def prepare(self, parameters: dict[str, nn.Parameter], listener: Listener) -> None:
        """Called when the model is known, before its first call."""
        self.parameters = parameters

    def value(self, name: str, tensor: torch.Tensor) -> list[Part]:
        """What this rank holds of a parameter, or of a state of its optimizer that has its shape."""
        return [local_part(tensor)]

    def gradient(self, name: str, parameter: nn.Parameter) -> list[Part]:
        return [] if parameter.grad is None else [local_part(parameter.grad)]

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[Part]:
        """A gradient before the reduction: of the part of the parameter that this rank computes with."""
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            local, box = local_part(parameter)
            return [(gradient, box)] if local.shape == gradient.shape else []
        return [(gradient, whole(gradient))]

    def coordinates(self) -> dict[str, int]:
        out = coordinates_of(list(self.parameters.values()))
        if not out and torch.distributed.is_available() and torch.distributed.is_initialized():
            out = {"dp": torch.distributed.get_rank()}
        return out

    def layout(self) -> str:
        """What took effect, in words: a framework may leave out silently what its settings ask for."""
        kinds = sorted({type(module).__name__ for module in self.model.modules()} & WRAPPER_NAMES)
        sharded = [p for p in self.parameters.values() if isinstance(p, DTensor)]
        if sharded:
            kinds.append(f"{len(sharded)} of {len(self.parameters)} parameters are DTensors, {sharded[0].placements}")
        return ", ".join(kinds) or "one device"


WRAPPER_NAMES = {"DistributedDataParallel", "FullyShardedDataParallel"}


def wrap_method(kind: type, name: str, before: Callable[[Any], object], after: Callable[[Any, Any], object]) -> None:
    """Call functions before and after a method of a class: with the object, and with the object and the result."""
    plain = getattr(kind, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = plain(self, *args, **kwargs)
        after(self, result)
        return result

    setattr(kind, name, wrapped)
