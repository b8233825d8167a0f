"""Plain PyTorch: modules, DDP, DTensor. What other frameworks do in another way they override."""

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshwright.check.holdings import Holding, coordinates_of, local_part, whole


class HeldPart(NamedTuple):
    """What a rank holds of a parameter's tensor. `name`: of the parameter, if it is a part of what the framework calls one."""

    value: torch.Tensor
    holding: Holding
    name: str = ""


class Listener(Protocol):
    """What an adapter tells the recorder."""

    def add_local(self, name: str, gradient: torch.Tensor) -> None: ...
    def begin_clipping(self) -> None: ...
    def end_clipping(self, norm: Any) -> None: ...


class FrameworkAdapter:
    """What the recorder and the watch ask a framework about the models of a process: one, or one for each stage of a pipeline."""

    name = "torch"
    batch_dim = 0  # of activations
    shows_clipped = True  # gradients can be read between clipping and the update
    hooks_gradients = True  # hooks of parameters see the gradients of this rank

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.models: list[nn.Module] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.undo: list[Callable[[], object]] = []
        self.attach()

    def attach(self) -> None:
        """Replace the functions of the framework in which something is seen."""

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return True

    def add(self, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        """Learn a model with its parameters, before its first call."""
        self.models.append(model)
        self.parameters |= parameters

    def modules(self) -> Iterator[nn.Module]:
        for model in self.models:
            yield from model.modules()

    def watch_clipping(self, kind: type, method: str) -> None:
        """Tell the listener of the calls of a method that clips, or measures the norm, and returns the norm."""
        before, after = lambda _: self.listener.begin_clipping(), lambda _, norm: self.listener.end_clipping(norm)
        self.undo.append(wrap_method(kind, method, before, after))

    def release(self) -> None:
        """Take back what was replaced."""
        while self.undo:
            self.undo.pop()()

    def value(self, name: str, tensor: torch.Tensor) -> list[HeldPart]:
        """What this rank holds of a parameter, or of a state of its optimizer that has its shape."""
        return [HeldPart(*local_part(tensor))]

    def optimised(self) -> dict[int, str]:
        """What an optimizer updates in place of parameters, and their names."""
        return {}

    def gradient(self, name: str, parameter: nn.Parameter) -> list[HeldPart]:
        return [] if parameter.grad is None else self.value(name, summed(parameter.grad))

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[HeldPart]:
        """A gradient before the reduction: of the part of the parameter that this rank computes with."""
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            local, box = local_part(parameter)
            return [HeldPart(gradient, box)] if local.shape == gradient.shape else []
        return [HeldPart(gradient, whole(gradient))]

    def coordinates(self) -> dict[str, int]:
        out = coordinates_of(list(self.parameters.values()))
        stages = self.stages()
        if stages:
            out["pp"] = stages[0].group_rank
        elif not out and torch.distributed.is_available() and torch.distributed.is_initialized():
            out = {"dp": torch.distributed.get_rank()}
        return out

    def stages(self) -> list[Any]:
        """The stages of a pipeline of PyTorch on this rank."""
        pipelining = sys.modules.get("torch.distributed.pipelining.stage")
        if pipelining is None:
            return []
        parts = {id(part) for part in self.modules()}
        stages = [o for o in gc.get_objects() if isinstance(o, pipelining._PipelineStageBase) and id(o.submod) in parts]
        return sorted(stages, key=lambda stage: stage.stage_index)

    def layout(self) -> str:
        """What took effect, in words: a framework may leave out silently what its settings ask for."""
        kinds = sorted({type(module).__name__ for module in self.modules()} & WRAPPER_NAMES)
        registries = [value for model in self.models for value in vars(model).values() if isinstance(value, dict)]
        kinds += ["replicate"] * any("replicate" in names for names in registries)  # DDP as a composable function
        sharded = [p for p in self.parameters.values() if isinstance(p, DTensor)]
        if sharded:
            kinds.append(f"{len(sharded)} of {len(self.parameters)} parameters are DTensors, {sharded[0].placements}")
        if stages := self.stages():
            kinds.append(f"{stages[0].num_stages} pipeline stages over {stages[0].group_size} ranks")
        if (
            not kinds
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            return "no wrapper"  # the script reduces its gradients itself, or not at all
        return ", ".join(kinds) or "one device"


WRAPPER_NAMES = {"DistributedDataParallel", "FullyShardedDataParallel"}


def summed(gradient: torch.Tensor) -> torch.Tensor:
    """A DTensor whose ranks have summands is summed: PyTorch leaves that to whoever reads it, clipping or the optimizer."""
    if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
        return gradient.redistribute(
            placements=[Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        )
    return gradient


def replace_attribute(place: Any, name: str, value: Any) -> Callable[[], object]:
    """Set an attribute; the function that sets it back."""
    back = partial(setattr, place, name, getattr(place, name))
    setattr(place, name, value)
    return back


def wrap_method(
    kind: type, name: str, before: Callable[[Any], object], after: Callable[[Any, Any], object]
) -> Callable[[], object]:
    """Call functions before and after a method of a class, with the object, and with the object and the result. Returns what takes it back."""
    plain = getattr(kind, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = plain(self, *args, **kwargs)
        after(self, result)
        return result

    return replace_attribute(kind, name, wrapped)
