"""FSDP of PyTorch, both versions. Private names: `foreach_reduce` of version 2; `_handle` and the flat parameter of version 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, Listener, Part, wrap_method
from meshwright.check.holdings import Holding, whole


class FSDP2(FrameworkAdapter):
    """`fully_shard` swaps the parameters of a module while it computes, so their gradients are seen where they are reduced."""

    name = "FSDP2"
    hooks_gradients = False

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return any(isinstance(module, FSDPModule) for module in model.modules())

    def prepare(self, parameters: dict[str, nn.Parameter], listener: Listener) -> None:
        super().prepare(parameters, listener)
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as private

        plain = private.foreach_reduce
        names = {id(parameter): name for name, parameter in self.parameters.items()}

        def foreach_reduce(
            fsdp_params: list[Any], unsharded_grads: list[torch.Tensor], *args: Any, **kwargs: Any
        ) -> Any:
            for held, gradient in zip(fsdp_params, unsharded_grads, strict=False):
                if (name := names.get(id(held.sharded_param))) is not None:
                    listener.add_local(name, gradient)
            return plain(fsdp_params, unsharded_grads, *args, **kwargs)

        private.foreach_reduce = foreach_reduce

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[Part]:
        """Of a tensor-parallel part none: what is compared after the reduction is enough."""
        return [(gradient, whole(gradient))] if self.parameters[name].shape == gradient.shape else []


class FSDP1(FrameworkAdapter):
    """`FullyShardedDataParallel`: a rank holds a range of each flattened parameter. Its parameters keep their names with `use_orig_params=True`;
    without it, there is one flat parameter for each wrapped module, which cannot be mapped."""

    name = "FSDP1"
    hooks_gradients = False

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())

    def prepare(self, parameters: dict[str, nn.Parameter], listener: Listener) -> None:
        super().prepare(parameters, listener)
        from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

        wrap_method(
            Wrapper,
            "clip_grad_norm_",
            lambda _: listener.before_clipping(),
            lambda _, norm: listener.after_clipping(norm),
        )
        self.ranges: dict[
            int, tuple[tuple[int, ...], tuple[int, int]]
        ] = {}  # by parameter: its shape, what this rank has of it
        for module in self.model.modules():
            handle = getattr(module, "_handle", None)
            flat = getattr(handle, "flat_param", None)
            for shape, info, held in zip(
                *(getattr(flat, n, None) or () for n in ("_shapes", "_shard_param_infos", "_params")), strict=True
            ):
                first = info.intra_param_start_idx or 0
                self.ranges[id(held)] = tuple(shape), (first, first + info.numel_in_shard if info.in_shard else first)

    def value(self, name: str, tensor: torch.Tensor) -> list[Part]:
        shape, (first, last) = self.ranges.get(id(self.parameters[name]), (tuple(tensor.shape), (0, tensor.numel())))
        if tensor.numel() != last - first:
            return []
        start = (0,) * len(shape)
        return [(tensor.reshape(-1), Holding(shape, start, shape, flat=(first, last)))] if last > first else []

    def gradient(self, name: str, parameter: nn.Parameter) -> list[Part]:
        return [] if parameter.grad is None else self.value(name, parameter.grad)
