"""FSDP of PyTorch, both versions. Private names: `foreach_reduce` and the shards of version 2; `_handle` and the flat parameter of version 1."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, HeldPart, replace_attribute
from meshwright.check.holdings import Holding, whole


class FSDP2(FrameworkAdapter):
    """`fully_shard` swaps the parameters of a module while it computes, so their gradients are seen where they are reduced."""

    name = "FSDP2"
    hooks_gradients = False

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return any(isinstance(module, FSDPModule) for module in model.modules())

    def attach(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as private

        self.names: dict[int, str] = {}  # by shard
        plain = private.foreach_reduce

        def foreach_reduce(
            fsdp_params: list[Any], unsharded_grads: list[torch.Tensor], *args: Any, **kwargs: Any
        ) -> Any:
            for held, gradient in zip(fsdp_params, unsharded_grads, strict=False):
                if (name := self.names.get(id(held.sharded_param))) is not None:
                    self.listener.add_local(name, gradient)
            return plain(fsdp_params, unsharded_grads, *args, **kwargs)

        self.undo.append(replace_attribute(private, "foreach_reduce", foreach_reduce))

    def add(self, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        """A pipeline may have gathered the parameters before the first call: what lasts is their shards."""
        shards = {id(gathered): shard for gathered, shard in gathered_parameters(model)}
        super().add(model, {name: shards.get(id(p), p) for name, p in parameters.items()})
        self.names |= {id(parameter): name for name, parameter in self.parameters.items()}

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[HeldPart]:
        """Of a tensor-parallel part none: what is compared after the reduction is enough."""
        return [HeldPart(gradient, whole(gradient))] if self.parameters[name].shape == gradient.shape else []


def gathered_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Gathered parameters and the shards they were gathered from."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                for held in group.fsdp_params if group is not None else ():
                    if hasattr(held, "_unsharded_param"):
                        yield held._unsharded_param, held.sharded_param


class FSDP1(FrameworkAdapter):
    """`FullyShardedDataParallel`: a rank holds a range of each flattened parameter. With `use_orig_params=True` this is what is left of the
    parameters; without it there is one flat parameter for each wrapped module, which knows the names and ranges of those inside."""

    name = "FSDP1"
    hooks_gradients = False

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())

    def attach(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper
        from torch.distributed.fsdp import _runtime_utils as runtime

        self.watch_clipping(Wrapper, "clip_grad_norm_")
        self.held: dict[int, list[FlatRange]] = {}  # by the parameter that the optimizer has
        self.inside: dict[int, list[str]] = {}  # by flat parameter: the names of what it is made of
        plain = runtime._reduce_grad

        def reduce_grad(state: Any, handle: Any) -> Any:
            for name, part in self.summands(handle.flat_param):
                self.listener.add_local(name, part)
            return plain(state, handle)

        self.undo.append(replace_attribute(runtime, "_reduce_grad", reduce_grad))

    def add(self, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        super().add(model, parameters)
        for module in model.modules():
            flat = getattr(getattr(module, "_handle", None), "flat_param", None)
            if flat is not None and getattr(flat, "_shard_param_infos", None):
                self.learn(flat)

    def learn(self, flat: Any) -> None:
        """The ranges of a flat parameter. The optimizer has the flat one, or with `use_orig_params=True` each of what it is made of."""
        names = {id(p): name for name, p in self.parameters.items()}
        outer = names.get(id(flat), "").rpartition("_flat_param")[0]
        at = 0
        for i, (shape, info, path) in enumerate(zip(flat._shapes, flat._shard_param_infos, flat._fqns, strict=True)):
            first = info.intra_param_start_idx or 0
            held = first, first + (info.numel_in_shard if info.in_shard else 0)
            original = flat._params[i] if flat._params else None
            name = outer + path if original is None else names.get(id(original), path)
            self.inside.setdefault(id(flat), []).append(name)
            elements = FlatRange(name, tuple(shape), held, at if original is None else 0)
            self.held.setdefault(id(flat if original is None else original), []).append(elements)
            at += held[1] - held[0]

    def summands(self, flat: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradient of this rank before it is reduced: not sharded, flat, with padding between the parameters."""
        at, inside = 0, iter(zip(self.inside.get(id(flat), ()), flat._shapes, strict=False))
        for size, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not padding and (known := next(inside, None)) is not None:
                yield known[0], flat.grad.reshape(-1)[at : at + size].view(known[1])
            at += size

    def value(self, name: str, tensor: torch.Tensor) -> list[HeldPart]:
        known = self.held.get(id(self.parameters[name]))
        if known is None:
            return [HeldPart(tensor, whole(tensor))]
        flat = tensor.reshape(-1)
        return [
            r.part_of(flat) for r in known if r.held[1] > r.held[0] and flat.numel() >= r.at + r.held[1] - r.held[0]
        ]

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[HeldPart]:
        return [HeldPart(gradient, whole(gradient))]


@dataclass(frozen=True)
class FlatRange:
    """The elements of a parameter that this rank holds, and where they begin in what the optimizer has."""

    name: str
    shape: tuple[int, ...]
    held: tuple[int, int]
    at: int

    def part_of(self, flat: torch.Tensor) -> HeldPart:
        first, last = self.held
        box = Holding(self.shape, (0,) * len(self.shape), self.shape, flat=self.held)
        return HeldPart(flat[self.at : self.at + last - first], box, self.name)
