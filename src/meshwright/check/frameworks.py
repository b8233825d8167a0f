"""How each framework says what a rank holds, and where its gradients are: one object each, the first that recognises the model is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.check.holdings import Box, coordinates_of, local_part, whole

if TYPE_CHECKING:
    from meshwright.check.recorder import Recorder


class Framework:
    """Plain PyTorch: modules, DDP, DTensor. Other frameworks override what they do in another way."""

    name = "torch"
    hooks_gradients = True  # hooks of parameters see the gradients of this rank

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters: dict[str, nn.Parameter] = {}

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return True

    def prepare(self, recorder: Recorder) -> None:
        """Called when the model is known, before its first call."""
        assert recorder.names is not None
        self.parameters = recorder.names.parameters

    def value(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box | None]:
        return local_part(tensor)

    def gradient(self, name: str, parameter: nn.Parameter) -> tuple[torch.Tensor, Box | None] | None:
        return None if parameter.grad is None else local_part(parameter.grad)

    def box(self, name: str, gradient: torch.Tensor) -> Box | None:
        """The box of a gradient before the reduction: of the part of the parameter that this rank computes with."""
        parameter = self.parameters.get(name)
        if isinstance(parameter, DTensor):
            local, box = local_part(parameter)
            return box if local.shape == gradient.shape else whole(gradient)
        return whole(gradient)

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


class FullyShard(Framework):
    """FSDP2: `fully_shard` swaps the parameters of a module while it computes, so their gradients are seen where they are reduced."""

    name = "FSDP2"
    hooks_gradients = False

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return any(isinstance(module, FSDPModule) for module in model.modules())

    def prepare(self, recorder: Recorder) -> None:
        super().prepare(recorder)
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as private

        plain = private.foreach_reduce
        names = {id(parameter): name for name, parameter in self.parameters.items()}

        def foreach_reduce(fsdp_params: list[Any], unsharded_grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            for held, gradient in zip(fsdp_params, unsharded_grads, strict=False):
                if (name := names.get(id(held.sharded_param))) is not None:
                    recorder.add_local(name, gradient)
            return plain(fsdp_params, unsharded_grads, *args, **kwargs)

        private.foreach_reduce = foreach_reduce

    def box(self, name: str, gradient: torch.Tensor) -> Box | None:
        parameter = self.parameters[name]
        if tuple(parameter.shape) == tuple(gradient.shape):
            return whole(gradient)
        return None  # of a tensor-parallel part: the compared gradient after the reduction is enough


FRAMEWORKS: tuple[type[Framework], ...] = (FullyShard, Framework)


def framework_of(model: nn.Module) -> Framework:
    from meshwright.check.modules import topmost

    top = topmost(model)
    return next(kind for kind in FRAMEWORKS if kind.recognises(top))(top)
