"""Our own trainer, and modules under `meshwright.parallelize`: every parameter has its boxes of the sharding table."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.check.frameworks.plain import FrameworkAdapter, HeldPart, replace_attribute
from meshwright.check.holdings import Holding

if TYPE_CHECKING:
    from meshwright.parallel.sharded import Sharded


class OwnNetwork(FrameworkAdapter):
    name = "Meshwright"

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return next(networks_of(model), None) is not None

    def attach(self) -> None:
        self.networks: list[Sharded] = []
        self.pieces: dict[int, Any] = {}

    @property
    def network(self) -> Sharded:
        return self.networks[0]

    def add(self, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        super().add(model, parameters)
        network = next(networks_of(model), None)
        if network is None or network in self.networks:
            return
        self.networks.append(network)
        self.pieces |= {id(piece.parameter): piece for piece in network.pieces}
        finish = network.finish_gradients

        def finish_and_tell() -> None:
            finish()
            self.listener.begin_clipping()  # until the step ends: torch's norms in it are those of this rank's parts

        self.undo.append(replace_attribute(network, "finish_gradients", finish_and_tell))

    def optimised(self) -> dict[int, str]:
        """The optimizer has masters, or plain tensors that share the memory of shards."""
        names = {self.pieces[id(p)].name: name for name, p in self.parameters.items() if id(p) in self.pieces}
        return {id(piece.parameter): names[piece.name] for piece in self.network.updated if piece.name in names}

    def value(self, name: str, tensor: torch.Tensor) -> list[HeldPart]:
        from meshwright.parallel.pieces import local_tensor

        if (piece := self.pieces.get(id(self.parameters[name]))) is None:
            return []
        views = piece.views(local_tensor(tensor)) if local_tensor(tensor).shape == piece.local.shape else []
        return [
            HeldPart(view, Holding(box.full_shape, box.local_start, tuple(view.shape)), piece.name)
            for box, view in views
            if view.numel()
        ]

    def local_gradient(self, name: str, gradient: torch.Tensor) -> list[HeldPart]:
        return self.value(name, gradient)

    def coordinates(self) -> dict[str, int]:
        return dict(self.network.mesh.coordinates)

    def layout(self) -> str:
        plan = self.network.plan
        degrees = {axis: getattr(plan, axis) for axis in ("replicate", "shard", "tp", "cp", "pp", "ep")}
        return " × ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one device"


def networks_of(model: nn.Module) -> Iterator[Sharded]:
    """The network that has a module as a stage, or inside of one."""
    if "meshwright.parallel.sharded" not in sys.modules:
        return
    from meshwright.parallel.sharded import Sharded

    inside = set(map(id, model.modules()))
    for found in gc.get_objects():
        if issubclass(type(found), Sharded):
            stages = vars(found).get("stages", {}).values()
            if any(id(stage) in inside for stage in stages):
                yield found
