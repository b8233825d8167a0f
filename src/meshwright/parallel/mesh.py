"""One mesh for everything: the ranks of `describe.Layout` as a torch `DeviceMesh`, and a process group for every axis.

The mesh has a dimension for each axis of more than one rank, slowest first, so its groups are the layout's groups. Two
more are made where they are needed: `dp` (shard and replicate together, when both are there), over which plain data
parallelism reduces and tokens are counted, and `ends` (the first and the last stage of each pipeline), over which tied
embeddings sum their gradient. The mesh is passed as an argument; nothing here is global.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from meshwright.describe.layout import Layout
from meshwright.errors import MeshwrightError


class Mesh:
    """This rank's place: its index and its group on every axis. A group of one rank is None: nothing to say there."""

    def __init__(self, layout: Layout, rank: int, device: str = "cpu") -> None:
        world = distributed.get_world_size()
        if layout.plan.world != world:
            raise MeshwrightError("MW-MESH-001", f"the plan needs {layout.plan.world} ranks and {world} were started",
                                  why=f"{layout.plan.title()}")  # fmt: skip
        self.layout, self.rank, self.device = layout, rank, device
        self.coordinates = layout.coordinates(rank)
        self._made: dict[str, distributed.ProcessGroup | None] = {}
        wide = [i for i, axis in enumerate(layout.axes[::-1]) if layout.size(axis) > 1]
        names = tuple(layout.axes[::-1][i] for i in wide)
        self.device_mesh: DeviceMesh | None = None
        if names:
            grid = torch.from_numpy(layout.grid).reshape([layout.grid.shape[i] for i in wide])
            self.device_mesh = DeviceMesh(torch.device(device).type, grid, mesh_dim_names=names)
        if layout.plan.shard > 1 and layout.plan.replicate > 1:
            self._made["dp"] = self._new_groups(layout.groups("dp").tolist())

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def index(self, axis: str) -> int:
        """This rank's place among the ranks of its group."""
        if axis == "dp":
            return self.coordinates["replicate"] * self.layout.plan.shard + self.coordinates["shard"]
        return self.coordinates[axis]

    def group(self, axis: str) -> distributed.ProcessGroup | None:
        if axis == "world":
            return distributed.group.WORLD if self.size("world") > 1 else None
        if axis in self._made:
            return self._made[axis]
        if axis == "dp":
            axis = "shard" if self.layout.plan.shard > 1 else "replicate"
        if self.size(axis) == 1 or self.device_mesh is None:
            return None
        return self.device_mesh.get_group(axis)

    @cached_property
    def ends(self) -> distributed.ProcessGroup | None:
        """The group of this pipeline's first and last rank; made by all ranks at once, None on the ranks between."""
        if self.size("pp") == 1:
            return None
        return self._new_groups([[int(row[0]), int(row[-1])] for row in self.layout.groups("pp")])

    def sharding(self) -> DeviceMesh:
        """What ZeRO shards over: the shard axis, within the replicate axis where there is one."""
        assert self.device_mesh is not None
        hybrid = self.layout.plan.replicate > 1
        return self.device_mesh["replicate", "shard"] if hybrid else self.device_mesh["shard"]

    def _new_groups(self, groups: list[list[int]]) -> distributed.ProcessGroup | None:
        mine = None
        for members in groups:
            made = distributed.new_group(members)
            if self.rank in members:
                mine = made
        return mine
